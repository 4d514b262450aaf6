"""Reads rows that are added or written to a tensor at given positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..graph.nodes import (
    arguments,
    aten,
    is_op,
    is_tensor,
    operand,
    same_shape,
    several,
    shape,
    strip,
    value,
)
from ..refusal import Kind, Refusal, Refused, need
from .arithmetic import with_fresh
from .ids import distinct
from .reader import Opaque, Reader, reads, same
from .rows import (
    mask_rows,
    whole_rows,
)
from .terms import (
    Add,
    Axis,
    Choose,
    ChosenRows,
    Const,
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
    is_eq,
    substitute,
)


@reads(aten.index_add)
def _index_add(reader: Reader, node: fx.Node, level: int) -> Value:
    a = arguments(node)
    if a["dim"] != 0 or a["alpha"] != 1:
        raise Opaque
    return _added_in_pieces(reader, node, level, a["self"], a["index"], a["source"])


def _added_in_pieces(
    reader: Reader, node: fx.Node, level: int, base: fx.Node, index: fx.Node, source: fx.Node
) -> Value:
    found = reader.addend(node, base, level)
    for places, rows in _pieces(index, source):
        found = _added(reader, node, level, found, [reader.value(places, 0)], rows)
    return found


@reads(aten.scatter_add)
def _scatter_add(reader: Reader, node: fx.Node, level: int) -> Value:
    a = arguments(node)
    whole = shape(a["src"])
    if a["dim"] != 0 or not whole or len(whole) != len(shape(a["index"])):
        raise Opaque
    if not same(shape(a["index"])[0], whole[0]):
        raise Opaque
    index = reader.value(a["index"], 0)
    if free_axes(index.term) & {x for g in index.dims[1:] for x in g}:
        raise Opaque  # columns of a row go to different places
    if not all(same(s, t) for s, t in zip(shape(a["index"])[1:], shape(a["self"])[1:])):
        raise Opaque
    rows = _repeated(a["index"])
    if is_op(rows, aten.cat) and len(shape(rows)) == 1:
        return _added_in_pieces(reader, node, level, a["self"], rows, a["src"])
    return _added(
        reader,
        node,
        level,
        reader.addend(node, a["self"], level),
        [Value(index.dims[:1], index.term)],
        a["src"],
    )


@reads(aten.scatter_reduce)
def _scatter_reduce(reader: Reader, node: fx.Node, level: int) -> Value:
    a = arguments(node)
    if a["reduce"] != "sum" or not a["include_self"]:
        raise Opaque
    return _scatter_add(reader, node, level)


@reads(aten.index_put)
def _index_put(reader: Reader, node: fx.Node, level: int) -> Value:
    a = arguments(node)
    indices = a["indices"]
    if any(i is None for i in indices):
        raise Opaque
    if value(indices[0]).dtype == torch.bool:
        if len(indices) > 1 or not shape(a["values"]):
            raise Opaque
        where = _chosen_places(*mask_rows(reader, indices[0], shape(a["values"])[0]))
    else:
        where = [reader.value(i, 0) for i in indices]
    if a["accumulate"]:
        return _added(reader, node, level, reader.addend(node, a["self"], level), where, a["values"])
    return _put(reader, node, level, a["self"], indices, where, a["values"])


def _put(reader: Reader, node: fx.Node, level: int, base: fx.Node, indices: list[fx.Node], where: list[Value],
    rows: fx.Node,
) -> Value:  # fmt: skip
    """Read rows that replace base[indices]. If the new rows are base[indices] + y, read them as adding y."""
    added = _increment(reader, base, indices, rows)
    if added is not None and _once(where):
        return _added(reader, node, level, reader.addend(node, base, level), where, added)
    return _overwrite(reader, node, level, base, where, rows)


@reads(aten.masked_scatter)
def _masked_scatter(reader: Reader, node: fx.Node, level: int) -> Value:
    """Read masked_scatter of whole rows: rows that this mask chose go back to their places, in order."""
    a = arguments(node)
    mask, source = a["mask"], reader.value(a["source"], level)
    if level < 2:
        raise Opaque
    try:
        rows, chosen = whole_rows(reader, mask, a["self"], shape(a["source"])[0])
    except Opaque:
        raise Refused(Refusal(Kind.ELEMENTS_MASK, node)) from None
    whole = len(source.dims) == 2 and same(shape(a["source"])[1], shape(a["self"])[-1])
    own = whole and source.dims[0] == (rows,)
    need(own, Kind.OTHER_ROWS_PUT, node)
    where = _chosen_places(rows, chosen)
    return _put(reader, node, level, a["self"], [_repeated(mask)], where, a["source"])


def _increment(reader: Reader, base: fx.Node, indices: list[fx.Node], new: fx.Node) -> fx.Node | None:
    """Return y if new is base[indices] + y, as in `out[mask] += y`."""
    new = _unchanged(new)
    if not is_op(new, aten.add) or new.kwargs.get("alpha", 1) != 1:
        return None
    for old, y in ((new.args[0], new.args[1]), (new.args[1], new.args[0])):
        if not is_op(old, aten.index) or not is_tensor(y) or not same_shape(shape(y), shape(new)):
            continue
        taken = several(old, 1)
        if old.args[0] is not base or len(taken) != len(indices):
            continue
        if all(i is not None and reader.canon.same(i, j) for i, j in zip(taken, indices)):
            return y
    return None


@reads(aten.index_copy)
def _index_copy(reader: Reader, node: fx.Node, level: int) -> Value:
    a = arguments(node)
    if a["dim"] != 0:
        raise Opaque
    return _overwrite(reader, node, level, a["self"], [reader.value(a["index"], 0)], a["source"])


# --- parts of a tensor that are replaced ---


@reads(aten.select_scatter)
def _select_scatter(reader: Reader, node: fx.Node, level: int) -> Value:
    """Read a tensor with one part replaced. Each index along the dimension becomes a part of its own."""
    a = arguments(node)
    base, part = reader.addend(node, a["self"], level), reader.value(a["src"], level)
    d = a["dim"] % len(base.dims)
    if level < 2 or not isinstance(a["index"], int) or len(base.dims[d]) != 1:
        raise Opaque
    return _with_part(
        reader, node, base, d, a["index"], Value((*part.dims[:d], (), *part.dims[d:]), part.term)
    )


@reads(aten.slice_scatter)
def _slice_scatter(reader: Reader, node: fx.Node, level: int) -> Value:
    """Read a buffer with one slice replaced, if slices of this length fill it: that of each expert."""
    a = arguments(node)
    d = a["dim"] % len(shape(node))
    sizes = (shape(node)[d], shape(a["src"])[d], a["start"] or 0)
    if level < 2 or a["step"] != 1 or not all(isinstance(n, int) for n in sizes):
        raise Opaque
    size, length, start = sizes
    if not length or size % length or not 0 <= start < size or start % length:
        raise Opaque
    if size == length:
        return reader.value(a["src"], level)
    parts, at = size // length, start // length
    base, part = reader.addend(node, a["self"], level), reader.value(a["src"], level)
    if len(base.dims[d]) == 1:
        (axis,) = base.dims[d]
        cut = reader.split(axis, (parts, length))
        base = base.rename({axis: cut})
    if len(base.dims[d]) != 2 or base.dims[d][0].size != parts:
        raise Opaque
    return _with_part(reader, node, base, d, at, part)


def _with_part(reader: Reader, node: fx.Node, base: Value, d: int, at: int, part: Value) -> Value:
    """Return `base` with part `at` replaced; the first axis of dimension d counts the parts."""
    axis, *inner = base.dims[d]
    if not isinstance(axis.size, int):
        raise Opaque
    apart = Value((*base.dims[:d], (axis,), tuple(inner), *base.dims[d + 1 :]), base.term)
    rest = [i for i in range(len(base.dims) + 1) if i != d]
    apart, part = reader.together(apart, part, [(i, own) for own, i in enumerate(rest)])
    if apart.dims[d] != (axis,):
        raise Opaque
    parts = [substitute(apart.term, {axis: Const(i)}) for i in range(axis.size)]
    parts[at] = part.term
    dims = (*apart.dims[:d], (axis, *apart.dims[d + 1]), *apart.dims[d + 2 :])
    return Value(dims, Choose(axis, parts, reader.ref(node, dims)))


# --- places ---


def _placed(
    reader: Reader, level: int, base: Value, where: list[Value], source: fx.Node
) -> tuple[Value, Term, Term | None]:
    """Return three things: base; `source` as a term over base's axes, summed over the other axes of its rows;
    and the mask of the rows.

    where: the position of each row along the first dimensions of base.
    """
    if level < 2 or any(len(w.dims) != 1 for w in where):
        raise Opaque
    src = reader.value(source, level)
    group = where[0].dims[0]
    if len(group) == 1 and isinstance(group[0], ChosenRows):
        rows = group[0]
        if src.dims[0] != (rows,) or any(w.dims[0] != group for w in where):
            raise Opaque
        bound, mask = rows.bound, rows.mask
    else:
        if len(where) > 1:
            raise Opaque
        src, where[0] = reader.together(src, where[0], [(0, 0)])
        bound, mask = where[0].dims[0], None
    targets: list[tuple[Term, ...]] = []
    for w in where:
        place = substitute(w.term, reader.cuts)
        targets.append(place.parts if isinstance(place, Mix) else () if place is Const(0) else (place,))
    every = [t for target in targets for t in target]
    if not all(isinstance(t, Axis) and t in bound for t in every) or len(set(every)) != len(every):
        raise Opaque
    term = src.term if mask is None else Mul(mask, src.term)
    carried = Value((*targets, *src.dims[1:]), substitute(term, reader.cuts))  # type: ignore[arg-type]
    carried, fresh = with_fresh(carried, [b for b in bound if b not in every])
    base, carried = reader.together(base, carried, [(d, d) for d in range(len(base.dims))])
    return base, Sum(fresh, carried.term, None), mask


def _added(
    reader: Reader, node: fx.Node, level: int, base: Value, where: list[Value], source: fx.Node
) -> Value:
    old, new, _ = _placed(reader, level, base, where, source)
    if isinstance(old.term, Const):
        if old.term.value is None:
            raise Opaque
        return Value(old.dims, new)
    return Value(old.dims, Add([*flatten(old.term, Add), new], reader.ref(node, old.dims)))


def _overwrite(
    reader: Reader, node: fx.Node, level: int, base: fx.Node, where: list[Value], source: fx.Node
) -> Value:
    """Read rows that are overwritten. If they were not written before, overwriting them is the same as adding
    to zeros. The other rows keep their values."""
    if not _once(where):
        raise Opaque
    old, new, mask = _placed(reader, level, reader.addend(node, base, level), where, source)
    before = flatten(old.term, Add)
    if isinstance(old.term, Const) and not old.term.value:
        return Value(old.dims, new)
    if mask is None or not isinstance(new, Mul):
        raise Opaque
    chosen = set(flatten(new.args[0], Mul))
    if all(chosen <= set(flatten(t, Mul)) for t in before):
        return Value(old.dims, new)  # the other rows are zeros
    if all(kept_rows(t) is None and expert_mask(t) is None for t in before):
        old, new, _ = _placed(reader, level, reader.opaque(base), where, source)
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
    return Value(old.dims, Add([*after, new], reader.ref(node, old.dims)))


def _repeated(node: fx.Node) -> fx.Node:
    """Return v of v[..., None], expanded or not."""
    return strip(operand(node) if is_op(node, aten.expand) else node)


def _pieces(index: fx.Node, source: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Return pairs (positions, rows), if the index and the source are both concatenations of pieces with the
    same lengths."""
    if is_op(index, aten.cat) and is_op(source, aten.cat) and arguments(source)["dim"] == 0:
        places, rows = arguments(index)["tensors"], arguments(source)["tensors"]
        if len(places) == len(rows) and all(same(shape(i)[0], shape(r)[0]) for i, r in zip(places, rows)):
            return list(zip(places, rows))
    return [(index, source)]


