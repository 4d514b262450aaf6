"""Planner of the native runtime (csrc/cuda/choice.h, csrc/cuda/configs.h), in an instance of its own.

Functions that take a GPU also take a number of SMs, which means a Hopper GPU with so many.
"""

from __future__ import annotations

from ..runtime.fitted import Values, flat
from ..runtime.native import Only
from . import _native
from ._native import (
    FEW_WARPS,
    MANY_WARPS,
    BlockPlan,
    DecodeConfig,
    GemvConfig,
    Gpu,
    Kernel,
    KernelFamily,
    Product,
    ProductPlan,
    Routing,
    decode_config,
    gemv_config,
    gpu,
    use_kernels,
)

__all__ = [
    "FEW_WARPS",
    "MANY_WARPS",
    "BlockPlan",
    "DecodeConfig",
    "GemvConfig",
    "Gpu",
    "Kernel",
    "KernelFamily",
    "Product",
    "ProductPlan",
    "Routing",
    "block_plan",
    "decode_config",
    "decode_us",
    "decode_warps",
    "gemv_config",
    "gpu",
    "only",
    "plan",
    "prefill_us",
    "product",
    "tuned",
    "use_kernels",
]

only = Only(_native.set_only)
"""Forces one kernel family in this planner, as native.only does for operators."""


def product(routing: str, groups: int, rows: int, n: int, kp: int, block: int = 16) -> Product:
    """Describes the product of `rows` activation rows (in each group if masked) and [groups, n, kp]."""
    return Product(Routing[routing.upper()], groups, rows, n, kp, block)


def tuned(family: KernelFamily, values: Values) -> int:
    """Registers constants of the cost model. Returns their number for `Gpu.constants`."""
    return int(_native.add_tuned("", family, flat(values)))


def decode_us(of: Product, kernel: str, on: int | Gpu) -> float:
    """Returns the cost model's microseconds for decode, infinite if it cannot run. `kernel` is a `Kernel`."""
    return float(_native.decode_us(of, Kernel[kernel], on))


def prefill_us(of: Product, kernel: str, on: int | Gpu) -> float:
    return float(_native.prefill_us(of, Kernel[kernel], on))


def plan(of: Product, kernel: str, on: int | Gpu) -> ProductPlan:
    """Returns the kernel that an operator takes for a product."""
    return _native.plan(of, Kernel[kernel], on)


def block_plan(
    up: Product,
    down: Product,
    top_k: int,
    a_format: str,
    on: int | Gpu,
    *,
    bf16: bool = False,
    prefill_alone: bool = False,
) -> BlockPlan:
    """Returns the kernels that `moe` takes. In both products `rows` counts the (token, expert) pairs."""
    return _native.block_plan(up, down, top_k, a_format, on, bf16, prefill_alone)


def decode_warps(
    kp: int, compute_warps: int, *, rows: int = 2048, on: int | Gpu = 132
) -> DecodeConfig | None:
    """Returns the split of `compute_warps` warps that keeps most of them busy for `rows` activation rows.

    Returns None if no split fits into shared memory.
    """
    return _native.decode_warps(rows, kp, compute_warps, on)
