"""Reads rows that masks choose or that sorts reorder: which rows these are, how many each expert has, and how
they return to token order."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..graph.nodes import (
    arguments,
    aten,
    exact_int,
    is_op,
    is_tensor,
    item,
    operand,
    same_shape,
    shape,
    strip,
    value,
)
from ..refusal import Kind, need, refuse
from .conditions import is_boolean, is_zero, masked
from .ids import counted_ids, is_arange, support
from .reader import Opaque, Reader, reads, same
from .terms import (
    Apply,
    Axis,
    ChosenRows,
    Composite,
    Const,
    Mul,
    Sum,
    Term,
    Value,
    coordinate,
    free_axes,
    is_eq,
    some_chosen,
    substitute,
    transform,
)

# --- rows that a mask chooses ---


def mask_rows(reader: Reader, mask: fx.Node, size: Any) -> tuple[ChosenRows, Value]:
    """Return the rows that a mask selects, in row-major order, and the mask over axes of its own."""
    return _rows_where(reader, reader.value(mask, 0), value(mask).dtype, size)


def whole_rows(reader: Reader, mask: fx.Node, of: fx.Node, size: Any) -> tuple[ChosenRows, Value]:
    """Do the same as `mask_rows` for a mask over the elements of `of` that has one value for each row:
    mask[..., None], expanded or not."""
    v = reader.value(mask, 0)
    if len(shape(mask)) != len(shape(of)) or len(v.dims) < 2 or free_axes(v.term) & set(v.dims[-1]):
        raise Opaque
    return _rows_where(reader, Value(v.dims[:-1], v.term), value(mask).dtype, size)


def _rows_where(reader: Reader, v: Value, dtype: torch.dtype, size: Any) -> tuple[ChosenRows, Value]:
    if some_chosen(v.axes):
        raise Opaque
    key = ("mask", tuple(v.axes), v.term)  # the shape of the mask does not matter
    if key not in reader.rows:
        bound = tuple(Axis(x.size) for x in v.axes)
        term = substitute(v.term, dict(zip(v.axes, bound)))
        if dtype != torch.bool and not is_boolean(term):
            term = Apply(aten.ne, (term, Const(0)))
        reader.rows[key] = ChosenRows(size, bound, term)
    return reader.rows[key], v


def place_of(reader: Reader, nonzero: fx.Node, dim: int) -> Value:
    """Read column `dim` of nonzero(mask): the position of each selected row along that dimension of
    the mask."""
    rows, mask = mask_rows(reader, operand(nonzero), shape(nonzero)[0])
    place = coordinate(mask.dims[dim])
    return Value(((rows,),), substitute(place, dict(zip(mask.axes, rows.bound))))


# --- rows sorted by expert ---


def sorted_output(reader: Reader, sort: fx.Node, output: int) -> Value:
    """Read a sort. It reorders all rows: each row is one position of the sorted tensor."""
    a = arguments(sort)
    v = reader.value(a["self"], 0)
    if len(v.dims) != 1 or a["descending"] or some_chosen(v.axes):
        raise Opaque
    key = ("sort", reader.canon.number(a["self"]), str(a.get("stable")))
    if key not in reader.rows:
        bound = tuple(Axis(x.size) for x in v.axes)
        names = dict(zip(v.axes, bound))
        rows = reader.rows[key] = ChosenRows(shape(a["self"])[0], bound, None, substitute(v.term, names))
        reader.sorted_from[rows] = substitute(coordinate(v.dims[0]), names)
    rows = reader.rows[key]
    assert rows.key is not None
    return Value(((rows,),), reader.sorted_from[rows] if output == 1 else rows.key)


def sorted_rows(v: Value, d: int) -> ChosenRows | None:
    """Return the axis of dimension d if it has the rows of a sort."""
    group = v.dims[d]
    rows = group[0] if len(group) == 1 else None
    return rows if isinstance(rows, ChosenRows) and rows.key is not None else None


def counted_by(sizes: Any) -> fx.Node | None:
    """Return the node `counts` if `sizes` are all of its elements in order: counts[0], counts[1], ..."""
    found: set[fx.Node] = set()
    for i, size in enumerate(sizes):
        at = operand(size) if is_op(size, aten._local_scalar_dense) else None
        if not is_op(at, aten.select) or tuple(at.args[1:]) != (0, i):
            return None
        found.add(operand(at))
    counts = found.pop() if len(found) == 1 else None
    return counts if counts is not None and same_shape(shape(counts), (len(sizes),)) else None


def rows_of_expert(reader: Reader, e: int, counts: fx.Node, v: Value, sizes: list[Any]) -> Value:
    """Return expert e's part of sorted rows that are split by the number of rows of each expert."""
    if len(v.dims[0]) != 1 or not isinstance(v.dims[0][0], ChosenRows):
        raise Opaque
    rows = v.dims[0][0]
    if rows.key is None or not counts_of(reader, counts, len(sizes), rows):
        raise Opaque
    if rows not in reader.parts:
        reader.parts[rows] = [_part_of(rows, i, size) for i, size in enumerate(sizes)]
    if len(reader.parts[rows]) != len(sizes):
        raise Opaque
    own = reader.parts[rows][e]
    term = substitute(v.term, dict(zip(rows.bound, own.bound)))
    return Value(((own,), *v.dims[1:]), substitute(term, {own.mask.args[0]: Const(e)}))  # type: ignore[union-attr]


