"""Cuts out the part of a weight that one of several processes has: rows, columns, or a part of the experts'
intermediate size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...checkpoints.dialects import Codes
from ...checkpoints.fold import cat
from ...meta.formats import FORMATS
from ...meta.layouts import byte_view

LEAST = 32
"""A process gets a multiple of this many columns, because the layouts of GPUs need it. If a block of the
format is longer, it gets a multiple of a block.
"""


def share(inner: int, format: str, size: int, rank: int) -> range:
    """Returns the columns of the experts' intermediate dimension that process `rank` of `size` has. They are
    whole blocks.

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


class Stack:
    """The matrices of a process's experts as one operand [E, N, K] in layout plain.

    Each expert's matrix is written into its place when it arrives.
    """

    def __init__(self, experts: int, device: torch.device) -> None:
        self.experts, self.device = experts, device
        self._made: set[int] = set()
        self._memory: tuple[Tensor, Tensor] | None = None
        self._factor: Tensor | None = None

    @property
    def missing(self) -> list[int]:
        """Returns the experts whose matrices have not been written."""
        return [e for e in range(self.experts) if e not in self._made]

    def place(self, expert: int, n: int, k: int, blocks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the memory of an expert's codes and of its block scales, which have this dtype."""
        if self._memory is None:
            self._memory = (
                torch.empty((self.experts, n, k // 2), dtype=torch.uint8, device=self.device),
                torch.empty((self.experts, n, blocks), dtype=dtype, device=self.device),
            )
        packed, scale = self._memory
        return packed[expert], scale[expert]

    def write(self, expert: int, parts: Sequence[Codes], dtype: torch.dtype) -> None:
        """Writes an expert's matrix: parts with one global scale, which follow each other along its rows."""
        first, n = parts[0], sum(part.packed.shape[0] for part in parts)
        k, blocks = 2 * first.packed.shape[1], first.block_scale.shape[1]
        packed, scale = self.place(expert, n, k, blocks, dtype)
        start = 0
        for part in parts:
            rows = slice(start, start + part.packed.shape[0])
            for place, tensor in ((packed[rows], part.packed), (scale[rows], part.block_scale)):
                if place.data_ptr() != tensor.data_ptr():  # else it was read into its place
                    byte_view(place).copy_(byte_view(tensor))
            start = rows.stop
        if first.global_scale is not None:
            if self._factor is None:
                # vLLM sets the default dtype and the default device while it loads.
                self._factor = torch.empty(self.experts, dtype=torch.float32, device="cpu")
            self._factor[expert] = first.global_scale
        self._made.add(expert)

    def operand(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns codes, block scales and global scales of all experts."""
        assert self._memory is not None
        return *self._memory, None if self._factor is None else self._factor.to(self.device)
