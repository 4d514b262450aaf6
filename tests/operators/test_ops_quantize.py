"""quantize, dequantize, quantize_int8, prepack and unpack: bit for bit, and at the edges of their ranges."""

from __future__ import annotations

import platform

import pytest
import reference
import torch
from conftest import poisoned
from reference import FORMATS, FP4_FORMATS, random_weight

fp4 = torch.ops.fp4

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
SHAPES = ((5, 94), (3, 7, 48), (2, 3, 4, 32), (1, 2), (16,), (4, 1, 578), (0, 64), (3, 0, 32), (33, 1454))


def equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    assert got.dtype == want.dtype and got.shape == want.shape
    return got.numel() == 0 or torch.equal(
        got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)
    )


def assert_quantized(x, format, global_scale=None):
    """fp4::quantize gives the reference's bits."""
    with poisoned():
        got = fp4.quantize(x, format, global_scale)
    want = reference.quantize(x.cpu(), format, None if global_scale is None else global_scale.cpu())
    assert all(t.is_contiguous() for t in got)
    assert equal(got[1].cpu(), want[1]), "block scales"
    if format == "nvfp4":
        assert equal(got[2].cpu(), want[2].view(x.shape[:-2])), "global scale"
    else:
        assert got[2].numel() == 0
    wrong = (got[0].cpu() != want[0]).sum().item()
    assert wrong == 0, f"{wrong} of {want[0].numel()} packed bytes differ"
    return got


@pytest.fixture(params=FORMATS)
def format(request) -> str:
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize_matches_the_definition(shape, format, dtype, device):
    spread = torch.exp2(torch.randint(-8, 8, shape).float())
    assert_quantized((torch.randn(shape) * spread).to(DTYPES[dtype]).to(device), format)


@pytest.mark.parametrize("format", FP4_FORMATS)
def test_ties_go_to_the_even_code(format, device):
    grid = reference.E2M1[:8].float()
    ties = (grid[1:] + grid[:-1]) / 2  # 0.25, 0.75, ..., 5
    row = torch.cat((grid, ties, torch.tensor([6.0]))).repeat(2)[:32]
    row[-1] = 6.0
    row[15] = 6.0
    signs = torch.randint(0, 2, (64, 32)) * 2 - 1
    x = row * signs
    ones = torch.ones((), device=device) if format == "nvfp4" else None
    packed, scale, _ = assert_quantized(x.to(device), format, ones)
    assert (reference.scale_values(scale.cpu()) == 1).all()
    want = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 0, 2, 2, 4, 4, 6, 6, 7])
    assert torch.equal(reference.unpack_codes(packed.cpu())[:, :16] & 7, want.expand(64, 16).byte())


@pytest.mark.parametrize("format", reference.INT4_FORMATS)
def test_int4_rounds_to_even_and_clamps(format, device):
    """7.5 in a block makes its scale 1: to -8 on the one side, to 7 on the other."""
    row = torch.arange(-15, 16) / 2
    x = torch.cat((row, torch.tensor([7.5]))).expand(3, 32)
    packed, scale, _ = assert_quantized(x.to(device), format)
    assert (scale == 1).all()
    codes = reference.INT4[reference.unpack_codes(packed.cpu()).long()]
    want = [-8, -7, -6, -6, -6, -5, -4, -4, -4, -3, -2, -2, -2, -1, 0, 0]
    want += [0, 1, 2, 2, 2, 3, 4, 4, 4, 5, 6, 6, 6, 7, 7, 7]
    assert codes[0].tolist() == want


@pytest.mark.parametrize("format", FP4_FORMATS)
def test_values_on_the_grid_survive(format, device):
    """Quantising what dequantise gave changes nothing, where every block uses its largest code."""
    w = random_weight(format, 3, 20, 96)
    packed = w.packed.clone()
    packed[..., ::4] |= 0x07  # a 6 in every block
    scale = torch.where(w.scale.view(torch.uint8) < 0x10, 0x38, w.scale.view(torch.uint8)).view(w.scale.dtype)
    if format == "nvfp4":
        # powers of two, so that float32 computes the way back exactly
        global_scale = torch.exp2(torch.randint(-8, 8, (3,)).float()).to(device)
    else:
        global_scale = None
    packed, scale = packed.to(device), scale.to(device)
    x = fp4.dequantize(packed, scale, global_scale, format, torch.float32)
    again = fp4.quantize(x, format, global_scale)
    assert equal(again[0], packed) and equal(again[1], scale)


