"""Measures operators on one GPU: microseconds, share of the floor, and ratio to torch._grouped_mm in bf16, in
one process.

    python benchmarks/gpu_ops.py [--models qwen3,...] [--tokens 1,8,...] [--sweep]

Each figure is the median of CUDA-graph replays. A graph holds ROUTINGS calls, each with another random
routing, so that weights come from memory, not from L2. The floor is the larger of two times: the bytes that
must move, divided by the measured copy bandwidth; and the arithmetic, divided by the measured bf16 rate.
Every shape is checked first. --sweep times every tile candidate instead of the chosen one.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import record
import torch

import fp4_ops  # noqa: F401  loads torch.ops.fp4
from fp4_ops.backends.triton import tiles
from fp4_ops.meta.formats import FORMATS
from fp4_ops.runtime.oracle import relative_error

ROUTINGS = 8
DEVICE = "cuda"


@dataclass(frozen=True)
class Model:
    name: str
    experts: int
    top_k: int
    hidden: int
    inter: int


MODELS = {
    m.name: m
    for m in (
        Model("qwen3-30b", 128, 8, 2048, 768),
        Model("gpt-oss-120b", 128, 4, 2880, 2880),
        # One of eight expert-parallel ranks, with 32 local experts. Each token uses one of them.
        Model("dsv3", 32, 1, 7168, 2048),
        Model("mixtral-8x7b", 8, 2, 4096, 14336),
    )
}


def median_us(calls, replays: int = 20) -> float:
    """Returns the median time of a call. All `calls` are captured in one graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def ceilings() -> tuple[float, float]:
    """Measures the copy bandwidth (bytes/s, read + written) and the bf16 rate (flop/s)."""
    x = torch.randn(1 << 30, device=DEVICE, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    # Not copy_, because in a graph it is a node of the copy engine, which is slower.
    copy = median_us([partial(torch.neg, x, out=y)])
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 4 * (1 << 30) / copy * 1e6, 2 * 8192**3 / median_us([partial(torch.matmul, a, b)]) * 1e6


def random_weight(groups: int, n: int, k: int, format: str):
    """Returns random codes with plausible random scales."""
    fmt = FORMATS[format]
    packed = torch.randint(0, 256, (groups, n, k // 2), device=DEVICE, dtype=torch.uint8)
    shape = (groups, n, fmt.num_blocks(k))
    if fmt.has_global_scale:
        scale = (torch.rand(shape, device=DEVICE) * 440 + 1).to(fmt.scale_dtype)
        return packed, scale, torch.rand(groups, device=DEVICE) * 1e-4 + 1e-5
    scale = torch.randint(115, 123, shape, device=DEVICE, dtype=torch.uint8).view(fmt.scale_dtype)
    return packed, scale, None


def dequantized(weight, expert: int, format: str) -> torch.Tensor:
    packed, scale, gs = weight
    one = gs[expert : expert + 1] if gs is not None else None
    part = packed[expert : expert + 1], scale[expert : expert + 1], one
    return torch.ops.fp4.dequantize(*part, format, torch.float32)[0].double()


def bf16_of(weight, format: str) -> torch.Tensor:
    groups = weight[0].shape[0]
    return torch.stack([dequantized(weight, e, format).bfloat16() for e in range(groups)])


def routings(tokens: int, m: Model) -> list[torch.Tensor]:
    return [
        torch.rand(tokens, m.experts, device=DEVICE).topk(m.top_k, dim=1).indices for _ in range(ROUTINGS)
    ]


def offsets(ids: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.bincount(ids.flatten(), minlength=experts).cumsum(0).int()


def check_grouped(a, weight, offs, format: str) -> float:
    out = torch.ops.fp4.grouped_mm(a, *weight, offs, format=format)
    ends = offs.tolist()
    rows = torch.randperm(a.shape[0])[:24].tolist()
    pairs = [
        (out[r].double(), dequantized(weight, sum(e <= r for e in ends), format) @ a[r].double())
        for r in rows
    ]
    got, ref = (torch.stack(p) for p in zip(*pairs))
    return relative_error(got, ref)


def reference_moe(x, ids, topk_weights, w13, w2, format: str, tokens: list[int]) -> torch.Tensor:
    rows = []
    for t in tokens:
        total = 0
        for j, e in enumerate(ids[t].tolist()):
            gate, up = (dequantized(w13, e, format) @ x[t].double()).chunk(2)
            h = torch.nn.functional.silu(gate) * up
            total = total + topk_weights[t, j].double() * (dequantized(w2, e, format) @ h)
        rows.append(total)
    return torch.stack(rows)


def bench_model(
    m: Model, format: str, token_counts, bandwidth: float, rate: float, sweep: bool
) -> Iterator[record.Row]:
    w13 = random_weight(m.experts, 2 * m.inter, m.hidden, format)
    w2 = random_weight(m.experts, m.hidden, m.inter, format)
    bytes_per_weight = FORMATS[format].bytes_per_weight()
    for name, n, k, weight in (
        ("gate/up", 2 * m.inter, m.hidden, w13),
        ("down", m.hidden, m.inter, w2),
    ):
        wide = bf16_of(weight, format).transpose(1, 2)
        for tokens in token_counts:
            rows = tokens * m.top_k
            a = torch.randn(rows, k, device=DEVICE, dtype=torch.bfloat16)
            ids = routings(tokens, m)
            offs = [offsets(i, m.experts) for i in ids]
            hit = statistics.mean(len(i.unique()) for i in ids)
            moved = hit * n * k * bytes_per_weight + 2 * rows * (n + k)
            floor = max(moved / bandwidth, 2 * rows * n * k / rate) * 1e6
            wide_us = median_us([partial(torch._grouped_mm, a, wide, offs=o) for o in offs])
            device = tiles.device_of(a.device)
            for tile in tiles.CANDIDATES if sweep else (None,):
                tiles.force(tile)
                chosen = tiles.preferred(rows, m.experts, tiles.Problem(n, k), device)
                error = check_grouped(a, weight, offs[0], format)
                call = partial(torch.ops.fp4.grouped_mm, a, *weight, format=format)
                us = median_us([partial(call, offs=o) for o in offs])
                yield {
                    "table": "product", "model": m.name, "product": name, "experts": m.experts, "n": n,
                    "k": k, "format": format, "tokens": tokens, "us": us, "floor_us": floor,
                    "bf16_us": wide_us, "error": error, "tile": str(chosen),
                }  # fmt: skip
                assert error < 4e-3, "the answer is wrong"
        del wide
        tiles.force(None)
    # Whole blocks: route, gate/up, silu, down, combine.
    for tokens in token_counts:
        x = torch.randn(tokens, m.hidden, device=DEVICE, dtype=torch.bfloat16)
        ids = routings(tokens, m)
        weights = torch.rand(tokens, m.top_k, device=DEVICE)

        some = torch.randperm(tokens)[:4].tolist()
        ref = reference_moe(x, ids[0], weights, w13, w2, format, some)
        error = relative_error(torch.ops.fp4.moe(x, ids[0], weights, *w13, *w2, format=format)[some], ref)
        calls = [partial(torch.ops.fp4.moe, x, i, weights, *w13, *w2, format=format) for i in ids]
        us = median_us(calls)
        yield {
            "table": "block", "model": m.name, "format": format, "tokens": tokens, "us": us, "error": error,
        }  # fmt: skip
        assert error < 6e-3, "the answer is wrong"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default="1,8,32,128,512,2048,8192")
    parser.add_argument("--formats", default="nvfp4")
    parser.add_argument("--sweep", action="store_true")


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    torch.manual_seed(0)
    bandwidth, rate = ceilings()
    yield {"table": "ceilings", "copy_tb_per_s": bandwidth / 1e12, "bf16_tflop_per_s": rate / 1e12}
    for name in args.models.split(","):
        for format in args.formats.split(","):
            counts = [int(t) for t in args.tokens.split(",")]
            yield from bench_model(MODELS[name], format, counts, bandwidth, rate, args.sweep)


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
