"""Converts packed weights from one layout to another."""

from __future__ import annotations

import torch
from torch import Tensor

from ..meta.formats import FORMATS
from ..meta.layouts import LAYOUTS, same_bytes

Operands = tuple[Tensor, Tensor, Tensor | None]


def relayout(operands: Operands, format: str, k: int, source: str, target: str) -> Operands:
    """Returns (packed, block_scale, global_scale) of a weight [..., N, k] in another layout.

    `k` is the weight's own K. Hopper's layouts pad it, and the padding is removed on the way back. The global
    scale is None if the result has none.
    """
    packed, block_scale, global_scale = operands
    if same_bytes(source, target):
        return operands
    if source != "plain":
        packed, block_scale, global_scale = torch.ops.fp4.unpack(
            packed, block_scale, global_scale, format, source
        )
        if LAYOUTS[source].padded(k) != k:
            blocks = FORMATS[format].num_blocks(k)
            packed, block_scale = packed[..., : k // 2].contiguous(), block_scale[..., :blocks].contiguous()
    if target != "plain":
        packed, block_scale, global_scale = torch.ops.fp4.prepack(
            packed, block_scale, global_scale, format, target
        )
    return packed, block_scale, global_scale if global_scale is not None and global_scale.numel() else None
