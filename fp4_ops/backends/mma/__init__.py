"""Backend for GPUs from compute capability 8.0 on: the kernels of `_sm80.so` (csrc/device, csrc/sm80)."""

from __future__ import annotations

from ..base import native_backend


def _trusted(device_index: int) -> bool:
    from . import trust

    return trust.mma_kernels(device_index)


MMA = native_backend("mma", _trusted)