def _chosen_places(rows: ChosenRows, mask: Value) -> list[Value]:
    """Return the places along the mask's dimensions of the rows that it chose."""
    bound = dict(zip(mask.axes, rows.bound))
    return [Value(((rows,),), substitute(coordinate(g), bound)) for g in mask.dims]


def _unchanged(node: fx.Node) -> fx.Node:
    """Follow a node back through copies and casts to the same dtype."""
    while is_op(node, aten.clone, aten._to_copy) and value(node).dtype == value(operand(node)).dtype:
        node = operand(node)
    return node


def _rows_of(where: list[Value]) -> ChosenRows | None:
    """Return the rows whose places all of `where` are, or None."""
    groups = {w.dims for w in where}
    dims = groups.pop() if len(groups) == 1 else ()
    group = dims[0] if len(dims) == 1 else ()
    return group[0] if len(group) == 1 and isinstance(group[0], ChosenRows) else None


def _places(where: list[Value]) -> set[Axis]:
    return set().union(*(free_axes(w.term) for w in where))


def _once(where: list[Value]) -> bool:
    """Return whether no row is written twice."""
    return _visits_once(where) or _chosen_once(where)


def _visits_once(where: list[Value]) -> bool:
    """Return whether no two rows have the same place."""
    rows = _rows_of(where)
    if rows is None:
        return len(where) == 1 and isinstance(where[0].term, (Axis, Mix))
    return set(rows.bound) <= _places(where)


def _chosen_once(where: list[Value]) -> bool:
    """Return whether these are the tokens t of rows (t, j) with ids[t, j] == e, where no t has e twice among
    its ids.

    Rows written there may be added to the old values, which another expert may have written.
    """
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
    """Return the indicator of rows that were not overwritten, if the term has such a factor."""
    return term.args[0] if isinstance(term, Mul) and isinstance(term.args[0], NoneOf) else None


def expert_mask(term: Term) -> tuple[Term, Any] | None:
    """Return (ids, e) if the first factors of a term contain [ids == e]."""
    for f in flatten(term, Mul):
        if is_eq(f):
            ids, e = f.args  # type: ignore[attr-defined]
            if isinstance(e, Const):
                return ids, e.value
    return None
