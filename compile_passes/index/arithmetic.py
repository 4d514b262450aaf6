"""Reads arithmetic into terms: pointwise operators, products, sums, and results that are put together of
parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..graph.nodes import (
    FLOATING,
    arguments,
    aten,
    is_op,
    is_tensor,
    same_shape,
    shape,
    static_int,
    strip,
    value,
)
from ..operands import operand
from ..refusal import Kind, need, refuse
from .axes import Opaque, dimension, reads, same
from .conditions import Conditions
from .indicators import is_indicator
from .joined import joined
from .sorted_rows import sorted_rows
from .terms import (  # fmt: skip
    Add,
    AnyOf,
    Apply,
    Axis,
    Choose,
    Const,
    Mean,
    Mul,
    Ref,
    Sum,
    Term,
    Value,
    flatten,
    some_chosen,
    substitute,
    walk,
)


class Arithmetic(Conditions):
    # --- arithmetic ---

    def _operands(
        self, node: fx.Node, level: int, unsorted: Kind | None = None, addends: int = 0
    ) -> list[Value]:
        """Read a pointwise operator's tensors. The first `addends` of its arguments are added.

        `unsorted` refuses rows in two orders."""
        tensors = [n for n in node.args if is_tensor(n)]
        values = [
            self.addend(node, n, level) if n in node.args[:addends] else self.value(n, level) for n in tensors
        ]
        if unsorted is not None and len(values) == 2 and values[0].dims and values[1].dims:
            rank = len(shape(node))
            sort = [sorted_rows(v, 0) if len(v.dims) == rank else None for v in values]
            for i, j in ((0, 1), (1, 0)):
                other = values[j].dims[0] if len(values[j].dims) == rank else ()
                if sort[i] is not None and other and other != (sort[i],):
                    refuse(unsorted, node, strip(tensors[j]))
        return self.broadcast(values)

    def _pointwise(self, node: fx.Node, level: int) -> Value:
        if level == 0 or value(node).dtype not in FLOATING:
            raise Opaque
        values = self._operands(node, level)
        if not values:
            raise Opaque
        terms = iter(values)
        args = [next(terms).term if is_tensor(a) else a for a in node.args]
        if any(isinstance(a, (fx.Node, list, tuple)) for a in args):
            raise Opaque
        kwargs = tuple(node.kwargs.items())
        if any(isinstance(v, fx.Node) for _, v in kwargs):
            raise Opaque
        dims = self._joined(values)
        return Value(dims, Apply(node.target, args, kwargs, self.ref(node, dims)))

    @reads(aten.glu)
    def _glu(self, node: fx.Node, level: int) -> Value:
        """Read GLU: the first half times the sigmoid of the second."""
        a = arguments(node)
        v, d = self.value(a["self"], level), dimension(a["dim"], len(shape(node)))
        size = static_int(shape(node)[d])
        if level == 0 or size is None:
            raise Opaque
        up, gate = (self._part(v, d, start, 1, size) for start in (0, size))
        up, gate = self.together(up, gate, [(i, i) for i in range(len(up.dims))])
        opened = Apply(aten.sigmoid.default, (gate.term,))
        return Value(up.dims, Mul(up.term, opened, self.ref(node, up.dims)))

    @reads(aten.mul)
    def _mul(self, node: fx.Node, level: int) -> Value:
        a, b = node.args[:2]
        if level == 0 and not (is_tensor(a) and is_tensor(b) and _scales_rows(a, b)):
            tensors = [n for n in (a, b) if is_tensor(n)]
            masks = [value(n).dtype == torch.bool or is_indicator(self.value(n, 0).term) for n in tensors]
            if not any(masks):
                raise Opaque
        values = self._operands(node, level, Kind.UNSORTED_WEIGHTS)
        dims = self._joined(values)
        terms = iter(values)
        factors = [next(terms).term if is_tensor(n) else self._number(n) for n in (a, b)]
        return Value(dims, Mul(factors[0], factors[1], self.ref(node, dims)))

    @reads(aten.add)
    def _add(self, node: fx.Node, level: int) -> Value:
        if level == 0 or node.kwargs.get("alpha", 1) != 1 or value(node).dtype not in FLOATING:
            raise Opaque
        values = self._operands(node, level, Kind.UNSORTED_BIAS, addends=2)
        dims = self._joined(values)
        terms = iter(values)
        args = [next(terms).term if is_tensor(n) else self._number(n) for n in node.args[:2]]
        return Value(dims, self._of_slices(args, node, dims) or self._total(args, node, dims))

    def _of_slices(self, terms: list[Term], node: fx.Node, dims: tuple[tuple[Axis, ...], ...]) -> Term | None:
        """Join sums over two consecutive slices of a dimension into one sum."""
        for i, j in ((0, 1), (1, 0)):
            a, b = terms[i], terms[j]
            if not (isinstance(a, Sum) and isinstance(b, Sum) and len(a.axes) == len(b.axes) == 1):
                return None
            found = joined([a.body, b.body], [*a.axes, *b.axes])
            if found is not None:
                self.continued.add(strip(operand(node, j)))
                return Sum((found[0],), found[1], self.ref(node, dims))
        return None

    def _total(self, terms: list[Term], node: fx.Node, dims: tuple[tuple[Axis, ...], ...]) -> Term:
        args = [t for term in terms for t in flatten(term, Add)]
        args = [t for t in args if not (isinstance(t, Const) and t.value == 0)] or [Const(0.0)]
        return args[0] if len(args) == 1 else Add(args, self.ref(node, dims))

    @reads(aten.addcmul)
    def _addcmul(self, node: fx.Node, level: int) -> Value:
        """Read addcmul: input + tensor1 * tensor2."""
        if level == 0 or arguments(node)["value"] != 1 or value(node).dtype not in FLOATING:
            raise Opaque
        values = self._operands(node, level, addends=1)
        dims, (first, a, b) = self._joined(values), [v.term for v in values]
        return Value(dims, self._total([first, Mul(a, b)], node, dims))

    @reads(aten.sum)
    def _sum(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        source = a["self"]
        inner = self.value(source, level if level == 2 else 0)
        if level < 2 and not is_indicator(inner.term):
            raise Opaque
        dims = a.get("dim") or list(range(len(shape(source))))
        return self._reduced(node, inner, dims, a.get("keepdim"), Sum)

    @reads(aten.mean)
    def _mean(self, node: fx.Node, level: int) -> Value:
        """Read a mean, as in the norm of an expert's output."""
        a = arguments(node)
        if level < 2 or not a.get("dim"):
            raise Opaque
        v = self.value(a["self"], level)
        return self._reduced(node, v, a["dim"], a.get("keepdim"), Mean)

    @reads(aten.any)
    def _any(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        v = self.value(a["self"], 0)
        if a.get("dim") is None or not is_indicator(v.term):
            raise Opaque
        dims = a["dim"] if isinstance(a["dim"], (list, tuple)) else [a["dim"]]
        found = self._reduced(node, v, dims, a.get("keepdim"), AnyOf)
        return self._any_of.setdefault((self.canon.number(node), v), found)

    def _reduced(self, node: fx.Node, v: Value, over: Sequence[int], keepdim: Any, kind: Any) -> Value:
        over = [dimension(d, len(v.dims)) for d in over]
        axes = [x for d in over for x in v.dims[d]]
        if some_chosen(axes):
            raise Opaque
        v, fresh = self._fresh(v, axes)
        kept = [() if d in over else g for d, g in enumerate(v.dims) if keepdim or d not in over]
        return Value(tuple(kept), kind(fresh, v.term, self.ref(node, tuple(kept))))

    @staticmethod
    def _fresh(v: Value, axes: list[Axis]) -> tuple[Value, tuple[Axis, ...]]:
        """Give the axes that are summed over names of their own."""
        new = {a: Axis(a.size) for a in axes}
        return Value(tuple(tuple(new.get(a, a) for a in g) for g in v.dims), substitute(v.term, new)), tuple(
            new.values()
        )

    # --- products ---

    @reads(aten.mm, aten.bmm, aten.addmm, aten.baddbmm)
    def _product(self, node: fx.Node, level: int) -> Value:
        if level == 0:
            raise Opaque
        bias = operand(node) if is_op(node, aten.addmm, aten.baddbmm) else None
        first = 0 if bias is None else 1
        if any(node.kwargs.get(n, 1) != 1 for n in ("alpha", "beta")):
            raise Opaque
        left, right = self._factors(operand(node, first), operand(node, first + 1), level)
        batch = [(d, d) for d in range(len(left.dims) - 2)]
        try:
            left, right = self.together(left, right, [*batch, (-1, -2)])
        except Opaque:
            for own, rows in ((left, operand(node, first + 1)), (right, operand(node, first))):
                gathered = isinstance(own.term, Ref) and any(isinstance(i, Ref) for i in own.term.index)
                need(not (gathered and self._is_weight(own.term)), Kind.REPEATED, node, strip(rows))
            raise
        inner = left.dims[-1] or right.dims[-2]
        if some_chosen(inner):
            raise Opaque
        lead = tuple(a or b for a, b in zip(left.dims[:-2], right.dims[:-2]))
        dims = (*lead, left.dims[-2], right.dims[-1])
        fresh = {a: Axis(a.size) for a in inner}
        body = substitute(Mul(left.term, right.term), fresh)
        term = Sum(tuple(fresh.values()), body, self.ref(node, dims) if bias is None else None)
        if bias is not None:
            b = self.value(bias, 0)
            b = Value(((),) * (len(dims) - len(b.dims)) + b.dims, b.term)
            whole, b = self.together(Value(dims, term), b, [(d, d) for d in range(len(dims))])
            return Value(whole.dims, Add((whole.term, b.term), self.ref(node, whole.dims)))
        return Value(dims, term)

    def _factors(self, a: fx.Node, b: fx.Node, level: int) -> tuple[Value, Value]:
        """Read the operands of a product. If one is a weight, the other is read at a lower level."""
        left, right = self.value(a, 0), self.value(b, 0)
        if self._is_weight(right.term):
            return self.value(a, level - 1), right
        if self._is_weight(left.term):
            return left, self.value(b, level - 1)
        if level == 2:
            return self.value(a, 2), self.value(b, 2)
        raise Opaque

    def _is_weight(self, term: Term) -> bool:
        return isinstance(term, Ref) and self.is_weight(term.node)

    def _grouped_mm(self, node: fx.Node, level: int) -> Value:
        """Read a product of rows sorted by expert: each row is multiplied by the weight of its id."""
        a, weight = operand(node), operand(node, 1)
        offs = node.args[2] if len(node.args) > 2 else node.kwargs["offs"]
        if level == 0 or len(shape(a)) != 2 or len(shape(weight)) != 3 or not is_tensor(offs):
            raise Opaque
        if is_op(node, aten._grouped_mm) and arguments(node)["bias"] is not None:
            raise Opaque
        w = self.value(weight, 0)
        if not self._is_weight(w.term) or len(w.dims[0]) != 1:
            raise Opaque
        x, experts = self.value(a, level - 1), int(shape(weight)[0])
        rows = self._rows_that_end_at(offs, experts, sorted_rows(x, 0), a)
        assert rows.key is not None
        x = Value(x.dims, self._of_experts(x.term, rows.key, experts))
        masked = any(isinstance(t, Apply) and t.args[0] is rows.key for t in walk(x.term))
        need(not masked, Kind.MASKED_ROWS, a, strip(a))
        w = Value(w.dims[1:], substitute(w.term, self._assign(w.dims[0], rows.key)))
        x, w = self.together(x, w, [(1, 0)])
        fresh = {k: Axis(k.size) for k in x.dims[1]}
        body = substitute(Mul(x.term, w.term), fresh)
        return Value(((rows,), w.dims[1]), Sum(tuple(fresh.values()), body, None))

    # --- results put together ---

    @reads(aten.stack, aten.cat)
    def _stack(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        parts, rank = a["tensors"], len(shape(node))
        if is_op(node, aten.cat):  # cat ignores a tensor of shape [0], whatever the rank of the others
            parts = [n for n in parts if len(shape(n)) == rank or not same(shape(n)[0], 0)]
            if len(parts) == 1 and value(parts[0]).dtype == value(node).dtype:
                return self.value(parts[0], level)
        d = dimension(a["dim"], rank)
        if level == 0 or (level == 1 and not is_op(node, aten.cat)):
            raise Opaque
        values = [self.value(n, level) for n in parts]
        if is_op(node, aten.cat) and (again := self._whole_again(values, d)) is not None:
            return again
        rows = None
        if is_op(node, aten.cat):
            if d == 0 and some_chosen(x for v in values for x in v.dims[0]):
                rows, values = self._whole(values)
            elif level == 2 and all(v.dims[d] and _as_long(v.dims[d], values[0].dims[d]) for v in values):
                return self._joined_parts(node, values, d)
            elif any(v.dims[d] for v in values):
                raise Opaque  # they have several sizes in the dimension in which they are joined
            else:
                values = [Value(v.dims[:d] + v.dims[d + 1 :], v.term) for v in values]
        if level == 1 and rows is None:
            raise Opaque
        first, terms = values[0], self._over_the_same(values)
        if rows is not None:
            assert rows.key is not None
            return Value(((rows,), *first.dims), Choose(rows.key, terms))
        axis = Axis(len(parts))
        dims = (*first.dims[:d], (axis,), *first.dims[d:])
        return Value(dims, Choose(axis, terms, self.ref(node, dims)))

    def _over_the_same(self, values: list[Value], but: int | None = None) -> list[Term]:
        """Return the terms of values of one shape, over the axes of the first.

        but: the dimension in which they may differ."""
        first, terms = values[0], [values[0].term]
        for v in values[1:]:
            head, v = self.together(first, v, [(i, i) for i in range(len(first.dims)) if i != but])
            if head is not first:
                raise Opaque
            terms.append(v.term)
        return terms

    def _whole_again(self, values: list[Value], d: int) -> Value | None:
        """Join slices in the order in which they were cut, such as products with slices of one weight."""
        if not all(len(v.dims[d]) == 1 for v in values):
            return None
        first = values[0]
        try:
            terms = self._over_the_same(values, d)
        except Opaque:
            return None
        found = joined(terms, [v.dims[d][0] for v in values])
        if found is None:
            return None
        whole, term = found
        return Value((*first.dims[:d], (whole,), *first.dims[d + 1 :]), term)

    @reads(aten.copy)
    def _copied(self, node: fx.Node, level: int) -> Value:
        """Read a tensor after another one was copied into it."""
        old, new = operand(node), operand(node, 1)
        if not same_shape(shape(old), shape(new)) or value(old).dtype != value(new).dtype:
            raise Opaque
        return self.value(new, level)

    @reads(aten.select_scatter)
    def _select_scatter(self, node: fx.Node, level: int) -> Value:
        """Read a tensor with one part replaced. Each index along the dimension becomes a part of its own."""
        a = arguments(node)
        base, part = self.addend(node, a["self"], level), self.value(a["src"], level)
        d = a["dim"] % len(base.dims)
        (axis,) = base.dims[d] if len(base.dims[d]) == 1 else (None,)
        if level < 2 or not isinstance(a["index"], int) or axis is None or not isinstance(axis.size, int):
            raise Opaque
        rest = [i for i in range(len(base.dims)) if i != d]
        base, part = self.together(base, part, [(i, at) for at, i in enumerate(rest)])
        if base.dims[d] != (axis,):
            raise Opaque
        parts = [substitute(base.term, {axis: Const(i)}) for i in range(axis.size)]
        parts[a["index"]] = part.term
        return Value(base.dims, Choose(axis, parts, self.ref(node, base.dims)))

    def _joined_parts(self, node: fx.Node, values: list[Value], d: int) -> Value:
        """Read parts of one size, one below the other: part i has the rows from i times that size on."""
        first, terms = values[0], self._over_the_same(values)
        axis = Axis(len(values))
        dims = (*first.dims[:d], (axis, *first.dims[d]), *first.dims[d + 1 :])
        return Value(dims, Choose(axis, terms, self.ref(node, dims)))


def _as_long(ours: tuple[Axis, ...], theirs: tuple[Axis, ...]) -> bool:
    """Return whether two dimensions have the same size. Rows that were selected have none."""
    sizes = []
    for group in (ours, theirs):
        if some_chosen(group):
            return False
        size: Any = 1
        for a in group:
            size = size * a.size
        sizes.append(size)
    return same(*sizes)


def _scales_rows(a: fx.Node, b: fx.Node) -> bool:
    """Return whether one operand is a single number for each row of the other."""
    sizes = shape(a), shape(b)
    return len(sizes[0]) == len(sizes[1]) > 0 and any(same(s[-1], 1) for s in sizes)
