"""Writes single products of rows sorted by expert, and of weights gathered for each row."""

from __future__ import annotations

import torch
from torch import fx

from ..graph.nodes import aten, shape, value
from ..index.ids import nonnegative
from ..recognise.products import Product
from ..recognise.search import GATHERED, SORTED
from ..report import Load, Site, hint
from .writer import Writer

fp4 = torch.ops.fp4


def write_product(w: Writer, p: Product) -> Site:
    """Replace one product by fp4::grouped_mm or fp4::indexed_mm."""
    e, n, k = len(p.experts), p.matrix.n, p.matrix.k
    layout = w.layout(p.weight, (n, k))
    how = w.activations(p.weight, layout)
    packed = w.pack(p.experts, layout, p.node)
    weight = w.operands(packed)
    name = "indexed_mm" if p.offs is None else "grouped_mm"
    with w.gm.graph.inserting_before(p.node):
        a = p.a
        if len(shape(a)) != 2:
            a = w.call(aten.reshape.default, a, [-1, k])
        rows = w.quantised(a, how, layout)
        route = p.offs
        if route is None:
            assert p.ids is not None
            route = _safe_ids(w, p.ids, e)
        out = w.product(name, rows, weight, packed.spec, value(p.node).dtype, route)
        if p.unit_dim is not None:
            out = w.call(aten.unsqueeze.default, out, p.unit_dim)
    w.replace(p.node, out)
    form = SORTED if p.offs is not None else GATHERED
    load = Load(e, 1, hint(value(p.node).numel() // n))
    return w.site(f"fp4::{name}", p.node, [packed], form, how, f"{e} experts, N {n}, K {k}", load)


def _safe_ids(w: Writer, ids: fx.Node, experts: int) -> fx.Node:
    """Keep the model's meaning of negative ids: indexing counts them from the end, the operators skip
    them."""
    if nonnegative(ids):
        return ids
    wrapped = w.call(aten.add.Tensor, ids, experts)
    return w.call(aten.where.self, w.call(aten.lt.Scalar, ids, 0), wrapped, ids)