ERROR = {
    "nvfp4": (0.08, 0.105), "mxfp4": (0.10, 0.14),
    "int4": (0.102, 0.12), "int4_g64": (0.095, 0.112), "int4_g32": (0.086, 0.104),
}  # fmt: skip


def test_quantize_error_is_that_of_four_bits(format, device):
    x = torch.randn(64, 1024, device=device)
    packed, scale, global_scale = fp4.quantize(x, format)
    back = reference.dequantize(*(t.cpu() for t in (packed, scale, global_scale)), format)
    error = reference.relative_error(back, x.cpu().double())
    low, high = ERROR[format]
    assert low < error < high


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_rows_and_matrices(format, dtype, device):
    x = torch.randn(4, 6, 64).to(DTYPES[dtype])
    x[1] = 0
    x[2, 3] = 0
    x[3, :, :32] = -0.0
    packed, scale, global_scale = assert_quantized(x.to(device), format)
    back = fp4.dequantize(packed, scale, global_scale, format, torch.float32)
    assert torch.isfinite(back).all()
    assert (back[1] == 0).all() and (back[2, 3] == 0).all() and (back[3, :, :32] == 0).all()
    if format == "nvfp4":
        assert global_scale[1] == 1


def test_blocks_whose_scale_underflows(format, device):
    """Blocks far smaller than the largest: subnormal or zero scales, never NaN."""
    x = torch.randn(8, 128) * torch.exp2(-torch.arange(8.0) * 3)[:, None]
    x[0, 0] = 100
    packed, scale, global_scale = assert_quantized(x.to(device), format)
    assert torch.isfinite(fp4.dequantize(packed, scale, global_scale, format, torch.float32)).all()
    if format == "nvfp4":
        values = reference.scale_values(scale.cpu())
        assert ((values > 0) & (values < 2**-6)).any(), "no subnormal scale in the test"


def test_subnormal_scales_count_under_flush_denormal(format):
    """torch.set_flush_denormal makes float32 subnormals zero; those of e4m3 and float16 count."""
    if platform.machine() != "x86_64":
        pytest.skip("tried on x86-64 alone")
    x = torch.randn(8, 128) * torch.exp2(-torch.arange(8.0) * 3)[:, None]
    x[0, 0] = 100
    a = torch.randn(3, 128)

    def results():
        weight = fp4.quantize(x, format)
        back = fp4.dequantize(*weight, format, torch.float32)
        return *weight, back, fp4.mm(a, *weight, format=format), fp4.quantize(x.half(), format)[1]

    want = results()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        found = results()
    finally:
        torch.set_flush_denormal(False)
    for got, expected in zip(found, want, strict=True):
        assert (got is None and expected is None) or equal(got, expected)


@pytest.mark.parametrize("magnitude", [3e38, 1e30, 1e-30, 1e-38, 1e-42, 1e-45])
def test_huge_and_tiny_values(format, magnitude, device):
    x = (torch.rand(4, 64) * 0.9 + 0.1) * magnitude * (torch.randint(0, 2, (4, 64)) * 2 - 1)
    x[0, :32] = 0
    packed, scale, global_scale = fp4.quantize(x.to(device), format)
    back = fp4.dequantize(packed, scale, global_scale, format, torch.float64).cpu()
    assert torch.isfinite(back).all()
    assert (back[0, :32] == 0).all()
    if magnitude > 1e-36:
        assert_quantized(x.to(device), format)
        assert reference.relative_error(back, x.double()) < 0.2
    else:  # scales are subnormal float32 or underflow: coarse, but bounded
        assert (back.abs() <= 2 * x.double().abs().max() + 1e-37).all()


