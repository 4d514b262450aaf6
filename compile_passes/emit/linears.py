"""Linear layers outside experts: `mm` and `addmm` become `fp4::mm`, with `options={"linear": True}` or if the
model holds their weights in 4 bits.

Attention, the output head and routers stay as they are, by their names: they cost little and lose most.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ...meta.layouts import preferred_layout
from ..graph.nodes import Refusal, aten, is_op, shape, static_int, value
from ..index.reader import Reader
from ..index.terms import Ref, free_axes, substitute
from ..naming import input_name, location, module_path
from ..options import Options
from ..recognise.factors import K, N
from ..recognise.mixture import Matrix
from ..report import Load, Site, hint, left_alone
from ..weights.prequantized import format_of, is_held
from .mixture import packing

fp4 = torch.ops.fp4

KEPT = re.compile(r"attn|attention|(^|\.)(lm_head|embed\w*|router|gate|score\w*|shared_expert_gate)\.weight$")
"""Names of parameters that stay in the model's dtype."""


def linear_layers(writer: Any, graph: fx.Graph, reader: Reader, mutated: set[fx.Node]) -> Iterator[Site]:
    for node in list(graph.nodes):
        if not is_op(node, aten.mm, aten.addmm):
            continue
        if any(node.kwargs.get(n, 1) != 1 for n in ("alpha", "beta")):
            continue
        *bias, a, weight = node.args
        matrix = read_matrix(weight, reader)
        if matrix is None or set(matrix.ref.index) != {N, K}:
            continue
        if not (is_held(matrix.ref.node) or _is_asked_for(matrix, writer.options)):
            continue
        if bias and len(shape(bias[0])) != 1:
            continue
        try:
            yield _write(writer, node, a, matrix, bias[0] if bias else None, mutated)
        except Refusal as refusal:
            yield left_alone(refusal)


def _is_asked_for(matrix: Matrix, options: Options) -> bool:
    return options.linear and not KEPT.search(input_name(matrix.ref.node))


def read_matrix(node: fx.Node, reader: Reader) -> Matrix | None:
    """The matrix [N, K], of a parameter or of one expert's part of it, whose transpose `node` is."""
    v = reader.value(node, 0)
    if not isinstance(v.term, Ref) or not reader.is_weight(v.term.node):
        return None
    if len(v.dims) != 2 or any(len(g) != 1 for g in v.dims) or any(isinstance(i, Ref) for i in v.term.index):
        return None
    k, n = v.axes
    if free_axes(v.term) != {k, n}:
        return None
    sizes = static_int(n.size), static_int(k.size)
    if sizes[0] is None or sizes[1] is None:
        return None
    return Matrix(substitute(v.term, {n: N, k: K}), *sizes)


def _write(
    writer: Any, node: fx.Node, a: fx.Node, matrix: Matrix, bias: fx.Node | None, mutated: set[fx.Node]
) -> Site:
    call, options = writer.call, writer.options
    like = value(matrix.ref.node)
    format = format_of(matrix.ref.node, options.format)
    layout = preferred_layout(
        like.device.type, (matrix.n, matrix.k), dtype=like.dtype, format=format, a_format=options.wanted
    )
    packed = packing([(matrix,)], options.format, layout, False, mutated, node)
    a_format, why = options.a_format(like.device.type, layout)
    with writer.gm.graph.inserting_before(node):
        scale = None
        if a_format in ("int8", "fp8"):
            both = writer.quantize(a, a_format, layout)
            a, scale = (call(operator.getitem, both, i) for i in (0, 1))
        operands = [call(aten.select.int, t, 0, 0) for t in writer.slot(*packed)]
        out = call(
            fp4.mm.default, a, *(*operands, None)[:3], scale, bias, format=packed[1].format, layout=layout,
            out_dtype=value(node).dtype,
        )  # fmt: skip
    where = location(node), module_path(node)
    writer.replace(node, out)
    load = Load(1, 1, hint(value(node).numel() // matrix.n))
    text = f"N {matrix.n}, K {matrix.k}"
    return writer.site(
        "fp4::mm", "", where, [packed], "a linear layer", f"{a_format} ({why})", "", text, load
    )
