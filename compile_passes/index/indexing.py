"""Reads re-indexing into terms: views, gathers, and rows that masks and sorts choose."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...meta.torch_internals import OpOverload
from ..graph.ids import below, gathered
from ..graph.nodes import (
    COPIES,
    FLOATING,
    arguments,
    aten,
    is_op,
    item,
    same_shape,
    shape,
    strip,
    value,
)
from ..operands import integer, operand, several
from .axes import Opaque, dimension, prefix, reads, same, spread
from .indicators import as_boolean, is_boolean, is_eq, is_indicator
from .routing import distinct
from .sorted_rows import SortedRows, sorted_rows
from .terms import (
    Affine,
    AnyOf,
    Apply,
    Axis,
    ChosenRows,
    Const,
    Mix,
    Mul,
    Ref,
    Sum,
    Term,
    Value,
    coordinate,
    free_axes,
    some_chosen,
    substitute,
)


class Indexing(SortedRows):
    # --- re-indexing ---

    @reads(*COPIES)
    def _copy(self, node: fx.Node, level: int) -> Value:
        return self.value(operand(node), level)

    @reads(aten._to_copy)
    def _cast(self, node: fx.Node, level: int) -> Value:
        """Read a cast. Casts between floats only round. Indicators are 0 and 1 in any type, and ids fit
        their type."""
        source, dtype = operand(node), value(node).dtype
        was = value(source).dtype
        if was in FLOATING and dtype in FLOATING:
            return self.value(source, level)
        inner = self.value(source, 0)
        if dtype == torch.bool and was != torch.bool:
            return Value(inner.dims, as_boolean(inner.term))
        if was == torch.bool or is_indicator(inner.term):
            return inner
        if not was.is_floating_point and dtype in (torch.int64, torch.int32):
            return inner
        raise Opaque

    @reads(aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.flatten)
    def _view(self, node: fx.Node, level: int) -> Value:
        source = operand(node)
        if is_op(source, aten.nonzero) and len(shape(node)) == 1 and shape(source)[1] == 1:
            return self._coordinate(source, 0)
        old = self.value(source, level)
        atoms = old.axes
        if isinstance(old.term, Ref) and self._merges_leading(node, source, old):
            raise Opaque
        dims: list[tuple[Axis, ...]] = []
        mapping: dict[Axis, tuple[Axis, ...]] = {}
        sizes = [None if same(size, 1) else size for size in shape(node)]
        last = max((d for d, size in enumerate(sizes) if size is not None), default=-1)
        for d, size in enumerate(sizes):
            if size is None:
                dims.append(())
                continue
            if not atoms:
                raise Opaque
            group = prefix(size, atoms)
            if group is None and d == last:  # the remaining axes, whatever their size is called
                group = list(atoms)
            if group is None:
                first = atoms[0]
                rest = first.size // size
                if isinstance(first, ChosenRows) or not same(rest * size, first.size):
                    raise Opaque
                parts = self.split(first, (size, rest))
                mapping[first] = parts
                mapping = {a: tuple(spread(b, first, parts)) for a, b in mapping.items()}
                atoms[:1] = list(parts)
                group = [parts[0]]
            del atoms[: len(group)]
            dims.append(tuple(group))
        if any(not same(a.size, 1) for a in atoms):
            raise Opaque
        terms = {a: coordinate(tuple(b)) for a, b in mapping.items()}
        return Value(tuple(dims), substitute(old.term, terms))

    def _merges_leading(self, node: fx.Node, source: fx.Node, old: Value) -> bool:
        """Return whether [B, S, H] -> [B * S, H] makes the tokens one axis, like those of the router and the
        ids.

        A slice does not count: in a buffer with rows for each expert, it belongs to one expert.
        """
        assert isinstance(old.term, Ref)
        ours, new = shape(source), shape(node)
        plain = tuple(i for i in old.term.index if isinstance(i, Axis))
        if not len(ours) > len(new) >= 2 or plain != tuple(old.axes) or self.is_weight(old.term.node):
            return False
        whole = [s for s in shape(old.term.node) if not same(s, 1)]
        of_whole = len(plain) == len(whole) and all(same(a.size, s) for a, s in zip(plain, whole))
        return of_whole and same(ours[-1], new[-1])

    @reads(aten.permute, aten.transpose, aten.t)
    def _permute(self, node: fx.Node, level: int) -> Value:
        v = self.value(operand(node), level)
        rank = len(v.dims)
        order = list(range(rank))
        if is_op(node, aten.permute):
            order = [d % rank for d in several(node, 1)]
        elif rank >= 2:
            i, j = (0, 1) if is_op(node, aten.t) else (integer(node, n) % rank for n in (1, 2))
            order[i], order[j] = order[j], order[i]
        return Value(tuple(v.dims[d] for d in order), v.term)

    @reads(aten.expand)
    def _expand(self, node: fx.Node, level: int) -> Value:
        v = self.value(operand(node), level)
        new = shape(node)
        dims = ((),) * (len(new) - len(v.dims)) + v.dims
        return Value(
            tuple(g if g or same(s, 1) else (Axis(s),) for g, s in zip(dims, new)),
            v.term,
        )

    @reads(aten.repeat)
    def _repeat(self, node: fx.Node, level: int) -> Value:
        v = self.value(operand(node), level)
        times = several(node, 1)
        dims = ((),) * (len(times) - len(v.dims)) + v.dims
        return Value(tuple(g if same(n, 1) else (Axis(n), *g) for g, n in zip(dims, times)), v.term)

    @reads(aten.select)
    def _select(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        d = dimension(a["dim"], len(shape(a["self"])))
        if not isinstance(a["index"], int):
            raise Opaque
        places = _places(a["self"], d)
        if places is not None:
            return self._coordinate(places, a["index"] % shape(places)[1])
        v = self.value(a["self"], level)
        index = a["index"]
        if index < 0:
            size = shape(a["self"])[d]
            if not isinstance(size, int):
                raise Opaque
            index += size
        return self._at(v, d, Const(index))

    def _at(self, v: Value, d: int, index: Term) -> Value:
        """Return v with one dimension fixed."""
        mapping = self._assign(v.dims[d], index)
        return Value(v.dims[:d] + v.dims[d + 1 :], substitute(v.term, mapping))

    def _assign(self, group: tuple[Axis, ...], index: Term) -> dict[Axis, Term]:
        """Map the axes of one dimension to their values where the dimension's coordinate is `index`."""
        if some_chosen(group):
            raise Opaque
        if len(group) <= 1:
            return dict.fromkeys(group, index)
        if isinstance(index, Const):
            out: dict[Axis, Term] = {}
            rest = index.value
            for axis in reversed(group):
                if not isinstance(axis.size, int):
                    raise Opaque
                out[axis], rest = Const(rest % axis.size), rest // axis.size
            return out
        if not isinstance(index, Mix) or len(index.parts) != len(group):
            raise Opaque
        if not all(same(a.size, s) for a, s in zip(group, index.sizes)):
            raise Opaque
        return dict(zip(group, index.parts))

    @reads(aten.slice)
    def _slice(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        size, new = (shape(n)[dimension(a["dim"], len(shape(n)))] for n in (a["self"], node))
        if a["start"] in (0, None) and a["step"] == 1 and same(size, new):
            return self.value(a["self"], level)
        start = a["start"] or 0
        if not all(isinstance(n, int) for n in (size, new, start)):
            raise Opaque
        start = max(start + size, 0) if start < 0 else start
        return self._part(self.value(a["self"], level), a["dim"], start, a["step"], new)

    def _part(self, v: Value, dim: int, start: int, step: int, size: int) -> Value:
        d = dimension(dim, len(v.dims))
        group = v.dims[d]
        if size == 0:
            raise Opaque
        if size == 1:
            fixed = self._at(v, d, Const(start))
            return Value((*fixed.dims[:d], (), *fixed.dims[d:]), fixed.term)
        if some_chosen(group):
            raise Opaque
        if len(group) > 1:  # a flat buffer: take one number of the first axis
            length = 1
            for a in group[1:]:
                length *= a.size
            if not (step == 1 and same(length, size) and start % size == 0):
                raise Opaque
            fixed = substitute(v.term, {group[0]: Const(start // size)})
            return Value((*v.dims[:d], group[1:], *v.dims[d + 1 :]), fixed)
        if not group:
            raise Opaque
        axis = Axis(size)
        term = substitute(v.term, {group[0]: Affine(axis, start, step)})
        return Value((*v.dims[:d], (axis,), *v.dims[d + 1 :]), term)

    def _getitem(self, node: fx.Node, level: int) -> Value:
        found = item(node)
        if found is None:
            raise Opaque
        producer, index = found
        if is_op(producer, aten.sort):
            return self._sorted(producer, index)
        # The node calls another graph: cond, while_loop, scan.
        if not isinstance(producer.target, OpOverload):
            raise Opaque
        a = arguments(producer)
        whole: Any = a.get("self")
        if is_op(producer, aten.unbind):
            d = dimension(a["dim"], len(shape(whole)))
            places = _places(whole, d)
            if places is not None:
                return self._coordinate(places, index)
            return self._at(self.value(whole, level), d, Const(index))
        if is_op(producer, aten.split, aten.split_with_sizes, aten.chunk):
            if is_op(producer, aten.split_with_sizes) and a["dim"] % len(shape(whole)) == 0:
                counted = self._counted_by(a["split_sizes"])
                if counted is not None:
                    sizes = [t.shape[0] for t in producer.meta["val"]]
                    return self._rows_of(index, counted, self.value(whole, level), sizes)
            sizes = [shape_of[a["dim"]] for shape_of in (tuple(t.shape) for t in producer.meta["val"])]
            if not all(isinstance(s, int) for s in sizes):
                raise Opaque
            return self._part(self.value(whole, level), a["dim"], sum(sizes[:index]), 1, sizes[index])
        raise Opaque

    @reads(aten.arange)
    def _arange(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        if a.get("start", 0) != 0 or a.get("step", 1) != 1 or value(node).dtype.is_floating_point:
            raise Opaque
        own = self.opaque(node)
        return Value(own.dims, own.axes[0] if own.axes else Const(0))

    @reads(aten.zeros, aten.zeros_like, aten.new_zeros, aten.full, aten.full_like, aten.scalar_tensor)
    @reads(aten.empty, aten.empty_like, aten.new_empty)
    def _fill(self, node: fx.Node, level: int) -> Value:
        own = self.opaque(node)
        if is_op(node, aten.empty, aten.empty_like, aten.new_empty):
            dims = tuple(() if same(s, 1) else (Axis(s),) for s in shape(node))
            return Value(dims, Const(None))
        a = arguments(node)
        number = a.get("fill_value", a.get("s", 0))
        if (
            is_op(node, aten.full, aten.scalar_tensor)
            and type(number) is int
            and all(same(s, 1) for s in shape(node))
            and value(node).dtype == torch.int64
        ):
            return Value(((),) * len(shape(node)), Const(number))  # the number of an expert, as a tensor
        if number != 0:
            raise Opaque
        return Value(own.dims, Const(0.0))

    # --- rows ---

    def _mask_rows(self, mask: fx.Node, size: Any) -> tuple[ChosenRows, Value]:
        """Return the rows that a mask selects, in row-major order, and the mask over axes of its own."""
        return self._rows_where(self.value(mask, 0), value(mask).dtype, size)

    def _whole_rows(self, mask: fx.Node, of: fx.Node, size: Any) -> tuple[ChosenRows, Value]:
        """Return the same as `_mask_rows` for a mask over the elements of `of` that has one value for each
        row: mask[..., None], expanded or not."""
        v = self.value(mask, 0)
        if len(shape(mask)) != len(shape(of)) or len(v.dims) < 2 or free_axes(v.term) & set(v.dims[-1]):
            raise Opaque
        return self._rows_where(Value(v.dims[:-1], v.term), value(mask).dtype, size)

    def _rows_where(self, v: Value, dtype: torch.dtype, size: Any) -> tuple[ChosenRows, Value]:
        if some_chosen(v.axes):
            raise Opaque
        key = ("mask", tuple(v.axes), v.term)  # the shape of the mask does not matter
        if key not in self._rows:
            bound = tuple(Axis(x.size) for x in v.axes)
            term = substitute(v.term, dict(zip(v.axes, bound)))
            if dtype != torch.bool and not is_boolean(term):
                term = Apply(aten.ne, (term, Const(0)))
            self._rows[key] = ChosenRows(size, bound, term)
        return self._rows[key], v

    def _coordinate(self, nonzero: fx.Node, dim: int) -> Value:
        """Read column `dim` of nonzero(mask): the position of each selected row along that dimension of
        the mask."""
        rows, mask = self._mask_rows(operand(nonzero), shape(nonzero)[0])
        place = coordinate(mask.dims[dim])
        return Value(((rows,),), substitute(place, dict(zip(mask.axes, rows.bound))))

    def together(self, a: Value, b: Value, pairs: list[tuple[int, int]]) -> tuple[Value, Value]:
        for i, j in pairs:
            a, b = self._as_any(a, i, b.dims[j]), self._as_any(b, j, a.dims[i])
        return super().together(a, b, pairs)

    @staticmethod
    def _as_any(v: Value, d: int, theirs: tuple[Axis, ...]) -> Value:
        """Return `v` over tokens instead of (token, choice) pairs, if `theirs` are these tokens.

        `v` ranges over the pairs (t, j) with ids[t, j] == e. `theirs` ranges over the tokens t that have e
        among their ids. If no token has an expert twice, both have the same rows in the same order.
        """
        d %= len(v.dims)
        ours = v.dims[d]
        rows, tokens = (g[0] if len(g) == 1 else None for g in (ours, theirs))
        if not isinstance(rows, ChosenRows) or not isinstance(tokens, ChosenRows) or rows is tokens:
            return v
        if rows.mask is None or not isinstance(tokens.mask, AnyOf) or not is_eq(rows.mask):
            return v
        *token, choice = rows.bound
        ids = rows.mask.args[0]
        if len(tokens.mask.axes) != 1 or len(token) != len(tokens.bound) or not isinstance(ids, Ref):
            return v
        j = tokens.mask.axes[0]
        names = dict(zip(rows.bound, (*tokens.bound, j)))
        if substitute(rows.mask, names) is not tokens.mask.body:
            return v
        if not ids.index or ids.index[-1] is not choice or not distinct(ids.node):
            return v
        fresh = Axis(j.size)
        body = substitute(Mul(rows.mask, v.term), {**names, choice: fresh})
        return Value((*v.dims[:d], theirs, *v.dims[d + 1 :]), Sum((fresh,), body))

    @staticmethod
    def _counted_by(sizes: Any) -> fx.Node | None:
        """Return counts if sizes are the numbers counts[0], counts[1], ... to the last."""
        found: set[fx.Node] = set()
        for i, size in enumerate(sizes):
            at = operand(size) if is_op(size, aten._local_scalar_dense) else None
            if not is_op(at, aten.select) or tuple(at.args[1:]) != (0, i):
                return None
            found.add(operand(at))
        counts = found.pop() if len(found) == 1 else None
        return counts if counts is not None and same_shape(shape(counts), (len(sizes),)) else None

    def _rows_of(self, e: int, counts: fx.Node, v: Value, sizes: list[Any]) -> Value:
        """Return expert e's part of sorted rows that are split by the number of rows of each expert."""
        if len(v.dims[0]) != 1 or not isinstance(v.dims[0][0], ChosenRows):
            raise Opaque
        rows = v.dims[0][0]
        if rows.key is None or not self._counts_of(counts, len(sizes), rows):
            raise Opaque
        if rows not in self._parts:
            self._parts[rows] = [self._part_of(rows, i, size) for i, size in enumerate(sizes)]
        if len(self._parts[rows]) != len(sizes):
            raise Opaque
        own = self._parts[rows][e]
        term = substitute(v.term, dict(zip(rows.bound, own.bound)))
        return Value(((own,), *v.dims[1:]), substitute(term, {own.mask.args[0]: Const(e)}))  # type: ignore[union-attr]

    @staticmethod
    def _part_of(rows: ChosenRows, e: int, size: Any) -> ChosenRows:
        bound = tuple(Axis(x.size) for x in rows.bound)
        key = substitute(rows.key, dict(zip(rows.bound, bound)))
        return ChosenRows(size, bound, Apply(aten.eq, (key, Const(e))))

    def _whole(self, parts: list[Value]) -> tuple[ChosenRows, list[Value]]:
        """Return the sorted rows that were cut into these parts, one for each expert. Also return the parts
        over the axes of these rows."""
        for rows, owns in self._parts.items():
            if [v.dims[0] for v in parts] == [(own,) for own in owns]:
                terms = [substitute(v.term, dict(zip(own.bound, rows.bound))) for v, own in zip(parts, owns)]
                return rows, [Value(v.dims[1:], t) for v, t in zip(parts, terms)]
        raise Opaque

    def _pointwise(self, node: fx.Node, level: int) -> Value:
        raise NotImplementedError

    @reads(aten.floor_divide, aten.div)
    def _divide(self, node: fx.Node, level: int) -> Value:
        """Read pair // k: a row's token, from the number of its (token, choice) pair."""
        if is_op(node, aten.div) and node.kwargs.get("rounding_mode") not in ("floor", "trunc"):
            return self._pointwise(node, level)
        by, v = node.args[1], self.value(operand(node), 0)
        if by == 1:
            return v
        if isinstance(v.term, Mix) and isinstance(by, int):
            tail: Any = 1
            for cut in range(len(v.term.parts) - 1, 0, -1):
                tail = tail * v.term.sizes[cut]
                if same(tail, by):
                    return Value(v.dims, Mix(v.term.parts[:cut], v.term.sizes[:cut]))
        if isinstance(v.term, Axis) and isinstance(by, int) and not isinstance(v.term, ChosenRows):
            axis = v.term
            if same(axis.size, by):
                return Value(v.dims, Const(0))
            count = axis.size // by
            if same(count * by, axis.size):
                parts = self.split(axis, (count, by))
                if axis in v.axes:
                    return Value(v.rename({axis: parts}).dims, parts[0])
                if self._cuts.get(axis) is coordinate(parts):  # cut in the same way as before
                    return Value(v.dims, parts[0])
                if any(isinstance(r, ChosenRows) and axis in r.bound for r in v.axes):
                    self._recut(v, axis, parts)
                    return Value(v.dims, parts[0])
        raise Opaque

    @reads(aten.remainder)
    def _remainder(self, node: fx.Node, level: int) -> Value:
        """Read ids % E, which take_along_dim computes, as the ids if they were chosen among E experts."""
        source, by = operand(node), node.args[1]
        if value(node).dtype.is_floating_point:
            return self._pointwise(node, level)
        ids = strip(source)
        while is_op(ids, aten.expand):
            ids = strip(operand(ids))
        if not isinstance(by, int) or not below(ids, by):
            raise Opaque
        return self.value(source, 0)

    def _recut(self, v: Value, axis: Axis, parts: tuple[Axis, ...]) -> None:
        """Let rows that range over `axis` range over its parts. Terms over `axis` are corrected where rows
        end."""
        self._cuts[axis] = coordinate(parts)
        for rows in v.axes:
            if isinstance(rows, ChosenRows) and axis in rows.bound:
                at = rows.bound.index(axis)
                rows.bound = (*rows.bound[:at], *parts, *rows.bound[at + 1 :])

    @reads(aten.index, aten.index_select, aten.embedding)
    def _index(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        whole = a["weight"] if is_op(node, aten.embedding) else a["self"]
        if is_op(node, aten.embedding):
            indices = [a["indices"]]
        elif is_op(node, aten.index_select):
            d = dimension(a["dim"], len(shape(whole)))
            if not shape(a["index"]):
                raise Opaque
            indices = [None] * d + [a["index"]]
        else:
            indices = list(a["indices"])
        table = self.value(whole, level)
        given = [(d, i) for d, i in enumerate(indices) if i is not None]
        if len(given) == 1:
            d, index = given[0]
            rows = sorted_rows(table, d)
            if rows is not None and value(index).dtype != torch.bool:
                return self._restored(table, d, rows, index)
        if [d for d, _ in given] != list(range(given[0][0], given[0][0] + len(given))):
            raise Opaque
        first = given[0][0]
        lead, rest = table.dims[:first], table.dims[first + len(given) :]
        if value(given[0][1]).dtype == torch.bool:
            if len(given) > 1:
                raise Opaque
            mask_node = given[0][1]
            count = len(shape(mask_node))
            rows, mask = self._mask_rows(mask_node, shape(node)[first])
            table, mask = self.together(table, mask, [(first + i, i) for i in range(count)])
            return self._selected(table, mask, rows, first, count)
        indices = self.broadcast([self._index_into(whole, d, i) for d, i in given])
        if any(len(table.dims[d]) > 1 and _is_of_selected_rows(v) for (d, _), v in zip(given, indices)):
            table = self.opaque(whole)  # one of its axes is the rows' axis
            lead, rest = table.dims[:first], table.dims[first + len(given) :]
        values = self._own_axes(table, indices)
        dims = self._joined(values)
        if any(v.term is Const(None) for v in values):
            raise Opaque
        mapping: dict[Axis, Term] = {}
        for (d, _), v in zip(given, values):
            mapping.update(self._assign(*self._fit(table, d, v.term)))
        return Value((*lead, *dims, *rest), substitute(table.term, mapping))

    @staticmethod
    def _own_axes(table: Value, indices: list[Value]) -> list[Value]:
        """Give indices axes that the table does not have, so no row is paired with its own column by
        accident."""
        shared = set(table.axes) & {a for v in indices for a in v.axes}
        if some_chosen(shared):
            raise Opaque
        fresh: dict[Axis, Any] = {a: Axis(a.size) for a in shared}
        return [v.rename(fresh) for v in indices]

    def _fit(self, table: Value, d: int, index: Term) -> tuple[tuple[Axis, ...], Term]:
        """Return the axes of dimension d, and the index in as many parts as there are axes."""
        group = table.dims[d]
        if len(group) > 1 and isinstance(index, Axis) and not isinstance(index, ChosenRows):
            cut = self.split(index, tuple(a.size for a in group))
            return group, coordinate(cut)
        return group, index

    def _selected(self, table: Value, mask: Value, rows: ChosenRows, first: int, count: int) -> Value:
        """Return table[mask], over the axes that `rows` stands for."""
        if len(mask.axes) != len(rows.bound):
            raise Opaque
        if not all(same(x.size, y.size) for x, y in zip(mask.axes, rows.bound)):
            raise Opaque
        term = substitute(table.term, dict(zip(mask.axes, rows.bound)))
        return Value((*table.dims[:first], (rows,), *table.dims[first + count :]), term)

    @reads(aten.masked_select)
    def _masked_select(self, node: fx.Node, level: int) -> Value:
        """Read masked_select: elements, or whole rows one after another in one dimension."""
        a = arguments(node)
        try:
            rows, mask = self._whole_rows(a["mask"], a["self"], shape(node)[0] // shape(a["self"])[-1])
        except Opaque:
            if not same_shape(shape(a["self"]), shape(a["mask"])):
                raise
            rows, mask = self._mask_rows(a["mask"], shape(node)[0])
        count = len(mask.dims)
        table, mask = self.together(self.value(a["self"], level), mask, [(d, d) for d in range(count)])
        chosen = self._selected(table, mask, rows, 0, count)
        return Value((tuple(chosen.axes),), chosen.term)

    @reads(aten.gather)
    def _gather(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        table, index = self.value(a["self"], level), self.value(a["index"], 0)
        dim = dimension(a["dim"], len(table.dims))
        rows, (_, whole) = sorted_rows(table, dim), gathered(node)
        if rows is not None and whole is not None:
            return self._restored(table, dim, rows, whole)
        if len(table.dims) != len(index.dims):
            raise Opaque
        for d in range(len(table.dims)):
            if d != dim and not same(shape(a["self"])[d], shape(a["index"])[d]):
                raise Opaque
        if not isinstance(index.term, Term):
            raise Opaque
        table, index = self.together(table, index, [(d, d) for d in range(len(table.dims)) if d != dim])
        mapping = self._assign(*self._fit(table, dim, index.term))
        dims = tuple((i if d == dim else (t or i)) for d, (t, i) in enumerate(zip(table.dims, index.dims)))
        return Value(dims, substitute(table.term, mapping))


def _places(node: fx.Node, d: int) -> fx.Node | None:
    """Return nonzero(mask) if parts of `node` along dimension d are its columns. Raises Opaque if they are
    its rows."""
    node = strip(node)
    while is_op(node, aten.t, aten.permute, aten.transpose) and len(shape(node)) == 2:
        order = several(node, 1) if is_op(node, aten.permute) else [1, 0]
        swapped = [n % 2 for n in order] == [1, 0] and (
            not is_op(node, aten.transpose) or node.args[1] != node.args[2]
        )
        node, d = strip(operand(node)), 1 - d if swapped else d
    if not is_op(node, aten.nonzero):
        return None
    if d != 1:
        raise Opaque
    return node


def _is_of_selected_rows(index: Value) -> bool:
    """Return whether an index is an axis of rows that a mask selects."""
    rows = [a for a in index.axes if isinstance(a, ChosenRows) and a.key is None]
    return any(index.term is x for r in rows for x in r.bound)
