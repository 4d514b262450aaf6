"""A prepared block of transformers. It has its own file, so that unpickling it imports no compile passes."""

from __future__ import annotations

import torch
from families import expert_block, tiny
from torch import nn

import fp4_ops


class Prepared(nn.Module):
    """A block of transformers that `prepare` packed. Its graph already contains the operator."""

    H = 64

    def __init__(self) -> None:
        super().__init__()
        self.block = expert_block(tiny("qwen3_moe", "grouped_mm"))
        fp4_ops.prepare(self.block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x[None])
