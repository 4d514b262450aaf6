"""Operators inside a CUDA graph: replays with other rows, routing, ids and counts must equal eager runs.

The operators are those that the compiler emits. The weights have each layout that a GPU can use: Triton reads
`plain`, and the Hopper kernels read the others. The numbers of rows make decode and prefill run.
"""

import pytest
import torch

from fp4_ops.backends.launchers import library

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

G, N, K, TOP_K = 7, 144, 160, 3
LAYOUTS = ["plain", "sm90", "mma_bf16"]
ROWS = [1, 61, 400]


def weight(n: int, k: int, format: str):
    packed, scale, gs = torch.ops.fp4.quantize(torch.randn(G, n, k, device="cuda"), format)
    return packed, scale, (gs if gs.numel() else None)


class Product:
    """The weights of one product, and its rows: 16 bits or fp8, which a graph quantises anew each time."""

    def __init__(self, format: str, layout: str, rows: torch.dtype) -> None:
        if layout != "plain" and not library.available(0):
            pytest.skip("needs a Hopper GPU and its kernels (build with FP4_CUDA_ARCHS=90a)")
        if layout != "sm90" and rows == torch.float8_e4m3fn:
            pytest.skip(f"layout {layout} has no kernels of fp8 rows")
        self.options = {"format": format, "layout": layout}
        self.rows = rows
        if layout == "plain":
            self.packed = weight(N, K, format)
        else:
            codes = torch.ops.fp4.quantize(torch.randn(G, 192, K, device="cuda"), format)
            self.packed = torch.ops.fp4.prepack(*codes, format, layout)

    def __call__(self, op, a, *route, packed=None):
        scale = None
        if self.rows == torch.float8_e4m3fn:
            a, scale = torch.ops.fp4.quantize_fp8(a, layout=self.options["layout"])
        return op(a, *(packed or self.packed), *route, scale, out_dtype=torch.bfloat16, **self.options)


products = [
    pytest.mark.parametrize("format", ["nvfp4", "mxfp4"]),
    pytest.mark.parametrize("layout", LAYOUTS),
    pytest.mark.parametrize("rows", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"]),
]


def each_product(test):
    for mark in products:
        test = mark(test)
    return test


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


@each_product
@pytest.mark.parametrize("m", ROWS)
def test_mm_with_changed_rows(format, layout, rows, m):
    product = Product(format, layout, rows)
    one = tuple(t if t is None else t[-1] for t in product.packed)
    a = torch.empty(m, K, device="cuda", dtype=torch.bfloat16)

    def change(step):
        a.normal_(std=10.0**step)

    change(0)
    replay_equals_eager(lambda: product(torch.ops.fp4.mm, a, packed=one), change)


@each_product
@pytest.mark.parametrize("m", ROWS)
def test_grouped_mm_with_changed_offsets(format, layout, rows, m):
    product = Product(format, layout, rows)
    a = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
    offs = torch.zeros(G, device="cuda", dtype=torch.int32)

    def change(step):
        a.normal_()
        ends = torch.randint(0, m + 1, (G,)).sort().values
        offs.copy_(ends if step != 3 else torch.full((G,), m))  # once: everything on the first expert

    change(0)
    replay_equals_eager(lambda: product(torch.ops.fp4.grouped_mm, a, offs), change)


@each_product
@pytest.mark.parametrize("max_m", [3, 61])
def test_grouped_mm_masked_with_changed_counts(format, layout, rows, max_m):
    product = Product(format, layout, rows)
    a = torch.randn(G, max_m, K, device="cuda", dtype=torch.bfloat16)
    masked_m = torch.zeros(G, device="cuda", dtype=torch.int32)

    def change(step):
        a.normal_()
        masked_m.copy_(torch.randint(0, max_m + 1, (G,)) if step != 3 else torch.full((G,), max_m))

    change(0)
    replay_equals_eager(lambda: product(torch.ops.fp4.grouped_mm_masked, a, masked_m), change)


@each_product
@pytest.mark.parametrize("m", ROWS)
def test_indexed_mm_with_changed_ids(format, layout, rows, m):
    product = Product(format, layout, rows)
    a = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
    ids = torch.zeros(m, device="cuda", dtype=torch.int64)

    def change(step):
        a.normal_()
        ids.copy_(torch.randint(-1, G + 1, (m,)) if step != 3 else torch.full((m,), G - 1))

    change(0)
    replay_equals_eager(lambda: product(torch.ops.fp4.indexed_mm, a, ids), change)


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
