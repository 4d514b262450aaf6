"""Operators inside a CUDA graph: replays with other routing, ids and counts must equal eager runs."""

import pytest
import torch

import fp4_ops  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

G, N, K, TOP_K = 7, 144, 160, 3


def weight(n: int, k: int, format: str):
    packed, scale, gs = torch.ops.fp4.quantize(torch.randn(G, n, k, device="cuda"), format)
    return packed, scale, (gs if gs.numel() else None)


def capture(call):
    """Captures one call; its outputs are then poisoned before each replay, so nothing can be left over."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles the kernels, which a capture may not
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


def replay_equals_eager(call, change) -> None:
    graph, out = capture(call)
    seen = []
    for step in range(6):
        change(step)
        out.fill_(float("nan"))
        graph.replay()
        expected = call()
        assert torch.equal(out, expected)
        seen.append(expected.clone())
    assert not all(torch.equal(seen[0], s) for s in seen[1:]), "the change changed nothing"


@pytest.fixture(autouse=True)
def seeded():
    seed = torch.seed() % 2**31
    print("seed", seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_grouped_mm_with_changed_offsets(format):
    w, m = weight(N, K, format), 61
    a = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
    offs = torch.zeros(G, device="cuda", dtype=torch.int32)

    def change(step):
        a.normal_()
        ends = torch.randint(0, m + 1, (G,)).sort().values
        offs.copy_(ends if step != 3 else torch.full((G,), m))  # once: everything on the first expert

    change(0)
    replay_equals_eager(lambda: torch.ops.fp4.grouped_mm(a, *w, offs, format=format), change)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_grouped_mm_masked_with_changed_counts(format):
    w, max_m = weight(N, K, format), 21
    a = torch.randn(G, max_m, K, device="cuda", dtype=torch.bfloat16)
    masked_m = torch.zeros(G, device="cuda", dtype=torch.int32)

    def change(step):
        a.normal_()
        masked_m.copy_(torch.randint(0, max_m + 1, (G,)))

    change(0)
    replay_equals_eager(lambda: torch.ops.fp4.grouped_mm_masked(a, *w, masked_m, format=format), change)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("m", [1, 61])
def test_indexed_mm_with_changed_ids(format, m):
    w = weight(N, K, format)
    a = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
    ids = torch.zeros(m, device="cuda", dtype=torch.int64)

    def change(step):
        a.normal_()
        ids.copy_(torch.randint(-1, G + 1, (m,)))

    change(0)
    replay_equals_eager(lambda: torch.ops.fp4.indexed_mm(a, *w, ids, format=format), change)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 37])
def test_moe_with_changed_routing(format, tokens):
    hidden, inter = 96, 80
    w13, w2 = weight(2 * inter, hidden, format), weight(hidden, inter, format)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    ids = torch.zeros(tokens, TOP_K, device="cuda", dtype=torch.int64)
    topk_weights = torch.zeros(tokens, TOP_K, device="cuda")

    def change(step):
        x.normal_()
        topk_weights.uniform_()
        ids.copy_(torch.randint(-1, G + 1, (tokens, TOP_K)) if step != 3 else torch.zeros(tokens, TOP_K))

    change(0)
    replay_equals_eager(lambda: torch.ops.fp4.moe(x, ids, topk_weights, *w13, *w2, format=format), change)
