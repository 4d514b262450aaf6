"""Writes blocks and single products of rows sorted by expert, and of weights gathered for each row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...meta.formats import activation_name
from ...meta.layouts import LAYOUTS
from ..graph.nodes import WeightRef, aten, shape, value
from ..graph.products import IndexedRows, Product, nonnegative
from ..recognise.block import Block
from ..report import Load, Site, hint
from .writer import Writer

fp4 = torch.ops.fp4


def write_block(w: Writer, b: Block) -> Site:
    """fp4::moe in place of the block's root."""
    both = (b.up.weight, b.down.weight)
    layout = _layout(w, *both)
    how = w.activations(b.down.weight.placeholder, layout)
    gate = b.activation.name
    split = LAYOUTS[layout].interleaved and b.activation.gated and not b.activation.interleaved
    if split:
        gate = activation_name(replace(b.activation, interleaved=True)) or ""
    up = w.pack_whole(b.up.weight, layout, interleave=split)
    down = w.pack_whole(b.down.weight, layout)
    up_operands, down_operands = w.operands(up), w.operands(down)
    with w.gm.graph.inserting_before(b.root):
        hidden = b.up.weight.k
        x = b.x if len(shape(b.x)) == 2 else w.call(aten.reshape.default, b.x, [-1, hidden])
        out = w.call(
            fp4.moe.default,
            x,
            w.call(aten.reshape.default, _safe_ids(w, b.ids, b.rows, b.up.weight), [-1, b.k]),
            w.call(aten.reshape.default, b.weights, [-1, b.k]),
            *up_operands,
            *down_operands,
            _interleaved(w, b.up_bias) if split and b.up_bias is not None else b.up_bias,
            b.down_bias,
            format=down.spec.format,
            layout=layout,
            activation=gate,
            a_format=how.format,
            out_dtype=value(b.root).dtype,
        )
    w.replace(b.root, out)
    e, k = b.up.weight.experts, b.up.weight.k
    return w.site(
        "fp4::moe", b.up.node, [up, down], b.rows.form, how,
        f"{e} experts, top {b.k}, hidden {k}, intermediate {b.down.weight.k}",
        Load(e, b.k, hint(value(b.root).numel() // b.down.weight.n)), activation=b.activation.name,
    )  # fmt: skip


def write_product(w: Writer, p: Product) -> Site:
    """fp4::grouped_mm or fp4::indexed_mm in place of one product."""
    layout = _layout(w, p.weight)
    how = w.activations(p.weight.placeholder, layout)
    packed = w.pack_whole(p.weight, layout)
    weight = w.operands(packed)
    name = "indexed_mm" if p.offs is None else "grouped_mm"
    with w.gm.graph.inserting_before(p.node):
        a = p.a
        if len(shape(a)) != 2:
            a = w.call(aten.reshape.default, a, [-1, p.weight.k])
        rows = w.quantised(a, how, layout)
        route = p.offs if p.offs is not None else _safe_ids(w, p.ids, p.rows(), p.weight)
        out = w.product(name, rows, weight, packed.spec, value(p.node).dtype, route)
        if p.unit_dim is not None:
            out = w.call(aten.unsqueeze.default, out, p.unit_dim)
    w.replace(p.node, out)
    e, n, k = p.weight.experts, p.weight.n, p.weight.k
    form = "rows sorted by expert (grouped_mm)" if p.offs is not None else IndexedRows.form
    load = Load(e, 1, hint(value(p.node).numel() // n))
    return w.site(f"fp4::{name}", p.node, [packed], form, how, f"{e} experts, N {n}, K {k}", load)


def _layout(w: Writer, *weights: WeightRef) -> str:
    """One layout for the weights of one operator."""
    return w.layout(weights[0].placeholder, *((x.n, x.k) for x in weights))


def _safe_ids(w: Writer, ids: Any, rows: Any, weight: WeightRef) -> fx.Node:
    """Indexing counts negative ids from the end, the operators skip them: keep the model's meaning."""
    if not isinstance(rows, IndexedRows) or nonnegative(ids):
        return ids
    wrapped = w.call(aten.add.Tensor, ids, weight.experts)
    return w.call(aten.where.self, w.call(aten.lt.Scalar, ids, 0), wrapped, ids)


def _interleaved(w: Writer, bias: fx.Node) -> fx.Node:
    """A bias [E, 2 I] in the order of interleaved rows."""
    e, n = shape(bias)
    halves = w.call(aten.reshape.default, bias, [e, 2, n // 2])
    return w.call(aten.reshape.default, w.call(aten.transpose.int, halves, 1, 2), [e, n])
