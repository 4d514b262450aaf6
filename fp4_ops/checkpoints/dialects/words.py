"""int4 weights of GPTQ and AWQ, in words of eight codes along K or N, with zero points and groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..files import CheckpointError, TensorInfo
from .base import Codes, Read, StoredWeight
from .int4 import OFFSET, Int4Dialect

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of each of a word's eight codes, beginning with the lowest bits."""

MIDDLE = 8
"""The zero point of symmetric weights."""


def codes_of(words: Tensor) -> Tensor:
    """Returns the codes of int32 words, uint8 [..., 8], beginning with the lowest bits."""
    parts = words.contiguous().view(torch.uint8).unflatten(-1, (*words.shape[-1:], 4))
    return torch.stack([parts & 15, parts >> 4], -1).flatten(-2)


@dataclass(frozen=True)
class WordsDialect(Int4Dialect):
    """Weights with scales [K/group, N] and zero points [K/group, N/8]: value = (code - zero point) * scale.

    Symmetric weights, whose zero points are all 8, are converted exactly. Others can be requantised.
    """

    code_dtypes: tuple[torch.dtype, ...] = (torch.int32,)
    reads: tuple[str, ...] = (".qzeros", ".g_idx")
    index: str = ".g_idx"
    zero_offset: int = 0
    """Number that is added to the stored zero points. GPTQ's first version subtracts one before it stores
    them.
    """

    def scale_shape(self, packed: TensorInfo) -> tuple[int, ...]:
        n, k = self.shape(packed)
        return -(-k // min(self.group, k)), n

    def words(self, stored: StoredWeight, read: Read) -> Tensor:
        """Returns int32 [N, K/8]: words of eight codes along K, with the lowest k in the lowest bits."""
        raise NotImplementedError

    def zeros(self, stored: StoredWeight, read: Read) -> Tensor | None:
        info = stored.other(".qzeros")
        if info is None:
            return None
        zeros = self.columns(codes_of(read(info)))
        return ((zeros + self.zero_offset) & 15).to(torch.int8).T - MIDDLE

    def columns(self, codes: Tensor) -> Tensor:
        """Converts [R, N/8, 8], the codes of words along N, to [R, N]."""
        return codes.flatten(-2)

    def decode(self, stored: StoredWeight, read: Read) -> Codes:
        index = self.groups(stored, read)
        if not torch.equal(index, self.in_order(stored, index.device)):
            raise CheckpointError(
                f"fp4: {stored.other('.g_idx')} puts columns into groups out of order (desc_act), and no "
                f"operator supports this. The config says that they are in order. {REQUANTIZE}"
            )
        zeros = self.zeros(stored, read)
        if zeros is not None and bool((zeros != 0).any()):
            raise CheckpointError(
                f"fp4: {stored.other('.qzeros')} has zero points other than {MIDDLE - self.zero_offset}, and "
                f"the config says that weights are symmetric. {REQUANTIZE}"
            )
        packed = self.words(stored, read).view(torch.uint8) ^ OFFSET
        scale = self.read_scale(stored, read).T
        return Codes(packed, self.block_scales(scale, stored), None)

    def codes(self, stored: StoredWeight, read: Read) -> Tensor:
        return codes_of(self.words(stored, read)).view(*stored.shape).to(torch.int8) - MIDDLE

    def scales(self, stored: StoredWeight, read: Read) -> Tensor:
        return self.read_scale(stored, read).T


REQUANTIZE = (
    "Quantise the original weights with sym=True and desc_act=False, or with `python -m fp4_ops quantize`"
)


@dataclass(frozen=True)
class GPTQDialect(WordsDialect):
    """Codes are int32 [K/8, N]."""

    def shape(self, packed: TensorInfo) -> tuple[int, ...]:
        k, n = super().shape(packed)[0], packed.shape[1]
        return n, 8 * k

    def words(self, stored: StoredWeight, read: Read) -> Tensor:
        return read(stored.packed).T.contiguous()


@dataclass(frozen=True)
class AWQDialect(WordsDialect):
    """Codes are int32 [K, N/8], with columns in AWQ_ORDER."""

    def shape(self, packed: TensorInfo) -> tuple[int, ...]:
        k, n = super().shape(packed)[0], packed.shape[1]
        return 8 * n, k

    def columns(self, codes: Tensor) -> Tensor:
        out = torch.empty_like(codes)
        out[..., list(AWQ_ORDER)] = codes
        return out.flatten(-2)

    def words(self, stored: StoredWeight, read: Read) -> Tensor:
        rows = self.columns(codes_of(read(stored.packed))).T.contiguous()
        if rows.shape[-1] % 8:
            raise CheckpointError(
                f"fp4: {stored.packed} has {rows.shape[-1]} rows; it must be a multiple of 8"
            )
        return (rows[:, ::2] | rows[:, 1::2] << 4).contiguous().view(torch.int32)
