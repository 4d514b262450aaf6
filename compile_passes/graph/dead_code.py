"""Removes nodes that nothing needs from a graph, and nodes that only seem to be needed."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from .nodes import (
    ASSERTIONS,
    arguments,
    aten,
    behind,
    has_chosen_rows,
    is_impure,
    is_op,
    is_tensor,
    operand,
    reached,
    shape,
    static_int,
    value,
)


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
    return any(n not in live and has_chosen_rows(n) for n in behind(node))


def _has_effect(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or is_impure(node)


def _tensors_behind(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that a scalar, or a condition on a whole tensor, is computed from."""

    def has_dimensions(n: fx.Node) -> bool:
        return is_tensor(n) and len(shape(n)) > 0

    steps = reached(node.all_input_nodes, lambda n: () if has_dimensions(n) else n.all_input_nodes)
    return [n for n in steps if has_dimensions(n)]


def read_past_writes(graph: fx.Graph) -> None:
    """Make each read of a slice read the tensor before the writes to other slices, or the value that was
    written there.

    `buffer[e] = y` becomes a scatter into the whole buffer, so everything that is read from it later seems to
    depend on y. But slice e + 1 does not.
    """
    for node in list(graph.nodes):
        if not is_op(node, aten.select, aten.slice):
            continue
        source = operand(node)
        ours = _part(node, source)
        while ours is not None and is_op(source, aten.select_scatter, aten.slice_scatter):
            theirs = _part(source, operand(source))
            same_kind = is_op(node, aten.select) == is_op(source, aten.select_scatter)
            converted = value(operand(source, 1)).dtype != value(node).dtype
            if theirs == ours and same_kind and not converted:
                node.replace_all_uses_with(operand(source, 1))
                break
            if theirs is None or theirs[0] != ours[0] or not set(theirs[1]).isdisjoint(ours[1]):
                break
            source = operand(source)
            node.update_arg(0, source)


def _part(node: fx.Node, whole: fx.Node) -> tuple[int, range] | None:
    """Return (dimension, positions) that a node reads or writes in `whole`, if both are constant."""
    a = arguments(node)
    dim = a["dim"] % len(shape(whole))
    size = static_int(shape(whole)[dim])
    if size is None:
        return None
    if is_op(node, aten.select, aten.select_scatter):
        at = a["index"]
        return (dim, range(at % size, at % size + 1)) if isinstance(at, int) else None
    at = slice(a["start"], a["end"], a["step"])
    known = all(n is None or isinstance(n, int) for n in (at.start, at.stop, at.step))
    return (dim, range(size)[at]) if known else None
