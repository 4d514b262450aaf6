"""Finds which keys a query sees, from the integer arithmetic on positions that computes an attention mask.

An element of a mask is read as a function of its own indices, so results hold for all sizes. In transformers'
masks `kv <= q` is gathered from position tensors, and combined with a test whether query and key belong to
one packed sequence. That test reads the positions; they rise in steps of one, so it is always true.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..graph.nodes import arguments, aten, is_tensor, shape, static_int, value


class _Unknown(Exception):
    pass


@dataclass(frozen=True)
class Place:
    """An element is `plus` plus its index along `dim` (from the end: -1 is the last), or only `plus` if `dim`
    is None.

    Booleans are 0 and 1.
    """

    dim: int | None
    plus: int


@dataclass(frozen=True)
class NotBefore:
    """An element is whether its index along `late` is at least its index along `early`, plus `by`."""

    late: int
    early: int
    by: int = 0


Element = Place | NotBefore
FALSE, TRUE = Place(None, 0), Place(None, 1)
CAUSAL = NotBefore(late=-2, early=-1)
"""A query sees the keys up to its own index, as torch's `is_causal` means it for any two lengths."""


class Masks:
    """Reads the masks of one graph, whose layers share most of what masks are made of."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, Element | None] = {}

    def read(self, node: fx.Node) -> Element | None:
        """Return what an element of `node` is, or None if that is not known."""
        if node not in self._known:
            try:
                self._known[node] = self._settled(node, self._read(node))
            except _Unknown:
                self._known[node] = None
        return self._known[node]

    def _read(self, node: fx.Node) -> Element:
        rule = _RULES.get(getattr(node.target, "overloadpacket", None))
        if rule is None or not is_tensor(node) or value(node).dtype not in _INTEGERS:
            raise _Unknown
        return rule(self, node, arguments(node))

    @staticmethod
    def _settled(node: fx.Node, found: Element) -> Element:
        """The only index along a dimension of one element is 0, wherever that is broadcast to."""
        if isinstance(found, NotBefore):
            if any(static_int(shape(node)[d]) == 1 for d in (found.late, found.early)):
                raise _Unknown
            return found
        if found.dim is not None and static_int(shape(node)[found.dim]) == 1:
            found = Place(None, found.plus)
        if _is_bool(node) and found not in (FALSE, TRUE):
            raise _Unknown
        return found

    def _element(self, x: Any) -> Element:
        """Read the element of a tensor of the graph, or a Python number."""
        if isinstance(x, (bool, int)):
            return Place(None, int(x))
        found = self.read(x) if is_tensor(x) else None
        if found is None:
            raise _Unknown
        return found

    def _place(self, x: Any) -> Place:
        found = self._element(x)
        if not isinstance(found, Place):
            raise _Unknown
        return found

    # --- sources ---

    def _arange(self, node: fx.Node, a: dict[str, Any]) -> Element:
        start = static_int(a.get("start", 0))
        if start is None or a.get("step", 1) != 1:
            raise _Unknown
        return Place(-1, start)

    # --- shapes ---

    def _unsqueeze(self, node: fx.Node, a: dict[str, Any]) -> Element:
        rank = len(shape(node))
        new = a["dim"] % rank - rank
        return _moved(self._element(a["self"]), lambda d: d if d > new else d - 1)

    def _slice(self, node: fx.Node, a: dict[str, Any]) -> Element:
        start = static_int(a["start"] or 0)
        if start is None or start < 0 or a["step"] != 1:
            raise _Unknown
        return _shifted(self._element(a["self"]), _from_end(a["dim"], node), start)

    def _cat(self, node: fx.Node, a: dict[str, Any]) -> Element:
        """Parts that are all what the last one is, continued to where they are."""
        dim, parts = _from_end(a["dim"], node), a["tensors"]
        if any(len(shape(part)) != len(shape(node)) for part in parts):
            raise _Unknown
        sizes = [static_int(shape(part)[dim]) for part in parts[:-1]]
        starts = [0]
        for size in sizes:
            if size is None:
                raise _Unknown
            starts.append(starts[-1] + size)
        whole = _shifted(self._element(parts[-1]), dim, -starts[-1])
        for part, size, start in zip(parts, sizes, starts):
            there = _shifted(whole, dim, start)
            if size == 1 and isinstance(there, Place) and there.dim == dim:
                there = Place(None, there.plus)
            if size != 0 and self._element(part) != there:
                raise _Unknown
        return whole

    def _index(self, node: fx.Node, a: dict[str, Any]) -> Element:
        """x[i, j, ...], an index tensor for each dimension, none of which counts from the end."""
        found, indices = self._place(a["self"]), a["indices"]
        if len(indices) != len(shape(a["self"])) or any(i is None for i in indices):
            raise _Unknown
        places = [self._place(i) for i in indices]
        if any(map(_is_bool, indices)) or any(p.plus < 0 for p in places):
            raise _Unknown
        if found.dim is None:
            return found
        return replace(places[found.dim], plus=places[found.dim].plus + found.plus)

    # --- arithmetic ---

    def _add(self, node: fx.Node, a: dict[str, Any]) -> Element:
        x, y = self._place(a["self"]), self._place(a["other"])
        if a["alpha"] != 1 or (x.dim is not None and y.dim is not None):
            raise _Unknown
        return Place(y.dim if x.dim is None else x.dim, x.plus + y.plus)

    def _sub(self, node: fx.Node, a: dict[str, Any]) -> Element:
        x, y = self._place(a["self"]), self._place(a["other"])
        if a["alpha"] != 1 or y.dim not in (None, x.dim):
            raise _Unknown
        return Place(x.dim if y.dim is None else None, x.plus - y.plus)

    def _compare(self, node: fx.Node, a: dict[str, Any]) -> Element:
        x, y = self._place(a["self"]), self._place(a["other"])
        name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
        if x.dim == y.dim:
            return Place(None, int(getattr(operator, name)(x.plus, y.plus)))
        if name in ("le", "lt"):
            x, y = y, x
        if x.dim is None or y.dim is None or name in ("eq", "ne"):
            raise _Unknown
        return NotBefore(x.dim, y.dim, y.plus - x.plus + (name in ("lt", "gt")))

    def _and(self, node: fx.Node, a: dict[str, Any]) -> Element:
        if not _is_bool(node):
            raise _Unknown
        x, y = self._element(a["self"]), self._element(a["other"])
        if y in (TRUE, x):
            return x
        if x == TRUE:
            return y
        raise _Unknown

    def _cumsum(self, node: fx.Node, a: dict[str, Any]) -> Element:
        if self._element(a["self"]) != FALSE:
            raise _Unknown
        return FALSE


_INTEGERS = (torch.bool, torch.int32, torch.int64)

_RULES: dict[Any, Callable[[Masks, fx.Node, dict[str, Any]], Element]] = {
    aten.arange: Masks._arange,
    **dict.fromkeys((aten.ones, aten.ones_like, aten.new_ones), lambda m, node, a: TRUE),
    **dict.fromkeys((aten.zeros, aten.zeros_like, aten.new_zeros), lambda m, node, a: FALSE),
    **dict.fromkeys((aten.full, aten.full_like, aten.new_full), lambda m, node, a: m._place(a["fill_value"])),
    **dict.fromkeys(
        (aten.alias, aten.clone, aten.detach, aten.expand, aten._to_copy),
        lambda m, node, a: m._element(a["self"]),
    ),
    aten.unsqueeze: Masks._unsqueeze,
    aten.slice: Masks._slice,
    aten.cat: Masks._cat,
    aten.index: Masks._index,
    aten.add: Masks._add,
    aten.sub: Masks._sub,
    **dict.fromkeys((aten.eq, aten.ne, aten.le, aten.lt, aten.ge, aten.gt), Masks._compare),
    **dict.fromkeys((aten.bitwise_and, aten.logical_and), Masks._and),
    aten.cumsum: Masks._cumsum,
}


def _is_bool(node: fx.Node) -> bool:
    return value(node).dtype == torch.bool


def _from_end(dim: int, node: fx.Node) -> int:
    rank = len(shape(node))
    if not rank:
        raise _Unknown
    return dim % rank - rank


def _moved(found: Element, to: Callable[[int], int]) -> Element:
    if isinstance(found, NotBefore):
        return replace(found, late=to(found.late), early=to(found.early))
    return found if found.dim is None else replace(found, dim=to(found.dim))


def _shifted(found: Element, dim: int, by: int) -> Element:
    """Return the element that lies `by` further along `dim`."""
    if isinstance(found, Place):
        return replace(found, plus=found.plus + by) if found.dim == dim else found
    return replace(found, by=found.by + by * ((found.early == dim) - (found.late == dim)))
