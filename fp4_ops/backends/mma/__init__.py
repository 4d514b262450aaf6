"""GPUs from compute capability 8.0 on: the kernels of `_sm80.so` (csrc/device, csrc/sm80)."""

from __future__ import annotations

from ... import native
from ..base import Backend


def _trusted(device_index: int) -> bool:
    from . import trust

    return trust.mma_kernels(device_index)


MMA = Backend(
    "mma",
    "cuda",
    layouts=("mma_bf16",),
    needs="the native CUDA (compute capability 8.0 or later, FP4_CUDA_ARCHS=all) kernels",
    available=lambda index: native.family(index) == native.MMA,
    trusted=_trusted,
    operators=".launchers.operators",
)