def _part_of(rows: ChosenRows, e: int, size: Any) -> ChosenRows:
    bound = tuple(Axis(x.size) for x in rows.bound)
    key = substitute(rows.key, dict(zip(rows.bound, bound)))
    return ChosenRows(size, bound, Apply(aten.eq, (key, Const(e))))


def whole_of(reader: Reader, parts: list[Value]) -> tuple[ChosenRows, list[Value]]:
    """Return the sorted rows that were cut into these parts, one for each expert. Also return the parts
    over the axes of these rows."""
    for rows, owns in reader.parts.items():
        if [v.dims[0] for v in parts] == [(own,) for own in owns]:
            terms = [substitute(v.term, dict(zip(own.bound, rows.bound))) for v, own in zip(parts, owns)]
            return rows, [Value(v.dims[1:], t) for v, t in zip(parts, terms)]
    raise Opaque


# --- sorted rows that are put back ---


def index_into(reader: Reader, table: fx.Node, d: int, index: fx.Node) -> Value:
    """Read an index into dimension d of a tensor. A clamp of sorted ids to experts is ignored for a bias
    [E, N].

    The clamp only changes what rows of no expert read. The result does not depend on these rows, because they
    are masked later or not used at all.
    """
    clamp = strip(index)
    bias = reader.is_weight(strip(table)) and len(shape(table)) == 2 and d == 0
    if bias and len(shape(index)) == 1 and is_op(clamp, aten.clamp):
        a = arguments(clamp)
        v, last = reader.value(a["self"], 0), shape(table)[d] - 1
        rows = sorted_rows(v, 0) if len(v.dims) == 1 else None
        if rows is not None and v.term is rows.key and a["min"] in (None, 0) and same(a["max"], last):
            return v
    return reader.value(index, 0)


def restored(reader: Reader, table: Value, d: int, rows: ChosenRows, index: fx.Node) -> Value:
    """Put sorted rows back into their old order. After that, `bound` are ordinary axes."""
    if len(shape(index)) != 1:
        raise Opaque
    need(_inverts(reader, index, rows), Kind.NOT_RESTORED, index)
    fresh = tuple(Axis(a.size) for a in rows.bound)
    term = substitute(substitute(table.term, reader.cuts), dict(zip(rows.bound, fresh)))
    return Value((*table.dims[:d], fresh, *table.dims[d + 1 :]), term)


def _inverts(reader: Reader, index: fx.Node, rows: ChosenRows) -> bool:
    """Return whether index[s] is the sorted position of row s, so that the index is the inverse of the sort's
    permutation."""
    index = exact_int(index)
    found = item(index)
    if found is not None:  # the index is the argsort of the permutation
        source, output = found
        ascending = is_op(source, aten.sort) and not arguments(source)["descending"]
        return ascending and output == 1 and _permutes(reader, operand(source), rows)
    a = arguments(index) if index.op == "call_function" else {}
    if is_op(index, aten.index_put):
        if a["accumulate"] or len(a["indices"]) != 1:
            return False
        at, new = a["indices"][0], a["values"]
    elif index.target is aten.scatter.src and a["dim"] in (0, -1):
        at, new = a["index"], a["src"]
    else:
        return False
    if not (is_tensor(at) and is_tensor(new)):
        return False
    whole = len(shape(index)) == 1 and same_shape(shape(index), shape(at))
    return whole and _permutes(reader, at, rows) and is_arange(new, shape(index))


def _permutes(reader: Reader, node: fx.Node, rows: ChosenRows) -> bool:
    """Return whether an element of `node` is the place of a row in the unsorted tensor."""
    v = reader.value(node, 0)
    return v.dims == ((rows,),) and substitute(v.term, reader.cuts) is coordinate(rows.bound)


# --- how many rows each expert has ---


def rows_that_end_at(
    reader: Reader, offs: fx.Node, experts: int, rows: ChosenRows | None, a: fx.Node
) -> ChosenRows:
    """Return `rows`, the rows of `a`, if offs [E] are the ends of the rows of each expert."""
    cumsum = exact_int(offs)
    need(is_op(cumsum, aten.cumsum) and len(shape(cumsum)) == 1, Kind.OFFSETS_SUM, offs, cumsum)
    counted = _counted(reader, operand(cumsum), experts)
    if counted is None:
        raise Opaque
    if rows is not None and _are_of(reader, counted, rows):
        return rows
    sorts = [r for r in reader.rows.values() if r.key is not None]
    need(any(_are_of(reader, counted, r) for r in sorts), Kind.OFFSETS_OF_OTHERS, offs)
    refuse(Kind.ROWS_ORDER, a, strip(a))


