"""Batched products, y[e] = a[e] W[e]: each expert has the same number of rows, as in fixed buffers.

They become `fp4::grouped_mm_masked` with all rows counted.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ..meta.layouts import preferred_layout
from .factors import K, N, indices
from .graph import Refusal, aten, is_op, shape, static_int, value
from .mixture import Matrix
from .reading import Reader
from .report import Load, Site, hint, input_name, left_alone, location, module_path
from .terms import Axis, Const, Ref, Value, free_axes, substitute
from .write_mixture import packing

fp4 = torch.ops.fp4
ATTENTION = re.compile(r"attn|attention")
"""Names of parameters that multiply batches in attention: MLA's absorbed projections, grouped output ones."""
FORM = "batched rows (bmm): the same number for each expert"


def batched_products(writer: Any, graph: fx.Graph, reader: Reader, mutated: set[fx.Node]) -> Iterator[Site]:
    """Rewrite every `bmm` with a whole expert weight that no block has taken."""
    for node in list(graph.nodes):
        if not is_op(node, aten.bmm):
            continue
        for operand, other, left in ((node.args[1], node.args[0], False), (node.args[0], node.args[1], True)):
            if _is_written(operand, writer.written):
                continue
            experts = _experts(reader.value(operand, 0), left, reader)
            if experts is None:
                continue
            try:
                yield _write(writer, node, other, experts, left, mutated)
            except Refusal as refusal:
                yield left_alone(refusal)
            break


def _is_written(node: fx.Node, written: set[fx.Node]) -> bool:
    """Whether a tensor is a view of what a block has become, which is no weight."""
    while node not in written and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node in written


def _experts(v: Value, left: bool, reader: Reader) -> list[tuple[Matrix, ...]] | None:
    """The matrices of a weight [E, K, N], or [E, N, K] as the left operand."""
    if not isinstance(v.term, Ref) or not reader.is_weight(v.term.node):
        return None
    if any(isinstance(i, Ref) for i in indices(v.term)):
        return None  # gathered by ids
    if ATTENTION.search(input_name(v.term.node)):
        return None  # heads, or groups of heads
    if any(len(g) != 1 for g in v.dims) or free_axes(v.term) != set(v.axes):
        return None
    e, inner, out = v.axes if not left else (v.axes[0], v.axes[2], v.axes[1])
    sizes = [static_int(a.size) for a in (e, out, inner)]
    if None in sizes:
        return None
    names: dict[Any, Axis] = {inner: K, out: N}
    refs = [substitute(v.term, {**names, e: Const(i)}) for i in range(e.size)]
    return [(Matrix(r, out.size, inner.size),) for r in refs]


def _write(
    writer: Any,
    node: fx.Node,
    a: fx.Node,
    experts: list[tuple[Matrix, ...]],
    left: bool,
    mutated: set[fx.Node],
) -> Site:
    options = writer.options
    matrix = experts[0][0]
    device = value(matrix.ref.node).device.type
    layout = preferred_layout(device) if device == "cpu" else "plain"
    packed = packing(experts, options.format, layout, False, mutated, node)
    a_format, why = options.a_format(device, layout)
    rows = shape(a)[2 if left else 1]
    call = writer.call
    with writer.gm.graph.inserting_before(node):
        if left:
            a = call(aten.transpose.int, a, 1, 2)
        size = static_int(rows)
        count = size if size is not None else call(aten.sym_size.int, a, 1)
        every = call(aten.full.default, [len(experts)], count, dtype=torch.int32, device=value(node).device)
        scale = None
        if a_format in ("int8", "fp8"):
            both = writer.quantize(a, a_format, layout)
            a, scale = (call(operator.getitem, both, i) for i in (0, 1))
        out = call(
            fp4.grouped_mm_masked.default, a, *(*writer.slot(*packed), None)[:3], every, scale, None,
            format=packed[1].format, layout=packed[1].layout, out_dtype=value(node).dtype,
        )  # fmt: skip
        if left:
            out = call(aten.transpose.int, out, 1, 2)
    where = location(node), module_path(node)
    writer.replace(node, out)
    load = Load(len(experts), len(experts), hint(rows))
    text = f"{len(experts)} experts, N {matrix.n}, K {matrix.k}"
    return writer.site(
        "fp4::grouped_mm_masked", "", where, [packed], FORM, f"{a_format} ({why})", "", text, load
    )
