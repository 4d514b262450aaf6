"""The arithmetic of symmetric int4 weights, in groups along K or with one scale a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...meta.formats import FORMATS
from ..files import CheckpointError
from .base import Codes, Dialect, Read, StoredWeight

WHOLE_ROW = 1 << 62
"""The group size of one scale a row."""

OFFSET = 0x88
"""Packed int4 codes are stored plus 8, which in two's complement turns one bit."""

INT4_BLOCKS = {f.block: f.name for f in FORMATS.values() if f.element == "int4"}
"""In falling order."""


def of_group(size: int | None) -> dict[str, Any]:
    """`format` and `group` of a dialect whose groups have this size; -1 or None: one scale a row."""
    if size is None or size < 0:
        return {"format": next(iter(INT4_BLOCKS.values())), "group": WHOLE_ROW}
    # Groups of several blocks have the same scale in each of them.
    format = next((name for block, name in INT4_BLOCKS.items() if size % block == 0), None)
    return {"format": format or f"int4 in groups of {size}", "group": size}


@dataclass(frozen=True)
class Int4Dialect(Dialect):
    """Codes are two's complement, stored plus 8 where they are packed."""

    group: int = 0
    """Elements along K that share a scale; the config says how many."""

    @property
    def block(self) -> int:
        return self.group

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float16, torch.float32)

    def scale_dtype(self, weights: list[StoredWeight]) -> torch.dtype:
        format = FORMATS[self.format]
        same = all(w.block_scale.dtype == format.scale_dtype for w in weights)
        return format.scale_dtype if same or format.wide_scale_dtype is None else format.wide_scale_dtype

    def decode(self, stored: StoredWeight, read: Read) -> Codes:
        """Exact: scales are repeated for each block of a group, and float16 is widened to float32."""
        codes, scale = read(stored.packed).view(torch.uint8), self.read_scale(stored, read)
        if self.codes_per_byte == 2:
            packed = codes ^ OFFSET
        else:
            packed = (codes[..., ::2] & 15) | codes[..., 1::2] << 4
        return Codes(packed, self.block_scales(scale, stored), None)

    def block_scales(self, scale: Tensor, stored: StoredWeight) -> Tensor:
        """Scales of groups [N, K/group] as those of the format's blocks."""
        format, k = FORMATS[self.format], stored.shape[-1]
        each = -(-min(self.group, k) // format.block)
        scale = scale.repeat_interleave(each, -1)[..., : format.num_blocks(k)]
        return scale.to(self.scale_dtype([stored])).contiguous()

    def read_scale(self, stored: StoredWeight, read: Read) -> Tensor:
        scale = read(stored.block_scale)
        if not scale.isfinite().all():
            raise CheckpointError(f"fp4: {stored.block_scale} holds NaN or infinity")
        return scale

    def values(self, stored: StoredWeight, read: Read) -> Tensor:
        n, k = stored.shape
        codes = read(stored.packed)
        if self.codes_per_byte == 2:
            codes = codes.view(torch.uint8)
            codes = torch.stack([codes & 15, codes >> 4], -1).view(n, k).to(torch.int8) - 8
        scale = self.read_scale(stored, read).float()
        return codes.float() * scale.repeat_interleave(min(self.group, k), -1)[:, :k]
