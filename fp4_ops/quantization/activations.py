"""Emulates quantised activations: values are rounded to the grid and stay float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..meta.formats import FORMATS, INT8_BLOCK
from .grid import E4M3_MAX, dequantize_weight, divide, join_blocks, split_blocks
from .weight import quantize_weight


def _unchanged(x: Tensor) -> Tensor:
    return x


def round_fp8(x: Tensor) -> Tensor:
    """Rounds like `fp4::quantize_fp8`: e4m3 with one float32 scale a token, amax / 448."""
    scale = divide(x.abs().amax(-1, keepdim=True), E4M3_MAX)
    scale = scale.masked_fill(scale == 0, 1.0)
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def round_int8(x: Tensor) -> Tensor:
    """Rounds like `fp4::quantize_int8`: one float32 scale, amax / 127, for each block of 32."""
    blocks = split_blocks(x, INT8_BLOCK)
    scale = divide(blocks.abs().amax(-1, keepdim=True), 127.0)
    codes = (blocks / scale.masked_fill(scale == 0, 1.0)).round()
    return join_blocks(codes * scale, x.shape[-1])


def _round_fp4(format: str) -> Callable[[Tensor], Tensor]:
    def round_fp4(x: Tensor) -> Tensor:
        """Rounds like `fp4::quantize`. Every row is a matrix of its own, with its own global scale."""
        return dequantize_weight(*quantize_weight(x[:, None], format), FORMATS[format])[:, 0]

    return round_fp4


@dataclass(frozen=True)
class ActivationMode:
    """One format of activations. `round` maps float32 [rows, K] to the values that the product uses."""

    name: str
    label: str
    round: Callable[[Tensor], Tensor]
    weight_bits: int | None = None
    """Significant bits to which the kernels round code x block scale."""


ACTIVATION_MODES = {
    m.name: m
    for m in (
        ActivationMode("bf16", "W4A16", _unchanged),
        # FP8 tensor cores need the weights as e4m3, too. Scales with mantissas 0, 2, 4 lose nothing.
        ActivationMode("fp8", "W4A8 fp8", round_fp8, weight_bits=4),
        ActivationMode("int8", "W4A8 int8", round_int8),
        ActivationMode("nvfp4", "W4A4 nvfp4", _round_fp4("nvfp4")),
        ActivationMode("mxfp4", "W4A4 mxfp4", _round_fp4("mxfp4")),
    )
}
