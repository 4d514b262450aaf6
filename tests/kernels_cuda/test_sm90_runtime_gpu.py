"""The native runtime (csrc/cuda): operands, devices, modes of autograd, and calls from C++ to Python.

The other test_sm90_*_gpu.py files test results, graphs and streams.
"""

from __future__ import annotations

import threading

import pytest
import torch
from test_sm90_gpu import Weights, by_row, error, pytestmark, routed

from fp4_ops.runtime import native

__all__ = ["pytestmark"]

BOUND = 4e-3


@pytest.fixture(params=["decode", "gemv", "prefill"])
def kernel(request):
    with native.only(request.param):
        yield request.param


def operators():
    """Where the C++ operators are: under a name of their own where the GPU is emulated."""
    return torch.ops.fp4 if torch.version.cuda else torch.ops.fp4_emulated


@pytest.mark.parametrize("layout", ["sm90", "mma_bf16"])
def test_rows_that_begin_or_go_on_anywhere(kernel, layout):
    """Transposed, with gaps, in the middle of 16 bytes, and ids with strides: as contiguous ones."""
    groups, n, k, m = 3, 128, 192, 8
    w = Weights(groups, n, k, format="nvfp4", layout=layout)
    a = torch.randn(m, k, device="cuda").bfloat16()
    ids, ordered, offs = routed(m, groups)
    between = torch.empty(m * k + 1, device="cuda", dtype=a.dtype)[1:].view(m, k).copy_(a)
    views = {
        "transposed": a.t().contiguous().t(),
        "with gaps": torch.cat([a, a], 1)[:, :k],
        "between 16 bytes": between,
    }
    strided = torch.stack([ids, ids], 1)[:, 0]
    want = by_row(w.values, a, ids), by_row(w.values, a, ordered)
    for name, view in views.items():
        assert error(torch.ops.fp4.indexed_mm(view, *w.packed, strided, **w.options), want[0]) < BOUND, name
        assert error(torch.ops.fp4.grouped_mm(view, *w.packed, offs, **w.options), want[1]) < BOUND, name
    weights = [torch.stack([t, t], -1)[..., 0] for t in w.packed]
    assert error(torch.ops.fp4.grouped_mm(a, *weights, offs, **w.options), want[1]) < BOUND


@pytest.mark.parametrize("rows", [1, 3000])
def test_ids_of_both_widths(rows):
    """More rows than decode sorts itself, too."""
    groups, n, k = 300, 64, 128
    w = Weights(groups, n, k, format="mxfp4")
    a = torch.randn(rows, k, device="cuda").bfloat16()
    ids, _, _ = routed(rows, groups)
    for only in ("decode", "gemv", "prefill"):
        with native.only(only):
            got = [torch.ops.fp4.indexed_mm(a, *w.packed, i, **w.options) for i in (ids, ids.int())]
        assert torch.equal(*got)
        assert error(got[0], by_row(w.values, a, ids)) < BOUND


def test_nothing_to_do_is_zeros_or_nothing():
    w = Weights(2, 64, 128, format="nvfp4")
    none = [t[:0] for t in w.packed]
    a, ids = torch.randn(3, 128, device="cuda").bfloat16(), torch.tensor([0, 1, 0], device="cuda")
    offs = torch.zeros(0, dtype=torch.int32, device="cuda")
    for got in (
        torch.ops.fp4.grouped_mm(a, *none, offs, **w.options),
        torch.ops.fp4.indexed_mm(a, *none, ids, **w.options),
    ):
        assert got.shape == (3, 64) and not got.any()
    assert torch.ops.fp4.indexed_mm(a[:0], *w.packed, ids[:0], **w.options).shape == (0, 64)
    square = Weights(2, 128, 128, format="nvfp4"), Weights(2, 128, 64, format="nvfp4")
    both = *square[0].packed, *square[1].packed
    no_slots = torch.empty(3, 0, device="cuda")
    got = torch.ops.fp4.moe(a, no_slots.long(), no_slots, *both, **w.options)
    assert got.shape == (3, 128) and not got.any()
    got = torch.ops.fp4.moe(a[:0], ids[:0, None], no_slots[:0, :0].new_ones(0, 1), *both, **w.options)
    assert got.shape == (0, 128)


