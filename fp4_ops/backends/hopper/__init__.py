"""Backend for GPUs of compute capability 9.0: the kernels of `_sm90.so` (csrc/device, csrc/sm90)."""

from __future__ import annotations

from ..base import native_backend

HOPPER = native_backend("hopper")
