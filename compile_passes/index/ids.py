"""Reads ids of experts: which tensor counts them, how large they can be, whether they are distinct, and which
rows they choose."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..graph.nodes import (
    FLOATING,
    arguments,
    aten,
    exact_int,
    is_op,
    is_tensor,
    item,
    operand,
    passes_order,
    same_shape,
    several,
    shape,
    static_int,
    strip,
    value,
)
from ..refusal import Kind, need, refuse


def counted_ids(counts: fx.Node, experts: int) -> fx.Node:
    """Return the ids that `counts` [E] counts: bin e is the number of ids equal to e."""
    if is_op(counts, aten.histc):
        a = arguments(counts)
        low, high = a["min"], a["max"]
        each = low == 0 and high in (experts - 1, experts) and experts > 1
        need(a["bins"] == experts, Kind.HISTC_BINS, counts, a["bins"], experts)
        need(each, Kind.HISTC_RANGE, counts, low, high, experts - 1)
        ids = exact_int(a["self"])
        if high == experts:  # the last bin is closed: an id E would be counted as E - 1
            need(below(ids, experts), Kind.HISTC_LAST, counts, experts)
        return ids
    if is_op(counts, aten.bincount) and arguments(counts)["weights"] is None:
        bins = shape(counts)[0]
        need(bins == experts, Kind.BINCOUNT_BINS, counts, bins, experts)
        return exact_int(operand(counts))
    refuse(Kind.NO_HISTOGRAM, counts, counts)


def below(ids: fx.Node, experts: int) -> bool:
    """Return whether ids are indices of a topk, max or argmax over E columns, sorted or not."""
    ids = strip(ids)
    if is_op(ids, aten.argmax):
        return _columns(ids) == experts
    found = item(ids)
    if found is None:
        return False
    producer, index = found
    if is_op(producer, aten.sort) and index == 0:
        return below(exact_int(operand(producer)), experts)
    return is_op(producer, aten.topk, aten.max) and index == 1 and _columns(producer) == experts


def _columns(chooser: fx.Node) -> int | None:
    """Return the number of elements among which a topk, max or argmax chooses along its dimension."""
    a = arguments(chooser)
    sizes, dim = shape(a["self"]), a.get("dim")
    return static_int(sizes[dim]) if isinstance(dim, int) and sizes else None


def nonnegative(ids: fx.Node) -> bool:
    """Return whether ids are indices that some operator returned, or are clamped."""
    ids = strip(ids)
    if is_op(ids, aten.clamp):
        low = arguments(ids)["min"]
        return isinstance(low, int) and low >= 0
    found = item(ids)
    return is_op(ids, aten.argmax) or (
        found is not None and found[1] == 1 and is_op(found[0], aten.topk, aten.sort, aten.max)
    )


def gathered(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """Return (table, index) if `node` is table[index], where the index chooses whole rows along the first
    dimension."""
    if is_op(node, aten.index):
        index = several(node, 1)[0] if len(several(node, 1)) == 1 else None
        if is_tensor(index) and value(index).dtype in (torch.int64, torch.int32) and len(shape(index)) == 1:
            return operand(node), index
    if is_op(node, aten.index_select) and arguments(node)["dim"] == 0:
        return operand(node), operand(node, 2)
    if is_op(node, aten.gather) and arguments(node)["dim"] == 0 and len(shape(node)) == 2:
        # gather(x, 0, index[:, None].expand(-1, H)) with H all columns of x
        table, index = operand(node), operand(node, 2)
        rows = operand(index) if is_op(index, aten.expand) else None
        whole_rows = same_shape(shape(node)[1:], shape(table)[1:])
        if whole_rows and rows is not None and same_shape(shape(rows), (shape(node)[0], 1)):
            return table, strip(rows)
    return None, None


def distinct(ids: fx.Node) -> bool:
    """Return whether no row of ids [..., k], along the last dimension, names an expert twice.

    This holds for the indices of a `topk` or a `sort` along that dimension, and for any columns of them.
    """
    if shape(ids) and static_int(shape(ids)[-1]) == 1:
        return True
    while True:
        if passes_order(ids):
            if not _same_rows(ids, operand(ids)):
                return False
        elif is_op(ids, aten._to_copy):
            exact = value(ids).dtype in (torch.int64, torch.int32)
            if not exact or value(operand(ids)).dtype.is_floating_point:
                return False
        elif not is_op(ids, aten.slice):
            break
        ids = operand(ids)
    found = item(ids)
    if found is None or found[1] != 1 or not is_op(found[0], aten.topk, aten.sort):
        return False
    return arguments(found[0])["dim"] in (-1, len(shape(ids)) - 1)


def _same_rows(node: fx.Node, source: fx.Node) -> bool:
    """Return whether a view leaves the last dimension as it is."""
    a, b = shape(node), shape(source)
    return bool(a) and bool(b) and statically_known_true(a[-1] == b[-1])


# --- matrices of routing weights ---


def support(node: fx.Node) -> tuple[fx.Node, ...] | None:
    """Return tensors of ids, each [..., k], if the matrix `node` [..., E] is zero in all columns other than
    these ids. Else return None.

    No row of a tensor names an expert twice.
    """
    found = _background(node)
    return found[0] if found is not None and found[1] == 0 else None


def _background(node: fx.Node) -> tuple[tuple[fx.Node, ...], float] | None:
    """Return (ids, value in all other columns) of a matrix [..., E]."""
    while passes_order(node):
        if not _same_rows(node, operand(node)):
            return None
        node = operand(node)
    last = len(shape(node)) - 1
    if is_op(node, aten.scatter):
        dim, ids = node.args[1], operand(node, 2)
        fill = _constant(operand(node))
        whole = same_shape(shape(ids)[:-1], shape(node)[:-1])
        if fill is not None and dim in (-1, last) and whole and static_int(shape(ids)[-1]) and distinct(ids):
            return (ids,), fill
        return None
    if is_op(node, aten.eq):
        marked = _one_hot(node)
        return None if marked is None else ((marked,), 0.0)
    if is_op(node, aten._to_copy):
        found = _background(operand(node))
        exact = found is not None and (found[1] == 0 or value(node).dtype in FLOATING)
        return found if exact else None
    if is_op(node, aten.sigmoid) or (is_op(node, aten._softmax) and node.args[1] in (-1, last)):
        found = _background(operand(node))
        return (found[0], 0.0) if found is not None and found[1] == float("-inf") else None
    if is_op(node, aten.mul, aten.div):
        for a in node.args[: 2 if is_op(node, aten.mul) else 1]:
            found = _zeros(a, node)
            if found is not None:
                return found
    if is_op(node, aten.add):
        both = [_zeros(a, node) for a in node.args[:2]]
        if both[0] is not None and both[1] is not None:
            return both[0][0] + both[1][0], 0.0
    return None


def _zeros(a: Any, node: fx.Node) -> tuple[tuple[fx.Node, ...], float] | None:
    """Return the ids outside of which an elementwise operator's result is zero."""
    found = _background(a) if isinstance(a, fx.Node) and same_shape(shape(a), shape(node)) else None
    return found if found is not None and found[1] == 0 else None


def _one_hot(node: fx.Node) -> fx.Node | None:
    """Return ids [..., 1] if node [..., E] is `ids == arange(E)`."""
    ids, every = operand(node), node.args[1]
    numbered = isinstance(every, fx.Node) and is_arange(every, shape(node)[-1:])
    return ids if numbered and same_shape(shape(ids), (*shape(node)[:-1], 1)) else None


def is_arange(node: fx.Node, size: tuple[Any, ...]) -> bool:
    """Return whether a tensor of this shape counts 0, 1, 2, ..."""
    node = exact_int(node)
    if not is_op(node, aten.arange):
        return False
    a = arguments(node)
    return a.get("start", 0) == 0 and a.get("step", 1) == 1 and same_shape(shape(node), size)


def _constant(node: fx.Node) -> float | None:
    if is_op(node, aten.zeros, aten.zeros_like, aten.new_zeros):
        return 0.0
    if is_op(node, aten.full, aten.full_like):
        fill = arguments(node)["fill_value"]
        return float(fill) if isinstance(fill, (int, float)) else None
    return None
