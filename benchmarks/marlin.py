"""Calls Marlin's W4A16 products for experts (`moe_wna16_marlin_gemm`) in the same way as vLLM.

`load` takes the two operator libraries of a vLLM wheel, `_moe_C_stable_libtorch` and `_C_stable_libtorch`.
Marlin's weights and scales have the order of vLLM 0.33.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

E2M1 = 0x2000000010102
"""vLLM's number of the type of codes."""
ROW_BLOCKS = (8, 16, 32, 48, 64)
BLOCK = {"nvfp4": 16, "mxfp4": 32}


def load(folder: str) -> None:
    for name in ("_moe_C_stable_libtorch", "_C_stable_libtorch"):
        torch.ops.load_library(next(str(p) for p in Path(folder).glob(f"{name}*.so")))


def _interleaved(scale: Tensor) -> Tensor:
    """Reorders scales [K / block, N] as the lanes of Marlin's tiles read 64 columns."""
    k, n = scale.shape
    order = [i + 8 * j for i in range(8) for j in range(8)]
    rows = scale.reshape(-1, 64)[:, order].reshape(-1, 4)[:, [0, 2, 1, 3]]
    return rows.reshape(k, n)


def _nvfp4_scales(scale: Tensor, power: float) -> Tensor:
    """Converts bfloat16 scales [K / 16, N] to Marlin's bytes: e4m3 times 2^7 without a sign, shifted by one
    bit."""
    half = (_interleaved(scale).half() * power).half() * 128
    half[half < 2] = 0
    return (half.view(torch.int16) << 1).view(torch.float8_e4m3fn)[:, 1::2].contiguous()


class Weight:
    """Experts' weights [E, N, K] in 4 bits: packed, block scale and global scale of `fp4::quantize`.

    N and K are padded with zeros to sizes that Marlin supports.
    """

    def __init__(self, packed: Tensor, scale: Tensor, factor: Tensor | None, format: str) -> None:
        self.experts, self.n, k = packed.shape[0], packed.shape[1], 2 * packed.shape[2]
        self.k, block = -(-k // 128) * 128, BLOCK[format]
        self.padded_n = -(-self.n // 64) * 64
        more_n = self.padded_n - self.n
        packed = F.pad(packed, (0, (self.k - k) // 2, 0, more_n))
        scale = F.pad(scale.view(torch.uint8), (0, (self.k - k) // block, 0, more_n)).view(scale.dtype)
        scales, power = [], 1.0
        if format == "nvfp4":
            most = scale.float().max().item()
            power = 2.0 ** math.floor(math.log2(448 / most)) if 0 < most < 448 else 1.0
        codes: list[Tensor] = []
        for e in range(self.experts):
            as_words = packed[e].view(torch.int32).t().contiguous()
            codes.append(torch.ops._C.gptq_marlin_repack(as_words, self.k, self.padded_n, 4, False))
            values = scale[e].to(torch.bfloat16).t()
            scales.append(
                _nvfp4_scales(values, power)
                if format == "nvfp4"
                else _interleaved(values).to(torch.float8_e8m0fnu)
            )
        self.codes = torch.stack(codes)
        self.scales = torch.stack([s.view(torch.uint8) for s in scales]).view(scales[0].dtype)
        self.factor = None if factor is None else factor.float() * 2.0 ** (126 - 7) / power


class Rows:
    """Rows for the experts `topk_ids` [rows of x, top_k], sorted as the kernel needs them."""

    def __init__(self, topk_ids: Tensor, experts: int) -> None:
        count = topk_ids.numel()
        self.topk_ids = topk_ids.int().contiguous()
        self.top_k, self.experts = topk_ids.shape[1], experts
        self.block = next((b for b in ROW_BLOCKS if count / experts / b < 0.9), ROW_BLOCKS[-1])
        most = count + experts * (self.block - 1)
        most = min(count * self.block, most) if count < experts else most
        self.ones = torch.ones(topk_ids.shape, device=topk_ids.device)
        new = self.topk_ids.new_empty
        self.sorted, self.of_block, self.padded = new(most), new(-(-most // self.block)), new(1)
        self.align()

    def align(self) -> None:
        torch.ops._moe_C.moe_align_block_size(
            self.topk_ids, self.experts, self.block, self.sorted, self.of_block, self.padded, None, None
        )


def product(
    x: Tensor, w: Weight, rows: Rows, top_k: int, workspace: Tensor, out: Tensor, scores: Tensor | None = None
) -> Tensor:
    """Computes out[i] = x[i // top_k] @ w[expert of i].T, times scores[i] if they are given."""
    torch.ops._moe_C.moe_wna16_marlin_gemm(
        x, out, w.codes, None, w.scales, None, w.factor, None, workspace, rows.sorted, rows.of_block,
        rows.padded, rows.ones if scores is None else scores, rows.block, top_k, scores is not None, E2M1,
        x.shape[0], w.padded_n, w.k, False, True, False, -1, -1, -1,
    )  # fmt: skip
    return out
