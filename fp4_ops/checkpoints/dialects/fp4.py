"""Decodes weights in nvfp4 and mxfp4. The names of their tensors are given by the dialect."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...meta.formats import FORMATS
from ..files import DAMAGED, CheckpointError, TensorInfo
from .base import Codes, Dialect, Read, StoredWeight


def holds_nan(scale: Tensor) -> bool:
    """Returns whether scales in e4m3 or e8m0 hold NaN."""
    raw = scale.view(torch.uint8)
    words, ones = raw, 1
    if raw.is_contiguous() and raw.numel() % 8 == 0 and raw.storage_offset() % 8 == 0:
        # Compare eight bytes at a time. Small tensors then have too few elements for torch to use several
        # threads.
        words, ones = raw.view(-1).view(torch.int64), 0x0101010101010101
    # NaN is s1111111 in e4m3 and 0xff in e8m0. One more carries into the sign's bit, and into no other byte.
    carried = (words & 0x7F * ones) + ones
    if scale.dtype == torch.float8_e8m0fnu:
        carried &= words
    return bool((carried & (0x80 * ones if words is raw else -0x7F7F7F7F7F7F7F80)).any())


@dataclass(frozen=True)
class FP4Dialect(Dialect):
    """Codes are e2m1. Block scales are e4m3 (nvfp4) or e8m0 (mxfp4)."""

    reciprocal: bool = False
    """True if the stored global scale is a divisor: value = code * block_scale / global_scale."""
    wider: int = 0
    """Another possible number of elements along K that share a scale, a multiple of the format's block. The
    shape of the scale says which one applies.
    """

    @property
    def block(self) -> int:
        return FORMATS[self.format].block

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        dtype = FORMATS[self.format].scale_dtype
        # older torch has no e8m0 dtype, so some tools store its bytes
        return (dtype, torch.uint8) if dtype == torch.float8_e8m0fnu else (dtype,)

    def scale_shapes(self, packed: TensorInfo) -> tuple[tuple[int, ...], ...]:
        first = self.scale_shape(packed)
        if not self.wider:
            return (first,)
        *rows, k = self.shape(packed)
        return first, (*rows, -(-k // self.wider))

    def decode(self, stored: StoredWeight, read: Read) -> Codes:
        packed = read(stored.packed).view(torch.uint8).reshape(*stored.shape[:-1], stored.shape[-1] // 2)
        scale = self.each_block(self.read_block_scale(stored, read), stored.shape[-1])
        return Codes(packed, scale, self.read_global_scale(stored, read))

    def each_block(self, scale: Tensor, k: int) -> Tensor:
        """Returns one scale for each block, [..., N, K/block]. In the files, several blocks may share a
        scale.
        """
        blocks = -(-k // self.block)
        if scale.shape[-1] == blocks:
            return scale
        several = self.wider // self.block
        return scale.view(torch.uint8).repeat_interleave(several, -1)[..., :blocks].view(scale.dtype)

    def read_block_scale(self, stored: StoredWeight, read: Read) -> Tensor:
        format = FORMATS[self.format]
        block_scale = read(stored.block_scale).view(format.scale_dtype)
        if holds_nan(block_scale):
            raise CheckpointError(f"fp4: {stored.block_scale} holds NaN. {DAMAGED}")
        return block_scale

    def read_global_scale(self, stored: StoredWeight, read: Read) -> Tensor | None:
        if stored.global_scale is None:
            return None
        global_scale = read(stored.global_scale)
        global_scale = global_scale.reshape(() if global_scale.numel() == 1 else -1)
        bad = ~(global_scale.isfinite() & (global_scale > 0))
        if bad.any():
            number = global_scale.reshape(-1)[bad.reshape(-1)][0].item()
            raise CheckpointError(
                f"fp4: {stored.global_scale} is {number}; it must be positive and finite. {DAMAGED}"
            )
        return 1.0 / global_scale if self.reciprocal else global_scale


@dataclass(frozen=True)
class StackedBlocks(FP4Dialect):
    """Holds all experts in one tensor: packed [E, N, K/block, block/2], block_scale [E, N, K/block]."""

    stacked: bool = True

    def shape(self, packed: TensorInfo) -> tuple[int, ...]:
        if len(packed.shape) != 4 or packed.shape[-1] != self.block // 2:
            want = f"[E, N, K/{self.block}, {self.block // 2}]"
            raise CheckpointError(f"fp4: {packed} has shape {list(packed.shape)}; it must be {want}")
        e, n, blocks, half = packed.shape
        return e, n, blocks * half * 2
