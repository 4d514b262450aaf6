"""Single expert products, y[r] = W[e(r)] a[r], as models write them: each form is one function.

`sorted_products`: rows sorted by expert, `_grouped_mm` with cumulative offsets.
`indexed_products`: weights gathered for each row, `bmm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from ..operands import operand, several
from ..refusal import Kind, Refusal, Refused, need, refuse
from .nodes import (
    WeightRef,
    Weights,
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
    unswap,
    value,
)


@dataclass
class Product:
    """node [S, N] = a [S, K] times the expert's weight, transposed."""

    node: fx.Node
    a: fx.Node
    weight: WeightRef
    offs: fx.Node | None = None
    """Sorted form: the offsets as the product takes them."""
    ids: fx.Node | None = None
    """Indexed form: the expert of each row."""
    unit_dim: int | None = None
    """Indexed form: where `node` has a dimension of size one, [S, N, 1] or [S, 1, N]."""


# --- rows sorted by expert ---


def is_grouped_mm(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name in ("aten::_grouped_mm", "transformers::grouped_mm_fallback")


def sorted_product(node: fx.Node, weights: Weights) -> Product:
    a, mat2, offs = (arguments(node)[n] for n in _operand_names(node))
    if is_op(node, aten._grouped_mm):
        need(arguments(node)["bias"] is None, Kind.PRODUCT_BIAS, node)
    need(is_tensor(offs), Kind.NO_OFFSETS, node)
    need(len(shape(a)) == 2 and len(shape(mat2)) == 3, Kind.NOT_2D_BY_3D, node)
    need(value(offs).dtype == torch.int32, Kind.OFFSETS_DTYPE, node, value(offs).dtype)
    source, swapped = unswap(mat2)
    weight = weights.resolve(source, swapped, node)
    need(shape(offs)[0] == weight.experts, Kind.OFFSETS_COUNT, node)
    return Product(node, a, weight, offs=offs)


def _operand_names(node: fx.Node) -> tuple[str, str, str]:
    return ("self", "mat2", "offs") if is_op(node, aten._grouped_mm) else ("input", "weight", "offs")


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


# --- weights gathered for each row ---


def indexed_product(bmm: fx.Node, weights: Weights) -> Product:
    """bmm of W[ids] [S, N, K] and rows [S, K, 1], or of rows [S, 1, K] and W[ids] [S, K, N]."""
    left, right = operand(bmm), operand(bmm, 1)
    for factor, rows, weight_first in ((left, right, True), (right, left, False)):
        gather, swapped = unswap(factor)
        table, index = gathered(gather)
        if table is None or len(shape(gather)) != 3:
            continue
        assert index is not None
        source, swapped_before = unswap(table)
        # As the right operand the gathered weight must be [S, K, N]; as the left one it is [S, N, K].
        swapped = swapped ^ swapped_before ^ weight_first
        weight = weights.resolve(source, swapped, bmm)
        vector = shape(rows)[2 if weight_first else 1]
        need(vector == 1, Kind.ONE_ROW_A_WEIGHT, bmm)
        need(shape(rows)[0] == shape(index)[0], Kind.ONE_ID_A_ROW, bmm)
        return Product(bmm, rows, weight, ids=index, unit_dim=2 if weight_first else 1)
    refuse(Kind.NOT_GATHERED, bmm)


# --- all of them ---


def find_products(graph: fx.Graph, weights: Weights) -> Iterator[Product | Refusal]:
    """Every product with an expert weight, or why it could not be taken for one."""
    for node in graph.nodes:
        try:
            if is_grouped_mm(node):
                yield sorted_product(node, weights)
            elif is_op(node, aten.bmm) and _touches_weight(node, weights):
                yield indexed_product(node, weights)
        except Refused as why:
            yield why.refusal


def _touches_weight(bmm: fx.Node, weights: Weights) -> bool:
    for factor in (operand(bmm), operand(bmm, 1)):
        source, _ = unswap(factor)
        table, _ = gathered(source)
        if table is not None and len(shape(table)) == 3:
            return True
        if weights.is_candidate(source):
            return True
    return False
