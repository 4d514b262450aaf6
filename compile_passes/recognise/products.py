"""Finds single expert products, y[r] = W[e(r)] a[r]. Each form in which models write them has one function.

`sorted_product`: rows sorted by expert, `_grouped_mm` with cumulative offsets.
`indexed_product`: weights gathered for each row, `bmm`.
`read_batched`: the same number of rows for each expert, `bmm`, or one product of the same rows by all
matrices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..graph.nodes import (
    FLOATING,
    arguments,
    aten,
    is_grouped_mm,
    is_op,
    is_tensor,
    operand,
    shape,
    static_int,
    unswap,
    value,
)
from ..index.ids import gathered
from ..index.reader import Reader
from ..index.terms import Axis, Const, Ref, Value, free_axes, substitute
from ..naming import input_name
from ..refusal import Kind, Refusal, Refused, need, refuse
from ..weights.facts import Facts
from .block import EvenParts, Experts, Matrix, Parts
from .pieces import K, N, indices


@dataclass
class Product:
    """node [S, N] = a [S, K] times the expert's weight, transposed."""

    node: fx.Node
    a: fx.Node
    experts: Experts
    offs: fx.Node | None = None
    """Sorted form: the offsets argument of the product."""
    ids: fx.Node | None = None
    """Indexed form: the expert of each row."""
    unit_dim: int | None = None
    """Indexed form: the dimension of size one of `node`, [S, N, 1] or [S, 1, N]."""

    @property
    def matrix(self) -> Matrix:
        """Return the matrix of the first expert."""
        return next(iter(self.experts))[0]

    @property
    def weight(self) -> fx.Node:
        return self.matrix.ref.node


def _whole(node: fx.Node, swapped: bool, site: fx.Node, facts: Facts) -> Experts:
    """Return the matrices of the weight `node`, which must be used as [E, K, N], with its last two dimensions
    swapped or not."""
    need(node.op == "placeholder" or node in facts.fixed, Kind.COMPUTED, site, node)
    need(node in facts.fixed, Kind.ARGUMENT, site, node)
    facts.need_own(node, site)
    v = value(node)
    need(v.dim() == 3, Kind.DIMENSIONS, site, node, v.dim())
    need(v.dtype in FLOATING, Kind.WEIGHT_DTYPE, site, node, v.dtype)
    need(v.device.type in ("cpu", "cuda"), Kind.DEVICE, site, v.device.type)
    need(all(static_int(s) is not None for s in v.shape), Kind.SYMBOLIC_WEIGHT, site, node)
    along_k = node not in facts.stored or facts.stored[node].way.transposed == (not swapped)
    need(along_k, Kind.QUANTISED_ALONG_N, site, node)
    count, *sizes = map(int, v.shape)
    n, k = sizes if swapped else reversed(sizes)
    need(k % 2 == 0, Kind.ODD_K, site, k)

    def of(e: int) -> Parts:
        return (Matrix(Ref(node, (Const(e), N, K) if swapped else (Const(e), K, N)), n, k),)

    return EvenParts(of(0), of(1), count) if count > 1 else [of(0)]


# --- rows sorted by expert ---


def sorted_product(node: fx.Node, facts: Facts) -> Product:
    a, mat2, offs = (arguments(node)[n] for n in _operand_names(node))
    if is_op(node, aten._grouped_mm):
        need(arguments(node)["bias"] is None, Kind.PRODUCT_BIAS, node)
    need(is_tensor(offs), Kind.NO_OFFSETS, node)
    need(len(shape(a)) == 2 and len(shape(mat2)) == 3, Kind.NOT_2D_BY_3D, node)
    need(value(offs).dtype == torch.int32, Kind.OFFSETS_DTYPE, node, value(offs).dtype)
    source, swapped = unswap(mat2)
    experts = _whole(source, swapped, node, facts)
    need(shape(offs)[0] == len(experts), Kind.OFFSETS_COUNT, node)
    return Product(node, a, experts, offs=offs)


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
        experts = _whole(source, swapped, bmm, facts)
        vector = shape(rows)[2 if weight_first else 1]
        need(vector == 1, Kind.ONE_ROW_A_WEIGHT, bmm)
        need(shape(rows)[0] == shape(index)[0], Kind.ONE_ID_A_ROW, bmm)
        return Product(bmm, rows, experts, ids=index, unit_dim=2 if weight_first else 1)
    refuse(Kind.NOT_GATHERED, bmm)


# --- sorted and gathered rows ---


def find_products(graph: fx.Graph, facts: Facts) -> Iterator[Product | Refusal]:
    """Yield each product with an expert weight, or the reason why a similar product does not qualify."""
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


