"""Removes nodes that nothing needs from a graph."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from .nodes import ASSERTIONS, aten, is_impure, is_op, is_tensor, shape, value
from .walks import behind, reached


def sweep(graph: fx.Graph) -> None:
    """Remove dead code, and assertions about sizes or chosen rows of tensors that nothing else needs."""
    assertions = {n: None for n in graph.nodes if is_op(n, *ASSERTIONS)}
    live = behind(*(n for n in graph.nodes if _has_effect(n) and n not in assertions))
    asserted = [
        n
        for n in assertions
        if any(t in live for t in _tensors_behind(n))
        or (is_op(n, aten._assert_async) and not _is_of_some_rows(n, live))
    ]
    live |= behind(*asserted)
    for node in reversed(graph.nodes):
        if node not in live:
            graph.erase_node(node)


def erase_unused(graph: fx.Graph) -> None:
    """Remove unused nodes like fx's `eliminate_dead_code`, which is slow because it searches registries
    for each node."""
    for node in reversed(graph.nodes):
        if not node.users and not _has_effect(node):
            graph.erase_node(node)


def _is_of_some_rows(node: fx.Node, live: Collection[fx.Node]) -> bool:
    """Return whether `node` depends on rows that a mask chose, through nodes that nothing else needs."""
    return any(n not in live and is_tensor(n) and free_unbacked_symbols(value(n)) for n in behind(node))


def _has_effect(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or is_impure(node)


def _tensors_behind(node: fx.Node) -> list[fx.Node]:
    """The tensors that a scalar, or a condition on all of a tensor, is computed from."""

    def has_dimensions(n: fx.Node) -> bool:
        return is_tensor(n) and len(shape(n)) > 0

    steps = reached(node.all_input_nodes, lambda n: () if has_dimensions(n) else n.all_input_nodes)
    return [n for n in steps if has_dimensions(n)]
