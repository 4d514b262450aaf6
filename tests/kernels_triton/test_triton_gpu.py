"""The Triton kernels on a GPU against float64 over the exactly dequantised weights, on odd shapes.

Also with the tiles of GPUs that have less shared memory (`-k "99 KB"`, `-k "163 KB"`), and with the code that
they get: `-k sm_86` and `-k sm_80` compile mma.sync and cp.async instead of wgmma, for this GPU's assembler.
"""

from dataclasses import replace

import pytest
import torch

import fp4_ops  # noqa: F401

triton = pytest.importorskip("triton")

from fp4_ops.backends.triton import (  # noqa: E402
    activations,
    gemm,
    launch,
    ops,
    quantize,
    routing,
    tiles,
)  # fmt: skip

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Output rounding for 16 bits; for float32 the accumulation of the tensor cores, a little worse than IEEE.
BOUND = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 3e-6}
SHAPES = [(5, 727, 576), (3, 96, 2880), (2, 33, 50), (1, 577, 128), (4, 64, 40)]


@pytest.fixture(autouse=True)
def any_tile():
    yield
    tiles.force(None)


def forget_compiled() -> None:
    """Kernels are kept by their arguments, not by the architecture that they were compiled for."""
    for module in (activations, gemm, quantize, routing):
        for function in vars(module).values():
            if isinstance(function, triton.runtime.JITFunction):
                function.device_caches.clear()


LIKE = {"this GPU": None, "99 KB": None, "163 KB": None, "sm_86": (8, 6), "sm_80": (8, 0)}
MEMORY = {
    "sm_86": tiles.SHARED_MEMORY["99 KB"],
    "sm_80": tiles.SHARED_MEMORY["163 KB"],
    **tiles.SHARED_MEMORY,
}


@pytest.fixture(params=LIKE)
def like(request):
    """As if on a GPU of less memory, or of another architecture."""
    which, this = request.param, tiles.device_of(torch.device("cuda"))
    if which == "this GPU":
        yield this
        return
    if MEMORY[which] > this.shared_memory:
        pytest.skip("this GPU has less")
    capability = LIKE[which] or this.capability
    pretended = replace(this, name=which, capability=capability, shared_memory=MEMORY[which])
    tiles.pretend(pretended)
    if LIKE[which]:
        triton.knobs.runtime.override_arch = which.replace("_", "")
        forget_compiled()
    yield pretended
    tiles.pretend(None)
    if LIKE[which]:
        triton.knobs.runtime.override_arch = None
        forget_compiled()
    used = [tile for device, _, tile in launch._fits if device == pretended]
    assert used, "the choice did not ask"


def weight(g, n, k, format):
    scale = torch.rand(g, n, 1, device="cuda") * 4 + 0.01
    packed, block_scale, gs = torch.ops.fp4.quantize(torch.randn(g, n, k, device="cuda") * scale, format)
    w = packed, block_scale, (gs if gs.numel() else None)
    return w, torch.ops.fp4.dequantize(*w, format, torch.float64)


def reference(a, d, ids, bias):
    rows = []
    for r, e in enumerate(ids):
        inside = 0 <= e < d.shape[0]
        rows.append(d[e] @ a[r].double() + bias[e].double() if inside else d.new_zeros(d.shape[1]))
    return torch.stack(rows)


