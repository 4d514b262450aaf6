"""Finds products of chosen rows that are not plain: products that smaller ones correct (LoRA), or whose
weights the graph computes (pruning, norms of weights, parametrizations)."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..graph.nodes import (
    CUTS,
    FLOATING,
    PRODUCTS,
    RESHAPES,
    SWAPS,
    aten,
    is_op,
    is_tensor,
    item,
    shape,
    static_int,
    value,
)
from ..graph.walks import behind
from ..operands import operand
from ..refusal import Kind, Refusal

_SAME = (*RESHAPES, *SWAPS, *CUTS, aten.unbind, aten._to_copy)
_SCALED = (aten.mul, aten.div, aten.dropout, *_SAME)


def changed_products(graph: fx.Graph, is_weight: Callable[[fx.Node], bool]) -> Refusal | None:
    """Return a refusal if products of chosen rows are not plain: a LoRA beside them, or a computed weight."""
    products = [n for n in graph.nodes if is_op(n, *PRODUCTS) and _has_some_rows(n)]
    for node in graph.nodes:
        if not (is_op(node, aten.add) and _has_some_rows(node) and all(map(is_tensor, node.args[:2]))):
            continue
        for base, other in ((0, 1), (1, 0)):
            own = _weight(_unscaled(operand(node, base)), is_weight)
            small = _low_rank(_unscaled(operand(node, other)), is_weight)
            if own is not None and small:
                return Refusal(Kind.CORRECTED, node, (own, *small))
    made = [n for p in products if (n := _made_weight(p, is_weight)) is not None]
    if not made:
        return None
    kind = Kind.BAKED_WEIGHTS if len(made) > 1 else Kind.BAKED_WEIGHT
    return Refusal(kind, made[-1], (made[-1], len(made)))


def _made_weight(product: fx.Node, is_weight: Callable[[fx.Node], bool]) -> fx.Node | None:
    """Return the node that computes the matrix of a product of chosen rows: a pruning mask, a weight norm."""
    for node in product.all_input_nodes:
        while is_op(node, *_SAME) or (item(node) is not None and is_op(operand(node), *_SAME)):
            node = operand(node)
        matrix = node.op == "call_function" and is_tensor(node) and len(shape(node)) == 2
        if matrix and not _has_some_rows(node) and _is_of_weights(node, is_weight):
            return node
    return None


def _is_of_weights(node: fx.Node, is_weight: Callable[[fx.Node], bool]) -> bool:
    """Return whether a node does not depend on activations."""
    given = (n for n in behind(node) if n.op == "placeholder" and is_tensor(n))
    return all(is_weight(n) for n in given if value(n).dtype in FLOATING)


def _has_some_rows(node: fx.Node) -> bool:
    return is_tensor(node) and bool(free_unbacked_symbols(value(node)))


def _unscaled(node: fx.Node) -> fx.Node:
    """Follow a node back through scaling and views of chosen rows."""
    while is_op(node, *_SCALED):
        rows = [n for n in node.all_input_nodes if _has_some_rows(n)]
        if len(rows) != 1:
            break
        node = rows[0]
    return node


def _weight(product: fx.Node, is_weight: Callable[[fx.Node], bool]) -> fx.Node | None:
    """Return the parameter that chosen rows are multiplied by."""
    for node in product.all_input_nodes if is_op(product, *PRODUCTS) else ():
        while is_op(node, *_SAME):
            node = operand(node)
        if is_weight(node) and len(shape(node)) >= 2:
            return node
    return None


def _low_rank(node: fx.Node, is_weight: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Return the two weights of a product of a product if the rows between them are the narrowest (low
    rank)."""
    last = _weight(node, is_weight)
    rows = [n for n in node.all_input_nodes if _has_some_rows(n)] if last is not None else []
    inner = _unscaled(rows[0]) if len(rows) == 1 else None
    first = _weight(inner, is_weight) if inner is not None else None
    if last is None or first is None or inner is None:
        return []
    rank, wide = static_int(shape(inner)[-1]), static_int(shape(node)[-1])
    return [first, last] if rank is not None and wide is not None and rank < wide else []
