"""Samples of tensors on a GPU (fp4_ops/samples.py): one kernel for all runs."""

from __future__ import annotations

import ctypes
import itertools
import time

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...runs import RUN, Comparison, Runs

RUNS_A_PROGRAM = 32
SOON = 1000
"""Looks at an answer, some 0.1 us each, after which the host sleeps between them."""


@triton.jit(do_not_specialize=["runs"])
def samples_kernel(
    at_ptr,  # [runs] addresses
    sizes_ptr,  # [runs] bytes of each
    held_ptr,  # [runs, RUN] uint8
    count_ptr,  # [1] int64: programs that have compared; from bit 40 on, those that found a difference
    answer_ptr,  # [1] int64, on the host: what the last program of a launch left in count_ptr
    runs,
    RUN: tl.constexpr,
    COMPARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    run = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = run < runs
    size = tl.load(sizes_ptr + run, mask=inside, other=0)
    base = tl.load(at_ptr + run, mask=inside, other=0)
    byte = tl.arange(0, RUN)
    mask = byte[None, :] < size[:, None]
    address = (base[:, None] + byte[None, :]).to(tl.pointer_type(tl.uint8))
    now = tl.load(address, mask=mask, other=0)
    held = held_ptr + run[:, None] * RUN + byte[None, :]
    if COMPARE:
        differs = (now != tl.load(held, mask=mask, other=0)).to(tl.int64)
        mine = 1 + (tl.max(tl.max(differs, 1), 0) << 40)
        count = tl.atomic_add(count_ptr, mine) + mine
        if (count & 0xFFFFFFFFFF) % tl.num_programs(0) == 0:
            tl.store(answer_ptr, count)
    else:
        tl.store(held, now, mask=mask)


def programs(runs: int) -> int:
    return triton.cdiv(runs, RUNS_A_PROGRAM)


def launch(at: Tensor, sizes: Tensor, held: Tensor, count: Tensor, answer: Tensor, compare: bool) -> None:
    runs = at.numel()
    samples_kernel[(programs(runs),)](
        at, sizes, held, count, answer, runs, RUN=RUN, COMPARE=compare, BLOCK=RUNS_A_PROGRAM
    )


def read(at: Tensor, sizes: Tensor, held: Tensor) -> None:
    with torch.cuda.device(held.device):
        launch(at, sizes, held, held, held, compare=False)


class Watch:
    """Compares the samples on one stream, by a CUDA graph of one kernel: a launch costs the host 5 us.

    The kernel writes its answer to the host's memory, where the host looks for it.
    """

    def __init__(self, samples: Runs) -> None:
        self._runs, self._device = (samples.at, samples.sizes, samples.held), samples.device
        self._programs = programs(samples.at.numel())
        self._numbers = itertools.count(1)  # of launches; threads that share the stream draw different ones
        self._count = torch.zeros(1, dtype=torch.int64, device=samples.device)
        self._answer = torch.zeros(1, dtype=torch.int64, device="cpu").pin_memory()
        self._seen = ctypes.c_int64.from_address(self._answer.data_ptr())
        self._launch()  # compiles the kernel
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream(samples.device)):
            self._graph.capture_begin(capture_error_mode="thread_local")
            self._launch()
            self._graph.capture_end()
        torch.cuda.current_stream().synchronize()
        self._answer.zero_()
        self._count.zero_()

    def _launch(self) -> None:
        launch(*self._runs, self._count, self._answer, compare=True)

    def launch(self) -> int:
        """The number that `differs` is asked with."""
        number = next(self._numbers)
        self._graph.replay()
        return number

    def differs(self, launch: int) -> bool:
        """Waits until as many launches have compared: no answer is older than the question."""
        seen, compared, looks = self._seen, launch * self._programs, 0
        while seen.value & 0xFFFFFFFFFF < compared:
            looks += 1
            if looks < SOON:
                continue
            # The query raises CUDA's errors, after which no answer comes.
            if torch.cuda.current_stream(self._device).query() and seen.value & 0xFFFFFFFFFF < compared:
                raise RuntimeError("fp4: the GPU did not compare the weights with what was packed")
            time.sleep(2e-5)  # other threads go on
        return seen.value >> 40 != 0


class Launched(Comparison):
    """A comparison that the current stream has still to make. Only who asks for the answer waits for it."""

    def __init__(self, samples: Runs) -> None:
        stream = torch._C._cuda_getCurrentRawStream(samples.device.index)
        watch = samples.watches.get(stream)
        if watch is None:
            with torch.cuda.device(samples.device):
                watch = samples.watches[stream] = Watch(samples)
        self._watch, self._launch = watch, watch.launch()

    def differs(self) -> bool:
        return self._watch.differs(self._launch)
