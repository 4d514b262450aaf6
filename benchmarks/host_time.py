"""Measures the time of an eager operator call on host and GPU, beside torch's own operators in one process.

    python benchmarks/host_time.py [--tokens 1,8,64] [--calls 200]

The shapes are those of Qwen3-30B-A3B (128 experts, hidden 2048, intermediate 768, 8 experts per token) in
nvfp4, with layouts mma_bf16 (`moe` with a_format none) and sm90 (`auto`). host_us: calls are launched without
waiting; the median time of such runs, divided by the number of calls. gpu_us: the same calls, replayed in a
CUDA graph. `ratio` is the host's time divided by that of F.linear with the same tokens and mode. The rows
belong to `table: host`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import record
import torch
import torch.nn.functional as F

import fp4_ops  # noqa: F401  loads the operators

EXPERTS, HIDDEN, INTER, TOP_K = 128, 2048, 768, 8
MODES = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad}
RUNS = 15


def weight(groups: int, n: int, k: int, layout: str) -> tuple[torch.Tensor, ...]:
    values = torch.randn(groups, n, k, device="cuda") / k**0.5
    return torch.ops.fp4.prepack(*torch.ops.fp4.quantize(values, "nvfp4"), "nvfp4", layout)


def host_us(call: Callable[[], object], calls: int) -> float:
    """Measures the host's time for a call.

    Runs are short, so the host never waits for a full launch queue.
    """
    call()
    times = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls)
        torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def gpu_us(call: Callable[[], object], calls: int = 50) -> float:
    """Measures the GPU's time for a call: a graph of several calls runs behind another graph."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()
    times = []
    for _ in range(RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


class Calls:
    """The operators with their weights, by name."""

    def __init__(self) -> None:
        shapes = {"up": (2 * INTER, HIDDEN), "down": (HIDDEN, INTER)}
        self.linear = torch.randn(2 * INTER, HIDDEN, device="cuda").bfloat16()
        self.experts = torch.randn(EXPERTS, 2 * INTER, HIDDEN, device="cuda").bfloat16()
        self.weights = {
            (name, layout): weight(EXPERTS, *shape, layout)
            for name, shape in shapes.items()
            for layout in ("sm90", "mma_bf16")
        }

    def of(self, tokens: int) -> dict[str, Callable[[], object]]:
        op = torch.ops.fp4
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        ids = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K).indices
        scores = torch.rand(tokens, TOP_K, device="cuda")
        flat = ids.flatten().sort().values
        rows = x.repeat_interleave(TOP_K, 0)
        offs = torch.bincount(flat, minlength=EXPERTS).cumsum(0).int()
        up, options = self.weights["up", "mma_bf16"], {"format": "nvfp4", "layout": "mma_bf16"}
        one = [t[0] for t in up]
        stacked = self.experts.mT

        def block(layout: str, a_format: str) -> object:
            both = *self.weights["up", layout], *self.weights["down", layout]
            more = {"a_format": a_format, "format": "nvfp4", "layout": layout}
            return op.moe(x, ids, scores, *both, activation="silu_interleaved", **more)

        return {
            "F.linear": lambda: F.linear(x, self.linear),
            "torch._grouped_mm": lambda: torch._grouped_mm(rows, stacked, offs=offs),
            "mm": lambda: op.mm(x, *one, **options),
            "grouped_mm": lambda: op.grouped_mm(rows, *up, offs, **options),
            "indexed_mm": lambda: op.indexed_mm(rows, *up, flat, **options),
            "moe none": lambda: block("mma_bf16", "none"),
            "moe auto": lambda: block("sm90", "auto"),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", default="1,8,64")
    parser.add_argument("--calls", type=int, default=200)


def rows(given: argparse.Namespace) -> Iterator[record.Row]:
    calls = Calls()
    for tokens in map(int, given.tokens.split(",")):
        every = calls.of(tokens)
        for mode, enter in MODES.items():
            with enter():
                linear = 0.0
                for name, call in every.items():
                    us = host_us(call, given.calls)
                    linear = linear or us
                    yield {
                        "table": "host", "operator": name, "tokens": tokens, "mode": mode, "host_us": us,
                        "gpu_us": gpu_us(call), "ratio": us / linear,
                    }  # fmt: skip


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
