"""Removes nodes that nothing needs from a graph."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from .nodes import ASSERTIONS, aten, is_impure, is_op, is_tensor, shape, value


def sweep(graph: fx.Graph) -> None:
    """Dead code, and assertions about sizes or chosen rows of tensors that nothing needs any more."""
    live: set[fx.Node] = set()
    assertions = {n: None for n in graph.nodes if is_op(n, *ASSERTIONS)}
    _keep((n for n in graph.nodes if _has_effect(n) and n not in assertions), live)
    asserted = [
        n
        for n in assertions
        if _tensors_behind(n) & live or (is_op(n, aten._assert_async) and not _is_of_some_rows(n, live))
    ]
    _keep(asserted, live)
    for node in reversed(graph.nodes):
        if node not in live:
            graph.erase_node(node)


def erase_unused(graph: fx.Graph) -> None:
    """As fx's own `eliminate_dead_code`, which searches registries for what each node may do."""
    for node in reversed(graph.nodes):
        if not node.users and not _has_effect(node):
            graph.erase_node(node)


def _is_of_some_rows(node: fx.Node, live: set[fx.Node]) -> bool:
    """Whether what is not needed otherwise, and `node` is computed from, has rows that a mask chose."""
    seen: set[fx.Node] = set()
    _keep([node], seen)
    return any(is_tensor(n) and free_unbacked_symbols(value(n)) for n in seen - live)


def _has_effect(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or is_impure(node)


def _keep(nodes: Iterable[fx.Node], live: set[fx.Node]) -> None:
    """Mark all nodes that `nodes` are computed from as live."""
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in live:
            live.add(node)
            todo.extend(node.all_input_nodes)


def _tensors_behind(node: fx.Node) -> set[fx.Node]:
    """The tensors that a scalar, or a condition on all of a tensor, is computed from."""
    found, todo = set(), list(node.all_input_nodes)
    while todo:
        n = todo.pop()
        if is_tensor(n) and len(shape(n)) > 0:
            found.add(n)
        else:
            todo.extend(n.all_input_nodes)
    return found
