"""Explains what could not be read: a step of an expert, a product that belongs to no expert, a computed
weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ...meta.formats import SMALLEST_SIDE
from ..graph.nodes import (
    CUTS,
    FLOATING,
    PRODUCTS,
    RESHAPES,
    SWAPS,
    arguments,
    aten,
    behind,
    has_chosen_rows,
    is_op,
    is_tensor,
    item,
    operand,
    passes_order,
    several,
    shape,
    static_int,
    through,
    value,
)
from ..index.reader import Reader
from ..refusal import Kind, Refusal, Step

# --- a step that is not understood ---

_RANDOM = (aten.native_dropout, aten.bernoulli, aten.rand, aten.randn, aten.rand_like, aten.randn_like)
_ADDS = (aten.index_add, aten.index_put, aten.index_copy, aten.scatter_add)
_SELECTS = (aten.index, aten.index_select, aten.gather)


def is_random(step: fx.Node) -> bool:
    """Return whether a step draws random numbers, such as dropout in training mode or noise."""
    return is_op(step, *_RANDOM)


def kind_of(step: fx.Node) -> Step:
    """Return the kind of a step that is not understood."""
    if is_random(step):
        return Step.RANDOM
    if is_op(step, *_ADDS) and _has_token_counts(step.graph):
        return Step.OTHER_TOKENS
    if any(map(_is_chosen_by_experts, step.all_input_nodes)):
        return Step.CHOSEN_BY_EXPERTS
    if is_op(step, aten.index_copy):
        return Step.PUT
    if is_op(step, aten.index_put) and not step.kwargs.get("accumulate", (*step.args, False)[3]):
        return Step.PUT
    if is_op(step, aten.slice_scatter, aten.cat) and not any(map(has_chosen_rows, step.all_input_nodes)):
        return Step.JOINED
    if is_op(step, aten.split, aten.split_with_sizes, aten.cat):
        return Step.CUT
    if is_op(step, *_SELECTS):
        return Step.SELECTED
    if is_op(step, aten.add, aten.sub, aten.mul) and any(is_op(n, *PRODUCTS) for n in step.all_input_nodes):
        return Step.SUM_OF_PRODUCTS
    return Step.OTHER


def kind_on_output(step: fx.Node) -> Step:
    """Return the kind of a step on one expert's output, before the outputs of all experts are added."""
    return Step.RANDOM if is_random(step) else Step.ON_OUTPUT


def first_rows(nodes: Iterable[fx.Node]) -> Refusal | None:
    """Return a refusal for a slice of the indices of an expert's rows, because the number of rows that it
    drops depends on the data."""
    for node in nodes:
        places = node
        while is_op(places, aten.slice, aten.select, aten.squeeze, aten.unbind) or item(places) is not None:
            places = operand(places)
        if is_op(node, aten.slice) and is_op(places, aten.nonzero) and arguments(node).get("dim", 0) == 0:
            return Refusal(Kind.FIRST_ROWS, node)
    return None


def _has_token_counts(graph: fx.Graph) -> bool:
    """Return whether inputs have different symbolic numbers of rows that no torch._check declares equal."""
    inputs = (n for n in graph.find_nodes(op="placeholder") if is_tensor(n) and shape(n))
    return len({str(shape(n)[0]) for n in inputs if static_int(shape(n)[0]) is None}) > 1


def _is_chosen_by_experts(index: fx.Node) -> bool:
    """Return whether these rows are all or some of the indices that `topk` chose."""
    while passes_order(index) or is_op(index, aten.select, aten.slice):
        index = operand(index)
    found = item(index)
    return found is not None and found[1] == 1 and is_op(found[0], aten.topk)


# --- products that are not read as experts' ---

_VIEWS = (
    aten.t, aten.transpose, aten.permute, aten.view, aten.clone, aten._to_copy, aten.detach, aten.expand,
    aten.unsqueeze, aten.squeeze, aten.select, aten.reshape, aten.index, aten.index_select,
)  # fmt: skip
_STEPS_BETWEEN = 16
"""The most nodes of a norm and an activation together."""


class _Product(NamedTuple):
    node: fx.Node
    rows: fx.Node
    weight: fx.Node


