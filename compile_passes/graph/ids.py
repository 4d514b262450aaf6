"""Reads ids of experts: what counts them, what they are below, and which rows they choose."""

from __future__ import annotations

import torch
from torch import fx

from ..operands import operand, several
from ..refusal import Kind, need, refuse
from .nodes import (
    arguments,
    aten,
    exact_int,
    is_op,
    is_tensor,
    item,
    same_shape,
    shape,
    static_int,
    strip,
    value,
)


def counted_ids(counts: fx.Node, experts: int) -> fx.Node:
    """The ids of which `counts` [E] is the histogram: bin e counts exactly the ids equal to e."""
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
    """Whether ids are indices of a topk, max or argmax over E columns, sorted or not."""
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
    """Among how many a topk, max or argmax chooses along its dimension."""
    a = arguments(chooser)
    sizes, dim = shape(a["self"]), a.get("dim")
    return static_int(sizes[dim]) if isinstance(dim, int) and sizes else None


def nonnegative(ids: fx.Node) -> bool:
    """Whether ids are indices that some operator returned, or are clamped."""
    ids = strip(ids)
    if is_op(ids, aten.clamp):
        low = arguments(ids)["min"]
        return isinstance(low, int) and low >= 0
    found = item(ids)
    return is_op(ids, aten.argmax) or (
        found is not None and found[1] == 1 and is_op(found[0], aten.topk, aten.sort, aten.max)
    )


def gathered(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """(table, index) if node is table[index], whole rows of the first dimension."""
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
