"""Compares samples of tensors on a GPU (fp4_ops/backends/samples.py), with one kernel for all runs."""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import time
import weakref

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...meta.torch_internals import current_raw_stream
from ...runtime.runs import RUN, Runs, library

RUNS_A_PROGRAM = 32
COMPARED = (1 << 40) - 1
"""Bits of an answer that count programs. The bits above count differences."""
NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING."""
AT_ONCE, SOON = 200_000, 2_000_000
"""Nanoseconds for which the host polls for an answer without a break, and nanoseconds after which it sleeps
between polls.
"""


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


@functools.cache
def driver() -> ctypes.PyDLL:
    """Loads the CUDA driver. Calls keep the interpreter's lock (they are short), so no two threads launch one
    graph at once.
    """
    return ctypes.PyDLL("libcuda.so.1")


def check(error: int) -> None:
    if error != 0:
        raise RuntimeError(f"fp4: the weights cannot be compared with their packed bytes: CUDA error {error}")


@functools.cache
def recording(device: torch.device) -> torch.cuda.Stream:
    """Returns a stream for recording, in which nothing ever runs. torch's own streams may be used by other
    code."""
    made = ctypes.c_void_p()
    check(driver().cuStreamCreate(ctypes.byref(made), NON_BLOCKING))
    return torch.cuda.ExternalStream(made.value, device)


class Watch:
    """Compares the samples with the tensors' current bytes, at a point in the work of one stream.

    `begin` launches the comparison, a CUDA graph of one kernel, with one call of the driver. A step has no
    other cost on the host. The cost matters, because steps of a small model wait for the host. The kernel
    writes its answer to host memory. The host looks for it there while later work runs.
    """

    def __init__(self, samples: Runs) -> None:
        self._runs, self._device = (samples.at, samples.sizes, samples.held), samples.device
        self._programs = programs(samples.at.numel())
        self._numbers = itertools.count(1)  # numbers of launches; threads draw different ones
        self._count = torch.zeros(1, dtype=torch.int64, device=samples.device)
        self._answer = torch.zeros(1, dtype=torch.int64, device="cpu").pin_memory()
        self._await = functools.partial(library().fp4_await, ctypes.c_void_p(self._answer.data_ptr()))
        self._stream = torch.cuda.current_stream()
        for t in self._runs:
            t.record_stream(self._stream)
        self._launch()  # compiles the kernel
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(recording(samples.device)):
            self._graph.capture_begin(capture_error_mode="thread_local")
            self._launch()
            self._graph.capture_end()
        self._stream.synchronize()
        self._answer.zero_()
        self._count.zero_()
        self._compare = functools.partial(
            driver().cuGraphLaunch, self._instantiated(), ctypes.c_void_p(self._stream.cuda_stream)
        )

    def _instantiated(self) -> ctypes.c_void_p:
        """Instantiates the graph for a launch by the driver, which is ten times as fast as torch's replay."""
        graph = ctypes.c_void_p()
        captured = ctypes.c_void_p(self._graph.raw_cuda_graph())
        check(driver().cuGraphInstantiateWithFlags(ctypes.byref(graph), captured, ctypes.c_ulonglong(0)))
        weakref.finalize(self, driver().cuGraphExecDestroy, graph).atexit = False
        return graph

    def _launch(self) -> None:
        launch(*self._runs, self._count, self._answer, compare=True)

    def begin(self) -> Begun:
        """Launches a comparison. It runs after all work that is in the stream now."""
        # After `number` launches, at least one was made after this line.
        number = next(self._numbers)
        if self._compare() != 0:
            # This thread may have no context, or the context of another GPU.
            with torch.cuda.device(self._device):
                torch.cuda.current_stream().query()
                check(self._compare())
        return Begun(self, number)

    def answered(self, launches: int) -> bool:
        """True if any byte differs.

        Waits until `launches` comparisons are done, so the answer is no older.
        """
        compared, end = launches * self._programs, time.monotonic_ns() + SOON
        while (answer := self._await(compared, AT_ONCE)) & COMPARED < compared:
            # After a CUDA error no answer comes. The query raises such an error.
            if self._stream.query() and (answer := self._await(compared, 0)) & COMPARED < compared:
                raise RuntimeError("fp4: the GPU did not compare the weights with their packed bytes")
            if time.monotonic_ns() > end:
                time.sleep(5e-5)
        return answer > COMPARED


class Begun:
    """A comparison that was launched and may not be finished."""

    __slots__ = ("_number", "_watch")

    def __init__(self, watch: Watch, number: int) -> None:
        self._watch, self._number = watch, number

    def differs(self) -> bool:
        return self._watch.answered(self._number)


_making = threading.Lock()


def begin(samples: Runs) -> Begun:
    """Starts a comparison in the current stream of the samples' device."""
    stream = current_raw_stream(samples.device.index)
    watch = samples.watches.get(stream)
    if watch is None:
        with _making, torch.cuda.device(samples.device):
            watch = samples.watches.get(stream) or samples.watches.setdefault(stream, Watch(samples))
    return watch.begin()  # type: ignore[no-any-return]
