"""Reads arithmetic into terms: pointwise operators, products, sums, and results joined from parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..graph.nodes import (
    FLOATING,
    arguments,
    aten,
    is_grouped_mm,
    is_op,
    is_pointwise,
    is_tensor,
    operand,
    same_shape,
    shape,
    static_int,
    strip,
    value,
)
from ..refusal import Kind, need, refuse
from .conditions import is_indicator, number
from .ids import below
from .reader import Opaque, Reader, dimension, dims_of, reads, same
from .rows import (
    of_experts,
    rows_that_end_at,
    sorted_rows,
    whole_of,
)
from .terms import (
    Add,
    Affine,
    AnyOf,
    Apply,
    Axis,
    Choose,
    ChosenRows,
    Const,
    Mean,
    Mix,
    Mul,
    Ref,
    Sum,
    Term,
    Value,
    coordinate,
    flatten,
    free_axes,
    some_chosen,
    substitute,
    walk,
)
from .views import axes_at, slice_of

# --- pointwise operators ---


def operands(
    reader: Reader, node: fx.Node, level: int, unsorted: Kind | None = None, addends: int = 0
) -> list[Value]:
    """Read a pointwise operator's tensors. The first `addends` of its arguments are added.

    `unsorted` is the refusal if the operands have rows in two different orders."""
    tensors = [n for n in node.args if is_tensor(n)]
    values = [
        reader.addend(node, n, level) if n in node.args[:addends] else reader.value(n, level) for n in tensors
    ]
    if unsorted is not None and len(values) == 2 and values[0].dims and values[1].dims:
        rank = len(shape(node))
        sort = [sorted_rows(v, 0) if len(v.dims) == rank else None for v in values]
        for i, j in ((0, 1), (1, 0)):
            other = values[j].dims[0] if len(values[j].dims) == rank else ()
            if sort[i] is not None and other and other != (sort[i],):
                refuse(unsorted, node, strip(tensors[j]))
    return reader.broadcast(values)


@reads(is_pointwise)
def pointwise(reader: Reader, node: fx.Node, level: int) -> Value:
    if level == 0 or value(node).dtype not in FLOATING:
        raise Opaque
    values = operands(reader, node, level)
    if not values:
        raise Opaque
    terms = iter(values)
    args = [next(terms).term if is_tensor(a) else a for a in node.args]
    if any(isinstance(a, (fx.Node, list, tuple)) for a in args):
        raise Opaque
    kwargs = tuple(node.kwargs.items())
    if any(isinstance(v, fx.Node) for _, v in kwargs):
        raise Opaque
    dims = dims_of(values)
    return Value(dims, Apply(node.target, args, kwargs, reader.ref(node, dims)))


@reads(aten.glu)
def _glu(reader: Reader, node: fx.Node, level: int) -> Value:
    """Read GLU: the first half times the sigmoid of the second."""
    a = arguments(node)
    v, d = reader.value(a["self"], level), dimension(a["dim"], len(shape(node)))
    size = static_int(shape(node)[d])
    if level == 0 or size is None:
        raise Opaque
    up, gate = (slice_of(reader, v, d, start, 1, size) for start in (0, size))
    up, gate = reader.together(up, gate, [(i, i) for i in range(len(up.dims))])
    opened = Apply(aten.sigmoid.default, (gate.term,))
    return Value(up.dims, Mul(up.term, opened, reader.ref(node, up.dims)))


@reads(aten.mul)
def _mul(reader: Reader, node: fx.Node, level: int) -> Value:
    a, b = node.args[:2]
    if level == 0 and not (is_tensor(a) and is_tensor(b) and _scales_rows(a, b)):
        tensors = [n for n in (a, b) if is_tensor(n)]
        masks = [value(n).dtype == torch.bool or is_indicator(reader.value(n, 0).term) for n in tensors]
        if not any(masks):
            raise Opaque
    values = operands(reader, node, level, Kind.UNSORTED_WEIGHTS)
    dims = dims_of(values)
    terms = iter(values)
    factors = [next(terms).term if is_tensor(n) else number(reader, n) for n in (a, b)]
    return Value(dims, Mul(factors[0], factors[1], reader.ref(node, dims)))


def _scales_rows(a: fx.Node, b: fx.Node) -> bool:
    """Return whether one operand is a single number for each row of the other."""
    sizes = shape(a), shape(b)
    return len(sizes[0]) == len(sizes[1]) > 0 and any(same(s[-1], 1) for s in sizes)


@reads(aten.add)
def _add(reader: Reader, node: fx.Node, level: int) -> Value:
    if level == 0 or node.kwargs.get("alpha", 1) != 1 or value(node).dtype not in FLOATING:
        raise Opaque
    values = operands(reader, node, level, Kind.UNSORTED_BIAS, addends=2)
    dims = dims_of(values)
    terms = iter(values)
    args = [next(terms).term if is_tensor(n) else number(reader, n) for n in node.args[:2]]
    return Value(dims, _of_slices(reader, args, node, dims) or _total(reader, args, node, dims))


def _of_slices(
    reader: Reader, terms: list[Term], node: fx.Node, dims: tuple[tuple[Axis, ...], ...]
) -> Term | None:
    """Join sums over two consecutive slices of a dimension into one sum."""
    for i, j in ((0, 1), (1, 0)):
        a, b = terms[i], terms[j]
        if not (isinstance(a, Sum) and isinstance(b, Sum) and len(a.axes) == len(b.axes) == 1):
            return None
        found = joined([a.body, b.body], [*a.axes, *b.axes])
        if found is not None:
            reader.continued.add(strip(operand(node, j)))
            return Sum((found[0],), found[1], reader.ref(node, dims))
    return None


def _total(reader: Reader, terms: list[Term], node: fx.Node, dims: tuple[tuple[Axis, ...], ...]) -> Term:
    args = [t for term in terms for t in flatten(term, Add)]
    args = [t for t in args if not (isinstance(t, Const) and t.value == 0)] or [Const(0.0)]
    return args[0] if len(args) == 1 else Add(args, reader.ref(node, dims))


@reads(aten.addcmul)
def _addcmul(reader: Reader, node: fx.Node, level: int) -> Value:
    """Read addcmul: input + tensor1 * tensor2."""
    if level == 0 or arguments(node)["value"] != 1 or value(node).dtype not in FLOATING:
        raise Opaque
    values = operands(reader, node, level, addends=1)
    dims, (first, a, b) = dims_of(values), [v.term for v in values]
    return Value(dims, _total(reader, [first, Mul(a, b)], node, dims))


@reads(aten.floor_divide, aten.div)
def _divide(reader: Reader, node: fx.Node, level: int) -> Value:
    """Read pair // k: a row's token, from the number of its (token, choice) pair."""
    if is_op(node, aten.div) and node.kwargs.get("rounding_mode") not in ("floor", "trunc"):
        return pointwise(reader, node, level)
    by, v = node.args[1], reader.value(operand(node), 0)
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
            parts = reader.split(axis, (count, by))
            if axis in v.axes:
                return Value(v.rename({axis: parts}).dims, parts[0])
            if reader.cuts.get(axis) is coordinate(parts):  # this axis was split in the same way before
                return Value(v.dims, parts[0])
            if any(isinstance(r, ChosenRows) and axis in r.bound for r in v.axes):
                _recut(reader, v, axis, parts)
                return Value(v.dims, parts[0])
    raise Opaque


