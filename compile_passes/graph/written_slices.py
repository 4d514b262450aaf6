"""Lets reads of a slice of a tensor skip writes to its other slices.

`buffer[e] = y` becomes a scatter into the whole buffer, so everything that is read from it later seems to
depend on y. But slice e + 1 does not.
"""

from __future__ import annotations

from torch import fx

from ..operands import operand
from .nodes import arguments, aten, is_op, shape, static_int, value


def read_past_writes(graph: fx.Graph) -> None:
    """Make each read of a slice read the tensor before the writes to other slices, or the value that was
    written there."""
    for node in list(graph.nodes):
        if not is_op(node, aten.select, aten.slice):
            continue
        source = operand(node)
        ours = _part(node, source)
        while ours is not None and is_op(source, aten.select_scatter, aten.slice_scatter):
            theirs = _part(source, operand(source))
            same_kind = is_op(node, aten.select) == is_op(source, aten.select_scatter)
            same_kind = (
                same_kind and value(operand(source, 1)).dtype == value(node).dtype
            )  # or it was converted
            if theirs == ours and same_kind:
                node.replace_all_uses_with(operand(source, 1))
                break
            if theirs is None or theirs[0] != ours[0] or not set(theirs[1]).isdisjoint(ours[1]):
                break
            source = operand(source)
            node.update_arg(0, source)


def _part(node: fx.Node, whole: fx.Node) -> tuple[int, range] | None:
    """(dimension, positions in it) that a node reads or writes of `whole`, if these are numbers."""
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
