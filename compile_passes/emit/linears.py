"""Linear layers outside experts: `mm` and `addmm` become `fp4::mm`, if the options give their kind a format,
or if the model holds their weights in 4 bits.

The kind follows from the weight's name, as in `prepare`. Routers always keep their dtype. They are known by
their names, or because a softmax or topk chooses by what they compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from ...meta.layouts import LAYOUTS
from ...models.outside_experts import kind_of
from ..graph.nodes import aten, is_op, operand, shape, value
from ..index.reader import Reader
from ..naming import input_name
from ..options import Options
from ..recognise.evidence import Evidence
from ..recognise.mixture import Matrix
from ..recognise.pieces import K, N
from ..recognise.products import factors, read_matrix
from ..refusal import Refusal, Refused
from ..report import Load, Site, hint
from .writer import QuantisedRows, Writer


def linear_layers(writer: Writer, reader: Reader, evidence: Evidence) -> Iterator[Site | Refusal]:
    quantised: dict[Any, QuantisedRows] = {}
    for node in list(writer.gm.graph.nodes):
        if not is_op(node, aten.mm, aten.addmm):
            continue
        if any(node.kwargs.get(n, 1) != 1 for n in ("alpha", "beta")):
            continue
        bias, a, weight = factors(node)
        matrix = read_matrix(weight, reader)
        if matrix is None or set(matrix.ref.index) != {N, K}:
            continue
        format = None
        if not writer.facts.in_4_bits(matrix.ref.node):
            format = _format_asked_for(matrix.ref.node, writer.options)
            if format is None or evidence.is_router(node):
                continue
        if bias is not None and len(shape(bias)) != 1:
            continue
        try:
            yield _write(writer, node, a, matrix, bias, format, quantised)
        except Refused as why:
            yield why.refusal


def _format_asked_for(weight: fx.Node, options: Options) -> str | None:
    """The format that the options give to weights of this kind. A head may share the embeddings' weight."""
    tied = any(is_op(user, aten.embedding) for user in weight.users)
    kind = "head" if tied else kind_of(input_name(weight))
    return options.outside.get(kind) if kind is not None else None


def _same_for_all(a: fx.Node) -> Any:
    """Return a key for rows: each F.linear of a tensor has its own view, and all views have the same key."""
    return (operand(a), str(a.args[1:])) if is_op(a, aten.view) else a


def _write(
    w: Writer,
    node: fx.Node,
    a: fx.Node,
    matrix: Matrix,
    bias: fx.Node | None,
    format: str | None,
    quantised: dict[Any, QuantisedRows],
) -> Site:
    """Writes `fp4::mm`.

    format: None for a weight that is in 4 bits already. quantised: rows of earlier layers, which several
    layers may share, as query, key and value do.
    """
    like = matrix.ref.node
    layout = w.layout(like, (matrix.n, matrix.k), format=format)
    packed = w.pack([(matrix,)], layout, node, format=format)
    how = w.activations(like, layout)
    key = (_same_for_all(a), how.format, LAYOUTS[layout].a_layout)
    with w.gm.graph.inserting_before(node):
        rows = quantised.get(key) or w.quantised(a, how, layout)
        quantised[key] = rows
        out = w.product("mm", rows, w.one_expert(packed, 0), packed.spec, value(node).dtype, bias=bias)
    w.replace(node, out)
    load = Load(1, 1, hint(value(node).numel() // matrix.n))
    text = f"N {matrix.n}, K {matrix.k}"
    return w.site("fp4::mm", node, [packed], "a linear layer", how, text, load)
