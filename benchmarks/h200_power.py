"""Measures clock, power and time of the prefill kernels at 8192 tokens, in bursts and under sustained load.

    python benchmarks/h200_power.py

A burst is one graph of eight launches after a pause of 0.3 s. Sustained load is the second half of 1.3 s of
such graphs, with the clock and the power that nvidia-smi shows in that time. torch's dense products of 8192^3
are measured, too: they show the rate that the chip reaches at that power. `to_half` reorders 16-bit rows
inside every W4A16 product.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import record
import torch
from h200_hopper import MODELS, ROUTINGS, captured, random_weight, routing

from fp4_ops.backends.launchers import rows as row_kernels
from fp4_ops.dev import prefill
from fp4_ops.dev.product import Routing

TOKENS = 8192
QUERY = "clocks.sm,power.draw.instant,clocks_event_reasons.sw_power_cap"
SHAPES = (("qwen3-30b", "gate/up"), ("qwen3-30b", "down"), ("gpt-oss-120b", "down"), ("mixtral-8x7b", "down"))


class Monitor(threading.Thread):
    """Collects the lines that nvidia-smi prints, with the time of each."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[float, str]] = []
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", "-lms", "40"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def run(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.time(), line.strip()))

    def between(self, begin: float, end: float) -> list[list[str]]:
        return [line.split(", ") for at, line in self.lines if begin < at < end]


def timed(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Measures microseconds per launch."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / ROUTINGS / replays


def measure(name: str, launch: Callable[[int], object]) -> record.Row:
    graph = captured(launch)
    burst = []
    for _ in range(6):
        time.sleep(0.3)
        burst.append(timed(graph, 1))
    monitor = Monitor()
    monitor.start()
    time.sleep(0.4)
    begin, times = time.time(), []
    while time.time() - begin < 1.3:
        times.append(timed(graph, 4))
    seen = monitor.between(begin + 0.5, begin + 1.25)
    monitor.process.kill()
    sustained = statistics.median(times[len(times) // 2 :])
    clock, power = (statistics.median(float(line[i]) for line in seen) for i in range(2))
    return {
        "table": "power", "kernel": name, "tokens": TOKENS, "burst_us": statistics.median(burst),
        "sustained_us": sustained, "mhz": clock, "watt": power, "power_cap": seen[-1][2],
    }  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    n = 8192
    dense = torch.randn(n, n, device="cuda").bfloat16()
    fp8, one = dense.to(torch.float8_e4m3fn), torch.ones((), device="cuda")
    yield measure("torch bf16 8192^3", lambda i: dense @ dense)
    yield measure(
        "torch fp8 8192^3",
        lambda i: torch._scaled_mm(
            fp8, fp8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        ),
    )
    for name, product in SHAPES:
        model = next(m for m in MODELS if m.name == name)
        width, k = (2 * model.inter, model.hidden) if product == "gate/up" else (model.hidden, model.inter)
        w = random_weight(model.experts, width, k)
        ids = [routing(model, TOKENS).flatten() for _ in range(ROUTINGS)]
        offs = [torch.bincount(i, minlength=model.experts).cumsum(0).int() for i in ids]
        m = ids[0].numel()
        x = torch.randn(m, k, device="cuda").bfloat16()
        out = torch.empty(m, width, device="cuda", dtype=torch.bfloat16)
        for label, ordered in (("fp8", row_kernels.quantize_fp8(x)), ("16 bits", row_kernels.to_half(x))):
            yield measure(
                f"{name} {product} {label}",
                lambda i: prefill.run(*ordered, w, offs[i], Routing.OFFS, m, out),  # noqa: B023
            )
        yield measure(f"{name} {product} to_half", lambda i: row_kernels.to_half(x))  # noqa: B023


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