def test_a_given_global_scale_is_used_and_saturates(device):
    x = torch.randn(3, 5, 64)
    given = torch.rand(3) + 0.5
    _, _, used = assert_quantized(x.to(device), "nvfp4", given.to(device))
    assert equal(used.cpu(), given)
    tiny = torch.full((3,), 1e-6)
    _, scale, _ = assert_quantized(x.to(device), "nvfp4", tiny.to(device))
    assert (reference.scale_values(scale.cpu()) == 448).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_not_finite_is_refused_on_cpu(format, dtype, bad):
    x = torch.randn(3, 70).to(DTYPES[dtype])
    x[2, 69] = bad
    with pytest.raises(RuntimeError, match=r"x (holds|has|contains) .*(NaN|finite)"):
        fp4.quantize(x, format)


def test_noncontiguous_input(format, device):
    x = torch.randn(6, 5, 64, device=device)
    for view in (x.transpose(0, 1), x[:, ::2], x[..., ::2], x[0].t()[:, :4], x[0, 0].expand(3, 64)):
        assert_quantized(view, format)


@pytest.mark.parametrize("dtype", [*DTYPES, "f64"])
def test_dequantize_every_code_and_scale(format, dtype, device):
    """Every byte as a scale times every code, rounded once to the type."""
    dtype = DTYPES.get(dtype, torch.float64)
    own, block = reference.SCALE_DTYPE[format], reference.BLOCK[format]
    bits = torch.arange(256**own.itemsize).to({1: torch.uint8, 2: torch.int16}[own.itemsize])
    scale = bits[:, None].view(own)
    packed = reference.pack_codes(torch.arange(16).repeat(len(bits), block // 16))
    global_scale = torch.tensor(1.0 + 2**-20) if format == "nvfp4" else None
    with poisoned():
        got = fp4.dequantize(
            packed.to(device), scale.to(device), None if global_scale is None else global_scale.to(device),
            format, dtype,
        ).cpu()  # fmt: skip
    want = reference.dequantize(packed, scale, global_scale, format)
    assert got.dtype == dtype
    if device == "cuda" and dtype != torch.float64:
        got, want = flush(got, dtype), flush(want.to(dtype), dtype)
    assert torch.equal(torch.nan_to_num(got, nan=-12345.0), torch.nan_to_num(want.to(dtype), nan=-12345.0))


def flush(t, dtype):
    """Subnormal results count as zero: a GPU may flush them."""
    return torch.where(t.abs() < 2.0**-126, 0.0, t.double()).to(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, "f64"])
@pytest.mark.parametrize("shape", [(94,), (5, 94), (3, 33, 48), (2, 3, 16, 64), (0, 32), (4, 1, 2)], ids=str)
def test_dequantize_is_exact(shape, format, dtype, device):
    dtype = DTYPES.get(dtype, torch.float64)
    if len(shape) == 1:
        w = random_weight(format, 1, *shape, device=device)
        w.packed, w.scale, w.dense = w.packed[0], w.scale[0], w.dense[0]
    else:
        w = random_weight(format, *shape, device=device)
    with poisoned():
        got = fp4.dequantize(*w.operands(), format, dtype)
    assert got.is_contiguous()
    assert torch.equal(got, w.dense.to(dtype) if dtype == torch.float64 else w.dense.float().to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 94), (3, 7, 48), (33,), (2, 1), (0, 32), (4, 727)], ids=str)
def test_quantize_int8_matches_the_definition(shape, dtype, device):
    x = (torch.randn(shape) * torch.exp2(torch.randint(-8, 8, shape).float())).to(DTYPES[dtype])
    if x.dim() == 2 and x.shape[0] > 1:
        x[1] = 0
    with poisoned():
        codes, scale = fp4.quantize_int8(x.to(device))
    want_codes, want_scale = reference.quantize_int8(x)
    assert equal(scale.cpu(), want_scale)
    assert equal(codes.cpu(), want_codes)


