"""Rewrites attention for torch's fastest kernels: heads that share keys and values, and causal masks.

Models repeat keys and values for all query heads of a group, and pass a causal mask as a tensor. A fused
kernel that knows about both reads a group's keys once and skips keys that no query sees. On an H200 (64
sequences with 4096 keys, 32 query heads, 4 key/value heads), attention in a decoding step takes 5.2 ms if
keys and values are repeated, and 0.13 ms with groups.

Which keys a query sees is read from the integer arithmetic on positions that computes an attention mask. An
element of a mask is read as a function of its own indices, so results hold for all sizes. In transformers'
masks `kv <= q` is gathered from position tensors, and combined with a test whether query and key belong to
one packed sequence. That test reads the positions; they rise in steps of one, so it is always true.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...meta.torch_internals import FakeTensorMode, TorchDispatchMode
from ..graph.nodes import (
    arguments,
    aten,
    integer,
    is_op,
    is_tensor,
    operand,
    same_shape,
    shape,
    static_int,
    strip,
    value,
)

SDPA = aten.scaled_dot_product_attention.default


def write_attention(graph: fx.Graph, fake_mode: FakeTensorMode) -> list[str]:
    """Rewrites calls of torch's attention that qualify, and describes what was done.

    A call changes only if torch has one kernel for the new one, for these shapes on this device.
    """
    done: Counter[str] = Counter()
    masks, kernels = Masks(), _Kernels(fake_mode)
    for node in graph.find_nodes(op="call_function", target=SDPA):
        a = arguments(node)
        swapped = _swapped(value(node))
        if a["dropout_p"] != 0 or isinstance(a["is_causal"], fx.Node) or swapped is None:
            continue
        groups = _groups(a)
        seen = masks.read(a["attn_mask"]) if is_tensor(a["attn_mask"]) else None
        causal = {"attn_mask": None, "is_causal": seen == CAUSAL} if seen in (CAUSAL, TRUE) else {}
        for g, c in ((groups, causal), (groups, {}), (None, causal)):
            new = {**a, **c, "enable_gqa": a["enable_gqa"] or g is not None}
            if (g or c) and kernels.one_for(new, g):
                _write(graph, node, new, g, swapped)
                done.update([what for what, yes in ((_HEADS, g), (_MASK, c)) if yes])
                break
    return [f"attention ({n}x): {what}" for what, n in done.items()]


_HEADS = "keys and values, which the model repeats, are read once for each group of heads (enable_gqa)"
_MASK = "the mask, which the graph makes of positions alone, is the causal one or hides nothing (is_causal)"


@dataclass(frozen=True)
class _Group:
    """Keys or values before they were repeated: [B, heads, 1, L, D], or [B, L, heads, 1, D] if `swapped`."""

    node: fx.Node
    swapped: bool

    @property
    def repeated_dim(self) -> int:
        return 3 if self.swapped else 2

    def of(self, x: Any, squeeze: Any, transpose: Any) -> Any:
        """Return [B, heads, L, D]."""
        x = squeeze(x, self.repeated_dim)
        return transpose(x, 1, 2) if self.swapped else x


def _groups(a: dict[str, Any]) -> tuple[_Group, _Group] | None:
    """Return keys and values, if both are repeated in the same way."""
    if a["enable_gqa"]:
        return None
    key, value = _group(a["key"]), _group(a["value"])
    if key is None or value is None:
        return None
    heads = [shape(g.node)[g.repeated_dim - 1] for g in (key, value)]
    return (key, value) if statically_known_true(heads[0] == heads[1]) else None


def _group(x: fx.Node) -> _Group | None:
    """Read heads that are each repeated n times, side by side: [B, H, 1, L, D] expanded to [B, H, n, L,
    D], as [B, H n, L, D]."""
    swapped = is_op(x, aten.transpose) and {integer(x, i) % 4 for i in (1, 2)} == {1, 2}
    flat = operand(x) if swapped else x
    expanded = strip(flat)
    if not is_op(expanded, aten.expand) or len(shape(expanded)) != 5:
        return None
    group = _Group(operand(expanded), swapped)
    d, old, new = group.repeated_dim, shape(group.node), shape(expanded)
    copies = static_int(new[d])
    joined = (*new[: d - 1], new[d - 1] * new[d], *new[d + 1 :])
    if copies is None or len(old) != 5 or static_int(old[d]) != 1 or not same_shape(joined, shape(flat)):
        return None
    return group if same_shape((*old[:d], copies, *old[d + 1 :]), new) else None


class _Kernels:
    """Checks whether torch has a fused kernel for a call. Otherwise it runs products and softmax one by
    one."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self._mode = fake_mode
        self._known: dict[str, bool] = {}

    def one_for(self, a: dict[str, Any], groups: tuple[_Group, _Group] | None) -> bool:
        tensors = {n: value(x) for n, x in a.items() if is_tensor(x)}
        if groups:
            for name, group in zip(("key", "value"), groups):
                tensors[name] = group.of(self._like(value(group.node)), torch.squeeze, torch.transpose)
        what = [(n, x.dtype, x.device, tuple(x.shape), x.stride()) for n, x in tensors.items()]
        key = str((what, a["is_causal"], a["enable_gqa"]))
        if key not in self._known:
            fakes = {n: self._like(x) for n, x in tensors.items()}
            self._known[key] = self._try({**a, **fakes, "scale": None})  # the choice ignores the scale
        return self._known[key]

    def _like(self, x: torch.Tensor) -> torch.Tensor:
        with self._mode:
            return torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device=x.device)

    def _try(self, a: dict[str, Any]) -> bool:
        env = self._mode.shape_env
        asked = env.suppress_guards() if env is not None else contextlib.nullcontext()
        try:
            with torch.no_grad(), self._mode, asked, _Operators() as operators:
                SDPA(**a)
        except RuntimeError:
            return False
        return any(n.startswith("_scaled_dot_product_") and "math" not in n for n in operators.names)


