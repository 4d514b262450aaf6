"""Prefill where blocks share tiles in parts of K: few tiles, many steps."""

import pytest
import torch
from fp4_ops.meta.formats import ACTIVATIONS
from test_sm90_gpu import (
    CONFIGS,
    FORMATS,
    FP8_BOUND,
    Weights,
    by_row,
    error,
    plain_order,
    pytestmark,
    sums_bound,
)

from fp4_ops.sm90 import decode, library, prefill, rows

__all__ = ["pytestmark"]

GROUPS, N, K = 3, 320, 7040
"""55 steps of K, and rows that no tile of more than 64 divides."""
COUNTS = [(0, 161, 300), (1, 0, 40), (17, 33, 70)]
CANDIDATES = [(kernel, config) for kernel in ("half", "w4a8") for config in CONFIGS[kernel]]


def leave_noise() -> None:
    """Where the next launch finds its scratch memory: not flags that are down by chance."""
    size = prefill.workspace_bytes("w4a8", library.multiprocessors(0))
    torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")


def ordered(kernel: str, a: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Rows as the kernel takes them, and the values it multiplies."""
    if kernel == "half":
        return rows.to_half(a), a.double()
    x, scale = rows.quantize_fp8(a)
    return (x, scale), plain_order(x)[:, : a.shape[1]].double() * scale.double()[:, None]


def bound(kernel: str) -> float:
    return sums_bound(K) if kernel == "half" else FP8_BOUND


@pytest.mark.parametrize("kernel", CONFIGS)
@pytest.mark.parametrize("counts", COUNTS[::2], ids=str)  # of the others by wider candidates than chosen
def test_such_sizes_are_shared(kernel, counts):
    size = decode.Routing.OFFS, GROUPS, sum(counts), N, K, library.multiprocessors(0)
    assert prefill.choose(*size, kernel).share_below > 0


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("kernel, config", CANDIDATES)
def test_every_candidate(kernel, config, counts, format):
    w = Weights(GROUPS, N, K, format=format)
    bias = torch.randn(GROUPS, N, device="cuda")
    weight = w.of_kernels(bias)
    offs = torch.tensor(counts, device="cuda").cumsum(0).int()
    ids = torch.repeat_interleave(torch.arange(GROUPS, device="cuda"), torch.tensor(counts, device="cuda"))
    ids = torch.cat([ids, ids.new_full((2,), -1)])  # and rows of nobody
    m = len(ids)
    given, values = ordered(kernel, torch.randn(m, K, device="cuda").bfloat16())
    want = by_row(w.values, values, ids) + torch.where((ids >= 0)[:, None], bias[ids.clamp(min=0)], 0)
    results = []
    for _ in range(2):
        out = torch.full((m, N), float("nan"), device="cuda")
        leave_noise()
        prefill.run(*given, weight, offs, decode.Routing.OFFS, m, out, config=config)
        results.append(out)
    assert error(results[0], want) < bound(kernel)
    assert torch.equal(*results) and not results[0][-2:].any()

    out = torch.full((m, N), float("nan"), device="cuda")
    one = decode.Weight(*(t[-1:] for t in w.packed), None, 1, *weight[5:])
    prefill.run(*given, one, None, decode.Routing.DENSE, m, out, config=config)
    assert error(out, values @ w.values[-1].T) < bound(kernel)

    gate = ACTIVATIONS["silu_interleaved"]
    out = torch.full((m, N // 2), float("nan"), device="cuda", dtype=torch.bfloat16)
    scale = 1 / want.abs().max().float()  # so that no exponential overflows
    given = given[0], given[1] * scale
    plain = w.of_kernels()
    prefill.run(*given, plain, offs, decode.Routing.OFFS, m, out, gate=gate, config=config)
    pairs = by_row(w.values, values * scale.double(), ids).unflatten(-1, (-1, 2))
    assert error(out, torch.nn.functional.silu(pairs[..., 0]) * pairs[..., 1]) < max(2 * bound(kernel), 5e-3)


@pytest.mark.hardware
@pytest.mark.parametrize("kernel", CONFIGS)
def test_two_streams_and_replays(kernel):
    """Each launch has scratch memory of its own, and a replay finds its flags as the launch did."""
    w = Weights(GROUPS, N, K, format="nvfp4")
    weight = w.of_kernels()
    work = []
    for counts in COUNTS:
        given, _ = ordered(kernel, torch.randn(sum(counts), K, device="cuda").bfloat16())
        offs = torch.tensor(counts, device="cuda").cumsum(0).int()

        def run(given=given, offs=offs):
            out = torch.full((len(given[0]), N), float("nan"), device="cuda")
            prefill.run(*given, weight, offs, decode.Routing.OFFS, len(out), out)
            return out

        work.append((run, run()))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in work]
    for _ in range(20):
        got = []
        for stream, (run, _) in zip(streams, work):
            with torch.cuda.stream(stream):
                got.append(run())
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, (_, b) in zip(got, work, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [run() for run, _ in work]
    for _ in range(5):
        graph.replay()
        assert all(torch.equal(a, b) for a, (_, b) in zip(got, work, strict=True))
