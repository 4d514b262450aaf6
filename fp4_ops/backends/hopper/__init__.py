"""GPUs of compute capability 9.0: the kernels of `_sm90.so` (csrc/device, csrc/sm90)."""

from __future__ import annotations

from ... import native
from ..base import Backend

HOPPER = Backend(
    "hopper",
    "cuda",
    layouts=("mma_bf16", "sm90", "sm90_int4"),
    needs="the native CUDA (compute capability 9.0, FP4_CUDA_ARCHS=all) kernels",
    available=lambda index: native.family(index) == native.HOPPER,
    operators=".launchers.operators",
)
