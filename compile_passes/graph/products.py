"""Expert products, y[r] = W[e(r)] a[r], as models write them. Each form is one function that yields Products.

`sorted_products`: rows sorted by expert, `_grouped_mm` with cumulative offsets.
`indexed_products`: weights gathered for each row, `bmm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import advice
from ..naming import called
from .nodes import (
    Canon,
    Refusal,
    WeightRef,
    Weights,
    arguments,
    aten,
    exact_int,
    is_op,
    is_tensor,
    item,
    need,
    refuse,
    same_shape,
    shape,
    static_int,
    strip,
    uncast,
    unswap,
    value,
)


class Rows:
    """How the rows of a product are assigned to tokens and experts. One subclass for each form."""

    form: str
    sorts: bool
    """Whether rows stand in another order than the tokens'."""

    def expert_ids(self) -> fx.Node:
        """Ids [S] in token order: row t*k + j is choice j of token t."""
        raise NotImplementedError

    def tokens(self, a: fx.Node) -> tuple[fx.Node, int]:
        """(x [T, H], k) if row r of `a` is the token of row r."""
        raise NotImplementedError

    def same_as(self, other: Rows) -> bool:
        raise NotImplementedError

    def is_expert_row(self, node: fx.Node) -> fx.Node | None:
        """The table if `node` is table[expert of row r], else None."""
        raise NotImplementedError

    def unmask(self, node: fx.Node) -> fx.Node | None:
        """`node` without a mask that zeroes only rows whose expert id is out of range, else None."""
        return None

    def restored(self, node: fx.Node) -> fx.Node | None:
        """The rows as they were, if `node` puts sorted rows back in token order, else None."""
        return None

    def weights_in_token_order(self, node: fx.Node, in_order: bool) -> fx.Node:
        """`node` is one number a row; the same numbers in token order."""
        raise NotImplementedError


@dataclass
class Product:
    """node [S, N] = a [S, K] times the expert's weight, transposed."""

    node: fx.Node
    a: fx.Node
    weight: WeightRef
    rows: Callable[[], Rows]
    """Proves how rows belong to experts; only a whole block needs it, a single product does not."""
    offs: fx.Node | None = None
    """Sorted form: the offsets as the product takes them."""
    ids: fx.Node | None = None
    """Indexed form: the expert of each row."""
    unit_dim: int | None = None
    """Indexed form: where `node` has a dimension of size one, [S, N, 1] or [S, 1, N]."""


# --- rows sorted by expert ---


def is_grouped_mm(node: fx.Node) -> bool:
    return is_op(node, aten._grouped_mm) or (
        getattr(node.target, "_schema", None) is not None
        and node.target._schema.name == "transformers::grouped_mm_fallback"
    )


def sorted_product(node: fx.Node, weights: Weights, canon: Canon) -> Product:
    a, mat2, offs = (arguments(node)[n] for n in _operand_names(node))
    if is_op(node, aten._grouped_mm):
        need(arguments(node)["bias"] is None, "_grouped_mm with a bias", node, advice.ROW_BIAS)
    need(is_tensor(offs), "_grouped_mm without offsets", node, advice.GROUPED)
    need(
        len(shape(a)) == 2 and len(shape(mat2)) == 3,
        "_grouped_mm is not 2D x 3D (rows by experts)",
        node,
        advice.GROUPED,
    )
    need(
        value(offs).dtype == torch.int32,
        f"the offsets are {value(offs).dtype}, not int32",
        node,
        advice.OFFSETS,
    )
    source, swapped = unswap(mat2)
    weight = weights.resolve(source, swapped, node)
    need(shape(offs)[0] == weight.experts, "one offset for each expert is needed", node, advice.OFFSETS)
    return Product(node, a, weight, rows=lambda: SortedRows.prove(offs, weight.experts, canon), offs=offs)


def _operand_names(node: fx.Node) -> tuple[str, str, str]:
    return ("self", "mat2", "offs") if is_op(node, aten._grouped_mm) else ("input", "weight", "offs")


