"""Tests of the kernels between the products on Hopper: routing, quantised and gated rows, combine."""

import itertools

import pytest
import reference
import torch
from conftest import large

from fp4_ops.backends.launchers import library, rows
from fp4_ops.meta.formats import ACTIVATIONS
from fp4_ops.meta.layouts import LAYOUTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not library.available(0),
        reason="needs a Hopper GPU and its kernels (build with FP4_CUDA_ARCHS=90a)",
    ),
]

FORMATS = ["nvfp4", "mxfp4"]
DTYPES = [torch.bfloat16, torch.float16]
WIDTHS = [16, 32, 48, 256, 768, 1024, 1536, 2048, 2880, 4096, 16384]
"""A row to a warp's half, a warp, a thread block: see row_plan."""
ROWS = [1, 7, 70, large(5000)]


def plain_order(codes: torch.Tensor) -> torch.Tensor:
    """fp8 rows back from the layout's order."""
    return (
        codes.view(*codes.shape[:-1], codes.shape[-1] // 64, 4, 4, 4).transpose(-2, -3).reshape(codes.shape)
    )


def random_rows(m: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    x = (torch.randn(m, width, device="cuda") * 10 ** torch.empty(m, 1, device="cuda").uniform_(-3, 3)).to(
        dtype
    )
    if m > 1:
        x[m // 2] = 0
    return x


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bit for bit: codes of x * (448 / amax), in the order of k, and amax / 448."""
    amax = x.float().abs().amax(-1, keepdim=True)
    top = torch.full_like(amax, 448)
    codes = torch.where(amax > 0, x.float() * (top / amax), 0).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), (amax / top)[:, 0]


def logical(codes: torch.Tensor, width: int) -> torch.Tensor:
    """The bytes in the order of k; the padding is zeros."""
    assert codes.shape[-1] == LAYOUTS["sm90"].padded(width)
    codes = plain_order(codes.view(torch.uint8))
    assert not codes[:, width:].any()
    return codes[:, :width]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_quantize_fp8_bits(width, m, dtype):
    x = random_rows(m, width, dtype)
    codes, scale = rows.quantize_fp8(x)
    want, want_scale = quantized(x)
    assert torch.equal(scale, want_scale)
    assert torch.equal(logical(codes, width), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 70, large(5000)])
@pytest.mark.parametrize("width", [*WIDTHS, 20000])
def test_rows_to_half(width, m, dtype):
    """Bit for bit; what a row loses is below 2^-38 of its largest value."""
    x = random_rows(m, width, dtype)
    values, factor = rows.to_half(x)
    want, want_factor = reference.half_rows(x)
    assert torch.equal(values, want) and torch.equal(factor, want_factor)
    back = reference.plain_rows(values).double()[:, :width] * factor.double()[:, None]
    assert ((back - x.double()).abs() <= x.double().abs().amax(-1, keepdim=True) * 2.0**-38).all()


@pytest.mark.parametrize("width", [16, 768, 2880])
def test_rows_to_half_keep_what_is_not_finite(width):
    for bad in (float("nan"), float("inf")):
        x = torch.randn(5, width, device="cuda").bfloat16()
        x[2, width // 2] = bad
        values, factor = rows.to_half(x)
        assert torch.isfinite(factor).all()
        assert (~torch.isfinite(reference.plain_rows(values))).nonzero().tolist() == [[2, width // 2]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("groups", [1, 12, 128, 1023])
def test_route_sorts_by_expert(groups, dtype):
    """Chunks of 1024 ids; up to eight of them are counted by every block, more by a kernel before."""
    for count in (1, 31, 1000, 1024, 1025, 5000, 8192, 8193, 70000):
        ids = torch.randint(-2, groups + 2, (count,), device="cuda", dtype=dtype)
        key = torch.where((ids >= 0) & (ids < groups), ids, groups).long()
        order = key.argsort(stable=True)
        offs, sorted_rows, position = rows.route(ids, groups)
        assert torch.equal(sorted_rows, order.int()) and torch.equal(position, order.argsort().int())
        assert torch.equal(offs, torch.bincount(key, minlength=groups + 1)[:groups].cumsum(0).int())


@pytest.mark.parametrize("top_k", [1, 8])
@pytest.mark.parametrize("width", [32, 768, 2048, 2880, 20000])
def test_16_bit_rows_go_where_their_experts_want_them(width, top_k):
    tokens, groups = 700, 12
    x = random_rows(tokens, width, torch.bfloat16)
    ids = torch.randint(-2, groups + 4, (tokens, top_k), device="cuda")
    offs, sorted_rows, position = rows.route(ids, groups)
    want, want_factor = (t[sorted_rows.long() // top_k] for t in reference.half_rows(x))
    for end in (None, offs[-1:]):
        values, factor = rows.to_half(x, position=position, end=end)
        live = tokens * top_k if end is None else int(end)
        assert torch.equal(values[:live], want[:live]) and torch.equal(factor[:live], want_factor[:live])
        plain = rows.same(x, position=position, end=end)
        assert torch.equal(plain[:live], x[sorted_rows.long() // top_k][:live])


@pytest.mark.parametrize("gate", ["silu", "silu_interleaved", "swigluoai", "gelu"])
@pytest.mark.parametrize("width", [48, 768, 2880, 14336, 20000])
def test_gated_rows_to_half(width, gate):
    for dtype, m in itertools.product(DTYPES, (3, 600)):
        x = torch.randn(m, 2 * width, device="cuda").to(dtype)
        values, factor = rows.to_half(x, ACTIVATIONS[gate])
        back = reference.plain_rows(values).double() * factor.double()[:, None]
        exact = reference.activate(x.double(), gate)
        # fp16 rounds a value by at most 2^-11 of it; float32 in the gates adds less than 1e-5.
        assert ((back[:, :width] - exact).norm() / exact.norm()).item() < 2**-11 + 1e-5
        assert not back[:, width:].any()


@pytest.mark.parametrize("top_k", [1, 3, 8, 10, 40])
@pytest.mark.parametrize("tokens", [1, 9, 700, large(5000)])
@pytest.mark.parametrize("width", [32, 768, 2048, 2880, 16384])
def test_rows_go_where_their_experts_want_them(width, tokens, top_k):
    groups = 12
    if width * tokens * top_k > 2**30:
        pytest.skip("too large to be compared")
    x = random_rows(tokens, width, torch.bfloat16)
    ids = torch.randint(-2, groups + 4, (tokens, top_k), device="cuda")
    offs, sorted_rows, position = rows.route(ids, groups)
    want, want_scale = quantized(x)
    token = sorted_rows.long() // top_k
    for end in (None, offs[-1:]):
        codes, scale = rows.quantize_fp8(x, position=position, end=end)
        live = tokens * top_k if end is None else int(end)
        assert torch.equal(scale[:live], want_scale[token[:live]])
        assert torch.equal(logical(codes[:live], width), want[token[:live]])


@pytest.mark.parametrize("gate", [name for name, a in ACTIVATIONS.items() if rows.gates(a)])
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_gated_rows(width, m, gate):
    gate = ACTIVATIONS[gate]
    for dtype in DTYPES:
        x = (torch.randn(m, 2 * width, device="cuda") * 3).to(dtype)
        x[-1, ::3] = 0  # some of the gates of a thread
        if m > 1:
            x[m // 2] = 0
        exact = reference.activate(x.double(), gate.name)
        amax = exact.abs().amax(-1, keepdim=True)
        noise = 2e-5 * exact.abs() + 2e-6 * amax  # of exp and erf in float32
        if gate.function == "gelu":  # 1 + erf loses bits where a gate is negative
            noise += 2.0**-22 * reference.activate(x.double().abs(), gate.name)
        got = rows.same(x, gate)
        rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
        assert ((got.double() - exact).abs() <= noise + rounding * exact.abs() + 2.0**-25).all()
        codes, scale = rows.quantize_fp8(x, gate)
        assert ((scale.double()[:, None] - amax / 448).abs() <= 1e-4 * amax / 448).all()
        values = logical(codes, width).view(torch.float8_e4m3fn).double() * scale.double()[:, None]
        step = torch.maximum(exact.abs() / 16, amax / 448 / 1024)  # half of it, at most
        assert ((values - exact).abs() <= 1.001 * step + 1e-4 * exact.abs() + noise).all()
        end = torch.tensor([m // 3], dtype=torch.int32, device="cuda")
        again, again_scale = rows.quantize_fp8(x, gate, end=end)
        assert torch.equal(again[: m // 3].view(torch.uint8), codes[: m // 3].view(torch.uint8))
        assert torch.equal(again_scale[: m // 3], scale[: m // 3])
        assert torch.equal(rows.same(x, gate, end=end)[: m // 3], got[: m // 3])


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "swigluoai"])
def test_gates_of_any_size(gate):
    """Far outside of what the quick division takes: tiny and huge gates, zeros of both signs."""
    gate = ACTIVATIONS[gate]
    g = torch.randn(64, 768, device="cuda") * 10 ** torch.empty(64, 768, device="cuda").uniform_(-30, 3)
    g[::5, ::7] = 0
    g[1::5, ::7] = -0.0
    up = torch.randn(64, 768, device="cuda")
    x = (torch.stack([g, up], -1).flatten(1) if gate.interleaved else torch.cat([g, up], 1)).bfloat16()
    got = rows.same(x, gate).double()
    x = x.double()
    g, up = (x[:, ::2], x[:, 1::2]) if gate.interleaved else x.chunk(2, 1)
    if gate.limit:
        g, up = g.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    slope = g * gate.alpha if gate.function == "silu" else (8 / torch.pi) ** 0.5 * (g + 0.044715 * g**3)
    exact = g * torch.sigmoid(slope) * (up + gate.up_offset)
    # The exponent of a float32 exp is off by a few 2^-24 of itself, which is at most 88.
    assert ((got - exact).abs() <= (2.0**-8 + 1e-4) * exact.abs() + 1e-30).all()
    assert torch.equal(got.signbit(), exact.signbit())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("k", [16, 32, 768, 2880, 16384])
def test_quantize_fp4_rows_equals_the_operator(k, format, dtype):
    x = (torch.randn(70, k, device="cuda") * 10 ** torch.empty(70, 1, device="cuda").uniform_(-3, 3)).to(
        dtype
    )
    x[3] = 0
    x[4, :16] = 0
    position = torch.randperm(210, device="cuda").int()
    values, factor = rows.quantize_fp4(x, position=position, format=format)
    codes, scale, each = torch.ops.fp4.quantize(x[position.long().argsort() // 3][:, None], format)
    ones = torch.ones(210, device="cuda") if format == "nvfp4" else None
    want = torch.ops.fp4.dequantize(codes, scale, ones, format, torch.bfloat16)[:, 0]
    assert torch.equal(values, want)
    assert torch.equal(factor, each if format == "nvfp4" else torch.ones_like(factor))
    for bad in (float("nan"), float("inf")):
        x[7, k // 2] = bad
        assert rows.quantize_fp4(x, format=format)[1].isnan().nonzero().tolist() == [[7]]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("shape", [(3, 64), (70, 768), (2, 3, 2880), (5, 40), (4, 16384)], ids=str)
def test_quantize_fp8_equals_the_cpu(shape, dtype):
    x = torch.randn(shape, dtype=dtype) * 5
    x.view(-1, shape[-1])[0] = 0
    codes, scale = torch.ops.fp4.quantize_fp8(x.cuda(), layout="sm90")
    want_codes, want_scale = torch.ops.fp4.quantize_fp8(x, layout="sm90")
    torch.testing.assert_close(scale.cpu(), want_scale, rtol=1e-6, atol=0)
    # x * (448 / amax) and x / (amax / 448) differ in the last bit, which decides ties.
    a, b = codes.cpu().view(torch.uint8).int(), want_codes.view(torch.uint8).int()
    assert int((a - b).abs().max()) <= 1
    assert int((a != b).sum()) <= 1 + 5e-3 * a.numel()


@pytest.mark.parametrize("m", [1, 1000, 1025, 70000])
def test_route_is_a_stable_sort(m):
    groups = 37
    ids = torch.randint(-2, groups + 2, (m,), device="cuda")
    offs, sorted_rows, position = rows.route(ids, groups)
    key = torch.where((ids >= 0) & (ids < groups), ids, groups)
    assert torch.equal(sorted_rows.long(), key.argsort(stable=True))
    assert torch.equal(sorted_rows[position.long()].long(), torch.arange(m, device="cuda"))
    assert torch.equal(offs.long(), torch.bincount(key, minlength=groups + 1)[:groups].cumsum(0))


@pytest.mark.parametrize("n", [4, 12, 64, 132, 2048, 2880])
@pytest.mark.parametrize("top_k", [1, 4, 8, 10, 40])
def test_combine(top_k, n):
    groups = 6
    all_dtypes = [torch.float32, *DTYPES]
    for tokens in (1, 9, 300):
        for i, y_dtype in enumerate([torch.float32, torch.bfloat16] * 3):
            out_dtype, weight_dtype = all_dtypes[i % 3], all_dtypes[(i + tokens) % 3]
            bias_dtype = [None, *all_dtypes][(i + top_k + tokens) % 4]
            ids = torch.randint(-1, groups + 1, (tokens, top_k), device="cuda")
            ids = ids.int() if i % 2 else ids
            y = torch.randn(tokens * top_k, n, device="cuda").to(y_dtype)
            weights = torch.rand(tokens, top_k, device="cuda").to(weight_dtype)
            bias = None
            if bias_dtype is not None:  # a view that begins between 16 bytes
                bias = torch.randn(groups * n + 1, device="cuda").to(bias_dtype)[1:].view(groups, n)
            position = rows.route(ids, groups)[2] if i < 4 else None
            out = torch.full((tokens, n), float("nan"), dtype=out_dtype, device="cuda")
            rows.combine(y, position, ids, weights, bias, groups, out)
            terms = (y if position is None else y[position.long()]).double().view(tokens, top_k, n)
            if bias is not None:
                terms = terms + bias.double()[ids.long().clamp(0, groups - 1)]
            live = ((ids >= 0) & (ids < groups))[..., None]
            terms = torch.where(live, terms * weights.double()[..., None], 0)
            rounding = {torch.float32: 0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[out_dtype]
            want = terms.sum(1)
            # Each term and each partial sum is rounded to float32.
            slack = 2.0**-23 * (top_k + 2) * terms.abs().sum(1) + rounding * want.abs() * 1.001 + 2.0**-25
            assert ((out.double() - want).abs() <= slack).all()
