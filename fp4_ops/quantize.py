"""Defines `fp4_ops.quantize`, which quantises a tensor to 4 bits."""

from __future__ import annotations

import torch

from .tensor import FP4Tensor


def quantize(x: torch.Tensor, format: str, *, global_scale: torch.Tensor | None = None) -> FP4Tensor:
    """Quantises x [..., K] to 4 bits along its last dimension: `fp4::quantize`, as one tensor.

        x[..., n, k] ~ value(code[..., n, k]) * block_scale[..., n, k // block] * global_scale[...]

    x: float32, bfloat16 or float16, on any device; K even.
    format: one of `fp4_ops.info().formats`. It says what a code stands for, the block, and how scales are
        chosen: nvfp4 as NVIDIA defines it, mxfp4 as OCP MX v1, int4 symmetric as compressed-tensors does
        (docs/operators.md, "Conversion", has the formulas).
    global_scale: nvfp4 only; float32 x.shape[:-2], one factor a matrix. None: the matrix's largest
        magnitude over 6 * 448.

    Returns a tensor with the shape and dtype of x. Codes are rounded to nearest, ties to even.
    Raises RuntimeError that names the argument: another dtype, an odd K, an unknown format, a wrong shape;
    on the CPU also NaN or infinity in x.
    """
    packed, block_scale, used = torch.ops.fp4.quantize(x.detach(), format, global_scale)
    return FP4Tensor(packed, block_scale, used if used.numel() else None, format=format, dtype=x.dtype)
