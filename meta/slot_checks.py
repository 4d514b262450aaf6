"""Checks the arguments of `moe_slots`, and defines how the memory of the slots is divided.
csrc/cuda/slots.cpp has the same."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .check_parts import check, check_device, check_dtype
from .operand_checks import Experts

COUNTERS = 3
"""The number of counters at the end of `state`: calls, experts that the calls used, and experts that had to
be fetched."""
MOST_EXPERTS = 1024
"""The largest number of experts, and of slots. The kernel that plans a call has a thread for each."""
ALIGN = 256
"""The part of each tensor in `slots` begins at a multiple of this number of bytes."""

Weights = Sequence[torch.Tensor | None]


def slot_bytes(weights: Weights, count: int) -> int:
    """Returns the bytes that `slots` needs for `count` experts. It has a part [count, ...] for each of the
    weights and biases of `moe`, in the order of the arguments."""
    sizes = (count * math.prod(w.shape[1:]) * w.dtype.itemsize for w in weights if w is not None)
    return sum(-(-size // ALIGN) * ALIGN for size in sizes)


def check_slots(
    experts: Experts, weights: Weights, slots: torch.Tensor, state: torch.Tensor, x: torch.Tensor
) -> None:
    """Checks the memory of a cache. `weights`: the weights and biases of `moe`, in its arguments' order."""
    groups = experts.up.groups
    check_dtype("slots", slots, (torch.uint8,))
    check_dtype("state", state, (torch.int32,))
    check(slots.dim() == 1, lambda: f"slots has {slots.dim()} dimensions; it must have 1")
    check(state.dim() == 1, lambda: f"state has {state.dim()} dimensions; it must have 1")
    check_device("slots", slots, "x", x)
    check_device("state", state, "x", x)
    check(groups >= 1, lambda: "w13 has 0 experts; slots are for 1 or more")
    count = state.shape[0] - groups - COUNTERS
    check(
        count >= 1,
        lambda: (
            f"state has {state.shape[0]} elements; it must have {groups + COUNTERS + 1} or more: {groups} "
            f"experts, {COUNTERS} counters, and one for each slot"
        ),
    )
    check(
        max(groups, count) <= MOST_EXPERTS,
        lambda: (
            f"w13 has {groups} experts, and state is for {count} slots; at most {MOST_EXPERTS} of each are "
            "possible"
        ),
    )
    least = slot_bytes(weights, count)
    check(
        slots.shape[0] >= least,
        lambda: f"slots has {slots.shape[0]} bytes; {count} slots of these weights take {least}",
    )