@pytest.mark.parametrize("layout", ["plain", "sm90"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 94), (3, 7, 48), (33,), (2, 1), (0, 32), (3, 0), (4, 727)], ids=str)
def test_quantize_fp8_matches_the_definition(shape, dtype, layout, device):
    x = (torch.randn(shape) * torch.exp2(torch.randint(-8, 8, shape).float())).to(DTYPES[dtype])
    if x.dim() == 2 and x.shape[0] > 1:
        x[1] = 0
    with poisoned():
        codes, scale = fp4.quantize_fp8(x.to(device), layout=layout)
    want_codes, want_scale = reference.quantize_fp8(x)
    if layout == "sm90":
        want_codes = reference.sm90_order(want_codes.view(torch.uint8)).view(want_codes.dtype)
    assert equal(scale.cpu(), want_scale)
    if layout == "sm90" and device == "cuda":
        # Hopper's kernel multiplies by 448 / amax, three roundings of float32 away from x / scale: of two
        # codes about as near it may take the other.
        exact = reference.sm90_order(x.double() / want_scale.double()[..., None].clamp(min=1e-300))
        off, nearest = ((c.double() - exact).abs() for c in (codes.cpu(), want_codes))
        assert (off <= nearest + 2.0**-21 * exact.abs()).all()
    else:
        assert equal(codes.cpu(), want_codes)


@pytest.mark.parametrize("magnitude", [3e38, 1e-36, 1e-42, 1e-45])
def test_quantize_fp8_of_huge_and_tiny_rows(magnitude, device):
    x = (torch.rand(3, 64) * 0.9 + 0.1) * magnitude
    codes, scale = fp4.quantize_fp8(x.to(device))
    back = reference.dequantize_fp8(codes.cpu(), scale.cpu())
    assert torch.isfinite(back).all() and (back.abs() <= 2 * x.double().abs().max() + 1e-42).all()
    if magnitude > 1e-37:
        assert reference.relative_error(back, x.double()) < 0.04


def test_quantize_fp8_of_nan_and_infinity(device):
    """The row becomes NaN, and no other does."""
    x = torch.randn(4, 40, device=device)
    x[1, 3], x[2, 39] = torch.nan, -torch.inf
    back = reference.dequantize_fp8(*(t.cpu() for t in fp4.quantize_fp8(x)))
    assert back[1:3].isnan().all() and torch.isfinite(back[[0, 3]]).all()


@pytest.mark.parametrize("shape", [(16, 32), (3, 33, 64), (2, 48, 94), (5, 32), (1, 160, 1454)], ids=str)
def test_prepack_is_a_permutation_that_unpack_undoes(shape, format):
    w = random_weight(format, *shape)
    with poisoned():
        packed, scale, factor = fp4.prepack(w.packed, w.scale, w.global_scale, format, "tile16")
        back = fp4.unpack(packed, scale, factor, format, "tile16")
    assert equal(back[0], w.packed) and equal(back[1], w.scale)
    assert packed.shape == w.packed.shape and scale.dtype == w.scale.dtype
    assert torch.equal(
        scale.view(torch.uint8).flatten().sort().values, w.scale.view(torch.uint8).flatten().sort().values
    )
    codes = [reference.unpack_codes(t).flatten().bincount(minlength=16) for t in (packed, w.packed)]
    assert torch.equal(*codes)
    n, k = shape[-2:]
    if n >= 16 and k % 32 == 0:
        assert not torch.equal(packed, w.packed)
    assert torch.equal(
        fp4.dequantize(packed, scale, w.global_scale, format, torch.float64, layout="tile16"), w.dense
    )


def test_plain_layout_is_a_copy(format, device):
    w = random_weight(format, 3, 20, 64, device=device)
    for convert in (fp4.prepack, fp4.unpack):
        for got, given in zip(convert(*w.operands(), format, "plain"), w.operands()):
            if given is None:
                assert got.numel() == 0 and got.dtype == torch.float32
            else:
                assert equal(got, given) and got.data_ptr() != given.data_ptr()