def unread_experts(graph: fx.Graph, is_weight: Callable[[fx.Node], bool], many: int) -> Refusal | None:
    """Return a refusal for experts without a readable product. `many` FFNs of one shape side by side over the
    same rows count as experts."""
    return _stacked_weights(graph, is_weight) or _steps_between(graph, is_weight, many)


def unread_rows(graph: fx.Graph, reader: Reader, choices: int) -> Refusal:
    """Return why products with `choices` different selections of rows cannot be read as experts."""
    products = {n: p for n in graph.nodes if (p := _product(n, reader.is_weight)) is not None and _rows_of(n)}
    fed = False
    for product in products.values():
        own, todo = {product.node}, [product.rows]
        while todo:
            node = todo.pop()
            if node not in own and _rows_of(node) == _rows_of(product.node):
                own.add(node)
                todo += () if node in products else node.all_input_nodes
        after = own & products.keys() - {product.node}
        for node in (n for n in graph.nodes if n in own - after):
            if after.isdisjoint(node.all_input_nodes):
                continue
            fed = True
            after.add(node)
            if node is not product.node and is_tensor(node) and reader.value(node, 1) is reader.opaque(node):
                return between_products((item(node) or (node,))[0])
    last = next(reversed(products), None)
    if last is not None and not fed:
        return Refusal(Kind.ONE_LAYER, last, (choices,))
    rows = [n for n in graph.nodes if is_op(n, *PRODUCTS) and _rows_of(n)]
    return Refusal(Kind.READ_AS_NONE, rows[-1], (choices,))


def _rows_of(node: fx.Node) -> frozenset[object]:
    """Return the sizes of rows, chosen by a mask or `where`, of a floating tensor. Empty if it has all
    rows."""
    made = node.meta.get("val")
    first = made[0] if isinstance(made, (tuple, list)) and made else made
    floats = isinstance(first, torch.Tensor) and first.dtype.is_floating_point
    return frozenset(free_unbacked_symbols(first)) if floats else frozenset()


def between_products(step: fx.Node) -> Refusal:
    """Return the refusal for a step between an expert's products that is not allowed there."""
    kind = Kind.RANDOM_BETWEEN if is_random(step) else Kind.BETWEEN
    sums = is_op(step, aten.add, aten.sub, aten.mul, aten.div) and len(step.all_input_nodes) > 1
    return Refusal(Kind.SUM_BETWEEN if sums else kind, step, (step,))


def _stacked_weights(graph: fx.Graph, is_weight: Callable[[fx.Node], bool]) -> Refusal | None:
    """Return a refusal for products with a stack of matrices that the graph makes from parameters."""
    made = []
    for node in graph.nodes:
        for of in node.all_input_nodes if is_op(node, *PRODUCTS) else ():
            stack = through(of, *_VIEWS)
            if not is_op(stack, aten.stack, aten.cat) or len(shape(stack)) < 2:
                continue
            parts = [through(n, *_VIEWS) for n in several(stack, 0)]
            if len(parts) > 1 and all(map(is_weight, parts)):
                made.append(stack)
    if not made:
        return None
    kind = Kind.STACKED_WEIGHTS if len(made) > 1 else Kind.STACKED_WEIGHT
    return Refusal(kind, made[-1], (made[-1], len(made)))


def _steps_between(graph: fx.Graph, is_weight: Callable[[fx.Node], bool], many: int) -> Refusal | None:
    """Return a refusal for FFNs that have more than an activation between their products: a norm, a PReLU.

    Heads of one trunk share its products, so they are no FFNs.
    """
    products = {n: p for n in graph.nodes if (p := _product(n, is_weight)) is not None}
    alike: dict[tuple[object, ...], dict[fx.Node, fx.Node]] = defaultdict(dict)
    for down in products.values():
        between = _between(down.rows, products)
        ups = [products[n] for n in between if n in products]
        steps = [n for n in between if n not in products and not is_op(n, *_VIEWS) and item(n) is None]
        if ups and steps:
            shapes = str([shape(p.weight) for p in (down, *ups)])  # some may be symbolic
            with_parameters = [n for n in steps if any(i.op == "placeholder" for i in n.all_input_nodes)]
            random = [n for n in steps if is_random(n)]
            first = (with_parameters or random or steps)[0]
            alike[through(ups[0].rows, *_VIEWS), shapes].setdefault(ups[0].node, first)
    for found in alike.values():
        if len(found) >= many:
            return between_products(next(iter(found.values())))
    return None