class SortedRows(Rows):
    form = "rows sorted by expert (grouped_mm)"
    sorts = True

    def __init__(self, offs: fx.Node, sort: fx.Node, ids: fx.Node, experts: int, canon: Canon) -> None:
        self.offs, self.sort, self.ids, self.experts, self.canon = offs, sort, ids, experts, canon

    @staticmethod
    def prove(offs: fx.Node, experts: int, canon: Canon) -> SortedRows:
        """offs is the running count of the ids 0 .. E-1 among `ids`, and `sort` sorts the same ids."""
        node = exact_int(offs)
        need(
            is_op(node, aten.cumsum),
            f"the offsets ({called(node)}) are not a cumulative sum of counts",
            offs,
            advice.OFFSETS,
        )
        need(
            arguments(node)["dim"] in (0, -1) and len(shape(node)) == 1,
            "the cumsum is not over experts",
            offs,
            advice.OFFSETS,
        )
        counts = exact_int(node.args[0])
        counted = counted_ids(counts, experts)
        sort = item(counted)
        if sort is None or not _is_id_sort(sort[0]) or sort[1] != 0:
            # Counted before sorting: the sort is found from the rows; it must sort these same ids.
            sorts = [n for n in counted.graph.nodes if _is_id_sort(n) and canon.same(n.args[0], counted)]
            need(bool(sorts), "the offsets count ids that are not sorted anywhere", offs, advice.OFFSETS)
            node = sorts[0]
        else:
            node = sort[0]
        ids = node.args[0]
        need(len(shape(ids)) == 1, "the sorted ids are not one-dimensional", node, advice.FLAT_IDS)
        return SortedRows(offs, node, ids, experts, canon)

    def expert_ids(self) -> fx.Node:
        return self.ids

    def same_as(self, other: Rows) -> bool:
        return (
            isinstance(other, SortedRows)
            and self.experts == other.experts
            and self.canon.same(self.sort, other.sort)
            and self.canon.same(self.offs, other.offs)
        )

    def _is_perm(self, node: Any) -> bool:
        found = item(strip(node)) if is_tensor(node) else None
        return found is not None and found[1] == 1 and self.canon.same(found[0], self.sort)

    def _is_sorted_ids(self, node: Any) -> bool:
        """The expert of each row; clamping changes only ids that are out of range."""
        if not is_tensor(node):
            return False
        node = strip(node)
        if is_op(node, aten.clamp):
            a = arguments(node)
            if a["min"] not in (None, 0) or a["max"] != self.experts - 1:
                return False
            node = strip(a["self"])
        found = item(node)
        return found is not None and found[1] == 0 and self.canon.same(found[0], self.sort)

    def tokens(self, a: fx.Node) -> tuple[fx.Node, int]:
        a = uncast(a)  # autocast rounds the rows for the product
        a = uncast(self.unmask(a) or a)
        x, index = gathered(a)
        need(x is not None, f"the rows ({called(a)}) are not gathered from the tokens", a, advice.TOKEN_ROWS)
        assert x is not None and index is not None
        source = strip(index)
        if self._is_perm(source):
            k: Any = 1
            perm = source
        else:
            need(
                _is_floor_divide(source),
                f"the rows are gathered by {called(source)}, not by perm // k",
                a,
                advice.TOKEN_ROWS,
            )
            perm, k = source.args[0], source.args[1]
            need(static_int(k) is not None, "k is symbolic", a, advice.STATIC_K)
            need(
                self._is_perm(perm),
                "the rows are gathered in another order than the ids are sorted",
                a,
                advice.TOKEN_ROWS,
            )
        need(
            shape(self.ids)[0] == shape(x)[0] * k,
            f"{k} choices a token do not make the sorted ids",
            a,
            advice.TOKEN_ROWS,
        )
        return x, k

    def is_expert_row(self, node: fx.Node) -> fx.Node | None:
        table, index = gathered(node)
        return table if table is not None and self._is_sorted_ids(index) else None

    def unmask(self, node: fx.Node) -> fx.Node | None:
        if not is_op(node, aten.masked_fill):
            return None
        a = arguments(node)
        if a["value"] != 0 or not is_tensor(a["mask"]):
            return None
        mask = strip(a["mask"])
        if not same_shape(shape(a["mask"]), (shape(self.ids)[0], 1)):
            return None
        bound = {aten.ge: self.experts, aten.gt: self.experts - 1}
        for op, limit in bound.items():
            if is_op(mask, op) and mask.args[1] == limit:
                found = item(strip(mask.args[0]))
                if found is not None and found[1] == 0 and self.canon.same(found[0], self.sort):
                    return a["self"]
        return None

    def restored(self, node: fx.Node) -> fx.Node | None:
        source, index = gathered(node)
        if source is None:
            return None
        need(
            self._is_inverse(index),
            "rows are put back by other than the inverse permutation",
            node,
            advice.RESTORE,
        )
        return source

    def _is_inverse(self, node: Any) -> bool:
        node = strip(node)
        if is_op(node, aten.index_put):
            a = arguments(node)
            (size,) = shape(self.ids)
            return (
                not a["accumulate"]
                and len(a["indices"]) == 1
                and self._is_perm(a["indices"][0])
                and same_shape(shape(a["self"]), (size,))
                and _is_arange(a["values"], size)
            )
        found = item(node)  # argsort of the permutation
        return (
            found is not None and found[1] == 1 and _is_id_sort(found[0]) and self._is_perm(found[0].args[0])
        )

    def weights_in_token_order(self, node: fx.Node, in_order: bool) -> fx.Node:
        if in_order:
            return node
        table, index = gathered(strip(node))
        need(
            table is not None and self._is_perm(index),
            "the routing weights are not in the order of the sorted rows",
            node,
            advice.SORTED_WEIGHTS,
        )
        assert table is not None
        need(
            same_shape(shape(table), shape(self.ids)),
            "one weight for each row is needed",
            node,
            advice.SORTED_WEIGHTS,
        )
        return table


