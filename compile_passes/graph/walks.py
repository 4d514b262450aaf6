"""Walks from nodes of a graph along their inputs or users."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx


def reached(
    start: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]], most: int | None = None
) -> dict[fx.Node, None]:
    """Return the nodes of `start` and all nodes that `step` reaches from them, in the order of discovery.

    most: the walk ends when it has found this many.
    """
    found = dict.fromkeys(start)
    todo = list(found)
    while todo and (most is None or len(found) < most):
        for node in step(todo.pop()):
            if node not in found:
                found[node] = None
                todo.append(node)
    return found


def behind(*nodes: fx.Node) -> dict[fx.Node, None]:
    """Return nodes, and everything that they are computed from."""
    return reached(nodes, lambda node: node.all_input_nodes)


def after(*nodes: fx.Node) -> dict[fx.Node, None]:
    """Return nodes, and everything that is computed from them."""
    return reached(nodes, lambda node: node.users)
