"""Measures the Hopper kernels with the expert shapes of four models: both products and the whole block,
compared with the floor.

    python benchmarks/h200_hopper.py [--models qwen3-30b,...] [--tokens 1,8,32,128,512,2048,8192]
                                     [--format mxfp4]

Weights are random, in nvfp4 (or mxfp4), and routing is random and uniform. Times are microseconds, the median
over replays of a CUDA graph. Each launch in the graph has another of `ROUTINGS` routings, so that weights are
not in L2. The time of a block includes the quantisation of activations to fp8; the time of a product does
not. 16-bit rows are multiplied by weights in layout mma_bf16, as in a model that was prepared with
activation="bf16". Other rows, and `auto`, use layout sm90. Each measurement is a burst of about 20 ms after a
pause, as in results/peers_h200.json. Without pauses the chip reaches its power limit, and its clock is up to
a quarter lower (h200_power.py). The floor is max(bytes of the experts hit / copy bandwidth, flops / matmul
rate). Both rates are measured in this process. `int4` is int4 in groups of 128 x fp8; `bf16` is torch's own
grouped_mm with bfloat16 weights. `peer` is the time of the fastest other kernel for 4-bit weights, with
16-bit rows and with rows of any kind. It comes from results/peers_h200.json, which was recorded in another
process on an H200 (null on other cards). Each product is first compared with float32 over the dequantised
weights.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import hopper_operators as ops
import record
import torch
import torch.nn.functional as F

import fp4_ops  # noqa: F401  loads the operators
from fp4_ops.backends.launchers import library
from fp4_ops.backends.launchers import rows as row_kernels
from fp4_ops.dev import decode, planner
from fp4_ops.dev.product import Int4Weight, NativeWeight
from fp4_ops.meta.formats import FORMATS
from fp4_ops.meta.layouts import LAYOUTS

ROUTINGS = 8
PAUSE_SECONDS = 0.25
BURST_US = 20_000
GRAPH_US = 1_000
"""The shortest duration of a graph, so that its launch has little influence on the times of its kernels."""
LAYOUT = row_kernels.LAYOUT
PEERS = record.RESULTS / "peers_h200.json"


@dataclass(frozen=True)
class Model:
    name: str
    experts: int
    hidden: int
    inter: int
    top_k: int
    """The number of experts of a token. 0 means one of this device's experts, as if experts were spread over
    devices."""


MODELS = (
    Model("qwen3-30b", 128, 2048, 768, 8),
    Model("gpt-oss-120b", 128, 2880, 2880, 4),
    Model("dsv3", 32, 7168, 2048, 0),
    Model("mixtral-8x7b", 8, 4096, 14336, 2),
)


def captured(launch: Callable[[int], object], launches: int = ROUTINGS) -> torch.cuda.CUDAGraph:
    """Captures `launch(i)`, which uses routing i, for one routing after another."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch(0)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(launches):
                launch(i % ROUTINGS)
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Measures microseconds of a replay that runs behind another replay, which hides the work of the host."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def median_us(launch: Callable[[int], object], pause: float = PAUSE_SECONDS) -> float:
    """Measures microseconds of a launch, in a burst after the pause."""
    rough = replay_us(captured(launch)) / ROUTINGS
    launches = max(round(min(max(GRAPH_US, ROUTINGS * rough), BURST_US / 4) / rough), 1)
    graph = captured(launch, launches)
    time.sleep(pause)
    times = [replay_us(graph) for _ in range(max(3, round(BURST_US / (2 * launches * rough))))]
    return statistics.median(times) / launches


