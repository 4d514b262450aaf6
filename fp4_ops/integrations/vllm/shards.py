"""Cuts the part of a weight that one of several processes has: rows, columns, or a part of the experts'
intermediate size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...checkpoints.dialects import Codes
from ...checkpoints.fold import cat
from ...meta.formats import FORMATS

LEAST = 32
"""A process gets a multiple of this many columns, because the layouts of GPUs need it. If a block of the
format is longer, it gets a multiple of a block.
"""


def share(inner: int, format: str, size: int, rank: int) -> range:
    """Returns the columns of the experts' intermediate dimension that process `rank` of `size` has: whole
    blocks.

    Any division gives the same sum over processes, so nothing is padded. If there are more processes than
    blocks, some get no columns.
    """
    unit = max(FORMATS[format].block, LEAST)
    units = -(-inner // unit)
    first, last = (min(inner, unit * (units * r // size)) for r in (rank, rank + 1))
    return range(first, last)


def rows(codes: Codes, parts: Sequence[range]) -> Codes:
    """Returns rows of a matrix, in the order of `parts`."""

    def of(tensor: Tensor) -> Tensor:
        return cat(*(tensor[part.start : part.stop] for part in parts))

    return Codes(of(codes.packed), of(codes.block_scale), codes.global_scale)


def columns(codes: Codes, part: range, format: str) -> tuple[Codes, int]:
    """Returns columns of a matrix, and the number of zeros that were put in front of them.

    A block keeps its scale. So a part that begins inside a block gets zero codes in front.
    """
    block = FORMATS[format].block
    first = part.start // block
    front = part.start - first * block
    packed = codes.packed[:, first * block // 2 : -(-part.stop // 2)].clone()
    packed[:, : front // 2] = 0
    if front % 2:
        packed[:, front // 2] &= 0xF0
    if part.stop % 2:
        packed[:, -1] &= 0x0F
    scale = codes.block_scale.view(torch.uint8) if codes.block_scale.itemsize == 1 else codes.block_scale
    scale = scale[:, first : -(-part.stop // block)].contiguous()
    if len(part) == 0:  # one block of zeros, because operators need K > 0
        packed = torch.zeros_like(codes.packed[:, : block // 2])
        scale = codes.block_scale[:, :1].contiguous()
    return Codes(packed, scale.view(codes.block_scale.dtype), codes.global_scale), front


def add_rows(codes: Codes, n: int) -> Codes:
    """Adds rows of zeros at the end of a matrix, so that N = n."""
    more = n - codes.packed.shape[0]
    if more <= 0:
        return codes
    packed = torch.cat([codes.packed, codes.packed.new_zeros(more, codes.packed.shape[1])])
    scale = cat(codes.block_scale, *([codes.block_scale[:1]] * more))
    return Codes(packed, scale, codes.global_scale)


def stack(matrices: Sequence[Codes]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Stacks the experts' matrices to one operand [E, N, K]."""
    packed = torch.stack([c.packed for c in matrices])
    wide = {c.block_scale.dtype for c in matrices}
    scales = [c.block_scale.float() if len(wide) > 1 else c.block_scale for c in matrices]
    dtype = scales[0].dtype
    raw = torch.stack([s.view(torch.uint8) if dtype.itemsize == 1 else s for s in scales])
    factors = [c.global_scale for c in matrices if c.global_scale is not None]
    return packed, raw.view(dtype), torch.stack([f.reshape(()) for f in factors]) if factors else None