def _counted(reader: Reader, counts: fx.Node, experts: int) -> tuple[Term, list[Axis]] | None:
    """Find (ids, axes) such that counts[e] is the number of positions along `axes` where ids == e."""
    node = exact_int(counts)
    v = reader.value(node, 0)
    if isinstance(v.term, Sum) and is_eq(v.term.body):
        ids, expert = v.term.body.args  # type: ignore[attr-defined]
        if v.dims == ((expert,),):
            return ids, list(v.term.axes)
    ids = _marked(node) if is_op(node, aten.sum) else counted_ids(node, experts)
    found = reader.value(ids, 0) if ids is not None else None
    return None if found is None else (found.term, found.axes)


def counts_of(reader: Reader, counts: fx.Node, experts: int, rows: ChosenRows) -> bool:
    counted = _counted(reader, counts, experts)
    return counted is not None and _are_of(reader, counted, rows)


def _are_of(reader: Reader, counted: tuple[Term, list[Axis]], rows: ChosenRows) -> bool:
    """Return whether these are the ids by which `rows` were sorted, in any order."""
    ids, axes = counted
    if axes == [rows]:
        return ids is rows.key
    own: dict[Any, Term] = dict(zip(axes, rows.bound))
    if len(axes) != len(rows.bound):  # an axis of one of them was split
        if len(axes) != 1:
            return False
        own = {axes[0]: coordinate(rows.bound)}
    return substitute(ids, own) is substitute(rows.key, reader.cuts)


def _marked(node: fx.Node) -> fx.Node | None:
    """Return ids [T, k] if node [E] counts rows of a matrix of zeros [T, E] with 1 at the ids, which are
    distinct."""
    a = arguments(node)
    marks = strip(a["self"])
    if a["dim"] != [0] or a["keepdim"] or value(marks).dtype not in (torch.int64, torch.int32, torch.float32):
        return None
    while is_op(marks, aten._to_copy):
        marks = strip(operand(marks))
    if not is_op(marks, aten.scatter) or marks.target is not aten.scatter.value or marks.args[3] != 1:
        return None
    found = support(marks)
    return found[0] if found is not None and len(found) == 1 else None


# --- rows that belong to no expert ---


@reads(aten.masked_fill)
def _masked_fill(reader: Reader, node: fx.Node, level: int) -> Value:
    """Read masked_fill(a, mask, 0): a times the opposite of the mask."""
    a = arguments(node)
    try:
        return _no_sentinels(reader, node, level)
    except Opaque:
        if not is_tensor(a["mask"]) or not is_zero(reader, a["value"]):
            raise
    return masked(reader, node, reader.value(a["mask"], 0), reader.value(a["self"], level), False)


def _no_sentinels(reader: Reader, node: fx.Node, level: int) -> Value:
    """Read masked_fill(rows, ids >= c, 0), where rows are sorted by these ids, as rows * [ids < c].

    Ids that are at least the number of experts name no expert. The mask removes such rows.
    """
    a = arguments(node)
    if not is_tensor(a["mask"]) or a["value"] != 0:
        raise Opaque
    v, mask = reader.value(a["self"], level), reader.value(a["mask"], 0)
    rows = sorted_rows(v, 0) if v.dims else None
    low = _sentinels_from(mask.term, rows.key) if rows is not None else None
    if low is None or mask.dims != ((rows,), *[()] * (len(v.dims) - 1)):
        raise Opaque
    return Value(v.dims, Mul(Apply(aten.lt, (rows.key, Const(low))), v.term))  # type: ignore[union-attr]


def _sentinels_from(mask: Term, key: Term | None) -> int | None:
    """Return c if the mask is [key >= c]."""
    if not isinstance(mask, Apply) or mask.op not in (aten.ge, aten.gt) or mask.args[0] is not key:
        return None
    low = mask.args[1]
    known = isinstance(low, Const) and isinstance(low.value, int)
    return low.value + (mask.op is aten.gt) if known else None


def of_experts(term: Term, key: Term, experts: int) -> Term:
    """Return `term` without conditions that say that the id `key` is below the number of experts."""

    def at(t: Term) -> Term | None:
        if not isinstance(t, Composite):
            return t
        rest = [f for f in t.args if not _is_id_below(f, key, experts)] if isinstance(t, Mul) else []
        return transform(rest[0], at) if len(rest) == 1 else None

    return transform(term, at)


def _is_id_below(term: Any, key: Term, experts: int) -> bool:
    """Return whether a term is [key < c], where c is at least the number of experts."""
    below = isinstance(term, Apply) and term.op is aten.lt and term.args[0] is key
    return below and isinstance(term.args[1], Const) and term.args[1].value >= experts