def _recut(reader: Reader, v: Value, axis: Axis, parts: tuple[Axis, ...]) -> None:
    """Let rows that range over `axis` range over its parts."""
    reader.cuts[axis] = coordinate(parts)
    for rows in v.axes:
        if isinstance(rows, ChosenRows) and axis in rows.bound:
            at = rows.bound.index(axis)
            rows.bound = (*rows.bound[:at], *parts, *rows.bound[at + 1 :])


@reads(aten.remainder)
def _remainder(reader: Reader, node: fx.Node, level: int) -> Value:
    """Read ids % E, which take_along_dim computes, as the ids if they were chosen among E experts."""
    source, by = operand(node), node.args[1]
    if value(node).dtype.is_floating_point:
        return pointwise(reader, node, level)
    ids = strip(source)
    while is_op(ids, aten.expand):
        ids = strip(operand(ids))
    if not isinstance(by, int) or not below(ids, by):
        raise Opaque
    return reader.value(source, 0)


# --- sums ---


@reads(aten.sum)
def _sum(reader: Reader, node: fx.Node, level: int) -> Value:
    a = arguments(node)
    source = a["self"]
    inner = reader.value(source, level if level == 2 else 0)
    if level < 2 and not is_indicator(inner.term):
        raise Opaque
    dims = a.get("dim") or list(range(len(shape(source))))
    return _reduced(reader, node, inner, dims, a.get("keepdim"), Sum)


