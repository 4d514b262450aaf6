"""Runs of bytes, of which samples of tensors are made (samples.py), and comparisons of them."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from .library_files import library_path

RUN = 64
"""Bytes of one run: a CPU's cache line, two sectors of a GPU's."""


class Runs(Protocol):
    """What a kernel is told of them."""

    device: torch.device
    at: Tensor
    """int64 addresses."""
    sizes: Tensor
    """int64 bytes, at most RUN."""
    held: Tensor
    """uint8 [runs, RUN]: what was there."""
    watches: dict[int, Any]
    """On a GPU: what compares them, for each stream."""


class Comparison(Protocol):
    """Of samples with what is there."""

    def differs(self) -> bool:
        """Waits for the answer."""


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