def ceilings() -> tuple[float, float, float]:
    """Measures the copy bandwidth in bytes/us (read + write), and the bf16 and fp8 matmul rates in
    flops/us."""
    a = torch.randn(1 << 28, device="cuda")
    b = torch.empty_like(a)
    copy = 2 * a.nbytes / median_us(lambda i: torch.neg(a, out=b))
    n = 8192
    x = torch.randn(n, n, device="cuda").bfloat16()
    bf16 = 2 * n**3 / median_us(lambda i: x @ x)
    q = x.to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    multiply = lambda i: torch._scaled_mm(  # noqa: E731
        q, q.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return copy, bf16, 2 * n**3 / median_us(multiply)


def random_weight(groups: int, n: int, k: int, layout: str = "sm90", format: str = "nvfp4") -> NativeWeight:
    kp, block = LAYOUT.padded(k), FORMATS[format].block
    codes = torch.randint(0, 256, (groups, n, kp // 2), dtype=torch.uint8, device="cuda")
    scale = torch.randint(40, 120, (groups, n, kp // block), dtype=torch.uint8, device="cuda")
    if format == "mxfp4":
        scale &= 0x78  # powers of two
    if layout == "sm90":
        flag = ((scale & 7) == 0) | ((scale & 7) == 7)
        scale = torch.where(flag, scale | 0x80, scale)
    factor = torch.full((groups,), 1e-3, device="cuda")
    return NativeWeight(codes, scale, factor, None, groups, n, kp, LAYOUTS[layout], block)


def routing(model: Model, tokens: int) -> torch.Tensor:
    """Returns expert ids [tokens, k]."""
    if model.top_k == 0:
        return torch.randint(0, model.experts, (tokens, 1), device="cuda")
    return torch.rand(tokens, model.experts, device="cuda").topk(model.top_k).indices


def check(a, w: NativeWeight, k: int, format: str, offs, out, what: str, bound: float) -> None:
    """Compares a few rows with float32 over the dequantised weights."""
    for r in torch.randint(0, a.shape[0], (4,)).tolist():
        e = int(torch.searchsorted(offs, r, right=True))
        expert = (t[e : e + 1] for t in (w.codes, w.scales, w.global_scale))
        one = row_kernels.dequantize(*expert, FORMATS[format], torch.float32, w.bf16)
        want = one[0, :, :k] @ a[r].float()
        error = (out[r].float() - want).norm() / want.norm()
        assert error < bound, f"{what}: row {r} is off by {error:.1e}"


@functools.cache
def recorded_peers() -> list[record.Row]:
    return [row for row in record.read(PEERS)["rows"] if row["table"] == "product"]


def fastest_peer(shape: tuple[int, int, int], tokens: int, kinds: tuple[str, ...]) -> float | None:
    """Returns the recorded microseconds, or None if there is no record."""
    times = [
        row["us"]
        for row in recorded_peers()
        if (row["experts"], row["n"], row["k"], row["tokens"]) == (*shape, tokens) and row["kind"] in kinds
    ]
    return min(times, default=None)


def products(
    model: Model, n: int, k: int, format: str, tokens: list[int], peaks: tuple[float, float, float]
) -> Iterator[record.Row]:
    copy, bf16_rate, fp8_rate = peaks
    recorded_card = "H200" in torch.cuda.get_device_name()
    w, wide = (random_weight(model.experts, n, k, layout, format) for layout in ("sm90", "mma_bf16"))
    scales = torch.rand((model.experts, n, w.kp // 128), device="cuda") * 56
    int4 = Int4Weight(w.codes, scales, w.global_scale, 128, None, model.experts, n, w.kp)
    plain = torch.randn(model.experts, n, k, device="cuda", dtype=torch.bfloat16)
    for t in tokens:
        ids = [routing(model, t).flatten().sort().values for _ in range(ROUTINGS)]
        counts = [torch.bincount(i, minlength=model.experts) for i in ids]
        offs = [c.cumsum(0).int() for c in counts]
        rows = ids[0].numel()
        hit = statistics.mean(int((c > 0).sum()) for c in counts)
        weight_bytes, flops = hit * n * k * FORMATS[format].bytes_per_weight(), 2 * rows * n * k
        floor16 = max((weight_bytes + 2 * rows * (n + k)) / copy, flops / bf16_rate)
        floor8 = max((weight_bytes + rows * (2 * n + k)) / copy, flops / fp8_rate)
        x = torch.randn(rows, k, device="cuda").bfloat16()
        q, s = row_kernels.quantize_fp8(x)
        a16 = lambda i: ops.grouped_mm(x, None, wide, offs[i], torch.bfloat16)  # noqa: E731, B023
        a8 = lambda i: ops.grouped_mm(q, s, w, offs[i], torch.bfloat16)  # noqa: E731, B023
        i4 = lambda i: ops.grouped_mm(q, s, int4, offs[i], torch.bfloat16)  # noqa: E731, B023
        stock = lambda i: F.grouped_mm(x, plain.mT, offs=offs[i])  # noqa: E731, B023
        check(x, wide, k, format, offs[0], a16(0), "W4A16", 8e-3)
        check(x, w, k, format, offs[0], a8(0), "W4A8", 7e-2)
        us16, us8, us4, us = median_us(a16), median_us(a8), median_us(i4), median_us(stock)
        config = planner.decode_config(rows, model.experts, w.n, w.kp, library.multiprocessors(0))
        few16, few8 = (ops.decodes(a, weight, decode.Routing.OFFS, rows) for a, weight in ((x, wide), (q, w)))
        how16, how8 = str(config) if few16 else "prefill", "same" if few8 else "prefill"
        shape = (model.experts, n, k)
        yield {
            "table": "product", "model": model.name, "experts": model.experts, "n": n, "k": k, "tokens": t,
            "format": format, "w4a16_floor_us": floor16, "w4a16_us": us16,
            "w4a16_peer_us": fastest_peer(shape, t, ("W4A16",)) if recorded_card else None,
            "w4a8_floor_us": floor8, "w4a8_us": us8,
            "w4a8_peer_us": fastest_peer(shape, t, ("W4A16", "W4A8")) if recorded_card else None,
            "int4_us": us4, "bf16_us": us, "kernels": f"{how16}; {how8}",
        }  # fmt: skip


def blocks(model: Model, format: str, tokens: list[int]) -> Iterator[record.Row]:
    up, down = (2 * model.inter, model.hidden), (model.hidden, model.inter)
    weights = {
        layout: [random_weight(model.experts, *shape, layout, format) for shape in (up, down)]
        for layout in ("sm90", "mma_bf16")
    }
    formats = ("none", "fp8", "auto")
    for t in tokens:
        x = torch.randn(t, model.hidden, device="cuda").bfloat16()
        ids = [routing(model, t) for _ in range(ROUTINGS)]
        scores = torch.rand(t, ids[0].shape[1], device="cuda")
        row = {"table": "block", "model": model.name, "format": format, "tokens": t}
        for f in formats:
            of = weights["mma_bf16" if f == "none" else "sm90"]
            run = lambda i: ops.moe(x, ids[i], scores, *of, "silu_interleaved", f, torch.bfloat16)  # noqa: E731, B023
            row[f"{f}_us"] = median_us(run)
        yield row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=",".join(m.name for m in MODELS))
    parser.add_argument("--tokens", default="1,8,32,128,512,2048,8192")
    parser.add_argument("--format", default="nvfp4", choices=("nvfp4", "mxfp4"))


def rows(given: argparse.Namespace) -> Iterator[record.Row]:
    tokens = [int(t) for t in given.tokens.split(",")]
    peaks = ceilings()
    yield {
        "table": "ceilings", "copy_tb_per_s": peaks[0] / 1e6, "bf16_tflop_per_s": peaks[1] / 1e6,
        "fp8_tflop_per_s": peaks[2] / 1e6,
    }  # fmt: skip
    for model in MODELS:
        if model.name in given.models.split(","):
            yield from products(model, 2 * model.inter, model.hidden, given.format, tokens, peaks)
            yield from products(model, model.hidden, model.inter, given.format, tokens, peaks)
            yield from blocks(model, given.format, tokens)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
