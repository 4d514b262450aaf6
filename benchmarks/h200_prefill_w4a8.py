"""Measures csrc/sm90/prefill_w4a8.cu alone on one H200: NVFP4 weights x FP8 activations, with many rows per
expert.

    python benchmarks/h200_prefill_w4a8.py [--tokens 512,2048,8192] [--all-candidates]

The script prints microseconds per launch, the floor max(bytes / 4.3 TB/s, flops / 1450 TFLOP/s), and the
better time of vLLM's CUTLASS int4 x fp8 and Humming's mxfp4 x fp8, measured on another H200 of the same kind.
Times are medians of replays of a CUDA graph, each after a pause, with four random uniform routings in turn
and Gaussian weights. Then it measures one matrix of some shapes (dense `mm`), and torch's fp8 product of the
same sizes with a scale for each row.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Iterator

import record
import torch

from fp4_ops.dev import prefill
from fp4_ops.dev.product import NativeWeight, Routing

SHAPES = {  # experts, N, K, top-k; best peer at 512, 2048, 8192 tokens
    "qwen3-30b gate/up": (128, 1536, 2048, 8, (73.4, 148, 399)),
    "qwen3-30b down": (128, 2048, 768, 8, (55.0, 98.4, 284)),
    "gpt-oss-120b gate/up": (128, 5760, 2880, 4, (307, 415, 1231)),
    "gpt-oss-120b down": (128, 2880, 2880, 4, (166, 225, 642)),
    "dsv3 gate/up": (32, 4096, 7168, 1, (132, 178, 460)),
    "dsv3 down": (32, 7168, 2048, 1, (75.4, 105, 278)),
    "mixtral-8x7b gate/up": (8, 28672, 4096, 2, (327, 868, 2848)),
    "mixtral-8x7b down": (8, 4096, 14336, 2, (142, 385, 1319)),
}
PEER_TOKENS = (512, 2048, 8192)
ROUTINGS = 4


def gaussian_codes(count: int) -> torch.Tensor:
    """Returns packed bytes whose codes have the frequencies of a Gaussian weight. Their order does not
    matter."""
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device="cuda")
    packed = torch.empty(count, dtype=torch.uint8, device="cuda")
    for part in packed.split(1 << 26):
        nibbles = []
        for _ in range(2):
            magnitude = torch.bucketize(torch.randn(part.numel(), device="cuda").mul_(2.6).abs_(), edges)
            sign = torch.randint(0, 2, (part.numel(),), device="cuda") << 3
            nibbles.append((magnitude | sign).to(torch.uint8))
        part.copy_(nibbles[0] | nibbles[1] << 4)
    return packed


def random_weight(groups: int, n: int, k: int) -> NativeWeight:
    kp = -(-k // 128) * 128
    scales = torch.randint(80, 127, (groups * n * kp // 16,), device="cuda").to(torch.uint8)
    mantissa = scales & 7
    scales |= ((mantissa == 0) | (mantissa == 7)).to(torch.uint8) << 7
    codes = gaussian_codes(groups * n * kp // 2)
    return NativeWeight(codes, scales, torch.rand(groups, device="cuda") + 0.5, None, groups, n, kp)


def random_routing(tokens: int, groups: int, top_k: int) -> torch.Tensor:
    ids = torch.rand(tokens, groups, device="cuda").topk(top_k, 1).indices.flatten()
    return torch.bincount(ids, minlength=groups).cumsum(0).to(torch.int32)


def microseconds(launch, burst_ms: float = 8, repeats: int = 7) -> float:
    """Measures bursts of about `burst_ms`, each after a pause, because a power limit slows sustained runs."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    launch(0)
    start.record()
    launch(1)
    end.record()
    torch.cuda.synchronize()
    count = max(4, min(100, int(burst_ms / start.elapsed_time(end))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            launch(i)
    graph.replay()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        time.sleep(0.04)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / count * 1e3)
    return sorted(times)[repeats // 2]


def measure(
    w: NativeWeight, k: int, tokens: int, top_k: int, configs: list[int]
) -> tuple[float, list[float]]:
    """Returns the floor and each candidate's time."""
    m = tokens * top_k
    routings = [random_routing(tokens, w.groups, top_k) for _ in range(ROUTINGS)]
    x = (torch.randn(m, w.kp, device="cuda") * 100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    x_scale = torch.rand(m, device="cuda")
    out = torch.empty(m, w.n, dtype=torch.bfloat16, device="cuda")
    hit = sum((r.diff(prepend=r.new_zeros(1)) > 0).sum().item() for r in routings) / ROUTINGS
    floor = max(2 * m * w.n * k / 1450e6, (hit * w.n * w.kp * 0.5625 + m * w.kp + 2 * m * w.n) / 4.3e6)

    def launch(config: int, i: int) -> None:
        prefill.run(x, x_scale, w, routings[i % ROUTINGS], Routing.OFFS, m, out, config=config)

    return floor, [microseconds(functools.partial(launch, config)) for config in configs]


def measure_dense(tokens: int) -> Iterator[record.Row]:
    """Compares one weight matrix in NVFP4 with torch's fp8 x fp8, both in bursts after a pause."""
    for n, k in {(n, k) for _, n, k, *_ in SHAPES.values() if k % 128 == 0}:
        w = random_weight(1, n, k)
        x = torch.randn(tokens, k, device="cuda").clamp_(-448, 448).to(torch.float8_e4m3fn)
        x_scale, w_scale = torch.rand(tokens, 1, device="cuda"), torch.rand(1, n, device="cuda")
        fp8 = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn).t()
        out = torch.empty(tokens, n, dtype=torch.bfloat16, device="cuda")
        flat = x_scale.flatten()

        def ours(i: int) -> None:
            prefill.run(x, flat, w, None, Routing.DENSE, tokens, out)  # noqa: B023

        def theirs(i: int) -> None:
            torch._scaled_mm(x, fp8, x_scale, w_scale, out_dtype=torch.bfloat16, use_fast_accum=True)  # noqa: B023

        us, peer = microseconds(ours), microseconds(theirs)
        flops = 2e-6 * tokens * n * k
        yield {
            "table": "dense", "tokens": tokens, "n": n, "k": k, "us": us, "tflop_per_s": flops / us,
            "scaled_mm_us": peer, "scaled_mm_tflop_per_s": flops / peer,
        }  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", default="512,2048,8192")
    parser.add_argument("--all-candidates", action="store_true")


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    torch.manual_seed(1)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    names = prefill.candidates()
    for name, (groups, n, k, top_k, peers) in SHAPES.items():
        w = random_weight(groups, n, k)
        for tokens in map(int, args.tokens.split(",")):
            chosen = prefill.choose(Routing.OFFS, groups, tokens * top_k, n, w.kp, sms).candidate
            configs = list(range(len(names))) if args.all_candidates else [chosen]
            floor, times = measure(w, k, tokens, top_k, configs)
            for config, us in zip(configs, times, strict=True):
                yield {
                    "table": "product", "shape": name, "experts": groups, "n": n, "k": k, "tokens": tokens,
                    "us": us, "floor_us": floor,
                    "peer_us": peers[PEER_TOKENS.index(tokens)] if tokens in PEER_TOKENS else None,
                    "candidate": str(names[config]), "chosen": config == chosen,
                }  # fmt: skip
    yield from measure_dense(4096)


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
