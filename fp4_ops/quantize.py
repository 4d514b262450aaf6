"""`fp4_ops.quantize`: a tensor to 4 bits."""

from __future__ import annotations

import torch

from .tensor import FP4Tensor


def quantize(x: torch.Tensor, format: str, *, global_scale: torch.Tensor | None = None) -> FP4Tensor:
    """x [..., K] to 4 bits along its last dimension: `fp4::quantize`, as one tensor.

    x: float32, bfloat16 or float16; K even. format: one of `fp4_ops.info().formats`. global_scale (nvfp4
    only): float32 x.shape[:-2], one factor a matrix; without it, each matrix's largest magnitude decides.
    The result has the shape and dtype of x. Raises RuntimeError naming the argument that does not fit.
    """
    packed, block_scale, used = torch.ops.fp4.quantize(x.detach(), format, global_scale)
    return FP4Tensor(packed, block_scale, used if used.numel() else None, format=format, dtype=x.dtype)
