"""Turns graph nodes into terms: what each node computes, in index notation (terms.py).

`Reader.value(node, level)` reads back through a bounded part of the graph. `level` is the number of products
with weights that may be between the node and the block's input. 2: the output side (down product, routing
weights, sums). 1: inside the FFN (activation, gate/up product). 0: rows and routing, where only re-indexing
is read. A node that is not understood is opaque: a `Ref` to itself. What is read is always right, if not
always useful.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from ..graph.nodes import Canon, aten, is_grouped_mm, is_tensor
from .axes import Opaque
from .indicators import INDICATOR
from .terms import Value
from .written_rows import WrittenRows

_COPIES = (aten.clone, aten.alias, aten.detach, aten.contiguous, aten.lift_fresh_copy)
_VIEWS = (aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.flatten)


class Reader(WrittenRows):
    def __init__(self, graph: fx.Graph, canon: Canon, is_weight: Callable[[fx.Node], bool]) -> None:
        super().__init__(graph, canon, is_weight)
        self._handlers = self._table()

    @property
    def understood(self) -> Collection[Any]:
        return self._handlers.keys()

    def _read(self, node: fx.Node, level: int) -> Value:
        if node.op != "call_function" or not is_tensor(node):
            raise Opaque
        if node.target is operator.getitem:
            return self._getitem(node, level)
        if node.target is aten.view.dtype:  # the same bits as other values
            raise Opaque
        packet = getattr(node.target, "overloadpacket", None)
        handler = self._handlers.get(packet)
        if handler is not None:
            return handler(node, level)
        if is_grouped_mm(node):
            return self._grouped_mm(node, level)
        if torch.Tag.pointwise in getattr(node.target, "tags", ()):
            return self._pointwise(node, level)
        raise Opaque

    def _table(self) -> dict[Any, Callable[[fx.Node, int], Value]]:
        table: dict[Any, Callable[[fx.Node, int], Value]] = {}
        table.update(dict.fromkeys(_COPIES, self._copy))
        table.update(dict.fromkeys(_VIEWS, self._view))
        table.update(dict.fromkeys(INDICATOR, self._compare))
        table.update({
            aten._to_copy: self._cast, aten.permute: self._permute, aten.transpose: self._permute,
            aten.t: self._permute, aten.expand: self._expand, aten.repeat: self._repeat,
            aten.select: self._select, aten.slice: self._slice, aten.arange: self._arange,
            aten.zeros: self._fill, aten.zeros_like: self._fill, aten.new_zeros: self._fill,
            aten.full: self._fill, aten.full_like: self._fill, aten.scalar_tensor: self._fill,
            aten.empty: self._fill,
            aten.empty_like: self._fill, aten.new_empty: self._fill, aten.mm: self._product,
            aten.bmm: self._product, aten.addmm: self._product, aten.baddbmm: self._product,
            aten.mul: self._mul, aten.add: self._add, aten.addcmul: self._addcmul,
            aten.sum: self._sum, aten.any: self._any, aten.mean: self._mean,
            aten.index: self._index, aten.index_select: self._index, aten.gather: self._gather,
            aten.embedding: self._index, aten.remainder: self._remainder,
            aten.index_add: self._index_add, aten.scatter_add: self._scatter_add,
            aten.index_put: self._index_put, aten.index_copy: self._index_copy,
            aten.masked_scatter: self._masked_scatter, aten.masked_select: self._masked_select,
            aten.stack: self._stack, aten.cat: self._stack, aten.copy: self._copied,
            aten.select_scatter: self._select_scatter,
            aten.floor_divide: self._divide, aten.div: self._divide,
            aten.where: self._where, aten.masked_fill: self._masked_fill,
            aten.logical_and: self._and, aten.bitwise_and: self._and,
            aten.logical_not: self._not, aten.bitwise_not: self._not, aten.eye: self._eye,
            aten.scatter_reduce: self._scatter_reduce, aten.glu: self._glu,
        })  # fmt: skip
        return table
