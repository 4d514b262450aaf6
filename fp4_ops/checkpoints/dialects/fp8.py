"""Decodes 8-bit weights, float or integer. They occur beside 4-bit weights, and in folders that will be
quantised."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..files import DAMAGED, CheckpointError, TensorInfo
from .base import STACKS, Codes, Dialect, Read, StoredWeight

_AT_ONCE = 1 << 22
"""Elements dequantised at a time."""

BYTES = (torch.uint8, torch.float8_e8m0fnu)
"""Dtypes of e8m0 scales, powers of two."""


@dataclass(frozen=True)
class EightBits(Dialect):
    """Weights with value = code * scale. There is one scale for the weight, for each row, for each block, or
    (MXFP8) for each 32 elements along K.

    The shape of the scale says which of these it is. The config gives the size of the blocks. No operator
    computes with such weights, so they become weights in the model's dtype.
    """

    code_dtypes: tuple[torch.dtype, ...] = (torch.float8_e4m3fn,)
    blocks: tuple[int, int] = (128, 128)
    """Rows and columns of a block that has a scale."""

    @property
    def is_dense(self) -> bool:
        return True

    @property
    def block(self) -> int:
        return self.blocks[1]

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.float32, torch.bfloat16, torch.float16, *BYTES)

    def is_packed(self, info: TensorInfo) -> bool:
        stack = len(info.shape) == 3 and info.name.endswith(STACKS)
        return super().is_packed(info) and (stack or not self.stacked)

    def shape(self, packed: TensorInfo) -> tuple[int, ...]:
        """Returns the stored shape: [N, K], or for all experts [E, N, K] or [E, K, N]."""
        if len(packed.shape) not in (2, 3):
            raise CheckpointError(f"fp4: {packed} has {len(packed.shape)} dimensions; it must have 2 or 3")
        return packed.shape

    def check_scale(self, packed: TensorInfo, scale: TensorInfo) -> None:
        if scale.dtype not in self.scale_dtypes or self._blocks(packed.shape, scale) is None:
            each = " for each expert, or for all" * (len(packed.shape) == 3)
            raise CheckpointError(
                f"fp4: {scale} is {scale.dtype} {list(scale.shape)}; beside a weight {list(packed.shape)} it "
                f"must be float32, bfloat16 or float16 with one number, one a row, or one a block of "
                f"{list(self.blocks)}, or e8m0 with one for 32 along K{each}"
            )

    def _blocks(self, shape: tuple[int, ...], scale: TensorInfo) -> tuple[int, int] | None:
        """Returns how many rows and columns of a matrix share a scale, or None if the scale's shape does not
        fit.
        """
        *experts, n, k = shape
        of_matrix = scale.shape
        if prod(of_matrix) == 1:
            return n, k
        if experts:
            if of_matrix[0] != experts[0]:
                return None
            of_matrix = of_matrix[1:]
            if prod(of_matrix) == 1:
                return n, k
            if of_matrix == (1, k):  # [E, K, N], with a scale for each output
                return n, 1
        if scale.dtype in BYTES and of_matrix == (n, -(-k // 32)):
            return 1, 32
        if of_matrix in ((n,), (n, 1)):
            return 1, k
        rows, columns = self.blocks
        whole = (-(-n // rows), -(-k // columns))
        # ModelOpt adds dimensions of size one
        if of_matrix in (whole, (whole[0], 1, whole[1], 1)):
            return self.blocks
        return None

    def decode(self, stored: StoredWeight, read: Read) -> Codes:
        raise NotImplementedError(f"{self.name} has no 4-bit codes")

    def values(self, stored: StoredWeight, read: Read) -> Tensor:
        return self.dequantize(stored, read, torch.float32)

    def dequantize(self, stored: StoredWeight, read: Read, dtype: torch.dtype) -> Tensor:
        """Returns the values in the stored shape ([N, K], or all experts'). The product is computed in
        float64 and rounded once.
        """
        if len(stored.shape) == 2:
            return self.matrix(stored, None, read(stored.packed), read, dtype)
        experts = range(stored.shape[0])
        return torch.stack([self.matrix(stored, i, read(stored.packed.row(i)), read, dtype) for i in experts])

    def matrix(
        self, stored: StoredWeight, expert: int | None, codes: Tensor, read: Read, dtype: torch.dtype
    ) -> Tensor:
        """Dequantises one matrix from its codes: the whole weight (`expert` is None), or one expert's."""
        blocks = self._blocks(stored.shape, stored.block_scale)
        assert blocks is not None
        scale = read(stored.block_scale)
        if stored.block_scale.dtype in BYTES:
            raw = scale.view(torch.uint8)
            nan = raw == 0xFF
            scale = torch.exp2(raw.double() - 127)
        else:
            scale = scale.double()
            nan = ~scale.isfinite()
        if nan.any():
            raise CheckpointError(f"fp4: {stored.block_scale} holds NaN or infinity. {DAMAGED}")
        if expert is not None and scale.numel() > 1:
            scale = scale[expert]
        (n, k), (rows, columns) = codes.shape, blocks
        scale = scale.reshape(-(-n // rows), -(-k // columns))
        out = torch.empty((n, k), dtype=dtype, device=codes.device)
        step = max(1, _AT_ONCE // k)
        for start in range(0, n, step):
            part = slice(start, min(start + step, n))
            of_row = torch.arange(part.start, part.stop, device=scale.device) // rows
            factor = scale[of_row].repeat_interleave(columns, -1)[:, :k] if columns < k else scale[of_row]
            out[part] = (codes[part].double() * factor).to(dtype)
        return out
