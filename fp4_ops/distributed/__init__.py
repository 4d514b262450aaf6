"""Runs experts on several processes: operators over torch.distributed, and the part of a model that a
process has."""

from __future__ import annotations

from typing import Any

import torch

from . import ops, workspace  # registers the kernels

__all__ = ["connect", "ops"]


def connect(
    group: Any,
    hidden_size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_tokens: int = workspace.MAX_TOKENS,
    device: torch.device | str = "cuda",
) -> str:
    """Lets `fp4::moe_ep` and `fp4::all_reduce` over `group` write into the other GPUs' memory.

    `prepare` and `load_checkpoint` call it themselves. All processes of the group must call it before a CUDA
    graph is captured, and each must have a GPU: a process that sees none returns at once, and the others wait
    for it until the group's timeout.

    hidden_size, dtype: the size and dtype of a token.
    max_tokens: the largest number of tokens of a process in one call. A larger call uses torch.distributed's
        collectives.
    device: this process's GPU.

    Returns "", or the reason why these processes cannot do this. In that case all calls use the collectives.
    """
    name = group.group_name
    return workspace.connect(
        "fp4_ops.distributed.connect", name, torch.device(device), hidden_size * dtype.itemsize, max_tokens
    )