def test_errors_name_the_argument_first():
    w = Weights(2, 64, 128, format="nvfp4")
    a = torch.randn(3, 144, device="cuda").bfloat16()
    with pytest.raises(RuntimeError, match=r"^a has 144 columns; b has K = 128"):
        torch.ops.fp4.grouped_mm(a, *w.packed, torch.zeros(2, dtype=torch.int32, device="cuda"), **w.options)


def test_an_error_in_python_keeps_its_words():
    """A conversion that is Python's, called by the C++ operator."""
    damaged = torch.full((1, 64, 8), -1.0, device="cuda").to(torch.float8_e4m3fn)
    codes = torch.zeros(1, 64, 64, dtype=torch.uint8, device="cuda")
    with pytest.raises(
        RuntimeError, match=r"^block_scale has negative values; layout 'sm90' cannot hold them"
    ):
        torch.ops.fp4.prepack(codes, damaged, torch.ones(1, device="cuda"), "nvfp4", "sm90")


@pytest.mark.parametrize("layout", ["sm90", "mma_bf16"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_a_scale_that_is_nan_is_refused(format, layout):
    """The layouts have no byte for NaN. One block has it, or all have; in nvfp4 it may have a sign."""
    packed, scale, factor = torch.ops.fp4.quantize(torch.randn(2, 64, 64, device="cuda"), format)
    for place in ((1, 3, 1), ...):
        for nan in {"nvfp4": (0x7F, 0xFF), "mxfp4": (0xFF,)}[format]:
            damaged = scale.clone()
            damaged.view(torch.uint8)[place] = nan
            with pytest.raises(RuntimeError, match=r"^block_scale has NaN values; the weight is damaged"):
                torch.ops.fp4.prepack(packed, damaged, factor if factor.numel() else None, format, layout)


@pytest.mark.parametrize("operator", ["mm", "grouped_mm", "moe"])
def test_rows_that_another_gpu_reads_with_this_layout(operator):
    """fp16 rows meet weights in mma_bf16 on other GPUs; here the error says which layout takes them."""
    w = Weights(4, 128, 128, format="nvfp4", layout="mma_bf16")
    x = torch.randn(8, 128, device="cuda").half()
    options = {"format": "nvfp4", "layout": "mma_bf16"}
    words = (
        rf"fp4::{operator}: layout is 'mma_bf16', and rows are float16; on this GPU, of compute capability "
        r"9\.0, its kernels read bfloat16\. Convert the rows, or use layout 'sm90'"
    )
    with pytest.raises(RuntimeError, match=words):
        if operator == "moe":
            up = Weights(4, 256, 128, format="nvfp4", layout="mma_bf16")
            ids, weights = (
                torch.zeros(8, 2, dtype=torch.int64, device="cuda"),
                torch.ones(8, 2, device="cuda"),
            )
            operators().moe(x, ids, weights, *up.packed, *w.packed, activation="silu", **options)
        elif operator == "mm":
            operators().mm(x, *(t[0] for t in w.packed), **options)
        else:
            ends = torch.tensor([2, 4, 6, 8], dtype=torch.int32, device="cuda")
            operators().grouped_mm(x, *w.packed, ends, **options)


def test_without_python_what_has_no_kernel_is_refused():
    x = torch.randn(2, 64, device="cuda")
    native.loaded().fp4_cuda_has_fallbacks(False)
    try:
        with pytest.raises(
            RuntimeError, match=r"fp4::quantize: .* no native CUDA kernel.* Python process .* mma_bf16"
        ):
            operators().quantize(x, "nvfp4")
        plain = torch.zeros(64, 32, dtype=torch.uint8, device="cuda"), torch.ones(64, 4, device="cuda")
        scale = plain[1].to(torch.float8_e4m3fn)
        with pytest.raises(RuntimeError, match=r"fp4::mm: layout is 'plain', and .* no native CUDA kernel"):
            operators().mm(x.bfloat16(), plain[0], scale, torch.ones((), device="cuda"), format="nvfp4")
    finally:
        native.loaded().fp4_cuda_has_fallbacks(True)
    assert len(operators().quantize(x, "nvfp4")) == 3


def everything(device: torch.device | str, seed: int = 3) -> list[torch.Tensor]:
    """Results of every native operator, by every kernel."""
    of = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=of).to(device)

    experts, hidden, inter, tokens, top_k = 4, 256, 128, 24, 2
    plain = [
        torch.ops.fp4.quantize(random(experts, *s), "nvfp4") for s in ((2 * inter, hidden), (hidden, inter))
    ]
    up, down = (torch.ops.fp4.prepack(*p, "nvfp4", "sm90") for p in plain)
    options = {"format": "nvfp4", "layout": "sm90"}
    x, scores = random(tokens, hidden).bfloat16(), random(tokens, top_k).abs()
    ids = torch.randint(0, experts, (tokens, top_k), generator=of).to(device)
    offs = torch.tensor([4, 4, 20, 24], dtype=torch.int32, device=device)
    found = [*torch.ops.fp4.quantize_fp8(x, layout="sm90")]
    for only in ("decode", "gemv", "prefill"):
        with native.only(only):
            found += [
                torch.ops.fp4.mm(x, *(t[0] for t in up), **options),
                torch.ops.fp4.grouped_mm(x, *up, offs, **options),
                torch.ops.fp4.indexed_mm(x[:4], *up, ids[:4, 0], **options),
                torch.ops.fp4.moe(x, ids, scores, *up, *down, a_format="auto", **options),
                torch.ops.fp4.moe(x[:1], ids[:1], scores[:1], *up, *down, a_format="fp8", **options),
            ]
    return [t.cpu() for t in found]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True))


