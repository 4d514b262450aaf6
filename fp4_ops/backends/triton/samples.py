"""Samples of tensors on a GPU (fp4_ops/samples.py): one kernel for all runs."""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...runs import RUN, Runs, library

RUNS_A_PROGRAM = 32
COMPARED = (1 << 40) - 1
"""The bits of an answer that count programs; those above count differences."""
NON_BLOCKING, HIGHEST = 1, -100
"""CU_STREAM_NON_BLOCKING, and a priority beyond all, for which the driver takes the highest that there is."""
AT_ONCE, SOON = 200_000, 2_000_000
"""Nanoseconds that the host looks for an answer without a break, and those after which it sleeps."""


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


class Driver(ctypes.Structure):
    """`Watch` of csrc/cpu/samples.cpp."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("record", "wait", "launch", "event", "beside", "graph")]


@functools.cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def held_library() -> ctypes.PyDLL:
    """Of short calls: they keep the interpreter's lock, so that no two threads launch one graph at once."""
    return ctypes.PyDLL(library()._name)


def check(error: int) -> None:
    if error != 0:
        raise RuntimeError(f"fp4: weights are not compared with what was packed: CUDA error {error}")


@functools.cache
def beside(device: torch.device, stream: int | None) -> torch.cuda.Stream:
    """A stream in which nothing else ever waits, as it might in one of torch's, which others use as well.

    That of a stream of the user's, or, for None, the one in which `Watch` records its graphs.
    """
    made = ctypes.c_void_p()
    check(driver().cuStreamCreateWithPriority(ctypes.byref(made), NON_BLOCKING, HIGHEST))
    return torch.cuda.ExternalStream(made.value, device)


class Watch:
    """Compares the samples with what is there when one stream gets to a point of its work.

    `begin` says which point. `differs` launches the comparison, a CUDA graph of one kernel, on a stream
    beside: what was launched on the stream meanwhile neither waits for it nor delays it. The kernel writes
    its answer to the host's memory, where the host looks for it.

    Threads may share the stream. The point of the last `begin` is then that of all, and no earlier than any.
    """

    def __init__(self, samples: Runs) -> None:
        self._runs, self._device = (samples.at, samples.sizes, samples.held), samples.device
        self._programs = programs(samples.at.numel())
        self._numbers = itertools.count(1)  # of launches; threads draw different ones
        self._count = torch.zeros(1, dtype=torch.int64, device=samples.device)
        self._answer = torch.zeros(1, dtype=torch.int64, device="cpu").pin_memory()
        self._await = functools.partial(library().fp4_await, ctypes.c_void_p(self._answer.data_ptr()))
        stream, self._event = torch.cuda.current_stream(), torch.cuda.Event()
        self._stream = ctypes.c_void_p(stream.cuda_stream)
        self._beside = beside(samples.device, stream.cuda_stream)
        for t in (*self._runs, self._count):
            t.record_stream(self._beside)
        self._launch()  # compiles the kernel
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(beside(samples.device, None)):
            self._graph.capture_begin(capture_error_mode="thread_local")
            self._launch()
            self._graph.capture_end()
        self._event.record(stream)  # makes it
        stream.synchronize()
        self._answer.zero_()
        self._count.zero_()
        self._driver = self._driven()
        at = ctypes.c_void_p(ctypes.addressof(self._driver))
        self._point = functools.partial(held_library().fp4_watch_point, at, self._stream)
        self._compare = functools.partial(held_library().fp4_watch_compare, at)

    def _driven(self) -> Driver:
        """What the driver is to be called with, without torch's way to it, which takes ten times as long."""
        graph = ctypes.c_void_p()
        captured = ctypes.c_void_p(self._graph.raw_cuda_graph())
        calls = [driver().cuEventRecord, driver().cuStreamWaitEvent, driver().cuGraphLaunch]
        check(driver().cuGraphInstantiateWithFlags(ctypes.byref(graph), captured, ctypes.c_ulonglong(0)))
        weakref.finalize(self, driver().cuGraphExecDestroy, graph).atexit = False
        pointers = [ctypes.cast(call, ctypes.c_void_p).value for call in calls]
        return Driver(*pointers, self._event.cuda_event, self._beside.cuda_stream, graph.value)

    def _launch(self) -> None:
        launch(*self._runs, self._count, self._answer, compare=True)

    def _once_more(self, call: Callable[[], int]) -> None:
        """A call of the driver's that failed: with a context, if this thread had none, or another GPU's."""
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().query()
            check(call())

    def begin(self) -> None:
        """What the stream was given until now comes before the comparison."""
        if self._point() != 0:
            self._once_more(self._point)

    def differs(self) -> bool:
        """Whether anything does, at the point of `begin` or later. Waits for the answer."""
        number = next(self._numbers)  # after `begin`: of as many launches one waits for this point at least
        if self._compare() != 0:
            self._once_more(self._compare)
        return self._answered(number)

    def _answered(self, launches: int) -> bool:
        """Waits until as many have compared: no answer is older than the question."""
        compared, end = launches * self._programs, time.monotonic_ns() + SOON
        while (answer := self._await(compared, AT_ONCE)) & COMPARED < compared:
            # The query raises CUDA's errors, after which no answer comes.
            if self._beside.query() and (answer := self._await(compared, 0)) & COMPARED < compared:
                raise RuntimeError("fp4: the GPU did not compare the weights with what was packed")
            if time.monotonic_ns() > end:
                time.sleep(5e-5)
        return answer > COMPARED


_making = threading.Lock()


def begin(samples: Runs) -> Watch:
    """Of the current stream of the samples' device."""
    stream = torch._C._cuda_getCurrentRawStream(samples.device.index)
    watch = samples.watches.get(stream)
    if watch is None:
        with _making, torch.cuda.device(samples.device):
            watch = samples.watches.get(stream) or samples.watches.setdefault(stream, Watch(samples))
    watch.begin()
    return watch  # type: ignore[no-any-return]