def _is_id_sort(node: Any) -> bool:
    """An ascending sort along the last dimension."""
    if not is_op(node, aten.sort):
        return False
    a = arguments(node)
    return not a["descending"] and a["dim"] in (-1, len(shape(a["self"])) - 1)


def _is_floor_divide(node: fx.Node) -> bool:
    if is_op(node, aten.floor_divide):
        return True
    return is_op(node, aten.div) and arguments(node).get("rounding_mode") in ("floor", "trunc")


def _is_arange(node: Any, size: Any) -> bool:
    if not is_tensor(node):
        return False
    node = exact_int(node)
    if not is_op(node, aten.arange):
        return False
    a = arguments(node)
    return a.get("start", 0) == 0 and a.get("step", 1) == 1 and same_shape(shape(node), (size,))


def counted_ids(counts: fx.Node, experts: int) -> fx.Node:
    """The ids of which `counts` [E] is the histogram: bin e counts exactly the ids equal to e."""
    if is_op(counts, aten.histc):
        a = arguments(counts)
        need(
            a["bins"] == experts, f"histc has {a['bins']} bins for {experts} experts", counts, advice.OFFSETS
        )
        need(
            a["min"] == 0 and a["max"] in (experts - 1, experts) and experts > 1,
            f"histc over [{a['min']}, {a['max']}] does not give each expert a bin; [0, {experts - 1}] does",
            counts,
            advice.OFFSETS,
        )
        ids = exact_int(a["self"])
        if a["max"] == experts:  # the last bin is closed: an id E would be counted as E - 1
            need(
                below(ids, experts),
                f"histc over [0, {experts}] counts id {experts} too",
                counts,
                advice.OFFSETS,
            )
        return ids
    if is_op(counts, aten.bincount) and arguments(counts)["weights"] is None:
        bins = shape(counts)[0]
        need(bins == experts, f"bincount has {bins} bins for {experts} experts", counts, advice.OFFSETS)
        return exact_int(counts.args[0])
    refuse(
        f"the offsets add up {called(counts)}, which is no histogram of expert ids", counts, advice.OFFSETS
    )


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
        return below(exact_int(producer.args[0]), experts)
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
    if is_op(node, aten.index) and len(node.args[1]) == 1 and is_tensor(node.args[1][0]):
        table, index = node.args[0], node.args[1][0]
        if value(index).dtype in (torch.int64, torch.int32) and len(shape(index)) == 1:
            return table, index
    if is_op(node, aten.index_select) and arguments(node)["dim"] == 0:
        return node.args[0], node.args[2]
    if is_op(node, aten.gather) and arguments(node)["dim"] == 0 and len(shape(node)) == 2:
        # gather(x, 0, index[:, None].expand(-1, H)) with H all columns of x
        table, index = node.args[0], node.args[2]
        rows = index.args[0] if is_op(index, aten.expand) else None
        whole_rows = same_shape(shape(node)[1:], shape(table)[1:])
        if whole_rows and rows is not None and same_shape(shape(rows), (shape(node)[0], 1)):
            return table, strip(rows)
    return None, None


