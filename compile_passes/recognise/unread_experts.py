"""Explains why no product of something that looks like experts was read as an expert's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..graph.nodes import PRODUCTS, aten, is_op, is_tensor, item, shape
from ..index.reader import Reader
from ..operands import operand, several
from ..refusal import Kind, Refusal
from .unread_steps import is_random

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
    """Return why products of this many choices of rows are not read. None of them ends an expert."""
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


def _source(node: fx.Node) -> fx.Node:
    while is_op(node, *_VIEWS):
        node = operand(node)
    return node


def _stacked_weights(graph: fx.Graph, is_weight: Callable[[fx.Node], bool]) -> Refusal | None:
    """Return a refusal for products with a stack of matrices that the graph makes from parameters."""
    made = []
    for node in graph.nodes:
        for of in node.all_input_nodes if is_op(node, *PRODUCTS) else ():
            stack = _source(of)
            if not is_op(stack, aten.stack, aten.cat) or len(shape(stack)) < 2:
                continue
            parts = [_source(n) for n in several(stack, 0)]
            if len(parts) > 1 and all(map(is_weight, parts)):
                made.append(stack)
    if not made:
        return None
    kind = Kind.STACKED_WEIGHTS if len(made) > 1 else Kind.STACKED_WEIGHT
    return Refusal(kind, made[-1], (made[-1], len(made)))


def _steps_between(graph: fx.Graph, is_weight: Callable[[fx.Node], bool], many: int) -> Refusal | None:
    """Return a refusal for FFNs that have more than an activation between their products: a norm, a PReLU."""
    products = {n: p for n in graph.nodes if (p := _product(n, is_weight)) is not None}
    alike: dict[tuple[object, ...], list[fx.Node]] = defaultdict(list)
    for down in products.values():
        between = _between(down.rows, products)
        ups = [products[n] for n in between if n in products]
        steps = [n for n in between if n not in products and not is_op(n, *_VIEWS) and item(n) is None]
        if ups and steps:
            shapes = str([shape(p.weight) for p in (down, *ups)])  # some may be symbolic
            with_parameters = [n for n in steps if any(i.op == "placeholder" for i in n.all_input_nodes)]
            random = [n for n in steps if is_random(n)]
            alike[_source(ups[0].rows), shapes].append((with_parameters or random or steps)[0])
    for found in alike.values():
        if len(found) >= many:
            return between_products(found[0])
    return None


def _product(node: fx.Node, is_weight: Callable[[fx.Node], bool]) -> _Product | None:
    factors = node.all_input_nodes[-2:] if is_op(node, *PRODUCTS) else []
    weights = [n for n in factors if is_weight(_source(n))]
    rows = [n for n in factors if n not in weights]
    return _Product(node, rows[0], weights[0]) if len(weights) == len(rows) == 1 else None


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