@reads(aten.mean)
def _mean(reader: Reader, node: fx.Node, level: int) -> Value:
    """Read a mean, as in the norm of an expert's output."""
    a = arguments(node)
    if level < 2 or not a.get("dim"):
        raise Opaque
    v = reader.value(a["self"], level)
    return _reduced(reader, node, v, a["dim"], a.get("keepdim"), Mean)


@reads(aten.any)
def _any(reader: Reader, node: fx.Node, level: int) -> Value:
    a = arguments(node)
    v = reader.value(a["self"], 0)
    if a.get("dim") is None or not is_indicator(v.term):
        raise Opaque
    dims = a["dim"] if isinstance(a["dim"], (list, tuple)) else [a["dim"]]
    found = _reduced(reader, node, v, dims, a.get("keepdim"), AnyOf)
    return reader.any_of.setdefault((reader.canon.number(node), v), found)


def _reduced(reader: Reader, node: fx.Node, v: Value, over: Sequence[int], keepdim: Any, kind: Any) -> Value:
    over = [dimension(d, len(v.dims)) for d in over]
    axes = [x for d in over for x in v.dims[d]]
    if some_chosen(axes):
        raise Opaque
    v, fresh = with_fresh(v, axes)
    kept = [() if d in over else g for d, g in enumerate(v.dims) if keepdim or d not in over]
    return Value(tuple(kept), kind(fresh, v.term, reader.ref(node, tuple(kept))))


def with_fresh(v: Value, axes: list[Axis]) -> tuple[Value, tuple[Axis, ...]]:
    """Give the axes that are summed over names of their own."""
    new = {a: Axis(a.size) for a in axes}
    return Value(tuple(tuple(new.get(a, a) for a in g) for g in v.dims), substitute(v.term, new)), tuple(
        new.values()
    )


# --- products ---


@reads(aten.mm, aten.bmm, aten.addmm, aten.baddbmm)
def _product(reader: Reader, node: fx.Node, level: int) -> Value:
    if level == 0:
        raise Opaque
    bias = operand(node) if is_op(node, aten.addmm, aten.baddbmm) else None
    first = 0 if bias is None else 1
    if any(node.kwargs.get(n, 1) != 1 for n in ("alpha", "beta")):
        raise Opaque
    left, right = _factors(reader, operand(node, first), operand(node, first + 1), level)
    batch = [(d, d) for d in range(len(left.dims) - 2)]
    try:
        left, right = reader.together(left, right, [*batch, (-1, -2)])
    except Opaque:
        for own, rows in ((left, operand(node, first + 1)), (right, operand(node, first))):
            gathered = isinstance(own.term, Ref) and any(isinstance(i, Ref) for i in own.term.index)
            need(not (gathered and _is_weight(reader, own.term)), Kind.REPEATED, node, strip(rows))
        raise
    inner = left.dims[-1] or right.dims[-2]
    if some_chosen(inner):
        raise Opaque
    lead = tuple(a or b for a, b in zip(left.dims[:-2], right.dims[:-2]))
    dims = (*lead, left.dims[-2], right.dims[-1])
    fresh = {a: Axis(a.size) for a in inner}
    body = substitute(Mul(left.term, right.term), fresh)
    term = Sum(tuple(fresh.values()), body, reader.ref(node, dims) if bias is None else None)
    if bias is not None:
        b = reader.value(bias, 0)
        b = Value(((),) * (len(dims) - len(b.dims)) + b.dims, b.term)
        whole, b = reader.together(Value(dims, term), b, [(d, d) for d in range(len(dims))])
        return Value(whole.dims, Add((whole.term, b.term), reader.ref(node, whole.dims)))
    return Value(dims, term)


def _factors(reader: Reader, a: fx.Node, b: fx.Node, level: int) -> tuple[Value, Value]:
    """Read the operands of a product. If one is a weight, the other is read at a lower level."""
    left, right = reader.value(a, 0), reader.value(b, 0)
    if _is_weight(reader, right.term):
        return reader.value(a, level - 1), right
    if _is_weight(reader, left.term):
        return left, reader.value(b, level - 1)
    if level == 2:
        return reader.value(a, 2), reader.value(b, 2)
    raise Opaque


def _is_weight(reader: Reader, term: Term) -> bool:
    return isinstance(term, Ref) and reader.is_weight(term.node)


