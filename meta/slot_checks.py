"""Checks the arguments of `moe_slots`. csrc/cuda/slots.cpp has the same."""

from __future__ import annotations

import torch

from .check_parts import check, check_device, check_dtype
from .checks import Experts

COUNTERS = 3
"""Counters at the end of `state`: calls, experts that they wanted, experts that had to be fetched."""
MOST_EXPERTS = 1024
"""Experts and slots that the kernel which plans a call has threads for."""


def check_slots(
    experts: Experts,
    weights: list[torch.Tensor | None],
    slots: list[torch.Tensor],
    state: torch.Tensor,
    x: torch.Tensor,
) -> None:
    """Checks the memory of a cache. `weights`: the weights and biases of `moe`, in the order of its arguments."""
    given = [w for w in weights if w is not None]
    check(
        len(slots) == len(given),
        lambda: f"slots has {len(slots)} tensors; it must have {len(given)}, one for each tensor of weights",
    )
    groups, count = experts.up.groups, slots[0].shape[0] if slots[0].dim() else 0
    for i, (weight, slot) in enumerate(zip(given, slots)):
        check(
            slot.dim() == weight.dim()
            and slot.dtype == weight.dtype
            and slot.shape[1:] == weight.shape[1:]
            and slot.shape[0] == count,
            lambda i=i, weight=weight, slot=slot: (
                f"slots[{i}] has shape {list(slot.shape)} and dtype {slot.dtype}; its weight has shape "
                f"{list(weight.shape)} and dtype {weight.dtype}. They must be contiguous and equal but in the "
                f"first size, {count} slots of {groups} experts"
            ),
        )
        check_device(f"slots[{i}]", slot, "x", x)
    check_dtype("state", state, (torch.int32,))
    check_device("state", state, "x", x)
    check(count >= 1, lambda: "slots has room for 0 experts; it must be 1 or more")
    check(
        max(groups, count) <= MOST_EXPERTS,
        lambda: f"w13 has {groups} experts and slots {count}; at most {MOST_EXPERTS} of each are possible",
    )
    wanted = groups + count + COUNTERS
    check(
        state.dim() == 1 and state.numel() == wanted,
        lambda: (
            f"state has {state.numel()} elements; it must have {wanted}: {groups} experts, {count} slots and "
            f"{COUNTERS} counters"
        ),
    )