def _product(node: fx.Node, is_weight: Callable[[fx.Node], bool]) -> _Product | None:
    factors = node.all_input_nodes[-2:] if is_op(node, *PRODUCTS) else []
    weights = [n for n in factors if is_weight(through(n, *_VIEWS))]
    rows = [n for n in factors if n not in weights]
    return _Product(node, rows[0], weights[0]) if len(weights) == len(rows) == 1 else None


def gathered_matrices(
    graph: fx.Graph, is_weight: Callable[[fx.Node], bool], gathers: Callable[[fx.Node], bool]
) -> Iterator[Refusal]:
    """Yield a refusal for each product with matrices that chosen ids gather from a stack of them, if several
    matrices meet one row."""
    for node in graph.nodes:
        for factor in node.all_input_nodes if is_op(node, *PRODUCTS) else ():
            matrices = through(factor, *RESHAPES, *SWAPS, aten._to_copy, aten.expand)
            if not gathers(matrices):
                continue
            stack = through(operand(matrices), *RESHAPES, *SWAPS, aten._to_copy)
            sizes = [static_int(s) or 0 for s in shape(stack)]
            if is_weight(stack) and len(sizes) == 3 and min(sizes[1:]) >= SMALLEST_SIDE:
                yield Refusal(Kind.GATHERED_ODDLY, node, (stack,))


def _between(rows: fx.Node, products: dict[fx.Node, _Product]) -> list[fx.Node]:
    """Return the nodes from products with weights to `rows`. Empty if there are many."""
    found: list[fx.Node] = []
    todo = [rows]
    while todo and len(found) <= _STEPS_BETWEEN:
        node = todo.pop()
        if node.op == "call_function" and node not in found:
            found.append(node)
            todo += node.all_input_nodes if node not in products else []
    return found if len(found) <= _STEPS_BETWEEN else []


# --- products with changed weights ---

_SAME = (*RESHAPES, *SWAPS, *CUTS, aten.unbind, aten._to_copy)
_SCALED = (aten.mul, aten.div, aten.dropout, *_SAME)


def changed_products(graph: fx.Graph, is_weight: Callable[[fx.Node], bool]) -> Refusal | None:
    """Return a refusal if smaller products correct the products of chosen rows (LoRA), or if the graph
    computes the weights of these products (pruning, weight norms, parametrizations)."""
    products = [n for n in graph.nodes if is_op(n, *PRODUCTS) and has_chosen_rows(n)]
    for node in graph.nodes:
        if not (is_op(node, aten.add) and has_chosen_rows(node) and all(map(is_tensor, node.args[:2]))):
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
        if matrix and not has_chosen_rows(node) and _is_of_weights(node, is_weight):
            return node
    return None


def _is_of_weights(node: fx.Node, is_weight: Callable[[fx.Node], bool]) -> bool:
    """Return whether a node does not depend on activations."""
    given = (n for n in behind(node) if n.op == "placeholder" and is_tensor(n))
    return all(is_weight(n) for n in given if value(n).dtype in FLOATING)


def _unscaled(node: fx.Node) -> fx.Node:
    """Follow a node back through scaling and views of chosen rows."""
    while is_op(node, *_SCALED):
        rows = [n for n in node.all_input_nodes if has_chosen_rows(n)]
        if len(rows) != 1:
            break
        node = rows[0]
    return node


def _weight(product: fx.Node, is_weight: Callable[[fx.Node], bool]) -> fx.Node | None:
    """Return the parameter that chosen rows are multiplied by."""
    for node in product.all_input_nodes if is_op(product, *PRODUCTS) else ():
        node = through(node, *_SAME)
        if is_weight(node) and len(shape(node)) >= 2:
            return node
    return None


def _low_rank(node: fx.Node, is_weight: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Return the two weights of two products in a row, if the dimension between them is the smallest (low
    rank)."""
    last = _weight(node, is_weight)
    rows = [n for n in node.all_input_nodes if has_chosen_rows(n)] if last is not None else []
    inner = _unscaled(rows[0]) if len(rows) == 1 else None
    first = _weight(inner, is_weight) if inner is not None else None
    if last is None or first is None or inner is None:
        return []
    rank, wide = static_int(shape(inner)[-1]), static_int(shape(node)[-1])
    return [first, last] if rank is not None and wide is not None and rank < wide else []