@reads(is_grouped_mm)
def _grouped_mm(reader: Reader, node: fx.Node, level: int) -> Value:
    """Read a product of rows sorted by expert: each row is multiplied by the weight of its id."""
    a, weight = operand(node), operand(node, 1)
    offs = node.args[2] if len(node.args) > 2 else node.kwargs["offs"]
    if level == 0 or len(shape(a)) != 2 or len(shape(weight)) != 3 or not is_tensor(offs):
        raise Opaque
    if is_op(node, aten._grouped_mm) and arguments(node)["bias"] is not None:
        raise Opaque
    w = reader.value(weight, 0)
    if not _is_weight(reader, w.term) or len(w.dims[0]) != 1:
        raise Opaque
    x, experts = reader.value(a, level - 1), int(shape(weight)[0])
    rows = rows_that_end_at(reader, offs, experts, sorted_rows(x, 0), a)
    assert rows.key is not None
    x = Value(x.dims, of_experts(x.term, rows.key, experts))
    masked = any(isinstance(t, Apply) and t.args[0] is rows.key for t in walk(x.term))
    need(not masked, Kind.MASKED_ROWS, a, strip(a))
    w = Value(w.dims[1:], substitute(w.term, axes_at(reader, w.dims[0], rows.key)))
    x, w = reader.together(x, w, [(1, 0)])
    fresh = {k: Axis(k.size) for k in x.dims[1]}
    body = substitute(Mul(x.term, w.term), fresh)
    return Value(((rows,), w.dims[1]), Sum(tuple(fresh.values()), body, None))


# --- results put together ---


@reads(aten.stack, aten.cat)
def stack(reader: Reader, node: fx.Node, level: int) -> Value:
    a = arguments(node)
    parts, rank = a["tensors"], len(shape(node))
    if is_op(node, aten.cat):  # cat ignores a tensor of shape [0], whatever the rank of the others
        parts = [n for n in parts if len(shape(n)) == rank or not same(shape(n)[0], 0)]
        if len(parts) == 1 and value(parts[0]).dtype == value(node).dtype:
            return reader.value(parts[0], level)
    d = dimension(a["dim"], rank)
    if level == 0 or (level == 1 and not is_op(node, aten.cat)):
        raise Opaque
    values = [reader.value(n, level) for n in parts]
    if is_op(node, aten.cat) and (again := _whole_again(reader, values, d)) is not None:
        return again
    rows = None
    if is_op(node, aten.cat):
        if d == 0 and some_chosen(x for v in values for x in v.dims[0]):
            rows, values = whole_of(reader, values)
        elif level == 2 and all(v.dims[d] and _as_long(v.dims[d], values[0].dims[d]) for v in values):
            return _joined_parts(reader, node, values, d)
        elif any(v.dims[d] for v in values):
            raise Opaque  # the parts have different sizes in the dimension along which they are joined
        else:
            values = [Value(v.dims[:d] + v.dims[d + 1 :], v.term) for v in values]
    if level == 1 and rows is None:
        raise Opaque
    first, terms = values[0], _over_the_same(reader, values)
    if rows is not None:
        assert rows.key is not None
        return Value(((rows,), *first.dims), Choose(rows.key, terms))
    axis = Axis(len(parts))
    dims = (*first.dims[:d], (axis,), *first.dims[d:])
    return Value(dims, Choose(axis, terms, reader.ref(node, dims)))


def _over_the_same(reader: Reader, values: list[Value], but: int | None = None) -> list[Term]:
    """Return the terms of values of one shape, over the axes of the first.

    but: the dimension in which they may differ."""
    first, terms = values[0], [values[0].term]
    for v in values[1:]:
        head, v = reader.together(first, v, [(i, i) for i in range(len(first.dims)) if i != but])
        if head is not first:
            raise Opaque
        terms.append(v.term)
    return terms


def _whole_again(reader: Reader, values: list[Value], d: int) -> Value | None:
    """Join slices in the order in which they were cut, such as products with slices of one weight."""
    if not all(len(v.dims[d]) == 1 for v in values):
        return None
    first = values[0]
    try:
        terms = _over_the_same(reader, values, d)
    except Opaque:
        return None
    found = joined(terms, [v.dims[d][0] for v in values])
    if found is None:
        return None
    whole, term = found
    return Value((*first.dims[:d], (whole,), *first.dims[d + 1 :]), term)


def _joined_parts(reader: Reader, node: fx.Node, values: list[Value], d: int) -> Value:
    """Read parts of one size, one below the other: part i has the rows from i times that size on."""
    first, terms = values[0], _over_the_same(reader, values)
    axis = Axis(len(values))
    dims = (*first.dims[:d], (axis, *first.dims[d]), *first.dims[d + 1 :])
    return Value(dims, Choose(axis, terms, reader.ref(node, dims)))


