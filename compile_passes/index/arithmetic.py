"""Arithmetic in terms: pointwise operators, products, sums, and results that are put together row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .. import advice
from ..graph.nodes import (
    FLOATING,
    Refusal,
    arguments,
    aten,
    is_op,
    is_tensor,
    need,
    refuse,
    same_shape,
    shape,
    static_int,
    strip,
    value,
)
from ..naming import called
from ..operands import operand, several
from .axes import Opaque, dimension, same
from .conditions import Conditions
from .indicators import is_eq, is_indicator
from .routing import distinct
from .sorted_rows import sorted_rows
from .terms import (  # fmt: skip
    Add,
    AnyOf,
    Apply,
    Axis,
    Choose,
    ChosenRows,
    Const,
    Mean,
    Mix,
    Mul,
    NoneOf,
    Ref,
    Sum,
    Term,
    Value,
    coordinate,
    flatten,
    free_axes,
    substitute,
    walk,
)


class Arithmetic(Conditions):
    # --- arithmetic ---

    def _operands(self, node: fx.Node, level: int, change: str = "") -> list[Value]:
        """Values of a pointwise operator's tensors; `change`: what helps where rows are in two orders."""
        tensors = [n for n in node.args if is_tensor(n)]
        values = [self.value(n, level) for n in tensors]
        if change and len(values) == 2 and values[0].dims and values[1].dims:
            rank = len(shape(node))
            sort = [sorted_rows(v, 0) if len(v.dims) == rank else None for v in values]
            for i, j in ((0, 1), (1, 0)):
                other = values[j].dims[0] if len(values[j].dims) == rank else ()
                if sort[i] is not None and other and other != (sort[i],):
                    what = "routing weights are" if is_op(node, aten.mul) else "bias is"
                    name = called(strip(tensors[j]))
                    refuse(f"the {what} not in the order of the sorted rows: {name}", node, change)
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

    def _glu(self, node: fx.Node, level: int) -> Value:
        """The first half times the sigmoid of the second."""
        a = arguments(node)
        v, d = self.value(a["self"], level), dimension(a["dim"], len(shape(node)))
        size = static_int(shape(node)[d])
        if level == 0 or size is None:
            raise Opaque
        up, gate = (self._part(v, d, start, 1, size) for start in (0, size))
        up, gate = self.together(up, gate, [(i, i) for i in range(len(up.dims))])
        opened = Apply(aten.sigmoid.default, (gate.term,))
        return Value(up.dims, Mul(up.term, opened, self.ref(node, up.dims)))

    def _mul(self, node: fx.Node, level: int) -> Value:
        a, b = node.args[:2]
        if level == 0 and not (is_tensor(a) and is_tensor(b) and _scales_rows(a, b)):
            tensors = [n for n in (a, b) if is_tensor(n)]
            masks = [value(n).dtype == torch.bool or is_indicator(self.value(n, 0).term) for n in tensors]
            if not any(masks):
                raise Opaque
        values = self._operands(node, level, advice.SORTED_WEIGHTS)
        dims = self._joined(values)
        terms = iter(values)
        factors = [next(terms).term if is_tensor(n) else self._number(n) for n in (a, b)]
        return Value(dims, Mul(factors[0], factors[1], self.ref(node, dims)))

    def _add(self, node: fx.Node, level: int) -> Value:
        if level == 0 or node.kwargs.get("alpha", 1) != 1 or value(node).dtype not in FLOATING:
            raise Opaque
        values = self._operands(node, level, advice.ROW_BIAS)
        dims = self._joined(values)
        terms = iter(values)
        args = [next(terms).term if is_tensor(n) else self._number(n) for n in node.args[:2]]
        return Value(dims, self._total(args, node, dims))

    def _total(self, terms: list[Term], node: fx.Node, dims: tuple[tuple[Axis, ...], ...]) -> Term:
        args = [t for term in terms for t in flatten(term, Add)]
        args = [t for t in args if not (isinstance(t, Const) and t.value == 0)] or [Const(0.0)]
        return args[0] if len(args) == 1 else Add(args, self.ref(node, dims))

    def _addcmul(self, node: fx.Node, level: int) -> Value:
        """input + tensor1 * tensor2."""
        if level == 0 or arguments(node)["value"] != 1 or value(node).dtype not in FLOATING:
            raise Opaque
        values = self._operands(node, level)
        dims, (first, a, b) = self._joined(values), [v.term for v in values]
        return Value(dims, self._total([first, Mul(a, b)], node, dims))

    def _sum(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        source = a["self"]
        inner = self.value(source, level if level == 2 else 0)
        if level < 2 and not is_indicator(inner.term):
            raise Opaque
        dims = a.get("dim") or list(range(len(shape(source))))
        return self._reduced(node, inner, dims, a.get("keepdim"), Sum)

    def _mean(self, node: fx.Node, level: int) -> Value:
        """Of an expert's output: what a norm divides it by."""
        a = arguments(node)
        if level < 2 or not a.get("dim"):
            raise Opaque
        v = self.value(a["self"], level)
        return self._reduced(node, v, a["dim"], a.get("keepdim"), Mean)

    def _any(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        v = self.value(a["self"], 0)
        if a.get("dim") is None or not is_indicator(v.term):
            raise Opaque
        dims = a["dim"] if isinstance(a["dim"], (list, tuple)) else [a["dim"]]
        return self._reduced(node, v, dims, a.get("keepdim"), AnyOf)

    def _reduced(self, node: fx.Node, v: Value, over: Sequence[int], keepdim: Any, kind: Any) -> Value:
        over = [dimension(d, len(v.dims)) for d in over]
        axes = [x for d in over for x in v.dims[d]]
        if any(isinstance(x, ChosenRows) for x in axes):
            raise Opaque
        v, fresh = self._fresh(v, axes)
        kept = [() if d in over else g for d, g in enumerate(v.dims) if keepdim or d not in over]
        return Value(tuple(kept), kind(fresh, v.term, self.ref(node, tuple(kept))))

    @staticmethod
    def _fresh(v: Value, axes: list[Axis]) -> tuple[Value, tuple[Axis, ...]]:
        """Axes that are summed over get names of their own."""
        new = {a: Axis(a.size) for a in axes}
        return Value(tuple(tuple(new.get(a, a) for a in g) for g in v.dims), substitute(v.term, new)), tuple(
            new.values()
        )

    # --- products ---

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
                reason = (
                    f"the rows ({called(strip(rows))}) follow each other in another order than choices do"
                )
                need(not (gathered and self._is_weight(own.term)), reason, node, advice.REPEATED)
            raise
        inner = left.dims[-1] or right.dims[-2]
        if any(isinstance(x, ChosenRows) for x in inner):
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
        """Operands of a product; one with a weight lowers the level of what it multiplies."""
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
        """Rows sorted by expert: each meets the weight of its own id."""
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
        reason = f"a mask zeroes rows of experts: {called(strip(a))} is not a product of the experts alone"
        need(not masked, reason, a, advice.BETWEEN)
        w = Value(w.dims[1:], substitute(w.term, self._assign(w.dims[0], rows.key)))
        x, w = self.together(x, w, [(1, 0)])
        fresh = {k: Axis(k.size) for k in x.dims[1]}
        body = substitute(Mul(x.term, w.term), fresh)
        return Value(((rows,), w.dims[1]), Sum(tuple(fresh.values()), body, None))

    # --- results put together ---

    def _stack(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        parts, rank = a["tensors"], len(shape(node))
        if is_op(node, aten.cat):  # that takes [0] for nothing, whatever the rank of the others
            parts = [n for n in parts if len(shape(n)) == rank or not same(shape(n)[0], 0)]
            if len(parts) == 1 and value(parts[0]).dtype == value(node).dtype:
                return self.value(parts[0], level)
        d = dimension(a["dim"], rank)
        if level == 0 or (level == 1 and not is_op(node, aten.cat)):
            raise Opaque
        values = [self.value(n, level) for n in parts]
        rows = None
        if is_op(node, aten.cat):
            if d == 0 and any(isinstance(x, ChosenRows) for v in values for x in v.dims[0]):
                rows, values = self._whole(values)
            elif level == 2 and all(v.dims[d] and _as_long(v.dims[d], values[0].dims[d]) for v in values):
                return self._joined_parts(node, values, d)
            elif any(v.dims[d] for v in values):
                raise Opaque  # joined along a dimension in which they are of several sizes
            else:
                values = [Value(v.dims[:d] + v.dims[d + 1 :], v.term) for v in values]
        if level == 1 and rows is None:
            raise Opaque
        first = values[0]
        terms = [first.term]
        for v in values[1:]:
            head, v = self.together(first, v, [(i, i) for i in range(len(first.dims))])
            if head is not first:
                raise Opaque
            terms.append(v.term)
        if rows is not None:
            assert rows.key is not None
            return Value(((rows,), *first.dims), Choose(rows.key, terms))
        axis = Axis(len(parts))
        dims = (*first.dims[:d], (axis,), *first.dims[d:])
        return Value(dims, Choose(axis, terms, self.ref(node, dims)))

    def _copied(self, node: fx.Node, level: int) -> Value:
        """What a tensor holds after another was copied into it."""
        old, new = operand(node), operand(node, 1)
        if not same_shape(shape(old), shape(new)) or value(old).dtype != value(new).dtype:
            raise Opaque
        return self.value(new, level)

    def _select_scatter(self, node: fx.Node, level: int) -> Value:
        """A tensor with one of its parts replaced: of each number along the dimension, a part of its own."""
        a = arguments(node)
        base, part = self.value(a["self"], level), self.value(a["src"], level)
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
        """Parts of one size, one below the other: part i has the rows from i times that size on."""
        first, terms = values[0], [values[0].term]
        for v in values[1:]:
            head, v = self.together(first, v, [(i, i) for i in range(len(first.dims))])
            if head is not first:
                raise Opaque
            terms.append(v.term)
        axis = Axis(len(values))
        dims = (*first.dims[:d], (axis, *first.dims[d]), *first.dims[d + 1 :])
        return Value(dims, Choose(axis, terms, self.ref(node, dims)))

    def _index_add(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        if a["dim"] != 0 or a["alpha"] != 1:
            raise Opaque
        return self._added_in_pieces(node, level, a["self"], a["index"], a["source"])

    def _added_in_pieces(
        self, node: fx.Node, level: int, base: fx.Node, index: fx.Node, source: fx.Node
    ) -> Value:
        found = self.value(base, level)
        for places, rows in _pieces(index, source):
            found = self._added(node, level, found, [self.value(places, 0)], rows)
        return found

    def _scatter_add(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        whole = shape(a["src"])
        if a["dim"] != 0 or not whole or len(whole) != len(shape(a["index"])):
            raise Opaque
        if not same(shape(a["index"])[0], whole[0]):
            raise Opaque
        index = self.value(a["index"], 0)
        if free_axes(index.term) & {x for g in index.dims[1:] for x in g}:
            raise Opaque  # columns of a row go to different places
        if not all(same(s, t) for s, t in zip(shape(a["index"])[1:], shape(a["self"])[1:])):
            raise Opaque
        rows = _repeated(a["index"])
        if is_op(rows, aten.cat) and len(shape(rows)) == 1:
            return self._added_in_pieces(node, level, a["self"], rows, a["src"])
        return self._accumulate(node, level, a["self"], [Value(index.dims[:1], index.term)], a["src"])

    def _scatter_reduce(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        if a["reduce"] != "sum" or not a["include_self"]:
            raise Opaque
        return self._scatter_add(node, level)

    def _index_put(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        indices = a["indices"]
        if any(i is None for i in indices):
            raise Opaque
        if value(indices[0]).dtype == torch.bool:
            if len(indices) > 1 or not shape(a["values"]):
                raise Opaque
            where = _chosen_places(*self._mask_rows(indices[0], shape(a["values"])[0]))
        else:
            where = [self.value(i, 0) for i in indices]
        if a["accumulate"]:
            return self._accumulate(node, level, a["self"], where, a["values"])
        added = self._increment(a["self"], indices, a["values"])
        if added is not None and (_visits_once(where) or _chosen_once(where)):
            return self._accumulate(node, level, a["self"], where, added)
        return self._overwrite(node, level, a["self"], where, a["values"])

    def _masked_scatter(self, node: fx.Node, level: int) -> Value:
        """Whole rows where the mask is True, in order: rows that this mask chose go back to their places."""
        a = arguments(node)
        mask, source = a["mask"], self.value(a["source"], level)
        if level < 2:
            raise Opaque
        try:
            rows, chosen = self._whole_rows(mask, a["self"], shape(a["source"])[0])
        except Opaque:
            reason = "masked_scatter has a mask of elements, not of whole rows"
            raise Refusal(reason, node, advice.PUT_BACK) from None
        whole = len(source.dims) == 2 and same(shape(a["source"])[1], shape(a["self"])[-1])
        own = whole and source.dims[0] == (rows,)
        need(own, "masked_scatter fills in rows that its mask did not choose", node, advice.PUT_BACK)
        where = _chosen_places(rows, chosen)
        added = self._increment(a["self"], [_repeated(mask)], a["source"])
        if added is not None and _visits_once(where):
            return self._accumulate(node, level, a["self"], where, added)
        return self._overwrite(node, level, a["self"], where, a["source"])

    def _increment(self, base: fx.Node, indices: list[fx.Node], new: fx.Node) -> fx.Node | None:
        """y if new is base[indices] + y: what `out[mask] += y` becomes."""
        new = _unchanged(new)
        if not is_op(new, aten.add) or new.kwargs.get("alpha", 1) != 1:
            return None
        for old, y in ((new.args[0], new.args[1]), (new.args[1], new.args[0])):
            if not is_op(old, aten.index) or not is_tensor(y) or not same_shape(shape(y), shape(new)):
                continue
            taken = several(old, 1)
            if old.args[0] is not base or len(taken) != len(indices):
                continue
            if all(i is not None and self.canon.same(i, j) for i, j in zip(taken, indices)):
                return y
        return None

    def _index_copy(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        if a["dim"] != 0:
            raise Opaque
        return self._overwrite(node, level, a["self"], [self.value(a["index"], 0)], a["source"])

    def _placed(
        self, level: int, base: Value, where: list[Value], source: fx.Node
    ) -> tuple[Value, Term, Term | None]:
        """base; `source` over base's axes, summed over whatever else its rows range over; the rows' mask.

        where: the place of each row along the first dimensions of base."""
        if level < 2 or any(len(w.dims) != 1 for w in where):
            raise Opaque
        src = self.value(source, level)
        group = where[0].dims[0]
        if len(group) == 1 and isinstance(group[0], ChosenRows):
            rows = group[0]
            if src.dims[0] != (rows,) or any(w.dims[0] != group for w in where):
                raise Opaque
            bound, mask = rows.bound, rows.mask
        else:
            if len(where) > 1:
                raise Opaque
            src, where[0] = self.together(src, where[0], [(0, 0)])
            bound, mask = where[0].dims[0], None
        targets: list[tuple[Term, ...]] = []
        for w in where:
            place = substitute(w.term, self._cuts)
            targets.append(place.parts if isinstance(place, Mix) else () if place is Const(0) else (place,))
        every = [t for target in targets for t in target]
        if not all(isinstance(t, Axis) and t in bound for t in every) or len(set(every)) != len(every):
            raise Opaque
        term = src.term if mask is None else Mul(mask, src.term)
        carried = Value((*targets, *src.dims[1:]), substitute(term, self._cuts))  # type: ignore[arg-type]
        carried, fresh = self._fresh(carried, [b for b in bound if b not in every])
        base, carried = self.together(base, carried, [(d, d) for d in range(len(base.dims))])
        return base, Sum(fresh, carried.term, None), mask

    def _accumulate(
        self, node: fx.Node, level: int, base: fx.Node, where: list[Value], source: fx.Node
    ) -> Value:
        return self._added(node, level, self.value(base, level), where, source)

    def _added(self, node: fx.Node, level: int, base: Value, where: list[Value], source: fx.Node) -> Value:
        old, new, _ = self._placed(level, base, where, source)
        if isinstance(old.term, Const):
            if old.term.value is None:
                raise Opaque
            return Value(old.dims, new)
        return Value(old.dims, Add([*flatten(old.term, Add), new], self.ref(node, old.dims)))

    def _overwrite(
        self, node: fx.Node, level: int, base: fx.Node, where: list[Value], source: fx.Node
    ) -> Value:
        """Rows that nobody wrote before are written: then to write is to add. Others keep what they had."""
        if not _visits_once(where):
            raise Opaque
        old, new, mask = self._placed(level, self.value(base, level), where, source)
        before = flatten(old.term, Add)
        if isinstance(old.term, Const) and not old.term.value:
            return Value(old.dims, new)
        if mask is None or not isinstance(new, Mul):
            raise Opaque
        chosen = set(flatten(new.args[0], Mul))
        if all(chosen <= set(flatten(t, Mul)) for t in before):
            return Value(old.dims, new)  # other rows are zeros
        if all(kept_rows(t) is None and expert_mask(t) is None for t in before):
            old, new, _ = self._placed(level, self.opaque(base), where, source)
            before = [Mul(NoneOf(()), old.term)]
        ours = expert_mask(new)
        if ours is None:
            raise Opaque
        kept = {t: rows for t in before if (rows := kept_rows(t)) is not None}
        for t in before:
            if t in kept:
                continue
            theirs = expert_mask(t)
            if theirs is None or theirs[0] is not ours[0] or theirs[1] == ours[1]:
                raise Opaque
        assert isinstance(new, Mul)
        by = new.args[0]
        after = [
            Mul(NoneOf((*kept[t].masks, by)), t.args[1]) if isinstance(t, Mul) and t in kept else t
            for t in before
        ]
        return Value(old.dims, Add([*after, new], self.ref(node, old.dims)))


def _repeated(node: fx.Node) -> fx.Node:
    """v of v[..., None], expanded or not."""
    return strip(operand(node) if is_op(node, aten.expand) else node)


def _pieces(index: fx.Node, source: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Rows one below the other, and as many places: each piece, where both are joined of as long ones."""
    if is_op(index, aten.cat) and is_op(source, aten.cat) and arguments(source)["dim"] == 0:
        places, rows = arguments(index)["tensors"], arguments(source)["tensors"]
        if len(places) == len(rows) and all(same(shape(i)[0], shape(r)[0]) for i, r in zip(places, rows)):
            return list(zip(places, rows))
    return [(index, source)]


def _chosen_places(rows: ChosenRows, mask: Value) -> list[Value]:
    """Where each of the rows that a mask chose lies along its dimensions."""
    bound = dict(zip(mask.axes, rows.bound))
    return [Value(((rows,),), substitute(coordinate(g), bound)) for g in mask.dims]


def _as_long(ours: tuple[Axis, ...], theirs: tuple[Axis, ...]) -> bool:
    """Whether two dimensions are of one size; rows that were selected have none."""
    sizes = []
    for group in (ours, theirs):
        if any(isinstance(a, ChosenRows) for a in group):
            return False
        size: Any = 1
        for a in group:
            size = size * a.size
        sizes.append(size)
    return same(*sizes)


def _scales_rows(a: fx.Node, b: fx.Node) -> bool:
    """One number for each row of the other."""
    sizes = shape(a), shape(b)
    return len(sizes[0]) == len(sizes[1]) > 0 and any(same(s[-1], 1) for s in sizes)


def _unchanged(node: fx.Node) -> fx.Node:
    """Back through copies and casts to the dtype a tensor has."""
    while is_op(node, aten.clone, aten._to_copy) and value(node).dtype == value(operand(node)).dtype:
        node = operand(node)
    return node


def _rows_of(where: list[Value]) -> ChosenRows | None:
    """What all of these are places of."""
    groups = {w.dims for w in where}
    dims = groups.pop() if len(groups) == 1 else ()
    group = dims[0] if len(dims) == 1 else ()
    return group[0] if len(group) == 1 and isinstance(group[0], ChosenRows) else None


def _places(where: list[Value]) -> set[Axis]:
    return set().union(*(free_axes(w.term) for w in where))


def _visits_once(where: list[Value]) -> bool:
    """Whether no two rows have the same place."""
    rows = _rows_of(where)
    if rows is None:
        return len(where) == 1 and isinstance(where[0].term, (Axis, Mix))
    return set(rows.bound) <= _places(where)


def _chosen_once(where: list[Value]) -> bool:
    """Whether these are the tokens t of rows (t, j) with ids[t, j] == e, and none has e among its ids twice.

    What is written there may be added to what was there; another expert may have written there before."""
    rows = _rows_of(where)
    if rows is None or rows.mask is None:
        return False
    places = _places(where)
    left = set(rows.bound) - places
    for f in flatten(rows.mask, Mul):
        if not is_eq(f):
            continue
        ids, e = f.args  # type: ignore[attr-defined]
        if isinstance(ids, Ref) and isinstance(e, Const) and ids.index:
            *token, choice = ids.index
            apart = isinstance(choice, Axis) and left == {choice}
            if apart and all(free_axes(i) <= places for i in token) and distinct(ids.node):
                return True
    return False


def kept_rows(term: Term) -> NoneOf | None:
    """Where a term's rows are those that were not written over, if it is of such."""
    return term.args[0] if isinstance(term, Mul) and isinstance(term.args[0], NoneOf) else None


def expert_mask(term: Term) -> tuple[Term, Any] | None:
    """(ids, e) if the term is something times [ids == e], in its first factors."""
    for f in flatten(term, Mul):
        if is_eq(f):
            ids, e = f.args  # type: ignore[attr-defined]
            if isinstance(e, Const):
                return ids, e.value
    return None
