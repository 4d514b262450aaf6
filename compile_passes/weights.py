"""Packed weights at run time: made at the first call, shared by all graphs, gone with the Parameter."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..experts import interleave
from ..meta import gradients
from ..meta.formats import FORMATS
from ..meta.layouts import LAYOUTS, packed_spec


@dataclass(frozen=True)
class Piece:
    """A part of parameter `source`, [n, k] or for a bias [n].

    `at` says what each of the parameter's dimensions is: ("at", i), one place; ("n", start, step) or
    ("k", start, step), a slice that becomes that dimension of the piece.
    """

    source: int
    at: tuple[tuple[Any, ...], ...]

    def take(self, weights: tuple[torch.Tensor, ...], sizes: dict[str, int]) -> torch.Tensor:
        w, order = weights[self.source].detach(), []
        for what, *rest in self.at:
            d = len(order)
            if what == "at":
                w = w.select(d, rest[0])
            else:
                start, step = rest
                w = w[(slice(None),) * d + (slice(start, start + step * (sizes[what] - 1) + 1, step),)]
                order.append(what)
        return w.t() if order == ["k", "n"] else w


@dataclass(frozen=True)
class Assembly:
    """A weight [E, parts * n, k] put together from many parameters: for each expert its parts, in order."""

    experts: tuple[tuple[Piece, ...], ...]
    n: int
    k: int
    interleaved: bool = False
    """Rows of the parts alternate, as a fused activation may want gate and up."""

    @property
    def shape(self) -> tuple[int, ...]:
        rows = len(self.experts[0]) * self.n
        return (len(self.experts), rows, self.k) if self.k else (len(self.experts), rows)

    @staticmethod
    def of_one(e: int, n: int, k: int, transposed: bool, parts: int = 1) -> Assembly:
        """One parameter as it is; its rows in `parts` parts, interleaved if there are several."""
        rows = n // parts
        pieces = []
        for i in range(e):
            taken = [(("n", p * rows, 1), ("k", 0, 1)) for p in range(parts)]
            pieces.append(tuple(Piece(0, (("at", i), *(at[::-1] if transposed else at))) for at in taken))
        return Assembly(tuple(pieces), rows, k, parts > 1)

    def build(self, *weights: torch.Tensor) -> torch.Tensor:
        sizes = {"n": self.n, "k": self.k}
        rows = []
        for parts in self.experts:
            taken = [p.take(weights, sizes) for p in parts]
            rows.append(torch.stack(taken, 1).flatten(0, 1) if self.interleaved else torch.cat(taken))
        return torch.stack(rows)

    def whole(self, shapes: list[tuple[int, ...]]) -> bool | None:
        """None unless it is one 3D parameter as it is; then whether that is stored transposed, [E, K, N]."""
        if len(shapes) != 1 or len(shapes[0]) != 3 or not self.k:
            return None
        count, order = len(self.experts[0]), [what for what, *_ in self.experts[0][0].at[1:]]
        transposed = order == ["k", "n"]
        e, n, k = self.shape
        if shapes[0] != ((e, k, n) if transposed else (e, n, k)):
            return None
        for i, parts in enumerate(self.experts):
            for p, part in enumerate(parts):
                rows = ("n", p, count) if self.interleaved else ("n", p * self.n, 1)
                both = (("k", 0, 1), rows) if transposed else (rows, ("k", 0, 1))
                if part.at != (("at", i), *both):
                    return None
        return transposed


@dataclass(frozen=True)
class PackSpec:
    """How a weight is packed.

    `transposed`: stored as [E, K, N]. `assembly`: put together first. `interleave`: rows of all gates,
    then all ups, become gate 0, up 0, gate 1, ...
    """

    format: str
    layout: str
    transposed: bool
    assembly: Assembly | None = None
    interleave: bool = False

    @property
    def tensors(self) -> int:
        return len(packed_spec(FORMATS[self.format], LAYOUTS[self.layout], (1,), 1, 1))

    def shapes(self, stored: tuple[int, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of the packed tensors of a weight stored with this shape."""
        if self.assembly is not None:
            stored = self.assembly.shape
        e, n, k = (stored[0], stored[2], stored[1]) if self.transposed else stored
        return packed_spec(FORMATS[self.format], LAYOUTS[self.layout], (e,), n, k)

    def num_bytes(self, stored: tuple[int, ...]) -> int:
        return sum(torch.Size(s).numel() * d.itemsize for s, d in self.shapes(stored))

    def pack(self, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Quantise and reorder; the result is no inference tensor whatever mode the caller is in."""
        with torch.inference_mode(False), torch.no_grad():
            w = self.assembly.build(*weights) if self.assembly is not None else weights[0].detach()
            if self.transposed:
                w = w.transpose(1, 2)
            if self.interleave:
                w = interleave(w)
            packed, scale, global_scale = torch.ops.fp4.quantize(w, self.format)
            if self.layout != "plain":
                packed, scale, global_scale = torch.ops.fp4.prepack(
                    packed, scale, global_scale, self.format, self.layout
                )
        return (packed, scale, global_scale)[: self.tensors]


@dataclass(frozen=True)
class JoinSpec:
    """Biases of many parameters as one tensor [E, N], not packed."""

    assembly: Assembly
    dtype: torch.dtype
    layout = "bias"
    transposed = False
    tensors = 1

    def shapes(self, stored: tuple[int, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [(self.assembly.shape, self.dtype)]

    def pack(self, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.inference_mode(False), torch.no_grad():
            return (self.assembly.build(*weights),)


class _Entry:
    __slots__ = ("packed", "refs", "states")

    def __init__(
        self, refs: list[Any], states: list[tuple[Any, ...]], packed: tuple[torch.Tensor, ...]
    ) -> None:
        self.refs, self.states, self.packed = refs, states, packed


def _state(weight: torch.Tensor) -> tuple[Any, ...]:
    version = -1 if weight.is_inference() else weight._version
    if is_traceable_wrapper_subclass(weight):
        # A write to the whole counts as one to it, not to what it holds.
        return (version, *(_state(getattr(weight, name)) for name in weight.__tensor_flatten__()[0]))
    return (weight.data_ptr(), version)


class PackedWeights:
    """Parameters -> packed tensors under one spec.

    An entry holds while the Parameters are the same objects, unwritten (`_version`; inference tensors have
    none) and in the same memory (`p.data = ...` does not count as a write). `p.data.mul_(2)` is not seen.
    """

    def __init__(self, spec: PackSpec | JoinSpec) -> None:
        self._spec = spec
        self._entries: dict[tuple[int, ...], _Entry] = {}
        self._lock = threading.Lock()

    def get(self, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        entry = self._entries.get(tuple(map(id, weights)))
        if entry is not None and all(
            ref() is weight and state == _state(weight)
            for ref, state, weight in zip(entry.refs, entry.states, weights)
        ):
            return entry.packed
        return self._pack(weights)

    def _pack(self, weights: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        with self._lock:
            states = [_state(w) for w in weights]
            key = tuple(map(id, weights))
            refs = [weakref.ref(w, lambda dead: self._forget(key, dead)) for w in weights]
            entry = _Entry(refs, states, self._spec.pack(*weights))
            self._entries[key] = entry
            return entry.packed

    def _forget(self, key: tuple[int, ...], dead: Any) -> None:
        entry = self._entries.get(key)
        if entry is not None and any(ref is dead for ref in entry.refs):
            del self._entries[key]

    def __len__(self) -> int:
        return len(self._entries)


_stores: dict[PackSpec | JoinSpec, PackedWeights] = {}


def store(spec: PackSpec | JoinSpec) -> PackedWeights:
    """The one cache for this spec: prefill, decode and regional graphs share their packed weights."""
    return _stores.setdefault(spec, PackedWeights(spec))


@dataclass(frozen=True)
class Swap:
    """Graph inputs `indices` make up a weight; its packed tensors follow the other inputs, in order."""

    indices: tuple[int, ...]
    spec: PackSpec | JoinSpec


def runtime(compiled: Callable[..., Any], keep: list[int], swaps: list[Swap]) -> Callable[..., Any]:
    """The callable Dynamo gets: packed tensors are looked up, unused originals dropped.

    Dynamo guards that no gradient can be asked for here, so autograd is skipped as a whole: the kernel that
    refuses gradients is Python and costs each operator call 8 us.
    """
    kept, packed = _getter(keep), _Lookup(swaps).get
    below_autograd = torch._C._AutoDispatchBelowAutograd

    def run(*args: Any) -> Any:
        # Dual tensors are not guarded against, and their tangents would be lost below autograd.
        if gradients.has_tangent(args):
            gradients.refuse_tangent('a model compiled with backend="fp4"', "call the model uncompiled")
        inputs = kept(args) + packed(args)
        with below_autograd():
            return compiled(*inputs)

    return run


def _getter(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda args: tuple(args[i] for i in indices)


class _Lookup:
    """The packed tensors of all swaps, in order, for a graph's arguments.

    Weights that were met before, in the memory and with the version they had then, are told all at once:
    asking each store takes microseconds a weight, before every step. Nothing is kept longer than they live.
    """

    def __init__(self, swaps: list[Swap]) -> None:
        self._stores = [(_getter(s.indices), store(s.spec)) for s in swaps]
        self._weights = _getter(sorted({i for s in swaps for i in s.indices}))
        self._met: dict[tuple[int, ...], tuple[Any, tuple[torch.Tensor, ...], list[Any]]] = {}

    def get(self, args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        weights = self._weights(args)
        key, state = tuple(map(id, weights)), _states(weights)
        met = self._met.get(key)
        if met is not None and met[0] == state:
            return met[1]
        self._met.pop(key, None)  # what is packed anew takes the place of the old
        packed = tuple(t for chosen, kept in self._stores for t in kept.get(*chosen(args)))
        if state is not None:
            self._met[key] = (state, packed, [weakref.ref(w, self._forget(key)) for w in weights])
        return packed

    def _forget(self, key: tuple[int, ...]) -> Callable[[Any], None]:
        lookup = weakref.ref(self)

        def forget(dead: Any) -> None:
            me = lookup()
            if me is not None:
                me._met.pop(key, None)

        return forget


def _states(weights: tuple[torch.Tensor, ...]) -> Any:
    """None for subclasses, and for inference tensors, which have no version."""
    if not _PLAIN.issuperset(map(type, weights)):
        return None
    try:
        return [w._version for w in weights], list(map(_data_ptr, weights))
    except RuntimeError:
        return None


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_data_ptr = torch.Tensor.data_ptr
