"""Packed weights at run time: made at the first call, shared by all graphs, gone with the Parameter."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..meta.formats import FORMATS
from ..meta.layouts import LAYOUTS, packed_spec


@dataclass(frozen=True)
class PackSpec:
    """How one weight is packed. `transposed`: stored as [E, K, N]."""

    format: str
    layout: str
    transposed: bool

    @property
    def tensors(self) -> int:
        return len(packed_spec(FORMATS[self.format], LAYOUTS[self.layout], (1,), 1, 1))

    def shapes(self, stored: tuple[int, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of the packed tensors of a weight stored with this shape."""
        e, n, k = (stored[0], stored[2], stored[1]) if self.transposed else stored
        return packed_spec(FORMATS[self.format], LAYOUTS[self.layout], (e,), n, k)

    def num_bytes(self, stored: tuple[int, ...]) -> int:
        return sum(torch.Size(s).numel() * d.itemsize for s, d in self.shapes(stored))

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Quantise and reorder; the result is no inference tensor whatever mode the caller is in."""
        with torch.inference_mode(False), torch.no_grad():
            w = weight.detach()
            if self.transposed:
                w = w.transpose(1, 2)
            packed, scale, global_scale = torch.ops.fp4.quantize(w, self.format)
            if self.layout != "plain":
                packed, scale, global_scale = torch.ops.fp4.prepack(
                    packed, scale, global_scale, self.format, self.layout
                )
        return (packed, scale, global_scale)[: self.tensors]


class _Entry:
    __slots__ = ("data_ptr", "packed", "ref", "version")

    def __init__(self, ref: Any, version: int, data_ptr: int, packed: tuple[torch.Tensor, ...]) -> None:
        self.ref, self.version, self.data_ptr, self.packed = ref, version, data_ptr, packed


class PackedWeights:
    """Parameter -> packed tensors under one PackSpec.

    An entry holds while the Parameter is the same object, unwritten (`_version`; inference tensors have none)
    and in the same memory (`p.data = ...` does not count as a write). `p.data.mul_(2)` is seen by neither.
    """

    def __init__(self, spec: PackSpec) -> None:
        self._spec = spec
        self._entries: dict[int, _Entry] = {}
        self._lock = threading.Lock()

    def get(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        entry = self._entries.get(id(weight))
        if (
            entry is not None
            and entry.ref() is weight
            and entry.data_ptr == weight.data_ptr()
            and entry.version == (-1 if weight.is_inference() else weight._version)
        ):
            return entry.packed
        return self._pack(weight)

    def _pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with self._lock:
            version = -1 if weight.is_inference() else weight._version
            key = id(weight)
            ref = weakref.ref(weight, lambda dead: self._forget(key, dead))
            entry = _Entry(ref, version, weight.data_ptr(), self._spec.pack(weight))
            self._entries[key] = entry
            return entry.packed

    def _forget(self, key: int, dead: Any) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry.ref is dead:
            del self._entries[key]

    def __len__(self) -> int:
        return len(self._entries)


_stores: dict[PackSpec, PackedWeights] = {}


def store(spec: PackSpec) -> PackedWeights:
    """The one cache for this spec: prefill, decode and regional graphs share their packed weights."""
    return _stores.setdefault(spec, PackedWeights(spec))


@dataclass(frozen=True)
class Swap:
    """Graph input `index` is a weight; its packed tensors follow the other inputs, in order."""

    index: int
    spec: PackSpec


def runtime(compiled: Callable[..., Any], keep: list[int], swaps: list[Swap]) -> Callable[..., Any]:
    """The callable Dynamo gets: packed tensors are looked up, unused originals dropped.

    Dynamo guards that no gradient can be asked for here, so autograd is skipped as a whole: the kernel that
    refuses gradients is Python and costs each operator call 8 us.
    """
    lookups = [(s.index, store(s.spec).get) for s in swaps]
    below_autograd = torch._C._AutoDispatchBelowAutograd

    def run(*args: Any) -> Any:
        inputs = [args[i] for i in keep]
        for index, get in lookups:
            inputs += get(args[index])
        with below_autograd():
            return compiled(*inputs)

    return run
