"""Reads conditions into terms: comparisons, masks, and what masks leave of a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..graph.nodes import arguments, aten, is_op, is_tensor, value
from ..operands import operand
from .axes import Opaque, reads
from .indexing import Indexing
from .indicators import INDICATOR, as_boolean, indicator, is_boolean, is_indicator, opposite
from .terms import Add, Apply, Composite, Const, Mul, Ref, Term, Value, flatten


class Conditions(Indexing):
    def _number(self, x: Any) -> Term:
        """Read a number: a constant, or a number that the graph computes, as an element of its node
        without an index."""
        if isinstance(x, fx.Node) and isinstance(x.meta.get("val"), (torch.SymFloat, torch.SymInt)):
            return Ref(self._scalars.setdefault(self.canon.number(x), x), ())
        if not isinstance(x, (int, float)):
            raise Opaque
        return Const(x)

    @reads(*INDICATOR)
    def _compare(self, node: fx.Node, level: int) -> Value:
        """Read comparisons of ids with experts, or of routing weights with zero, as indicators: 0 or 1."""
        a, b = operand(node), node.args[1]
        if is_tensor(b):
            values = self.broadcast([self._compared(a), self._compared(b)])
            of = [v.term for v in values]
            if isinstance(of[0], Const) and is_op(node, aten.eq):
                of.reverse()
            return Value(self._joined(values), indicator(node, *of))
        v = self.value(a, 0)
        if is_op(node, aten.gt, aten.ne) and b == 0 and is_indicator(v.term):
            return Value(v.dims, as_boolean(v.term))
        if is_op(node, aten.eq) and b == 0 and is_boolean(v.term):
            return Value(v.dims, opposite(v.term))
        v = self._compared(a)
        return Value(v.dims, indicator(node, v.term, self._number(b)))

    def _compared(self, node: fx.Node) -> Value:
        """Read an operand of a comparison. Its values are ids, not conditions, even if they are 0 and 1."""
        v = self.value(node, 0)
        return self.opaque(node) if isinstance(v.term, Composite) else v

    @reads(aten.logical_and, aten.bitwise_and)
    def _and(self, node: fx.Node, level: int) -> Value:
        """Read the conjunction of two conditions."""
        if value(node).dtype != torch.bool or not all(is_tensor(n) for n in node.args[:2]):
            raise Opaque
        a, b = self.broadcast([self.value(operand(node, i), 0) for i in (0, 1)])
        if not (is_boolean(a.term) and is_boolean(b.term)):
            raise Opaque
        return Value(self._joined([a, b]), Mul(a.term, b.term))

    @reads(aten.logical_not, aten.bitwise_not)
    def _not(self, node: fx.Node, level: int) -> Value:
        v = self.value(operand(node), 0)
        if value(node).dtype != torch.bool or not is_boolean(v.term):
            raise Opaque
        return Value(v.dims, opposite(v.term))

    @reads(aten.eye)
    def _eye(self, node: fx.Node, level: int) -> Value:
        """Read an identity matrix: row i is 1 in column i."""
        own = self.opaque(node)
        if len(own.axes) != 2:
            raise Opaque
        return Value(own.dims, Apply(aten.eq, own.axes))

    @reads(aten.where)
    def _where(self, node: fx.Node, level: int) -> Value:
        """Read where(mask, a, 0) and where(mask, 0, a): a times an indicator."""
        mask, a, other = node.args
        if not is_tensor(mask):
            raise Opaque
        for kept, zero, wanted in ((a, other, True), (other, a, False)):
            if is_tensor(kept) and self._is_zero(zero):
                return self._masked(node, self.value(mask, 0), self.value(kept, level), wanted)
        if level < 2 or not (is_tensor(a) and is_tensor(other)):
            raise Opaque
        return self._added_where(node, self.value(mask, 0), *(self.addend(node, n, 2) for n in (a, other)))

    def _added_where(self, node: fx.Node, mask: Value, a: Value, b: Value) -> Value:
        """Read where(mask, x + y, x) and where(mask, x, x + y): x, plus y times an indicator."""
        mask, a, b = values = self.broadcast([mask, a, b])
        dims, more, less = self._joined(values), flatten(a.term, Add), flatten(b.term, Add)
        wanted = len(more) > len(less)
        if not wanted:
            more, less = less, more
        before = set(less)
        added = [t for t in more if t not in before]
        if len(less) + len(added) != len(more) or not is_boolean(mask.term):
            raise Opaque
        by = mask.term if wanted else opposite(mask.term)
        return Value(dims, Add([*less, *(Mul(by, t) for t in added)], self.ref(node, dims)))

    @reads(aten.masked_fill)
    def _masked_fill(self, node: fx.Node, level: int) -> Value:
        """Read masked_fill(a, mask, 0): a times the opposite of the mask."""
        a = arguments(node)
        try:
            return self._no_sentinels(node, level)
        except Opaque:
            if not is_tensor(a["mask"]) or not self._is_zero(a["value"]):
                raise
        return self._masked(node, self.value(a["mask"], 0), self.value(a["self"], level), False)

    def _is_zero(self, x: Any) -> bool:
        return self.value(x, 0).term is Const(0.0) if is_tensor(x) else type(x) in (int, float) and x == 0

    def _masked(self, node: fx.Node, mask: Value, of: Value, wanted: bool) -> Value:
        """Return `of` where the mask has the value `wanted`, else 0."""
        mask, of = self.broadcast([mask, of])
        if not (is_indicator(mask.term) if wanted else is_boolean(mask.term)):
            raise Opaque
        dims = self._joined([mask, of])
        return Value(dims, Mul(mask.term if wanted else opposite(mask.term), of.term, self.ref(node, dims)))
