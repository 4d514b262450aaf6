"""Walks from nodes of a graph along their inputs or users."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx


def reached(
    start: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]], most: int | None = None
) -> dict[fx.Node, None]:
    """The nodes of `start` and all that `step` leads to from them, in the order in which they are found.

    most: the walk ends as soon as it has found so many."""
    found = dict.fromkeys(start)
    todo = list(found)
    while todo and (most is None or len(found) < most):
        for node in step(todo.pop()):
            if node not in found:
                found[node] = None
                todo.append(node)
    return found


def behind(*nodes: fx.Node) -> dict[fx.Node, None]:
    """Nodes, and all that they are computed from."""
    return reached(nodes, lambda node: node.all_input_nodes)


def after(*nodes: fx.Node) -> dict[fx.Node, None]:
    """Nodes, and all that is computed from them."""
    return reached(nodes, lambda node: node.users)