class _Operators(TorchDispatchMode):
    """Records the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def _swapped(out: torch.Tensor) -> bool | None:
    """Return whether a result [B, H, S, D] is stored as [B, S, H, D], which views rely on. None if it is
    neither."""
    if out.dim() != 4:
        return None
    _, h, s, d = out.shape
    for swapped, strides in ((False, (h * s * d, s * d, d, 1)), (True, (h * s * d, d, h * d, 1))):
        steps = zip(out.shape, out.stride(), strides)
        if all(statically_known_true(n == 1) or statically_known_true(x == y) for n, x, y in steps):
            return swapped
    return None


def _write(
    graph: fx.Graph,
    node: fx.Node,
    a: dict[str, Any],
    groups: tuple[_Group, _Group] | None,
    swapped: bool,
) -> None:
    with graph.inserting_before(node):

        def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            return graph.call_function(target, args, kwargs)

        def squeeze(x: fx.Node, d: int) -> fx.Node:
            return call(aten.squeeze.dim, x, d)

        def transpose(x: fx.Node, d: int, e: int) -> fx.Node:
            return call(aten.transpose.int, x, d, e)

        key, value = [g.of(g.node, squeeze, transpose) for g in groups] if groups else (a["key"], a["value"])
        out = call(
            SDPA, a["query"], key, value, a["attn_mask"], 0.0, a["is_causal"], scale=a["scale"],
            enable_gqa=a["enable_gqa"],
        )  # fmt: skip
        # Another kernel may return other strides.
        if swapped:
            out = transpose(call(aten.contiguous.default, transpose(out, 1, 2)), 1, 2)
        else:
            out = call(aten.contiguous.default, out)
    out.meta.update(node.meta)
    node.replace_all_uses_with(out)
    graph.erase_node(node)


# --- masks ---


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
    """An element is True if its index along `late` is at least its index along `early` plus `by`."""

    late: int
    early: int
    by: int = 0


Element = Place | NotBefore
FALSE, TRUE = Place(None, 0), Place(None, 1)
CAUSAL = NotBefore(late=-2, early=-1)
"""A query sees the keys up to its own index. For any two lengths, this is what torch's `is_causal` means."""


class Masks:
    """Reads the masks of one graph. Layers share most of the nodes that masks are computed from."""

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
        """Replace an index along a dimension of size 1 by 0, which stays right when the dimension is
        broadcast."""
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
        """Read a concatenation, if each part has the elements that the formula of the last part gives at the
        part's position."""
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
        """Read x[i, j, ...] with an index tensor for each dimension, if no index is negative."""
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
    """Return the element at the index that is larger by `by` along `dim`."""
    if isinstance(found, Place):
        return replace(found, plus=found.plus + by) if found.dim == dim else found
    return replace(found, by=found.by + by * ((found.early == dim) - (found.late == dim)))
