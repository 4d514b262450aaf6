"""Samples of tensors on a GPU (fp4_ops/samples.py): one kernel for all runs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...runs import RUN, Comparison, Runs

RUNS_A_PROGRAM = 32


@triton.jit(do_not_specialize=["runs"])
def samples_kernel(
    at_ptr,  # [runs] addresses
    sizes_ptr,  # [runs] bytes of each
    held_ptr,  # [runs, RUN] uint8
    found_ptr,  # [1] int32: set to 1 if any run differs; not touched otherwise
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
        differs = (now != tl.load(held, mask=mask, other=0)).to(tl.int32)
        if tl.max(tl.max(differs, 1), 0) > 0:
            tl.store(found_ptr, 1)
    else:
        tl.store(held, now, mask=mask)


def launch(at: Tensor, sizes: Tensor, held: Tensor, found: Tensor, compare: bool) -> None:
    runs = at.numel()
    grid = (triton.cdiv(runs, RUNS_A_PROGRAM),)
    samples_kernel[grid](at, sizes, held, found, runs, RUN=RUN, COMPARE=compare, BLOCK=RUNS_A_PROGRAM)


def read(at: Tensor, sizes: Tensor, held: Tensor) -> None:
    with torch.cuda.device(held.device):
        launch(at, sizes, held, held, compare=False)


class Launched(Comparison):
    """With what tensors hold when the work is done that the current stream was given until now.

    The kernel is launched when the answer is asked for, on a stream of its own: it takes no time of the
    current stream's, which may be given more work meanwhile.
    """

    def __init__(self, samples: Runs) -> None:
        self._samples = samples
        with torch.cuda.device(samples.device):
            if samples.side is None:
                samples.side = Side(samples.device)
            samples.side.before.record()

    def differs(self) -> bool:
        samples, side = self._samples, self._samples.side
        assert side is not None
        with torch.cuda.device(samples.device), torch.cuda.stream(side.stream):
            side.stream.wait_event(side.before)
            launch(samples.at, samples.sizes, samples.held, side.found, compare=True)
            side.after.record()
        side.after.synchronize()
        return bool(side.found.item())


class Side:
    """Where samples are compared: a stream, its events, and the answer, in memory of the host's."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.before, self.after = torch.cuda.Event(), torch.cuda.Event()
        self.found = torch.zeros(1, dtype=torch.int32, device="cpu").pin_memory()
