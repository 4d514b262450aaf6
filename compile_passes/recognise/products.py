"""Finds single expert products, y[r] = W[e(r)] a[r]. Each form in which models write them has one function.

`sorted_products`: rows sorted by expert, `_grouped_mm` with cumulative offsets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from ..graph.ids import gathered
from ..graph.nodes import (
    FLOATING,
    arguments,
    aten,
    is_grouped_mm,
    is_op,
    is_tensor,
    shape,
    static_int,
    unswap,
    value,
)
from ..operands import operand
from ..refusal import Kind, Refusal, Refused, need, refuse
from ..weights.facts import Facts


@dataclass(frozen=True)
class WeightRef:
    """An expert weight as the graph holds it: `placeholder` is [E, N, K], or [E, K, N] if `transposed`.

    It is a graph input, or a weight that the graph decodes from 4-bit inputs (weights/decoded.py).
    """

    placeholder: fx.Node
    transposed: bool

    @property
    def experts(self) -> int:
        return int(value(self.placeholder).shape[0])

    @property
    def n(self) -> int:
        return int(value(self.placeholder).shape[2 if self.transposed else 1])

    @property
    def k(self) -> int:
        return int(value(self.placeholder).shape[1 if self.transposed else 2])


@dataclass
class Product:
    """node [S, N] = a [S, K] times the expert's weight, transposed."""

    node: fx.Node
    a: fx.Node
    weight: WeightRef
    offs: fx.Node | None = None
    """Sorted form: the offsets, as the product has them."""
    ids: fx.Node | None = None
    """Indexed form: the expert of each row."""
    unit_dim: int | None = None
    """Indexed form: the dimension of size one of `node`, [S, N, 1] or [S, 1, N]."""


def _resolve(node: fx.Node, swapped: bool, site: fx.Node, facts: Facts) -> WeightRef:
    """Return the weight behind `node`, which must be used as [E, K, N], with its last two dimensions swapped
    or not."""
    need(node.op == "placeholder" or node in facts.fixed, Kind.COMPUTED, site, node)
    need(node in facts.fixed, Kind.ARGUMENT, site, node)
    facts.need_own(node, site)
    v = value(node)
    need(v.dim() == 3, Kind.DIMENSIONS, site, node, v.dim())
    need(v.dtype in FLOATING, Kind.WEIGHT_DTYPE, site, node, v.dtype)
    need(v.device.type in ("cpu", "cuda"), Kind.DEVICE, site, v.device.type)
    need(all(static_int(s) is not None for s in v.shape), Kind.SYMBOLIC_WEIGHT, site, node)
    weight = WeightRef(node, transposed=not swapped)
    along_k = node not in facts.stored or facts.stored[node].way.transposed == weight.transposed
    need(along_k, Kind.QUANTISED_ALONG_N, site, node)
    need(weight.k % 2 == 0, Kind.ODD_K, site, weight.k)
    return weight


# --- rows sorted by expert ---


def sorted_product(node: fx.Node, facts: Facts) -> Product:
    a, mat2, offs = (arguments(node)[n] for n in _operand_names(node))
    if is_op(node, aten._grouped_mm):
        need(arguments(node)["bias"] is None, Kind.PRODUCT_BIAS, node)
    need(is_tensor(offs), Kind.NO_OFFSETS, node)
    need(len(shape(a)) == 2 and len(shape(mat2)) == 3, Kind.NOT_2D_BY_3D, node)
    need(value(offs).dtype == torch.int32, Kind.OFFSETS_DTYPE, node, value(offs).dtype)
    source, swapped = unswap(mat2)
    weight = _resolve(source, swapped, node, facts)
    need(shape(offs)[0] == weight.experts, Kind.OFFSETS_COUNT, node)
    return Product(node, a, weight, offs=offs)


def _operand_names(node: fx.Node) -> tuple[str, str, str]:
    return ("self", "mat2", "offs") if is_op(node, aten._grouped_mm) else ("input", "weight", "offs")


# --- weights gathered for each row ---


def indexed_product(bmm: fx.Node, facts: Facts) -> Product:
    """Read a bmm of W[ids] [S, N, K] and rows [S, K, 1], or of rows [S, 1, K] and W[ids] [S, K, N]."""
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
        weight = _resolve(source, swapped, bmm, facts)
        vector = shape(rows)[2 if weight_first else 1]
        need(vector == 1, Kind.ONE_ROW_A_WEIGHT, bmm)
        need(shape(rows)[0] == shape(index)[0], Kind.ONE_ID_A_ROW, bmm)
        return Product(bmm, rows, weight, ids=index, unit_dim=2 if weight_first else 1)
    refuse(Kind.NOT_GATHERED, bmm)


# --- all of them ---


def find_products(graph: fx.Graph, facts: Facts) -> Iterator[Product | Refusal]:
    """Yield every product with an expert weight, or the reason why it is not one."""
    for node in graph.nodes:
        try:
            if is_grouped_mm(node):
                yield sorted_product(node, facts)
            elif is_op(node, aten.bmm) and _touches_weight(node, facts):
                yield indexed_product(node, facts)
        except Refused as why:
            yield why.refusal


def _touches_weight(bmm: fx.Node, facts: Facts) -> bool:
    for factor in (operand(bmm), operand(bmm, 1)):
        source, _ = unswap(factor)
        table, _ = gathered(source)
        if table is not None and len(shape(table)) == 3:
            return True
        if source in facts.fixed and len(shape(source)) == 3 and value(source).dtype.is_floating_point:
            return True
    return False