# --- the same number of rows for each expert ---

ATTENTION = re.compile(r"attn|attention")
"""Finds parameters of batched products in attention, such as MLA's absorbed projections and grouped output
projections."""


@dataclass(frozen=True)
class Batched:
    """node = a[e] W[e] for all experts. `experts` are their matrices."""

    node: fx.Node
    a: fx.Node
    experts: list[tuple[Matrix, ...]]
    left: bool
    """True if the weight is the left operand. Then a is [E, K, T], and the result is [E, N, T]."""
    shared: bool
    """True if all experts have the same rows. Then a is [.., T, K], and the result is [.., T, E N]."""
    last: bool = False
    """True if the weight is [K, N, E]. Then the result is [.., T, N E]."""

    @property
    def weight(self) -> fx.Node:
        return self.experts[0][0].ref.node

    @property
    def rows(self) -> Any:
        return shape(self.a)[2 if self.left else -2]


def read_batched(node: fx.Node, reader: Reader, written: set[fx.Node], last: bool = False) -> Batched | None:
    """Return the product of a batch, or of the same rows and all matrices.

    last: whether the experts of the second form are along the last dimension of their weight.
    """
    if not is_op(node, aten.bmm, aten.mm):
        return None
    a, b = operand(node), operand(node, 1)
    for matrix, other, left in ((b, a, False), (a, b, True)):
        if _is_written(matrix, written):
            continue
        v = reader.value(matrix, 0)
        if is_op(node, aten.bmm) and (experts := _experts(v, left, reader)) is not None:
            return Batched(node, other, experts, left, shared=False)
        if not left and all(static_int(s) == 1 for s in shape(other)[:-2]):
            experts = _experts(_apart(v, last), left, reader)
            if experts is not None:
                return Batched(node, other, experts, left, shared=True, last=last)
    return None


def _apart(v: Value, last: bool) -> Value:
    """Read a weight [K, E N] as [E, K, N], or [K, N E] if the experts are its last dimension."""
    *lead, inner, both = v.dims
    if any(lead) or len(both) != 2:
        return v
    experts, out = (both[1:], both[:1]) if last else (both[:1], both[1:])
    return Value((experts, inner, out), v.term)


def _is_written(node: fx.Node, written: set[fx.Node]) -> bool:
    """Return whether a tensor is a view of a rewritten block's output, which is not a weight."""
    while node not in written and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node in written


def _experts(v: Value, left: bool, reader: Reader) -> list[tuple[Matrix, ...]] | None:
    """Return the matrices of a weight [E, K, N], or of a left operand [E, N, K]."""
    if not isinstance(v.term, Ref) or not reader.is_weight(v.term.node):
        return None
    if any(isinstance(i, Ref) for i in indices(v.term)):
        return None  # gathered by ids
    if ATTENTION.search(input_name(v.term.node)):
        return None  # heads, or groups of heads
    if len(v.dims) != 3 or any(len(g) != 1 for g in v.dims) or free_axes(v.term) != set(v.axes):
        return None
    e, inner, out = v.axes if not left else (v.axes[0], v.axes[2], v.axes[1])
    sizes = [static_int(a.size) for a in (e, out, inner)]
    if None in sizes:
        return None
    names: dict[Any, Axis] = {inner: K, out: N}
    refs = [substitute(v.term, {**names, e: Const(i)}) for i in range(e.size)]
    return [(Matrix(r, out.size, inner.size),) for r in refs]


def factors(node: fx.Node) -> tuple[fx.Node | None, fx.Node, fx.Node]:
    """Return (bias, a, b) of `mm` or `addmm`."""
    bias = operand(node) if is_op(node, aten.addmm) else None
    return bias, operand(node, len(node.args) - 2), operand(node, len(node.args) - 1)


def read_matrix(node: fx.Node, reader: Reader) -> Matrix | None:
    """Return the matrix [N, K] whose transpose `node` is: a parameter, or one expert's part of one."""
    v = reader.value(node, 0)
    if not isinstance(v.term, Ref) or not reader.is_weight(v.term.node):
        return None
    if len(v.dims) != 2 or any(len(g) != 1 for g in v.dims) or any(isinstance(i, Ref) for i in v.term.index):
        return None
    k, n = v.axes
    if free_axes(v.term) != {k, n}:
        return None
    rows, columns = static_int(n.size), static_int(k.size)
    if rows is None or columns is None:
        return None
    return Matrix(substitute(v.term, {n: N, k: K}), rows, columns)
