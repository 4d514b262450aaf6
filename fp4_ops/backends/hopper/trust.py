"""Decides whether the products of a decoding step may become fp4::linears on this GPU.

The first use of the kernel on a GPU is checked (first_use.py).
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ...meta.torch_internals import without_modes
from ...runtime import first_use, native
from ...runtime.oracle import relative_error

BOUND = 4e-3
"""Bound of the error of bfloat16 results against float64."""
K, EPS = 2048, 1e-6
ROWS = (1, 8, 16)
"""Most rows of each of the kernel's forms that a step uses, and one row."""


def linears_error() -> float:
    """Returns the largest error of fp4::linears: a norm with three products, and a product with a residual.

    It is infinite if the operator does not run.
    """
    with torch.random.fork_rng(devices=[torch.cuda.current_device()]), torch.no_grad():
        torch.manual_seed(0)
        try:
            return max(_error(dtype, "cuda", n) for dtype in (torch.bfloat16, torch.float16) for n in ROWS)
        except RuntimeError as error:
            logging.getLogger("fp4_ops").warning("fp4: fp4::linears does not run: %s", error)
            return float("inf")


def _error(dtype: torch.dtype, device: str, rows: int) -> float:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    x, scale, residual = draw(rows, K), draw(K), draw(rows, 512)
    weights = [draw(n, K) / 32 for n in (4096, 512, 128)]
    got = torch.ops.fp4.linears(x, weights, [None] * 3, scale, EPS, None, keep_norm=True)
    got += torch.ops.fp4.linears(x, weights[1:2], [None], None, 0.0, residual, early=True)
    got += torch.ops.fp4.linears(x, weights[2:], [None], scale, EPS, None, norm_in_float=True)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    normed, in_float = wide.to(dtype) * scale, (wide * scale).to(dtype)
    want = [normed.double() @ w.double().T for w in weights] + [normed.double()]
    want.append(x.double() @ weights[1].double().T + residual.double())
    want.append(in_float.double() @ weights[2].double().T)
    return max(relative_error(a, b) for a, b in zip(got, want, strict=True))


def linears_kernel(device_index: int) -> bool:
    """True if the kernel passed the check on this GPU. Works while a backend runs on fake tensors."""
    properties = torch.cuda.get_device_properties(device_index)
    device = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
    with torch.cuda.device(device_index), without_modes():
        return first_use.agrees(
            "the kernel of fp4::linears", device, native.build(native.HOPPER), linears_error, BOUND, "torch"
        )
