"""Decides whether a graph may run twice in one call, and what must be undone before the second run.

On a GPU, the host may learn only while the graph runs that weights have changed (weights/runtime.py). The
weights are then packed again, and the graph runs again. The second run is correct if the first left nothing
behind, or only values that the second overwrites or that can be undone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .nodes import ASSERTIONS, arguments, aten, behind, is_op, is_pure, item, value

# These operators overwrite some places. The arguments listed say which places.
_PLACES = {
    aten.index_copy: ("dim", "index"),
    aten.index_put: ("indices",),
    aten.slice_scatter: ("dim", "start", "end", "step"),
    aten.select_scatter: ("dim", "index"),
    aten.scatter: ("dim", "index"),
}
_UPDATES = (torch.ops.fp4.update_cache.default, torch.ops.fp4.cached_attention.default)
Undo = tuple[tuple[int, int], ...]
"""(input, number) pairs: the graph adds the number to that input in place. The addition is undone before a
second run."""

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def undo_of(graph: fx.Graph, packed: int) -> Undo | None:
    """Return the steps that undo a run, so that a second run gives the result of a first one. None if the
    graph may not run twice.

    The last `packed` inputs are the packed weights. The graph must draw no random numbers. It must not
    communicate with other processes, because they may have no reason for a second run. Writes to inputs are
    allowed in two cases:

        - nothing else reads the input, and the places do not depend on the packed weights: a cache of keys,
          at this token's position;
        - a constant is added to an input of integers: a counter of tokens.
    """
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    weights = set(inputs[len(inputs) - packed :])
    undo = []
    for n in graph.nodes:
        if is_op(n, aten.copy_):
            target, new = n.args[:2]
            if not (isinstance(target, fx.Node) and target.op == "placeholder" and isinstance(new, fx.Node)):
                return None
            added = added_number(target, new)
            if added is not None:
                undo.append((inputs.index(target), added))
            elif not _overwrites(n, target, new, weights):
                return None
        elif n.target in _UPDATES:
            if not _updates_unread(n, weights):
                return None
        elif not _leaves_nothing_behind(n):
            return None
    return tuple(undo)


def _leaves_nothing_behind(n: fx.Node) -> bool:
    if n.op in ("placeholder", "output", "get_attr") or is_op(n, aten.empty, aten.empty_like):
        return True
    return is_op(n, *ASSERTIONS) or is_pure(n)


def added_number(target: fx.Node, new: fx.Node) -> int | None:
    """Return the number that `target.copy_(target + number)` adds to an input of integers."""
    self, number = _sum(new)
    if self is not target:
        return None
    was, now = value(target), value(new)
    alike = was.dtype in _INTEGERS and now.dtype == was.dtype and now.shape == was.shape
    written_once = sum(is_op(u, aten.copy_) for u in target.users) == 1
    return number if type(number) is int and alike and written_once else None


def _sum(node: fx.Node) -> tuple[Any, Any]:
    """Return the operands of a sum of a tensor and a number. The operator may compute several such sums."""
    if node.target is aten.add.Tensor and not node.kwargs:
        return node.args[0], node.args[1]
    found = item(node)
    if found is not None and found[0].target is aten._foreach_add.Scalar:
        a = arguments(found[0])
        return a["self"][found[1]], a["scalar"]
    return None, None


def _overwrites(write: fx.Node, target: fx.Node, new: fx.Node, weights: set[fx.Node]) -> bool:
    """Return whether a second run overwrites everything that the first has written, and nothing reads it
    before."""
    readers = {u for u in target.users if u.op != "output"} - {write}
    if not readers:
        return new is not target and value(new).shape == value(target).shape  # all is overwritten
    if readers != {new} or not is_op(new, *_PLACES):
        return False
    given = arguments(new)
    if given.pop("self") is not target or target in _nodes(given):
        return False
    if given.get("accumulate") or "reduce" in given:
        return False
    names = next(names for write, names in _PLACES.items() if is_op(new, write))
    return weights.isdisjoint(behind(*_nodes([given[name] for name in names])))


def _updates_unread(update: fx.Node, weights: set[fx.Node]) -> bool:
    """Return whether a second run overwrites what this operator has written, and nothing reads it before."""
    a = arguments(update)
    caches = {a["keys"], a["values"]}
    if any(cache.op != "placeholder" for cache in caches) or not weights.isdisjoint(behind(a["start"])):
        return False
    later = set()
    node = update
    while node.op != "output":
        node = node.next
        later.add(node)
    return all(user in later for cache in caches for user in cache.users if user is not update)


def _nodes(args: Any) -> set[fx.Node]:
    found: set[fx.Node] = set()
    fx.map_arg(args, found.add)
    return found
