"""Where weights lie in memory, and what shows that they were written to there."""

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
    except (RuntimeError, NotImplementedError):  # sparse, or on no device
        return 0


NO_MEMORY = (
    "has no memory: its storage was freed, or made smaller than the weight is. Fill it again before the "
    "call. To run without the original weights, use fp4_ops.prepare(model), which frees them"
)


def has_memory(t: torch.Tensor) -> bool:
    """Whether all its elements lie within its storage: `untyped_storage().resize_(0)` frees what is read."""
    if t.numel() == 0 or t.layout is not torch.strided or t.device.type == "meta":
        return True
    last = t.storage_offset() + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
    return (last + 1) * t.element_size() <= t.untyped_storage().nbytes()


def leaves_of(weights: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The plain tensors that weights are, or, of tensor subclasses, hold."""
    found: list[torch.Tensor] = []
    for w in weights:
        if type(w) is FP4Tensor:  # the way below takes 2 us a weight, in each call of a graph
            found += w.inner_tensors()
        elif is_traceable_wrapper_subclass(w):
            found += leaves_of(getattr(w, name) for name in w.__tensor_flatten__()[0])
        else:
            found.append(w)
    return tuple(found)


def shapes_of(weights: Iterable[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [(w.shape, w.stride()) for w in weights]


def watch(weights: Iterable[torch.Tensor], gone: Callable[[Any], None], owned: bool) -> list[Any]:
    """Weak references that call `gone` when the weights are gone.

    They go to the weights' memory, not to the tensors: `torch.utils.swap_tensors`, by which `load_state_dict`
    and `Module.to` may replace what a parameter holds, refuses a tensor that anything refers to weakly. But
    memory that is kept here never goes. So without `owned` (`packed.Entry.owned`, of what is kept) they go to
    the tensors.
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