@pytest.mark.hardware
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one():
    """Kernels that were launched on the first device before: what the driver keeps for each is there, too."""
    want = everything("cuda:0")
    assert torch.cuda.current_device() == 0
    assert equal(everything("cuda:1"), want)
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        assert equal(everything("cuda:0"), want)
        assert torch.cuda.current_device() == 1


@pytest.mark.hardware
def test_streams_and_a_graph_of_every_operator():
    want = everything("cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]
    for stream in streams:
        with torch.cuda.stream(stream):
            assert equal(everything("cuda"), want)
    torch.cuda.synchronize()
    w = Weights(4, 128, 256, format="nvfp4", layout="mma_bf16")
    a, offs = torch.randn(16, 256, device="cuda").bfloat16(), torch.tensor([3, 3, 9, 16], device="cuda").int()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.ops.fp4.grouped_mm(a, *w.packed, offs, **w.options)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            got = torch.ops.fp4.grouped_mm(a, *w.packed, offs, **w.options)
    for _ in range(3):
        a.copy_(torch.randn_like(a))
        graph.replay()
        assert torch.equal(got, torch.ops.fp4.grouped_mm(a, *w.packed, offs, **w.options))


@pytest.mark.hardware
def test_threads_at_once():
    want, got = everything("cuda"), {}

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            w = Weights(3, 64 * (i % 3 + 1), 128, format="nvfp4")
            a = torch.randn(9, 128, device="cuda").bfloat16()
            ids = torch.randint(0, 3, (9,), device="cuda")
            got[i] = error(torch.ops.fp4.indexed_mm(a, *w.packed, ids, **w.options), by_row(w.values, a, ids))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 12 and max(got.values()) < BOUND
    assert equal(everything("cuda"), want)


@pytest.mark.hardware
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_modes_of_autograd(mode):
    w = Weights(2, 64, 128, format="nvfp4")
    a = torch.randn(4, 128, device="cuda").bfloat16()
    want = torch.ops.fp4.mm(a, *(t[0] for t in w.packed), **w.options)
    with mode():
        assert torch.equal(torch.ops.fp4.mm(a, *(t[0] for t in w.packed), **w.options), want)


@pytest.mark.hardware
def test_a_gradient_is_refused():
    w = Weights(2, 64, 128, format="nvfp4")
    a = torch.randn(4, 128, device="cuda").bfloat16().requires_grad_()
    out = torch.ops.fp4.mm(a, *(t[0] for t in w.packed), **w.options)
    with pytest.raises(RuntimeError, match="fp4::mm has no gradient"):
        out.sum().backward()


def test_too_little_memory_is_said_in_words_that_callers_look_for():
    """accelerate and others look for them, as the type of torch's error does not pass the stable ABI."""
    w = Weights(64, 128, format="nvfp4")
    huge = torch.zeros(1, 128, device="cuda", dtype=torch.bfloat16).expand(1 << 50, 128)
    with pytest.raises(RuntimeError, match=r"(?i)memory"):
        torch.ops.fp4.mm(huge, *w.packed, **w.options)
