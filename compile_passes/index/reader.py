"""Turns graph nodes into terms: what each node computes, in index notation (terms.py).

`Reader.value(node, level)` reads back through a bounded part of the graph. `level` is the number of products
with weights that may be between the node and the block's input. 2: the output side (down product, routing
weights, sums). 1: inside the FFN (activation, gate/up product). 0: rows and routing, where only re-indexing
is read. A node that is not understood is opaque: a `Ref` to itself. What is read is always right, if not
always useful.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

from torch import fx

from ..graph.nodes import aten, is_grouped_mm, is_pointwise, is_tensor
from .axes import READERS, Opaque
from .terms import Value
from .written_rows import WrittenRows


class Reader(WrittenRows):
    @property
    def understood(self) -> Collection[Any]:
        return READERS.keys()

    def _read(self, node: fx.Node, level: int) -> Value:
        if node.op != "call_function" or not is_tensor(node):
            raise Opaque
        if node.target is operator.getitem:
            return self._getitem(node, level)
        if node.target is aten.view.dtype:  # the same bits as other values
            raise Opaque
        rule = READERS.get(getattr(node.target, "overloadpacket", None))
        if rule is not None:
            return rule(self, node, level)
        if is_grouped_mm(node):
            return self._grouped_mm(node, level)
        if is_pointwise(node):
            return self._pointwise(node, level)
        raise Opaque
