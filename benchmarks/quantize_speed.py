"""Measures how long it takes to quantise the experts of a large model: Qwen3-30B-A3B, 48 layers of 128
experts.

    python benchmarks/quantize_speed.py [--layers 48]

The weights are random bf16 numbers, made layer by layer on the device; this is not timed. The script runs the
methods without calibration; the goal is one minute for each on one H200. Extra memory is the peak memory of
`quantize_weight` without its result.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import record
import torch

from fp4_ops.meta.formats import FORMATS
from fp4_ops.quantization import METHODS, quantize_weight
from fp4_ops.quantization.methods import Method

SHAPES = ((128, 1536, 2048), (128, 2048, 768))  # gate_up and down


def measure(method: Method, format: str, layers: int, device: torch.device) -> tuple[float, int]:
    """Returns (seconds, extra bytes)."""
    seconds, extra = 0.0, 0
    on_gpu = device.type == "cuda"
    for _ in range(layers):
        for shape in SHAPES:
            w = torch.randn(shape, dtype=torch.bfloat16, device=device)
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            result = quantize_weight(w, format, method.name)
            if on_gpu:
                torch.cuda.synchronize()
            seconds += time.perf_counter() - start
            if on_gpu:
                kept = sum(t.nbytes for t in result if t is not None)
                extra = max(extra, torch.cuda.max_memory_allocated() - before - kept)
            del w, result
    return seconds, extra


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    device = torch.device(args.device)
    count = args.layers * sum(e * n * k for e, n, k in SHAPES)
    for format in FORMATS:
        for method in METHODS.values():
            if method.calibration != "none" or format not in method.formats:
                continue
            measure(method, format, 1, device)  # warms up the allocator
            seconds, extra = measure(method, format, args.layers, device)
            yield {
                "table": "method", "layers": args.layers, "g_weights": count / 1e9, "format": format,
                "method": method.name, "seconds": seconds, "g_weights_per_s": count / seconds / 1e9,
                "extra_gib": extra / 2**30 if device.type == "cuda" else None,
            }  # fmt: skip


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
