"""Decides whether weights may use the kernels of `_sm80.so` on this GPU.

The kernels are built for many GPUs, and were tested on few of them. So their first use is checked
(first_use.py).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...meta.formats import FP4_FORMATS
from ...meta.torch_internals import without_modes
from ...runtime import first_use, native, oracle

LAYOUT = "mma_bf16"
BOUND = 4e-3
"""Bound of the error of products with bfloat16 results. In a block, the rounded hidden values add as much
again.
"""
INT8_FACTOR = 10
"""Factor on the bound for a block with int8 rows, because the reference does not round to int8."""


def error_of(kernel: str) -> float:
    """Returns the largest error of the operators that use this kernel ("decode", "gemv" or "prefill").

    It is infinite if an operator does not run.
    """
    with torch.random.fork_rng(devices=[torch.cuda.current_device()]), torch.no_grad(), native.only(kernel):
        torch.manual_seed(0)
        found = []
        for format in FP4_FORMATS:
            for operator in oracle.PRODUCTS:
                for kind in ("bfloat16", "float16"):
                    found.append(_error(oracle.product, oracle.Case(operator, format, LAYOUT, kind)))
            found.append(_error(oracle.block, oracle.Case("moe", format, LAYOUT, "none", "silu")))
            if kernel == "prefill":
                int8 = _error(oracle.block, oracle.Case("moe", format, LAYOUT, "int8", "silu"))
                found.append(int8 / INT8_FACTOR)
    return max(found)


def _error(run: Callable[..., tuple[Tensor, Tensor]], case: Any) -> float:
    try:
        return oracle.relative_error(*run(case, "cuda"))
    except RuntimeError as error:
        logging.getLogger("fp4_ops").warning("fp4: %s does not run: %s", case, error)
        return float("inf")


def _build() -> str:
    return native.build(native.MMA)


def mma_kernels(device_index: int) -> bool:
    """True if this GPU's kernels passed the check.

    Works while a torch.compile backend runs on fake tensors.
    """
    properties = torch.cuda.get_device_properties(device_index)
    device = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
    with torch.cuda.device(device_index), without_modes():
        return all(
            first_use.agrees(
                f"the {kernel} kernel of layout '{LAYOUT}'", device, _build(),
                functools.partial(error_of, kernel), BOUND, "Triton",
            )
            for kernel in ("gemv", "decode", "prefill")
        )  # fmt: skip
