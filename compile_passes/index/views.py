"""Reads re-indexing into terms: views, casts, slices, gathers, and tensors whose elements are known."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from ...meta.torch_internals import OpOverload
from ..graph.nodes import (
    COPIES,
    FLOATING,
    arguments,
    aten,
    integer,
    is_op,
    item,
    operand,
    same_shape,
    several,
    shape,
    strip,
    value,
)
from .conditions import as_boolean, is_indicator
from .ids import gathered
from .reader import Opaque, Reader, dimension, dims_of, prefix, reads, same, spread
from .rows import (
    counted_by,
    index_into,
    mask_rows,
    place_of,
    restored,
    rows_of_expert,
    sorted_output,
    sorted_rows,
    whole_rows,
)
from .terms import (
    Affine,
    Axis,
    ChosenRows,
    Const,
    Mix,
    Ref,
    Term,
    Value,
    coordinate,
    some_chosen,
    substitute,
)

# --- the same elements ---


@reads(*COPIES)
def _copy(reader: Reader, node: fx.Node, level: int) -> Value:
    return reader.value(operand(node), level)


@reads(aten._to_copy)
def _cast(reader: Reader, node: fx.Node, level: int) -> Value:
    """Read a cast. Casts between floats only round. Indicators are 0 and 1 in any type, and ids fit
    their type."""
    source, dtype = operand(node), value(node).dtype
    was = value(source).dtype
    if was in FLOATING and dtype in FLOATING:
        return reader.value(source, level)
    inner = reader.value(source, 0)
    if dtype == torch.bool and was != torch.bool:
        return Value(inner.dims, as_boolean(inner.term))
    if was == torch.bool or is_indicator(inner.term):
        return inner
    if not was.is_floating_point and dtype in (torch.int64, torch.int32):
        return inner
    raise Opaque


@reads(aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.flatten)
def _view(reader: Reader, node: fx.Node, level: int) -> Value:
    source = operand(node)
    if is_op(source, aten.nonzero) and len(shape(node)) == 1 and shape(source)[1] == 1:
        return place_of(reader, source, 0)
    old = reader.value(source, level)
    atoms = old.axes
    if isinstance(old.term, Ref) and _merges_leading(reader, node, source, old):
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
        if group is None and d == last:  # all remaining axes; their sizes may be different symbols
            group = list(atoms)
        if group is None:
            first = atoms[0]
            rest = first.size // size
            if isinstance(first, ChosenRows) or not same(rest * size, first.size):
                raise Opaque
            parts = reader.split(first, (size, rest))
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


def _merges_leading(reader: Reader, node: fx.Node, source: fx.Node, old: Value) -> bool:
    """Return whether a view [B, S, H] -> [B * S, H] merges batch and sequence into one axis of tokens, as the
    router and the ids have it.

    A view of a slice does not count: in a buffer with rows for each expert, the slice belongs to one expert.
    """
    assert isinstance(old.term, Ref)
    ours, new = shape(source), shape(node)
    plain = tuple(i for i in old.term.index if isinstance(i, Axis))
    if not len(ours) > len(new) >= 2 or plain != tuple(old.axes) or reader.is_weight(old.term.node):
        return False
    whole = [s for s in shape(old.term.node) if not same(s, 1)]
    of_whole = len(plain) == len(whole) and all(same(a.size, s) for a, s in zip(plain, whole))
    return of_whole and same(ours[-1], new[-1])


@reads(aten.permute, aten.transpose, aten.t)
def _permute(reader: Reader, node: fx.Node, level: int) -> Value:
    v = reader.value(operand(node), level)
    rank = len(v.dims)
    order = list(range(rank))
    if is_op(node, aten.permute):
        order = [d % rank for d in several(node, 1)]
    elif rank >= 2:
        i, j = (0, 1) if is_op(node, aten.t) else (integer(node, n) % rank for n in (1, 2))
        order[i], order[j] = order[j], order[i]
    return Value(tuple(v.dims[d] for d in order), v.term)


@reads(aten.expand)
def _expand(reader: Reader, node: fx.Node, level: int) -> Value:
    v = reader.value(operand(node), level)
    new = shape(node)
    dims = ((),) * (len(new) - len(v.dims)) + v.dims
    return Value(
        tuple(g if g or same(s, 1) else (Axis(s),) for g, s in zip(dims, new)),
        v.term,
    )


@reads(aten.repeat)
def _repeat(reader: Reader, node: fx.Node, level: int) -> Value:
    v = reader.value(operand(node), level)
    times = several(node, 1)
    dims = ((),) * (len(times) - len(v.dims)) + v.dims
    return Value(tuple(g if same(n, 1) else (Axis(n), *g) for g, n in zip(dims, times)), v.term)


# --- parts ---


@reads(aten.select)
def _select(reader: Reader, node: fx.Node, level: int) -> Value:
    a = arguments(node)
    d = dimension(a["dim"], len(shape(a["self"])))
    if not isinstance(a["index"], int):
        raise Opaque
    places = _places(a["self"], d)
    if places is not None:
        return place_of(reader, places, a["index"] % shape(places)[1])
    v = reader.value(a["self"], level)
    index = a["index"]
    if index < 0:
        size = shape(a["self"])[d]
        if not isinstance(size, int):
            raise Opaque
        index += size
    return _at(reader, v, d, Const(index))


def _at(reader: Reader, v: Value, d: int, index: Term) -> Value:
    """Return v at one index of dimension d."""
    mapping = axes_at(reader, v.dims[d], index)
    return Value(v.dims[:d] + v.dims[d + 1 :], substitute(v.term, mapping))


def axes_at(reader: Reader, group: tuple[Axis, ...], index: Term) -> dict[Axis, Term]:
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
def _slice(reader: Reader, node: fx.Node, level: int) -> Value:
    a = arguments(node)
    size, new = (shape(n)[dimension(a["dim"], len(shape(n)))] for n in (a["self"], node))
    if a["start"] in (0, None) and a["step"] == 1 and same(size, new):
        return reader.value(a["self"], level)
    start = a["start"] or 0
    if not all(isinstance(n, int) for n in (size, new, start)):
        raise Opaque
    start = max(start + size, 0) if start < 0 else start
    return slice_of(reader, reader.value(a["self"], level), a["dim"], start, a["step"], new)


def slice_of(reader: Reader, v: Value, dim: int, start: int, step: int, size: int) -> Value:
    d = dimension(dim, len(v.dims))
    group = v.dims[d]
    if size == 0:
        raise Opaque
    if size == 1:
        fixed = _at(reader, v, d, Const(start))
        return Value((*fixed.dims[:d], (), *fixed.dims[d:]), fixed.term)
    if some_chosen(group):
        raise Opaque
    if len(group) > 1:  # a flat buffer: fix the first axis
        length = math.prod(a.size for a in group[1:])
        if not (step == 1 and same(length, size) and start % size == 0):
            raise Opaque
        fixed = substitute(v.term, {group[0]: Const(start // size)})
        return Value((*v.dims[:d], group[1:], *v.dims[d + 1 :]), fixed)
    if not group:
        raise Opaque
    axis = Axis(size)
    term = substitute(v.term, {group[0]: Affine(axis, start, step)})
    return Value((*v.dims[:d], (axis,), *v.dims[d + 1 :]), term)


@reads(operator.getitem)
def getitem(reader: Reader, node: fx.Node, level: int) -> Value:
    found = item(node)
    if found is None:
        raise Opaque
    producer, index = found
    if is_op(producer, aten.sort):
        return sorted_output(reader, producer, index)
    # The node calls another graph: cond, while_loop, scan.
    if not isinstance(producer.target, OpOverload):
        raise Opaque
    a = arguments(producer)
    whole: Any = a.get("self")
    if is_op(producer, aten.unbind):
        d = dimension(a["dim"], len(shape(whole)))
        places = _places(whole, d)
        if places is not None:
            return place_of(reader, places, index)
        return _at(reader, reader.value(whole, level), d, Const(index))
    if is_op(producer, aten.split, aten.split_with_sizes, aten.chunk):
        if is_op(producer, aten.split_with_sizes) and a["dim"] % len(shape(whole)) == 0:
            counted = counted_by(a["split_sizes"])
            if counted is not None:
                sizes = [t.shape[0] for t in producer.meta["val"]]
                return rows_of_expert(reader, index, counted, reader.value(whole, level), sizes)
        sizes = [shape_of[a["dim"]] for shape_of in (tuple(t.shape) for t in producer.meta["val"])]
        if not all(isinstance(s, int) for s in sizes):
            raise Opaque
        return slice_of(reader, reader.value(whole, level), a["dim"], sum(sizes[:index]), 1, sizes[index])
    raise Opaque


def _places(node: fx.Node, d: int) -> fx.Node | None:
    """Return nonzero(mask) if taking a part of `node` along dimension d takes a column of nonzero(mask).
    Raises Opaque if it takes a row."""
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


# --- tensors whose elements are known ---


@reads(aten.arange)
def _arange(reader: Reader, node: fx.Node, level: int) -> Value:
    a = arguments(node)
    if a.get("start", 0) != 0 or a.get("step", 1) != 1 or value(node).dtype.is_floating_point:
        raise Opaque
    own = reader.opaque(node)
    return Value(own.dims, own.axes[0] if own.axes else Const(0))


@reads(aten.zeros, aten.zeros_like, aten.new_zeros, aten.full, aten.full_like, aten.scalar_tensor)
@reads(aten.empty, aten.empty_like, aten.new_empty)
def fill(reader: Reader, node: fx.Node, level: int) -> Value:
    own = reader.opaque(node)
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


# --- rows by index ---


@reads(aten.index, aten.index_select, aten.embedding)
def _index(reader: Reader, node: fx.Node, level: int) -> Value:
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
    table = reader.value(whole, level)
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    if len(given) == 1:
        d, index = given[0]
        rows = sorted_rows(table, d)
        if rows is not None and value(index).dtype != torch.bool:
            return restored(reader, table, d, rows, index)
    if [d for d, _ in given] != list(range(given[0][0], given[0][0] + len(given))):
        raise Opaque
    first = given[0][0]
    lead, rest = table.dims[:first], table.dims[first + len(given) :]
    if value(given[0][1]).dtype == torch.bool:
        if len(given) > 1:
            raise Opaque
        mask_node = given[0][1]
        count = len(shape(mask_node))
        rows, mask = mask_rows(reader, mask_node, shape(node)[first])
        table, mask = reader.together(table, mask, [(first + i, i) for i in range(count)])
        return _selected(reader, table, mask, rows, first, count)
    indices = reader.broadcast([index_into(reader, whole, d, i) for d, i in given])
    if any(len(table.dims[d]) > 1 and _is_of_selected_rows(v) for (d, _), v in zip(given, indices)):
        table = reader.opaque(whole)  # the table and the rows share an axis
        lead, rest = table.dims[:first], table.dims[first + len(given) :]
    values = _own_axes(table, indices)
    dims = dims_of(values)
    if any(v.term is Const(None) for v in values):
        raise Opaque
    mapping: dict[Axis, Term] = {}
    for (d, _), v in zip(given, values):
        mapping.update(axes_at(reader, *_fit(reader, table, d, v.term)))
    return Value((*lead, *dims, *rest), substitute(table.term, mapping))


def _own_axes(table: Value, indices: list[Value]) -> list[Value]:
    """Give indices axes that the table does not have. A shared axis would be read as a diagonal of the
    table."""
    shared = set(table.axes) & {a for v in indices for a in v.axes}
    if some_chosen(shared):
        raise Opaque
    fresh: dict[Axis, Any] = {a: Axis(a.size) for a in shared}
    return [v.rename(fresh) for v in indices]


def _fit(reader: Reader, table: Value, d: int, index: Term) -> tuple[tuple[Axis, ...], Term]:
    """Return the axes of dimension d, and the index split into the same number of parts."""
    group = table.dims[d]
    if len(group) > 1 and isinstance(index, Axis) and not isinstance(index, ChosenRows):
        cut = reader.split(index, tuple(a.size for a in group))
        return group, coordinate(cut)
    return group, index


def _selected(reader: Reader, table: Value, mask: Value, rows: ChosenRows, first: int, count: int) -> Value:
    """Return table[mask], over the axes that `rows` stands for."""
    if len(mask.axes) != len(rows.bound):
        raise Opaque
    if not all(same(x.size, y.size) for x, y in zip(mask.axes, rows.bound)):
        raise Opaque
    term = substitute(table.term, dict(zip(mask.axes, rows.bound)))
    return Value((*table.dims[:first], (rows,), *table.dims[first + count :]), term)


def _is_of_selected_rows(index: Value) -> bool:
    """Return whether an index is an axis of rows that a mask selects."""
    rows = [a for a in index.axes if isinstance(a, ChosenRows) and a.key is None]
    return any(index.term is x for r in rows for x in r.bound)


@reads(aten.masked_select)
def _masked_select(reader: Reader, node: fx.Node, level: int) -> Value:
    """Read masked_select: elements, or whole rows one after another in one dimension."""
    a = arguments(node)
    try:
        rows, mask = whole_rows(reader, a["mask"], a["self"], shape(node)[0] // shape(a["self"])[-1])
    except Opaque:
        if not same_shape(shape(a["self"]), shape(a["mask"])):
            raise
        rows, mask = mask_rows(reader, a["mask"], shape(node)[0])
    count = len(mask.dims)
    table, mask = reader.together(reader.value(a["self"], level), mask, [(d, d) for d in range(count)])
    chosen = _selected(reader, table, mask, rows, 0, count)
    return Value((tuple(chosen.axes),), chosen.term)


@reads(aten.gather)
def _gather(reader: Reader, node: fx.Node, level: int) -> Value:
    a = arguments(node)
    table, index = reader.value(a["self"], level), reader.value(a["index"], 0)
    dim = dimension(a["dim"], len(table.dims))
    rows, (_, whole) = sorted_rows(table, dim), gathered(node)
    if rows is not None and whole is not None:
        return restored(reader, table, dim, rows, whole)
    if len(table.dims) != len(index.dims):
        raise Opaque
    for d in range(len(table.dims)):
        if d != dim and not same(shape(a["self"])[d], shape(a["index"])[d]):
            raise Opaque
    if not isinstance(index.term, Term):
        raise Opaque
    table, index = reader.together(table, index, [(d, d) for d in range(len(table.dims)) if d != dim])
    mapping = axes_at(reader, *_fit(reader, table, dim, index.term))
    dims = tuple((i if d == dim else (t or i)) for d, (t, i) in enumerate(zip(table.dims, index.dims)))
    return Value(dims, substitute(table.term, mapping))