# --- weights gathered for each row ---


def indexed_product(bmm: fx.Node, weights: Weights, canon: Canon) -> Product:
    """bmm of W[ids] [S, N, K] and rows [S, K, 1], or of rows [S, 1, K] and W[ids] [S, K, N]."""
    left, right = bmm.args
    for operand, rows, weight_first in ((left, right, True), (right, left, False)):
        gather, swapped = unswap(operand)
        table, index = gathered(gather)
        if table is None or len(shape(gather)) != 3:
            continue
        assert index is not None
        source, swapped_before = unswap(table)
        # As the right operand the gathered weight must be [S, K, N]; as the left one it is [S, N, K].
        swapped = swapped ^ swapped_before ^ weight_first
        weight = weights.resolve(source, swapped, bmm)
        vector = shape(rows)[2 if weight_first else 1]
        need(vector == 1, "each gathered weight must meet one row", bmm, advice.GATHERED)
        need(shape(rows)[0] == shape(index)[0], "one expert id for each row is needed", bmm, advice.GATHERED)
        return Product(
            bmm,
            rows,
            weight,
            rows=lambda: IndexedRows(index, canon),  # noqa: B023  returned at once
            ids=index,
            unit_dim=2 if weight_first else 1,
        )
    refuse("bmm with an expert weight that is not gathered by expert ids", bmm, advice.GATHERED)


class IndexedRows(Rows):
    form = "weights gathered for each row (batched_mm)"
    sorts = False

    def __init__(self, ids: fx.Node, canon: Canon) -> None:
        self.ids, self.canon = ids, canon

    def expert_ids(self) -> fx.Node:
        return self.ids

    def same_as(self, other: Rows) -> bool:
        return isinstance(other, IndexedRows) and self.canon.same(self.ids, other.ids)

    def tokens(self, a: fx.Node) -> tuple[fx.Node, int]:
        repeat = uncast(a)  # autocast rounds the rows for the product
        if is_op(repeat, aten.expand) and len(shape(repeat)) == 3:
            # x [T, 1, H] -> [T, k, H] -> [T * k, H]
            source, (tokens, k, width) = repeat.args[0], shape(repeat)
            if same_shape(shape(source), (tokens, 1, width)):
                need(static_int(k) is not None, "k is symbolic", repeat, advice.STATIC_K)
                need(
                    shape(self.ids)[0] == tokens * k,
                    f"{k} choices a token do not make the ids",
                    repeat,
                    advice.REPEATED,
                )
                return source, k
        return a, 1

    def is_expert_row(self, node: fx.Node) -> fx.Node | None:
        table, index = gathered(node)
        return table if table is not None and index is not None and self.canon.same(index, self.ids) else None

    def weights_in_token_order(self, node: fx.Node, in_order: bool) -> fx.Node:
        return node


# --- all of them ---


def find_products(graph: fx.Graph, weights: Weights, canon: Canon) -> Iterator[Product | Refusal]:
    """Every product with an expert weight, or why it could not be taken for one."""
    for node in graph.nodes:
        try:
            if is_grouped_mm(node):
                yield sorted_product(node, weights, canon)
            elif is_op(node, aten.bmm) and _touches_weight(node, weights):
                yield indexed_product(node, weights, canon)
        except Refusal as refusal:
            yield refusal


def _touches_weight(bmm: fx.Node, weights: Weights) -> bool:
    for operand in bmm.args:
        source, _ = unswap(operand)
        table, _ = gathered(source)
        if table is not None and len(shape(table)) == 3:
            return True
        if weights.is_candidate(source):
            return True
    return False
