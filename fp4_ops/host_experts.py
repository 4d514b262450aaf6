"""`fp4::moe_slots` where no kernel has a cache: on a CPU, whose memory holds all experts, and without the
native runtime. The weights are read where they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from .meta import checks, slot_checks


def moe_slots(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *weights: Tensor | None, slots: list[Tensor],
    state: Tensor, format: str, layout: str = "plain", activation: str = "silu", a_format: str = "none",
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Run `fp4::moe`; check what a cache on a GPU would need."""
    given: list[Any] = [*weights, *[None] * (8 - len(weights))]
    experts = checks.check_moe(
        x, topk_ids, topk_weights, *given[:6], format, layout, activation, a_format, *given[6:]
    )
    slot_checks.check_slots(experts, given, slots, state, x)
    out: Tensor = torch.ops.fp4.moe(
        x, topk_ids, topk_weights, *given, format=format, layout=layout, activation=activation,
        a_format=a_format, out_dtype=out_dtype,
    )  # fmt: skip
    return out


_LIBRARY = Library("fp4", "IMPL")
_LIBRARY.impl("moe_slots", moe_slots, "CPU")
