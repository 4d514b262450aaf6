"""Keeps what kernels read beside a weight and is made from its memory, such as its scales in another order.

It is made once, and freed together with the weight. A recorded CUDA graph reads it. So after a write to the
weight it is made again in the same memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..meta.torch_internals import is_traceable_wrapper_subclass
from . import first_use

Make = Callable[[Tensor], Tensor]
"""Function that makes [n, ...] from [n, ...], each of the n alone."""


class _Kept(NamedTuple):
    storage: weakref.ref[Any]
    version: int
    made: Tensor


_kept: dict[tuple[Any, ...], _Kept] = {}
"""Maps device, address, shape and dtype of a tensor, and what makes another of it, to that other tensor."""


def derived(source: Tensor, version: int | None, make: Make) -> Tensor:
    """Returns `make(source)` for a contiguous tensor, from the last call if nothing was written since.

    `version` is torch's count of writes to the tensor that the caller gave. (Views that an operator makes may
    have a count of their own.) Nothing is kept if it is None, as an inference tensor has none, nor while a
    graph is captured, because the kernels do not run then.
    """
    storage = source.untyped_storage()
    key = source.device, source.data_ptr(), source.shape, source.dtype, make
    kept = _kept.get(key)
    if kept is not None and kept.storage() is not storage:
        kept = None
    if kept is not None and kept.version == version:
        return kept.made
    with torch.inference_mode(False), torch.no_grad():
        made = make(source)
        if version is None or first_use.capturing():
            return made
        if kept is not None:
            made = kept.made.copy_(made)
        _kept[key] = _Kept(weakref.ref(storage, lambda dead: _forget(key, dead)), version, made)
    return made


def written(memory: Tensor) -> None:
    """Makes again what was made from memory that has been written to. Only CUDA graphs need this, which ask
    for no version."""
    if not _kept or memory.numel() == 0 or is_traceable_wrapper_subclass(memory):
        return
    storage, begin = memory.untyped_storage(), memory.data_ptr()
    last_element = sum((n - 1) * stride for n, stride in zip(memory.shape, memory.stride(), strict=True))
    end = begin + (last_element + 1) * memory.element_size()
    for (device, address, shape, dtype, make), kept in list(_kept.items()):
        if kept.storage() is not storage or not shape.numel():
            continue
        size = shape[1:].numel() * dtype.itemsize
        first, last = max(0, (begin - address) // size), min(shape[0], -(-(end - address) // size))
        if first < last:
            place = (address - storage.data_ptr()) // dtype.itemsize
            stride = torch.empty(shape, device="meta").stride()
            with torch.inference_mode(False), torch.no_grad():
                source = torch.empty(0, dtype=dtype, device=device).set_(storage, place, shape, stride)
                kept.made[first:last].copy_(make(source[first:last]))


def _forget(key: tuple[Any, ...], dead: Any) -> None:
    if key in _kept and _kept[key].storage is dead:
        del _kept[key]
