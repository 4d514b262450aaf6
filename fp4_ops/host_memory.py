"""Manages the host memory of weights on a CPU: huge pages, and blocks that are given back to the system."""

from __future__ import annotations

import ctypes

from torch import Tensor

_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14
"""Linux's number for this advice."""


def use_huge_pages(t: Tensor) -> Tensor:
    """Ask for huge pages under a new tensor of weights, before anything is written to it; return the tensor.

    A product of few tokens reads its weights once, and page walks slow that down. The system may refuse.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if type(t) is Tensor and t.device.type == "cpu" and madvise is not None:
        begin = -(-t.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
        size = (t.data_ptr() + t.nbytes) // _HUGE_PAGE * _HUGE_PAGE - begin
        if size > 0:
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _MADV_HUGEPAGE)
    return t


def return_freed_memory() -> None:
    """Give freed blocks back to the system. Otherwise glibc keeps blocks below its mmap threshold, up to 32
    MiB each."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
