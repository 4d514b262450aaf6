"""Takes samples of tensors: a few short runs of bytes of each matrix, to compare with the memory later.

A kernel or a library may write to a tensor without a new version (a fused optimizer, a collective, `p.data +=
d`). To read the whole tensor again would cost more than 4 bits save. Samples notice a change of many values,
and a CPU compares one run in nanoseconds. They notice every change of the bytes that they hold, and no other
change.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..runtime.runs import RUN, Comparison, library

LEAST_RUNS, LEAST_RUNS_OF_A_STACK = 2, 8
"""Least number of runs of a matrix [N, K] and of a stack [E, N, K]. A stack has one run for every four
matrices."""


class Samples:
    """Copies of some runs of bytes of tensors on one device."""

    def __init__(self, device: torch.device, at: Tensor, sizes: Tensor, held: Tensor | None = None) -> None:
        self.device, self.at, self.sizes = device, at, sizes
        self.watches: dict[int, Any] = {}  # one for each stream of the GPU (backends/triton/samples.py)
        self._count = at.numel()
        whole = device.type == "cpu" and bool((sizes == RUN).all())
        self._addresses = at.data_ptr(), None if whole else sizes.data_ptr()
        self.held = held if held is not None else self.read()
        if device.type == "cpu":
            arguments = (*map(ctypes.c_void_p, self._addresses), ctypes.c_int64(self._count))
            self._differs = functools.partial(
                library().fp4_runs_differ, *arguments, ctypes.c_void_p(self.held.data_ptr())
            )

    @staticmethod
    def of(tensors: Iterable[Tensor]) -> list[Samples]:
        """Takes samples of plain tensors (no subclasses), one object for each device.

        The tensors must still exist when samples are compared.
        """
        runs: dict[torch.device, list[tuple[int, int]]] = {}
        for t in tensors:
            runs.setdefault(t.device, []).extend(_runs(t))
        made = []
        for device, found in runs.items():
            if found and device.type in ("cpu", "cuda"):
                at, sizes = torch.tensor(found, dtype=torch.int64, device="cpu").t().contiguous().to(device)
                made.append(Samples(device, at, sizes))
        return made

    @staticmethod
    def joined(parts: Iterable[Samples]) -> list[Samples]:
        """Joins the samples of each device, so that one call compares them."""
        groups: dict[torch.device, list[Samples]] = {}
        for p in parts:
            groups.setdefault(p.device, []).append(p)
        return [
            Samples(
                device, *(torch.cat([getattr(p, name) for p in group]) for name in ("at", "sizes", "held"))
            )
            for device, group in groups.items()
        ]

    def read(self) -> Tensor:
        """Reads the bytes of each run. On a CPU this is a hash, which is less to compare."""
        if self.device.type == "cuda":
            held = torch.zeros(self._count, RUN, dtype=torch.uint8, device=self.device)
            _on_gpu().read(self.at, self.sizes, held)
        else:
            held = torch.zeros(self._count, dtype=torch.int64, device="cpu")
            library().fp4_runs_read(*self._addresses, self._count, held.data_ptr())
        return held

    def differs(self) -> bool:
        """True if any run holds other bytes now. On CUDA the host waits for the current stream.

        While a CUDA graph is captured nothing can be compared, and the result is False.
        """
        if self.device.type == "cpu":
            return bool(self._differs())
        return not torch.cuda.is_current_stream_capturing() and self.begin().differs()

    def begin(self) -> Comparison:
        """Starts a comparison in the GPU's current stream. A CPU compares when the result is asked for."""
        return self if self.device.type == "cpu" else _on_gpu().begin(self)


@functools.cache
def _on_gpu() -> Any:
    """Returns the module that compares on a GPU. It needs Triton."""
    from .triton import samples

    return samples


def _runs(t: Tensor) -> list[tuple[int, int]]:
    """Returns (address, bytes) of each run of a tensor."""
    if t.numel() == 0:
        return []
    matrices = math.prod(t.shape[:-2])
    count = max(matrices // 4, LEAST_RUNS_OF_A_STACK) if matrices > 1 else LEAST_RUNS
    if t.dim() == 1:  # one vector may hold values of all experts
        count += min(t.numel() >> 14, LEAST_RUNS_OF_A_STACK) + (t.numel() >> 22)
    first, item = t.data_ptr(), t.element_size()
    if _is_dense(t):
        return [(first + at, size) for at, size in _spread(t.numel() * item, count)]
    # Rows or elements are not adjacent: take one run in each of some of them.
    row = t.shape[-1] if t.stride(-1) == 1 else 1
    shape, strides = (t.shape[:-1], t.stride()[:-1]) if row > 1 else (t.shape, t.stride())
    runs = []
    for chosen in _some(math.prod(shape), count):
        at, rest = 0, chosen
        for size, stride in zip(reversed(shape), reversed(strides)):
            rest, index = divmod(rest, size)
            at += index * stride
        start = _hash(chosen) % (max(row * item - RUN, 0) // 4 + 1) * 4
        runs.append((first + at * item + start, min(RUN, row * item)))
    return runs


def _is_dense(t: Tensor) -> bool:
    """True if the elements fill one piece of memory, in any order."""
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


@functools.lru_cache(256)
def _spread(total: int, count: int) -> tuple[tuple[int, int], ...]:
    """Returns (start, bytes) of `count` runs within `total` bytes.

    If `total` is small, they cover all of it.
    """
    if total <= count * RUN:
        return tuple((at, min(RUN, total - at)) for at in range(0, total, RUN))
    return tuple((at * 16, RUN) for at in _some((total - RUN) // 16 + 1, count))


def _some(total: int, count: int) -> list[int]:
    """Returns `count` numbers below `total`, or all: one in each of `count` equal shares.

    A hash chooses the place within a share. At equal distances they could all lie in one column of a matrix.
    """
    if total <= count:
        return list(range(total))
    ends = [total * i // count for i in range(count + 1)]
    return [begin + _hash(i) % (end - begin) for i, (begin, end) in enumerate(itertools.pairwise(ends))]


def _hash(i: int) -> int:
    return ((i + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) >> 24
