"""Decodes symmetric int4 weights, with one scale for each group along K or for each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...meta.formats import FORMATS
from ..files import DAMAGED, CheckpointError
from .base import Codes, Dialect, Read, StoredWeight

WHOLE_ROW = 1 << 62
"""The group size that means one scale for each row."""

OFFSET = 0x88
"""Packed int4 codes are stored with 8 added. In two's complement this flips one bit."""

INT4_BLOCKS = {f.block: f.name for f in FORMATS.values() if f.element == "int4"}
"""Formats by their block, the largest first."""


def of_group(size: int | None) -> dict[str, Any]:
    """Returns `format` and `group` of a dialect with groups of this size. -1 or None means one scale for each
    row.
    """
    if size is None or size < 0:
        return {"format": next(iter(INT4_BLOCKS.values())), "group": WHOLE_ROW}
    # If a group has several blocks, all of them get its scale.
    format = next((name for block, name in INT4_BLOCKS.items() if size % block == 0), None)
    return {"format": format or f"int4 in groups of {size}", "group": size}


ASYMMETRIC = "asymmetric int4"
OUT_OF_ORDER = "int4 in groups out of order (desc_act, actorder 'group')"


@dataclass(frozen=True)
class Int4Dialect(Dialect):
    """Codes are in two's complement. Packed codes are stored with 8 added."""

    group: int = 0
    """Elements along K that share a scale. The config says how many."""
    index: str = ".weight_g_idx"
    """The suffix of the tensor that gives the group of each k."""
    required: tuple[str, ...] = ()
    """Suffixes of `reads` that must exist, because the weight cannot be read without them."""

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
        """Converts the weight exactly: repeats scales for each block of a group, and widens float16 to
        float32.
        """
        for suffix in self.reads:
            if (info := stored.other(suffix)) is not None:
                raise CheckpointError(
                    f"fp4: {info} moves zero or permutes columns, and the config says that weights are "
                    "symmetric, in order. Quantise the original weights anew, symmetric and with actorder "
                    "'static'"
                )
        codes, scale = read(stored.packed).view(torch.uint8), self.read_scale(stored, read)
        if self.codes_per_byte == 2:
            packed = codes ^ OFFSET
        else:
            packed = (codes[..., ::2] & 15) | codes[..., 1::2] << 4
        return Codes(packed, self.block_scales(scale, stored), None)

    def block_scales(self, scale: Tensor, stored: StoredWeight) -> Tensor:
        """Converts scales of groups [N, K/group] to scales of the format's blocks."""
        format, k = FORMATS[self.format], stored.shape[-1]
        each = -(-min(self.group, k) // format.block)
        scale = scale.repeat_interleave(each, -1)[..., : format.num_blocks(k)]
        return scale.to(self.scale_dtype([stored])).contiguous()

    def read_scale(self, stored: StoredWeight, read: Read) -> Tensor:
        scale = read(stored.block_scale)
        if not scale.isfinite().all():
            raise CheckpointError(f"fp4: {stored.block_scale} holds NaN or infinity. {DAMAGED}")
        return scale

    def values(self, stored: StoredWeight, read: Read) -> Tensor:
        for suffix in self.required:
            if stored.other(suffix) is None:
                raise CheckpointError(
                    f"fp4: {stored.packed} has no {suffix} beside it, and the config has {self.name} weights "
                    "other than symmetric int4 of one group size. Quantise the original weights anew"
                )
        codes, scale = self.codes(stored, read), self.scales(stored, read).float()
        index, zeros = self.groups(stored, read).to(codes.device), self.zeros(stored, read)
        if zeros is not None:
            codes = codes - zeros[:, index]
        return codes.float() * scale[:, index]

    def codes(self, stored: StoredWeight, read: Read) -> Tensor:
        """Returns the codes as int8 [N, K], in two's complement."""
        codes = read(stored.packed)
        if self.codes_per_byte == 1:
            return codes
        codes = codes.view(torch.uint8)
        return torch.stack([codes & 15, codes >> 4], -1).view(*stored.shape).to(torch.int8) - 8

    def scales(self, stored: StoredWeight, read: Read) -> Tensor:
        """Returns the scales [N, groups]."""
        return self.read_scale(stored, read)

    def groups(self, stored: StoredWeight, read: Read) -> Tensor:
        """Returns the group of each k, int64 [K]."""
        info, k = stored.other(self.index), stored.shape[-1]
        if info is None:
            return self.in_order(stored)
        index = read(info).long()
        if index.shape != (k,) or bool((index < 0).any() or (index >= -(-k // min(self.group, k))).any()):
            raise CheckpointError(f"fp4: {info} does not give each of {k} columns a group. {DAMAGED}")
        return index

    def in_order(self, stored: StoredWeight, device: torch.device | None = None) -> Tensor:
        k = stored.shape[-1]
        return torch.arange(k, device=device) // min(self.group, k)

    def zeros(self, stored: StoredWeight, read: Read) -> Tensor | None:
        """Returns the zero points, int8 [N, groups], which are subtracted from `codes`; None if there are
        none. In the file they are packed along N, with 8 added.
        """
        info = stored.other(".weight_zero_point")
        if info is None:
            return None
        zeros = read(info)
        if zeros.dtype == torch.int32:
            parts = zeros.T.contiguous().view(torch.uint8)
            zeros = torch.stack([parts & 15, parts >> 4], -1).flatten(-2).T[: stored.shape[0]]
            zeros = zeros.to(torch.int8) - 8
        return zeros.to(torch.int8)
