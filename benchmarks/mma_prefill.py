"""Measures 4-bit weights x bf16, fp16 or int8 activations with mma.sync (csrc/sm80), as on GPUs without
wgmma.

    python benchmarks/mma_prefill.py [--library FILE] [--most-shared KB] [--tokens 128,512,2048,8192]
        [--format nvfp4] [--rows int8] [--all-candidates]

The kernels are those of `_sm80.so`, or of `--library`. An H100 runs them if they are built with `nvcc
-gencode arch=compute_80,code=sm_90`. With `--most-shared 99`, launches use at most the shared memory of
sm_86, 89 and 120; with 163, that of sm_80. The script prints microseconds per launch, TFLOP/s, the time to
move the bytes at the rate of a copy, which is measured first, and the time of torch's grouped product with
weights in the rows' type (bf16 for int8 rows). The quantisation of rows to int8 is not timed. Measurements
are bursts of 8 ms after a pause, with four random uniform routings in turn and Gaussian weights.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
from collections.abc import Iterator

import record
import torch
from h200_prefill_w4a8 import gaussian_codes, microseconds, random_routing

from fp4_ops.backends.launchers import library
from fp4_ops.dev import prefill
from fp4_ops.dev.product import NativeWeight, Routing
from fp4_ops.meta.layouts import LAYOUTS

SHAPES = {  # experts, N, K, top-k
    "qwen3-30b gate/up": (128, 1536, 2048, 8),
    "qwen3-30b down": (128, 2048, 768, 8),
    "gpt-oss-20b gate/up": (32, 5760, 2880, 4),
    "gpt-oss-20b down": (32, 2880, 2880, 4),
    "dsv3 gate/up": (32, 4096, 7168, 1),
    "dsv3 down": (32, 7168, 2048, 1),
    "mixtral-8x7b gate/up": (8, 28672, 4096, 2),
    "mixtral-8x7b down": (8, 4096, 14336, 2),
}
BLOCK = {"nvfp4": 16, "mxfp4": 32}
ROWS = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.bfloat16}
"""Kinds of rows, each with the dtype of results."""
ROUTINGS = 4
"""The number of routings that take turns, so that other experts' weights are in L2."""


def random_weight(groups: int, n: int, k: int, block: int) -> NativeWeight:
    """Makes random bytes in the layout, with scales from 2^-4 to 2^3 times the layout's own factor."""
    kp = -(-k // 128) * 128
    layout = LAYOUTS["mma_bf16"]
    scales = torch.randint(6 << 3, 13 << 3, (groups * n * kp // block,), device="cuda").to(torch.uint8)
    factor = torch.rand(groups, device="cuda") + 0.5
    codes = gaussian_codes(groups * n * kp // 2)
    return NativeWeight(codes, scales, factor, None, groups, n, kp, layout, block)


def copy_rate() -> float:
    """Measures the bytes per second that a copy reads and writes."""
    a = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / microseconds(lambda _: b.copy_(a)) * 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--library")
    parser.add_argument("--most-shared", type=int, default=0)
    parser.add_argument("--tokens", default="128,512,2048,8192")
    parser.add_argument("--format", default="nvfp4", choices=BLOCK)
    parser.add_argument("--rows", default="bf16", choices=ROWS)
    parser.add_argument("--all-candidates", action="store_true")
    parser.add_argument("--no-torch", action="store_true")


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    torch.manual_seed(1)
    library.FILE = args.library or "_sm80.so"
    library.library.cache_clear()
    loaded = library.library()
    assert isinstance(loaded, ctypes.CDLL), f"{library.FILE} is not built"
    loaded.fp4_kernel_prefill_most_shared(args.most_shared * 1024)
    kernel, sms = prefill.for_block(args.rows, BLOCK[args.format]), library.multiprocessors(0)
    dtype = ROWS[args.rows]
    names, rate = prefill.candidates(kernel), copy_rate()
    for name, (groups, n, k, top_k) in SHAPES.items():
        w = random_weight(groups, n, k, BLOCK[args.format])
        dense = None if args.no_torch else torch.randn(groups, n, k, device="cuda", dtype=dtype)
        for tokens in map(int, args.tokens.split(",")):
            m = tokens * top_k
            routings = [random_routing(tokens, groups, top_k) for _ in range(ROUTINGS)]
            x, x_scale = torch.randn(m, k, device="cuda", dtype=dtype), None
            taken = x
            if args.rows == "int8":
                taken = torch.randint(-127, 128, (m, w.kp), device="cuda", dtype=torch.int8)
                x_scale = torch.ones(w.kp // 128, m, device="cuda")
            out = torch.empty(m, n, dtype=dtype, device="cuda")
            hit = sum((r.diff(prepend=r.new_zeros(1)) > 0).sum().item() for r in routings) / ROUTINGS
            weight_bytes = hit * n * w.kp * (0.5 + 1 / BLOCK[args.format])

            def launch(config: int, i: int) -> None:
                route = routings[i % ROUTINGS]  # noqa: B023
                prefill.run(taken, x_scale, w, route, Routing.OFFS, m, out, config=config)  # noqa: B023

            def theirs(i: int) -> None:
                torch._grouped_mm(x, dense.transpose(-2, -1), routings[i % ROUTINGS])  # noqa: B023

            choice = prefill.choose(Routing.OFFS, groups, m, n, w.kp, sms, kernel)
            peer = None if dense is None else microseconds(theirs, repeats=3)
            configs = range(len(names)) if args.all_candidates else [choice.candidate]
            for config in configs:
                if prefill.choose(Routing.OFFS, groups, m, n, w.kp, sms, kernel, config).candidate < 0:
                    continue  # it needs more shared memory
                us = microseconds(functools.partial(launch, config), repeats=3)
                yield {
                    "table": "mma_prefill", "shape": name, "experts": groups, "n": n, "k": k,
                    "tokens": tokens, "rows": args.rows,
                    "us": us, "tflop_per_s": 2e-6 * m * n * k / us,
                    "bytes_us": (weight_bytes + 2 * m * (k + n)) / rate * 1e6, "torch_us": peer,
                    "model_us": 1e6 * choice.seconds if config == choice.candidate else None,
                    "candidate": names[config], "chosen": config == choice.candidate,
                }  # fmt: skip


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