def error(out, ref) -> float:
    return ((out.double() - ref).norm() / ref.norm()).item()


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_indexed_and_grouped(shape, dtype, format, like):
    g, n, k = shape
    w, d = weight(g, n, k, format)
    for m in (1, 45, 200):
        a = torch.randn(m, k, device="cuda", dtype=dtype)
        bias = torch.randn(g, n, device="cuda", dtype=dtype)
        ids = torch.randint(-1, g + 1, (m,), device="cuda")
        ids[0] = 0
        out = torch.ops.fp4.indexed_mm(a, *w, ids, None, bias, format=format)
        assert out.dtype == dtype
        assert error(out, reference(a, d, ids.tolist(), bias)) < BOUND[dtype]
        offs = torch.randint(0, m + 1, (g,), device="cuda").sort().values.int()
        offs[-1] = max(1, int(offs[-1]))
        of_row = torch.searchsorted(offs, torch.arange(m, device="cuda"), right=True).tolist()
        out = torch.ops.fp4.grouped_mm(a, *w, offs, None, bias, format=format)
        assert error(out, reference(a, d, of_row, bias)) < BOUND[dtype]
        assert not out[int(offs[-1]) :].any()


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("tile", tiles.CANDIDATES, ids=str)
def test_every_tile(tile, format, like):
    if not tiles.usable(tile, tiles.Problem(200, 768), like):
        pytest.skip("not for this architecture")
    tiles.force(tile)
    g, n, k, m = 3, 200, 800, 301
    w, d = weight(g, n, k, format)
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(0, g, (m,), device="cuda")
    bias = torch.zeros(g, n, device="cuda")
    try:
        out = torch.ops.fp4.indexed_mm(a, *w, ids, format=format, out_dtype=torch.float32)
    except RuntimeError as refused:
        assert "no tile of the product kernel" in str(refused)
        pytest.skip("does not fit")
    assert error(out, reference(a, d, ids.tolist(), bias)) < 3e-6


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "int4", "int4_g32"])
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32", "fp8"])
def test_prefill_of_wide_weights(kind, format, like):
    """Enough weight rows and tokens for the largest tiles; also columns' groups, masked rows, one matrix."""
    g, n, k, m = 2, 4096, 512, 700
    w, d = weight(g, n, k, format)
    if kind == "fp8":
        a, scale = torch.ops.fp4.quantize_fp8(torch.randn(m, k, device="cuda"))
        exact = a.double() * scale.double()[:, None]
    else:
        a, scale = torch.randn(m, k, device="cuda").to(getattr(torch, kind)), None
        exact = a.double()
    options = {"format": format, "out_dtype": torch.float32}
    offs = torch.tensor([250, 640], device="cuda", dtype=torch.int32)
    of_row = [0] * 250 + [1] * 390 + [-1] * 60
    want = reference(exact, d, of_row, torch.zeros(g, n, device="cuda"))
    assert error(torch.ops.fp4.grouped_mm(a, *w, offs, scale, **options), want) < 3e-6
    halves = a.view(2, m // 2, k), None if scale is None else scale.view(2, m // 2)
    counts = torch.tensor([m // 2, 200], device="cuda", dtype=torch.int32)
    out = torch.ops.fp4.grouped_mm_masked(halves[0], *w, counts, halves[1], **options)
    assert error(out[0], exact[: m // 2] @ d[0].T) < 3e-6
    assert error(out[1, :200], exact[m // 2 : m // 2 + 200] @ d[1].T) < 3e-6 and not out[1, 200:].any()
    one = [None if t is None else t[0] for t in w]
    assert error(torch.ops.fp4.mm(a, *one, scale, **options), exact @ d[0].T) < 3e-6
    ends = torch.tensor([128, 384], device="cuda", dtype=torch.int32)
    out = torch.ops.fp4.grouped_mm_k(a, *one, ends, scale, **options)
    assert error(out[0], exact[:, :128] @ d[0, :, :128].T) < 3e-6
    assert error(out[1], exact[:, 128:384] @ d[0, :, 128:384].T) < 3e-6


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn, torch.int64])
def test_rows_of_any_dtype_are_copied(dtype):
    rows, offs = torch.randn(7, 40, device="cuda").to(dtype), torch.tensor([3, 7], device="cuda").int()
    masked, counts = torch.ops.fp4.to_masked(rows, offs, 5)
    assert masked.dtype == dtype and torch.equal(masked[0, :3].view(torch.uint8), rows[:3].view(torch.uint8))
    back, _ = torch.ops.fp4.from_masked(masked, counts, 7)
    assert torch.equal(back.view(torch.uint8), rows.view(torch.uint8))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("m", [45, 3000])
def test_sorting_by_count_gives_the_same_rows(format, m, monkeypatch):
    g, n, k = 9, 48, 64
    w, _ = weight(g, n, k, format)
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(-1, g + 1, (m,), device="cuda")
    few = torch.ops.fp4.indexed_mm(a, *w, ids, format=format)
    monkeypatch.setattr(ops, "SORT_BY_COMPARISON", 0)
    assert torch.equal(few, torch.ops.fp4.indexed_mm(a, *w, ids, format=format))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swigluoai"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_moe(dtype, format, activation, like):
    g, hidden, inter, top_k = 6, 144, 72, 3
    w13, d13 = weight(g, 2 * inter, hidden, format)
    w2, d2 = weight(g, hidden, inter, format)
    b13, b2 = torch.randn(g, 2 * inter, device="cuda"), torch.randn(g, hidden, device="cuda")
    for tokens in (1, 70):
        x = torch.randn(tokens, hidden, device="cuda", dtype=dtype) / 4
        ids = torch.randint(-1, g + 1, (tokens, top_k), device="cuda")
        ids[0, 0] = 0
        topk = torch.rand(tokens, top_k, device="cuda")
        out = torch.ops.fp4.moe(x, ids, topk, *w13, *w2, b13, b2, format=format, activation=activation)
        ref = torch.zeros(tokens, hidden, device="cuda", dtype=torch.float64)
        for t in range(tokens):
            for j, e in enumerate(ids[t].tolist()):
                if not 0 <= e < g:
                    continue
                y = d13[e] @ x[t].double() + b13[e].double()
                if activation == "swigluoai":
                    gate, up = y[0::2].clamp(max=7), y[1::2].clamp(-7, 7)
                    h = gate * torch.sigmoid(1.702 * gate) * (up + 1)
                else:
                    gate, up = y.chunk(2)
                    how = "tanh" if activation == "gelu_tanh" else "none"
                    h = (
                        torch.nn.functional.silu(gate)
                        if activation == "silu"
                        else torch.nn.functional.gelu(gate, approximate=how)
                    )
                    h = h * up
                ref[t] += topk[t, j].double() * (d2[e] @ h + b2[e].double())
        assert error(out, ref) < 2 * BOUND[dtype]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_and_dequantize_equal_the_cpu(format, dtype):
    for shape in ((3, 40, 50), (17, 64), (2, 2, 5, 96), (30,)):
        x = torch.randn(shape, dtype=dtype) * torch.exp(2 * torch.randn(*shape[:-1], 1)).to(dtype)
        x.flatten()[: shape[-1] // 2] = 0
        there, here = torch.ops.fp4.quantize(x.cuda(), format), torch.ops.fp4.quantize(x, format)
        for a, b, name in zip(there, here, ("packed", "block_scale", "global_scale")):
            view = torch.uint8 if a.element_size() == 1 else torch.int32
            assert torch.equal(a.cpu().view(view), b.view(view)), name
        for out in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            a = torch.ops.fp4.dequantize(*there, format, out).cpu()
            assert torch.equal(a, torch.ops.fp4.dequantize(*here, format, out))
        a, b = torch.ops.fp4.quantize_int8(x.cuda()), torch.ops.fp4.quantize_int8(x)
        assert torch.equal(a[0].cpu(), b[0]) and torch.equal(a[1].cpu(), b[1])


def test_what_runs_on_the_cpu_only_says_so():
    w, _ = weight(2, 32, 64, "nvfp4")
    a = torch.randn(4, 64, device="cuda")
    offs = torch.tensor([2, 4], device="cuda", dtype=torch.int32)
    with pytest.raises(RuntimeError, match="layout is 'tile16', which only the CPU kernels read"):
        torch.ops.fp4.grouped_mm(a, *w, offs, format="nvfp4", layout="tile16")
    codes, scale = torch.ops.fp4.quantize_int8(a)
    with pytest.raises(RuntimeError, match="int8 activations run on CPU only"):
        torch.ops.fp4.grouped_mm(codes, *w, offs, scale, format="nvfp4")
