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
    """A comparison that the current stream has still to make. Only who asks for the answer waits for it."""

    def __init__(self, samples: Runs) -> None:
        with torch.cuda.device(samples.device):
            found, on_host = samples.found, samples.on_host
            if found is None or on_host is None:
                found = torch.zeros(1, dtype=torch.int32, device=samples.device)
                on_host = torch.zeros(1, dtype=torch.int32, device="cpu").pin_memory()
                samples.found, samples.on_host = found, on_host
            launch(samples.at, samples.sizes, samples.held, found, compare=True)
            on_host.copy_(found, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
        self._on_host = on_host

    def differs(self) -> bool:
        self._done.synchronize()
        return bool(self._on_host.item())
