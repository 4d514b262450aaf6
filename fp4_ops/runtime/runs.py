"""Runs of bytes that make up the samples of tensors (samples.py), and their comparison."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from .libraries import function_of, library_path

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
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    for name, arguments, result in (
        ("fp4_runs_read", [pointer, pointer, count, pointer], None),
        ("fp4_runs_differ", [pointer, pointer, count, pointer], ctypes.c_int),
        ("fp4_await", [pointer, count, count], count),
    ):
        function = function_of(loaded, name)
        function.argtypes, function.restype = arguments, result
    return loaded
