"""Looks at the memory of weights: where it is, and what shows that it was written to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...meta.torch_internals import is_traceable_wrapper_subclass
from ...tensor import FP4Tensor


def layout_of(t: torch.Tensor) -> tuple[Any, ...]:
    return (t.shape, t.dtype, t.device, t.stride())


def memory_of(t: torch.Tensor) -> int:
    try:
        return t.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors, or tensors on no device
        return 0


NO_MEMORY = (
    "has no memory: its storage was freed, or made smaller than the weight is. Fill it again before the "
    "call. To run without the original weights, use fp4_ops.prepare(model), which frees them"
)


def has_memory(t: torch.Tensor) -> bool:
    """Return whether all elements lie within the storage. `untyped_storage().resize_(0)` frees memory that
    is still read."""
    if t.numel() == 0 or t.layout is not torch.strided or t.device.type == "meta":
        return True
    last = t.storage_offset() + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
    return (last + 1) * t.element_size() <= t.untyped_storage().nbytes()


def leaves_of(weights: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return plain tensors: the weights themselves, or the tensors that a tensor subclass holds."""
    found: list[torch.Tensor] = []
    for w in weights:
        if type(w) is FP4Tensor:  # a shortcut: the general way takes 2 us a weight in each call
            found += w.inner_tensors()
        elif is_traceable_wrapper_subclass(w):
            found += leaves_of(getattr(w, name) for name in w.__tensor_flatten__()[0])
        else:
            found.append(w)
    return tuple(found)


def shapes_of(weights: Iterable[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [(w.shape, w.stride()) for w in weights]


def watch(weights: Iterable[torch.Tensor], gone: Callable[[Any], None], owned: bool) -> list[Any]:
    """Create weak references that call `gone` when the weights are freed.

    They refer to the weights' memory, not to the tensors: `load_state_dict` and `Module.to` may use
    `torch.utils.swap_tensors`, which refuses a tensor with weak references. But memory that our packed
    tensors share is never freed. So without `owned` (`packed.Entry.owned`) they refer to the tensors.
    """
    kept = [leaf.untyped_storage() for leaf in leaves_of(weights)] if owned else weights
    return [weakref.ref(x, gone) for x in kept]


def states_of(leaves: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Versions and addresses. Inference tensors have no version."""
    try:
        versions = [w._version for w in leaves]
    except RuntimeError:
        versions = [-1 if w.is_inference() else w._version for w in leaves]
    return versions, list(map(_data_ptr, leaves))


_data_ptr = torch.Tensor.data_ptr
