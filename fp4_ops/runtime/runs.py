"""Runs of bytes that make up the samples of tensors (samples.py), and their comparison."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from .libraries import library_path

RUN = 64
"""Bytes of one run: a CPU's cache line, or two sectors of a GPU's."""


class Runs(Protocol):
    """Runs as a kernel takes them."""

    device: torch.device
    at: Tensor
    """Addresses, int64."""
    sizes: Tensor
    """Sizes in bytes, int64, at most RUN."""
    held: Tensor
    """Bytes that the runs had, uint8 [runs, RUN]."""
    watches: dict[int, Any]
    """Objects that compare runs on a GPU, by stream."""


class Comparison(Protocol):
    """A comparison of samples with memory, possibly still running."""

    def differs(self) -> bool:
        """Waits for the comparison. Returns True if any byte differs."""


@functools.cache
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library_path()))
    if not hasattr(loaded, "fp4_await"):
        raise ImportError(
            f"fp4_ops: {loaded._name} is older than the Python files beside it. "
            "Build it again: pip install --no-build-isolation -e ."
        )
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    loaded.fp4_runs_read.argtypes = [pointer, pointer, count, pointer]
    loaded.fp4_runs_read.restype = None
    loaded.fp4_runs_differ.argtypes = [pointer, pointer, count, pointer]
    loaded.fp4_await.argtypes = [pointer, count, count]
    loaded.fp4_await.restype = count
    return loaded
