"""The Triton kernels on a GPU against float64 over the exactly dequantised weights, on odd shapes."""

import pytest
import torch

import fp4_ops  # noqa: F401
from fp4_ops.triton import ops, tiles

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Output rounding for 16 bits; for float32 the accumulation of the tensor cores, a little worse than IEEE.
BOUND = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 3e-6}
SHAPES = [(5, 727, 576), (3, 96, 2880), (2, 33, 50), (1, 577, 128), (4, 64, 40)]


@pytest.fixture(autouse=True)
def seeded():
    seed = torch.seed() % 2**31
    print("seed", seed)
    torch.manual_seed(seed)
    yield
    tiles.force(None)


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
def test_indexed_and_grouped(shape, dtype, format):
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
def test_every_tile(tile, format):
    tiles.force(tile)
    g, n, k, m = 3, 200, 544, 301
    w, d = weight(g, n, k, format)
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(0, g, (m,), device="cuda")
    bias = torch.zeros(g, n, device="cuda")
    out = torch.ops.fp4.indexed_mm(a, *w, ids, format=format, out_dtype=torch.float32)
    assert error(out, reference(a, d, ids.tolist(), bias)) < 3e-6


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
def test_moe(dtype, format, activation):
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
