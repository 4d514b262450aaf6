"""Prefill in which blocks share tiles along K (few tiles, many steps), or claim whole tiles (many tiles)."""

import pytest
import torch
from development import development
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

from fp4_ops.backends.launchers import library, rows
from fp4_ops.meta.formats import ACTIVATIONS

decode, prefill = development("decode"), development("prefill")

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
    one = decode.NativeWeight(*(t[-1:] for t in w.packed), None, 1, *weight[5:])
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


CLAIMED = [(3, 40, 0, 17), (0, 0, 60, 0), (0, 0, 0, 0), (15, 15, 15, 15)]
"""Rows of each group, of 60: other tiles than the launch was planned for, or none."""


def claimed_size(kernel: str, config: int) -> tuple[int, int] | None:
    """N and K of which such a launch claims the tiles, if it ever does."""
    size = decode.Routing.OFFS, len(CLAIMED[0]), 60
    sms = library.multiprocessors(0)
    sizes = ((n, k) for k in (2048, 4096) for n in range(512, 320 * sms, 64))
    return next((s for s in sizes if prefill.choose(*size, *s, sms, kernel, config).claims), None)


@pytest.mark.parametrize("kernel, config", CANDIDATES)
def test_tiles_are_claimed_once(kernel, config):
    size = claimed_size(kernel, config)
    assert (size is None) == ("cluster 2" in prefill.candidates(kernel)[config])
    if size is None:
        return
    n, k = size
    w = Weights(len(CLAIMED[0]), n, k, format="nvfp4")
    given, values = ordered(kernel, torch.randn(60, k, device="cuda").bfloat16())
    for counts in CLAIMED:
        offs = torch.tensor(counts, device="cuda").cumsum(0).int()
        ids = torch.searchsorted(offs, torch.arange(60, device="cuda"), right=True)
        ids = torch.where(ids < len(counts), ids, -1)
        results = []
        for _ in range(2):
            out = torch.full((60, n), float("nan"), device="cuda", dtype=torch.bfloat16)
            leave_noise()
            prefill.run(*given, w.of_kernels(), offs, decode.Routing.OFFS, 60, out, config=config)
            results.append(out)
        assert torch.equal(*results) and not results[0][ids < 0].any()
        assert error(results[0], by_row(w.values, values, ids)) < max(bound(kernel), 4e-3)


@pytest.mark.hardware
@pytest.mark.parametrize("kernel", ["half", "w4a8"])
def test_claims_of_streams_and_replays(kernel):
    """Launches beside each other count their tiles apart; a replay counts anew, whatever the routing."""
    config = next(i for i in CONFIGS[kernel] if claimed_size(kernel, i))
    n, k = claimed_size(kernel, config)
    w = Weights(len(CLAIMED[0]), n, k, format="nvfp4").of_kernels()
    given, _ = ordered(kernel, torch.randn(60, k, device="cuda").bfloat16())

    def run(offs):
        out = torch.full((60, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        prefill.run(*given, w, offs, decode.Routing.OFFS, 60, out, config=config)
        return out

    routes = [torch.tensor(counts, device="cuda").cumsum(0).int() for counts in CLAIMED]
    want = [run(offs) for offs in routes]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in routes]
    for _ in range(20):
        got = []
        for stream, offs in zip(streams, routes):
            with torch.cuda.stream(stream):
                got.append(run(offs))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    offs = routes[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(offs)
    for i in [0, 1, 2, 2, 3, 0, 2, 1] * 3:
        offs.copy_(routes[i])
        graph.replay()
        assert torch.equal(out, want[i])


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