def _as_long(ours: tuple[Axis, ...], theirs: tuple[Axis, ...]) -> bool:
    """Return whether two dimensions have the same size. Selected rows have no known size."""
    ours_long, theirs_long = (math.prod(a.size for a in group) for group in (ours, theirs))
    return not some_chosen((*ours, *theirs)) and same(ours_long, theirs_long)


@reads(aten.copy)
def _copied(reader: Reader, node: fx.Node, level: int) -> Value:
    """Read a tensor after another one was copied into it."""
    old, new = operand(node), operand(node, 1)
    if not same_shape(shape(old), shape(new)) or value(old).dtype != value(new).dtype:
        raise Opaque
    return reader.value(new, level)


# --- slices of a dimension, joined again ---


def joined(terms: Sequence[Term], axes: Sequence[Axis]) -> tuple[Axis, Term] | None:
    """Return (whole, term) where term i, over axes[i], is the next part of `term` over `whole`.

    None if the terms differ in more than their part.
    """
    sizes = [a.size for a in axes]
    if some_chosen(axes) or not all(isinstance(s, int) for s in sizes):
        return None
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    whole = Axis(sum(sizes))
    try:
        return whole, _Joined(list(axes), starts, whole).of(list(terms))
    except (_Differ, RecursionError):  # terms of experts are never that deep
        return None


class _Differ(Exception):
    """The terms are not parts of one term."""


class _Joined:
    def __init__(self, axes: list[Axis], starts: list[int], whole: Axis) -> None:
        self._axes, self._starts, self._whole = axes, starts, whole
        self._done: dict[tuple[Term, ...], Any] = {}
        """Maps parts to the term that they are parts of, and the axes of sums in the parts to the axis in
        that term."""

    def of(self, terms: list[Any]) -> Any:
        """Return the term that these are parts of."""
        if not all(isinstance(t, Term) for t in terms):
            return self._same(terms)
        if tuple(terms) not in self._done:
            self._done[tuple(terms)] = self._read(terms)
        return self._done[tuple(terms)]

    def _read(self, terms: list[Any]) -> Any:
        first = terms[0]
        places = [_place(t, a) for t, a in zip(terms, self._axes)]
        known = [p for p in places if p is not None]
        if len(known) == len(terms):
            if [p - known[0] for p in known] != self._starts:
                raise _Differ
            return Affine(self._whole, known[0], 1)
        if known:
            raise _Differ
        if all(t is first for t in terms) and not free_axes(first) & {*self._axes}:
            return first
        if not all(type(t) is type(first) for t in terms):
            raise _Differ
        if isinstance(first, Ref):
            self._same([t.node for t in terms])
            return Ref(first.node, self._each([t.index for t in terms]))
        if isinstance(first, Affine):
            self._same([(t.start, t.step) for t in terms])
            return Affine(self.of([t.base for t in terms]), first.start, first.step)
        if isinstance(first, Mix):
            self._same([tuple(map(str, t.sizes)) for t in terms])
            return Mix(self._each([t.parts for t in terms]), first.sizes)
        if isinstance(first, Apply):
            self._same([(t.op, t.named) for t in terms])
            return Apply(first.op, self._each([t.args for t in terms]), first.named)
        if isinstance(first, Mul):
            return Mul(*self._each([t.args for t in terms]))
        if isinstance(first, Add):
            return Add(self._each([t.args for t in terms]))
        if isinstance(first, (Sum, Mean)):
            self._same([tuple(str(a.size) for a in t.axes) for t in terms])
            each = list(zip(*(t.axes for t in terms)))
            own = [a[0] if all(b is a[0] for b in a) else Axis(a[0].size) for a in each]
            self._done |= dict(zip(each, own))
            return type(first)(own, self.of([t.body for t in terms]))
        raise _Differ

    def _each(self, lists: list[tuple[Any, ...]]) -> list[Any]:
        self._same([len(parts) for parts in lists])
        return [self.of(list(column)) for column in zip(*lists)]

    @staticmethod
    def _same(values: list[Any]) -> Any:
        if any(v != values[0] for v in values[1:]):
            raise _Differ
        return values[0]


def _place(term: Any, axis: Axis) -> int | None:
    """Return the start of a coordinate that runs over `axis`."""
    if term is axis:
        return 0
    if isinstance(term, Affine) and term.base is axis and term.step == 1:
        return term.start
    return None
