"""The Hopper kernels (layouts sm90 and mma_bf16) against float64 over the exactly dequantised operands."""

import pytest
import reference
import torch
from conftest import large
from development import development

from fp4_ops.backends.hopper import HOPPER
from fp4_ops.backends.launchers import library, rows
from fp4_ops.experts.packed import PackedWeight, interleave
from fp4_ops.meta.formats import ACTIVATIONS
from fp4_ops.meta.layouts import LAYOUTS
from fp4_ops.runtime import native

decode, planner, prefill = development("decode"), development("planner"), development("prefill")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not library.available(0),
        reason="needs a Hopper GPU and its kernels (build with FP4_CUDA_ARCHS=90a)",
    ),
]

FORMATS = ["nvfp4", "mxfp4"]
DTYPES = [torch.bfloat16, torch.float16]
LAYOUT_NAMES = ["sm90", "mma_bf16"]
ROWS_OF = [(torch.bfloat16, "sm90"), (torch.float16, "sm90"), (torch.bfloat16, "mma_bf16")]
"""16-bit rows and the layouts whose kernels read them."""
CONFIGS = {
    kernel: range(len(prefill.candidates(kernel)) if library.library() else 1)
    for kernel in ("half", "bf16", "w4a8")
}
"""Prefill's candidates."""
CANDIDATES = [
    *(pytest.param(torch.float16, config, id=f"half-{config}") for config in CONFIGS["half"]),
    *(pytest.param(torch.bfloat16, config, id=f"bf16-{config}") for config in CONFIGS["bf16"]),
    *(pytest.param(torch.float8_e4m3fn, config, id=f"fp8-{config}") for config in CONFIGS["w4a8"]),
]
BOUND = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 2e-6}


@pytest.fixture(params=["decode", "prefill"])
def kernel(request):
    with native.only(request.param):
        yield request.param


def sums_bound(k: int) -> float:
    """Float32 results of one warp's sums: tensor cores cut the low bits off, so the error grows with K."""
    return max(BOUND[torch.float32], 2e-9 * k)


WITH_GEMV = pytest.mark.parametrize("kernel", ["decode", "gemv", "prefill"], indirect=True)
"""For tests of few rows: gemv is a part of what the others are tested as decode."""
FP8_BOUND = 2.5e-2
"""Against float64 over the quantised activations: the prefill kernel rounds weight x block scale to e4m3."""
SHAPES = [
    (8, 192, 768),
    (3, 128, 2880),
    (5, 64, 64),
    (60, 128, 256),
    (4, 256, 1040),
    (1, 64, 16),
    (256, 64, 128),
]
ROWS = [1, 7, 33, 150, 1500]


class Weights:
    """Random weights in a layout and the values they stand for."""

    def __init__(self, *shape: int, format: str, exact_scales: bool = False, layout: str = "sm90") -> None:
        spread = torch.rand(*shape[:-1], 1, device="cuda") * 4 + 0.01
        plain = torch.ops.fp4.quantize(torch.randn(*shape, device="cuda") * spread, format)
        if exact_scales and format == "nvfp4":  # mantissas 0, 2, 4: products with 1.5 are exact in e4m3
            byte = plain[1].view(torch.uint8)
            mantissa = torch.tensor([0, 0, 2, 2, 4, 4, 4, 4], device="cuda", dtype=torch.uint8)[
                (byte & 7).long()
            ]
            plain = plain[0], ((byte & 0xF8) | mantissa).clamp(min=40).view(plain[1].dtype), plain[2]
        self.format = format
        self.plain = plain[0], plain[1], (plain[2] if plain[2].numel() else None)
        self.packed = torch.ops.fp4.prepack(*plain, format, layout)
        self.layout = LAYOUTS[layout]
        self.values = torch.ops.fp4.dequantize(*self.plain, format, torch.float64)
        self.options = {"format": format, "layout": layout}

    def of_kernels(self, bias: torch.Tensor | None = None) -> decode.NativeWeight:
        groups, n, k = self.values.shape
        block = reference.BLOCK[self.format]
        return decode.NativeWeight(*self.packed, bias, groups, n, self.layout.padded(k), self.layout, block)


def by_row(values: torch.Tensor, a: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """values [G, N, K], a [M, K], ids [M]; rows of no expert are zeros."""
    out = torch.zeros(a.shape[0], values.shape[1], dtype=torch.float64, device="cuda")
    for e in range(values.shape[0]):
        mine = ids == e
        out[mine] = a[mine].double() @ values[e].T
    return out


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm().clamp(min=1e-300)).item()


def routed(m: int, groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random ids with some of no expert, the same sorted, and their offsets; the first row has an expert."""
    ids = torch.randint(-1, groups, (m,), device="cuda")
    ids[0] = groups - 1
    ordered = torch.where(ids < 0, groups, ids).sort().values
    offs = torch.bincount(ordered, minlength=groups + 1)[:groups].cumsum(0).int()
    return ids, ordered, offs


def plain_order(codes: torch.Tensor) -> torch.Tensor:
    """fp8 rows back from the layout's order."""
    return codes.view(*codes.shape[:-1], -1, 4, 4, 4).transpose(-2, -3).reshape(codes.shape)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_layout_is_the_cpus(shape, format, layout):
    w = Weights(*shape, format=format, layout=layout)
    here = torch.ops.fp4.prepack(*(t.cpu() if t is not None else None for t in w.plain), format, layout)
    for name, a, b in zip(("packed", "block_scale", "global_scale"), w.packed, here, strict=True):
        assert torch.equal(a.cpu(), b), name
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        got = torch.ops.fp4.dequantize(*w.packed, format, dtype, layout=layout)[..., : shape[-1]]
        assert torch.equal(got, torch.ops.fp4.dequantize(*w.plain, format, dtype))


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_every_scale_is_the_cpus(layout):
    """Zero and subnormal ones, too."""
    scale = torch.arange(127, dtype=torch.uint8).repeat(64, 1)
    scale = torch.nn.functional.pad(scale, (0, 1)).view(torch.float8_e4m3fn)
    plain = torch.randint(0, 256, (64, 1024), dtype=torch.uint8), scale, torch.tensor(1.0)
    want = torch.ops.fp4.prepack(*plain, "nvfp4", layout)
    packed = torch.ops.fp4.prepack(*(t.cuda() for t in plain), "nvfp4", layout)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(packed, want, strict=True))
    values = torch.ops.fp4.dequantize(*packed, "nvfp4", torch.float64, layout=layout)
    assert torch.equal(values.cpu(), torch.ops.fp4.dequantize(*plain, "nvfp4", torch.float64))


def test_mxfp4_that_spreads_too_far_is_refused():
    packed, scale, _ = torch.ops.fp4.quantize(torch.randn(2, 64, 64, device="cuda"), "mxfp4")
    scale.view(torch.uint8)[1, 3, 1] = 127 - 40
    with pytest.raises(RuntimeError, match=r"of matrix 1 spreads over \d+ binades; layout 'sm90'"):
        torch.ops.fp4.prepack(packed, scale, None, "mxfp4", "sm90")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype, layout", ROWS_OF)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_16_bit_rows(kernel, shape, dtype, layout, format):
    w = Weights(*shape, format=format, layout=layout)
    groups, n, k = shape
    for m in ROWS:
        top = 3 if dtype == torch.bfloat16 else 0  # float16 outputs would overflow
        size = 10 ** torch.empty(m, 1, device="cuda").uniform_(-3, top)
        a = (torch.randn(m, k, device="cuda") * size).to(dtype)
        bias = torch.randn(groups, n, device="cuda", dtype=dtype)
        ids, ordered, offs = routed(m, groups)
        got = torch.ops.fp4.grouped_mm(a, *w.packed, offs, **w.options)
        assert error(got, by_row(w.values, a, ordered)) < BOUND[dtype]
        assert not got[int(offs[-1]) :].any()
        want = by_row(w.values, a, ids) + torch.where((ids >= 0)[:, None], bias[ids.clamp(min=0)], 0).double()
        assert (
            error(torch.ops.fp4.indexed_mm(a, *w.packed, ids, None, bias, **w.options), want) < BOUND[dtype]
        )
        last = [t[groups - 1] for t in w.packed]
        want = a.double() @ w.values[-1].T + bias[-1].double()
        assert error(torch.ops.fp4.mm(a, *last, None, bias[-1], **w.options), want) < BOUND[dtype]
    max_m = 21
    a = torch.randn(groups, max_m, k, device="cuda").to(dtype)
    masked_m = torch.randint(0, max_m + 1, (groups,), device="cuda").int()
    masked_m[0] = max_m
    got = torch.ops.fp4.grouped_mm_masked(a, *w.packed, masked_m, **w.options)
    live = (torch.arange(max_m, device="cuda") < masked_m[:, None])[..., None]
    assert error(got, torch.where(live, a.double() @ w.values.mT, 0)) < BOUND[dtype]
    assert not got[~live.expand_as(got)].any()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("compute_warps", [planner.FEW_WARPS, planner.MANY_WARPS])
@pytest.mark.parametrize("k", [64, 768, 1536, 2880, 4096, 5120, 7168, 14336])
def test_both_decode_kernels_in_float32(k, compute_warps, layout, format):
    config = planner.decode_warps(LAYOUTS["sm90"].padded(k), compute_warps)
    assert config is not None
    groups, n = 3, 192
    w = Weights(groups, n, k, format=format, layout=layout)
    for m in (1, 50):
        a = torch.randn(m, k, device="cuda").bfloat16()
        _, ordered, offs = routed(m, groups)
        out = torch.full((m, n), float("nan"), device="cuda")
        decode.run(a, w.of_kernels(), offs, decode.Routing.OFFS, m, out, config=config)
        assert error(out, by_row(w.values, a, ordered)) < BOUND[torch.float32], config


def as_prefill_takes(
    x: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """bfloat16 rows as those of this dtype, their scales, and what both stand for."""
    if dtype == torch.float8_e4m3fn:
        a, scale = rows.quantize_fp8(x)
        return a, scale, plain_order(a)[:, : x.shape[1]].double() * scale.double()[:, None]
    return *(rows.to_half(x) if dtype == torch.float16 else (x, None)), x.double()


def layout_for(dtype: torch.dtype) -> str:
    return "mma_bf16" if dtype == torch.bfloat16 else "sm90"


PREFILL_SHAPES = [
    (3, 320, 2880),
    (2, 64, 16),
    (5, 192, 640),
    (1, 256, 14336),
    (300, 128, 256),
    large((2, 32768, 128)),
]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("config", CONFIGS["half"])
@pytest.mark.parametrize("dtype, layout", ROWS_OF)
@pytest.mark.parametrize("shape", PREFILL_SHAPES, ids=str)
def test_every_16_bit_prefill_candidate(shape, dtype, layout, config, format):
    """Dense, contiguous and masked, token tiles of every width, empty experts, rows of none, with factors."""
    groups, n, k = shape
    w = Weights(*shape, format=format, layout=layout)
    bias = torch.randn(groups, n, device="cuda", dtype=dtype)
    weight = w.of_kernels(bias)
    counts = torch.tensor([0, 1, 64, 65, 120, 160, 161, 190, 193, 300, 385], device="cuda")
    draw = torch.randint(0, len(counts), (groups,), device="cuda")
    counts = counts[draw] if groups < 100 else counts[:3].repeat(100)
    counts[0] = 161
    m = int(counts.sum()) + 5
    ids = torch.repeat_interleave(torch.arange(groups, device="cuda"), counts)
    ids = torch.cat([ids, ids.new_full((5,), -1)])
    a, factor = torch.randn(m, k, device="cuda").to(dtype), torch.rand(m, device="cuda") + 0.5
    offs = counts.cumsum(0).int()
    own = torch.where((ids >= 0)[:, None], bias[ids.clamp(min=0)], 0).double()

    def run(x, scale, *args):
        if layout == "sm90":
            x, own = rows.to_half(x)
            scale = own if scale is None else own * scale
        prefill.run(x, scale, *args, config=config)

    for scale in (None, factor):
        values = a.double() if scale is None else a.double() * scale.double()[:, None]
        for out_dtype in (torch.float32, torch.bfloat16):
            out = torch.full((m, n), float("nan"), device="cuda", dtype=out_dtype)
            run(a, scale, weight, offs, decode.Routing.OFFS, m, out)
            assert error(out, by_row(w.values, values, ids) + own) < max(BOUND[out_dtype], sums_bound(k))
            assert not out[-5:].any()
    one = decode.NativeWeight(*(t[-1] for t in w.packed), None, 1, *weight[5:])
    out = torch.full((m, n), float("nan"), device="cuda")
    run(a, None, one, None, decode.Routing.DENSE, m, out)
    assert error(out, a.double() @ w.values[-1].T) < sums_bound(k)
    max_m = m // groups
    a = a[: groups * max_m]
    masked_m = torch.randint(0, max_m + 1, (groups,), device="cuda").int()
    masked_m[0] = max_m
    out = torch.full((groups * max_m, n), float("nan"), device="cuda")
    run(a, None, weight, masked_m, decode.Routing.MASKED, max_m, out)
    row = torch.arange(groups * max_m, device="cuda")
    ids = torch.where(row % max_m < masked_m[row // max_m], row // max_m, -1)
    own = torch.where((ids >= 0)[:, None], bias[ids.clamp(min=0)], 0).double()
    assert error(out, by_row(w.values, a, ids) + own) < sums_bound(k)
    assert not out[ids < 0].any()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("gate", ["silu_interleaved", "swigluoai"])
@pytest.mark.parametrize("dtype, config", CANDIDATES)
def test_gates_of_every_prefill_candidate(dtype, config, gate, format):
    """Contiguous and masked, token tiles of every width, the last columns, empty experts, rows of none."""
    counts = [0, 1, 9, 23, 24, 31, 39, 40, 64, 65, 120, 129, 170, 190, 193, 265, 285, 600]
    groups, n, k = len(counts), 320, 384
    counts = torch.tensor(counts, device="cuda")[torch.randperm(groups)]
    w = Weights(groups, n, k, format=format, exact_scales=True, layout=layout_for(dtype))
    weight = w.of_kernels(bias := torch.randn(groups, n, device="cuda"))
    m = int(counts.sum()) + 5
    ids = torch.repeat_interleave(torch.arange(groups, device="cuda"), counts)
    ids = torch.cat([ids, ids.new_full((5,), -1)])
    offs = counts.cumsum(0).int()
    # Sums of unit size, so that a gate is neither closed nor open all along.
    x = (torch.randn(m, k, device="cuda") / (k**0.5 * w.values.square().mean().sqrt())).bfloat16()
    a, scale, values = as_prefill_takes(x, dtype)

    def want(ids):
        own = torch.where((ids >= 0)[:, None], bias[ids.clamp(min=0)], 0).double()
        gated = reference.activate(by_row(w.values, values[: len(ids)], ids) + own, gate)
        return torch.where((ids >= 0)[:, None], gated, 0)

    for out_dtype in DTYPES:
        out = torch.full((m, n // 2), float("nan"), device="cuda", dtype=out_dtype)
        args = (a, scale, weight, offs, decode.Routing.OFFS, m, out)
        prefill.run(*args, gate=ACTIVATIONS[gate], config=config)
        assert error(out, want(ids)) < (4e-3 if dtype == torch.float8_e4m3fn else BOUND[out_dtype])
        assert not out[-5:].any()
    max_m = m // groups
    row = torch.arange(groups * max_m, device="cuda")
    masked_m = torch.randint(0, max_m + 1, (groups,), device="cuda").int()
    masked_m[0] = max_m
    ids = torch.where(row % max_m < masked_m[row // max_m], row // max_m, -1)
    out = torch.full((groups * max_m, n // 2), float("nan"), device="cuda", dtype=torch.bfloat16)
    args = (a, scale, weight, masked_m, decode.Routing.MASKED, max_m, out)
    prefill.run(*args, gate=ACTIVATIONS[gate], config=config)
    assert error(out, want(ids)) < BOUND[torch.bfloat16]
    assert not out[ids < 0].any()


@pytest.mark.hardware
@pytest.mark.parametrize("gate", ["silu_interleaved", "swigluoai"])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=["half", "bf16", "fp8"]
)
def test_gates_of_an_odd_last_row_are_the_same_whatever_ran_before(dtype, gate):
    """Two rows share a division: the last of an odd number has nothing beside it but what was left there."""
    groups, n, k = 256, 2048, 128
    w = Weights(groups, n, k, format="nvfp4", exact_scales=True, layout=layout_for(dtype))
    weight = w.of_kernels()
    counts = torch.tensor([1, 3, 15, 17], device="cuda")[torch.randint(0, 4, (groups,), device="cuda")]
    offs, m = counts.cumsum(0).int(), int(counts.sum())
    unit = torch.randn(m, k, device="cuda") / (k**0.5 * w.values.square().mean().sqrt())
    outs = []
    for size in (0, 3, 0, -2, 0, 1, 0, 5, 0, -5, 0):
        x = (unit * 2.0**size).bfloat16()
        a, scale, _ = as_prefill_takes(x, dtype)
        out = torch.full((m, n // 2), float("nan"), device="cuda", dtype=torch.bfloat16)
        prefill.run(a, scale, weight, offs, decode.Routing.OFFS, m, out, gate=ACTIVATIONS[gate])
        outs += [out] * (size == 0)
    for other in outs[1:]:
        assert torch.equal(outs[0], other)


@pytest.mark.parametrize("dtype, config", CANDIDATES)
def test_a_large_group_is_cut_into_more_tiles_than_it_needs(dtype, config):
    """4096 rows are 16 x 256, not 15 x 288; of 16 bits 3520 are 20 x 176, not 19 x 192."""
    n, k = 192, 128
    w = Weights(2, n, k, format="nvfp4", exact_scales=True, layout=layout_for(dtype))
    weight = w.of_kernels()
    for first in (4096, 3520, 4000, 1):
        x = torch.randn(first + 577, k, device="cuda").bfloat16()
        a, scale, values = as_prefill_takes(x, dtype)
        offs = torch.tensor([first, first + 577], dtype=torch.int32, device="cuda")
        out = torch.full((first + 577, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        prefill.run(a, scale, weight, offs, decode.Routing.OFFS, len(x), out, config=config)
        ids = (torch.arange(len(x), device="cuda") >= first).long()
        assert error(out, by_row(w.values, values, ids)) < 4e-3


@pytest.mark.parametrize("kernel", CONFIGS)
def test_dense_rows_in_tiles_of_a_chosen_width(kernel):
    dtype = {"half": torch.float16, "bf16": torch.bfloat16, "w4a8": torch.float8_e4m3fn}[kernel]
    widths = []
    for m, n, k in ((200, 192, 256), (500, 320, 640), (1100, 320, 640), (2030, 192, 256)):
        w = Weights(1, n, k, format="nvfp4", exact_scales=True, layout=layout_for(dtype))
        x = torch.randn(m, k, device="cuda").bfloat16()
        a, scale, values = as_prefill_takes(x, dtype)
        out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        prefill.run(a, scale, w.of_kernels(), None, decode.Routing.DENSE, m, out)
        assert error(out, values @ w.values[0].T) < 4e-3
        size = decode.Routing.DENSE, 1, m, n, w.layout.padded(k), library.multiprocessors(0), kernel
        widths.append(prefill.choose(*size).tile_width)
    assert any(widths)


@pytest.mark.parametrize(
    "format, exact_scales",
    [("nvfp4", False), ("nvfp4", True), ("mxfp4", True)],
    ids=["nvfp4", "nvfp4 exact", "mxfp4"],
)
@pytest.mark.parametrize("shape", [*SHAPES, large((2, 24576, 256))], ids=str)
def test_products_of_fp8_rows(kernel, shape, format, exact_scales):
    """Where scales are not exact in fp8, over all calls together: one call may see few blocks."""
    w = Weights(*shape, format=format, exact_scales=exact_scales)
    groups, n, k = shape
    few_blocks = groups * n * k < 2**14
    bound = 4e-3 if exact_scales else 6e-2 if few_blocks else FP8_BOUND
    pairs = []
    for m in ROWS:
        a, a_scale = torch.ops.fp4.quantize_fp8(torch.randn(m, k, device="cuda").bfloat16(), layout="sm90")
        values = plain_order(a)[:, :k].double() * a_scale[:, None].double()
        _, ordered, offs = routed(m, groups)
        got = torch.ops.fp4.grouped_mm(a, *w.packed, offs, a_scale, **w.options)
        pairs.append((got, by_row(w.values, values, ordered)))
        assert not got[int(offs[-1]) :].any()
        got = torch.ops.fp4.mm(a, *(t[0] for t in w.packed), a_scale, **w.options)
        pairs.append((got, values @ w.values[0].T))
    for got, want in pairs if exact_scales else []:
        assert error(got, want) < bound
    assert error(*(torch.cat([t.double().flatten() for t in side]) for side in zip(*pairs))) < bound


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("a_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_fp4_rows(kernel, shape, a_format, layout):
    """Both operands dequantised exactly, float32 sums: no error but theirs."""
    w = Weights(*shape, format="nvfp4", layout=layout)
    groups, _, k = shape
    for m in ROWS:
        codes, scale, _ = torch.ops.fp4.quantize(torch.randn(m, k, device="cuda"), a_format)
        factor = torch.rand(m, device="cuda") + 0.5 if a_format == "nvfp4" else None
        plain = torch.ones((), device="cuda") if factor is not None else None
        values = torch.ops.fp4.dequantize(codes, scale, plain, a_format, torch.float64)
        values = values if factor is None else values * factor.double()[:, None]
        ids, ordered, offs = routed(m, groups)
        options = {"a_format": a_format, "out_dtype": torch.float32, **w.options}
        got = torch.ops.fp4.grouped_mm(codes, *w.packed, offs, scale, None, factor, **options)
        assert error(got, by_row(w.values, values, ordered)) < BOUND[torch.float32]
        got = torch.ops.fp4.indexed_mm(codes, *w.packed, ids, scale, None, factor, **options)
        assert error(got, by_row(w.values, values, ids)) < BOUND[torch.float32]
        last = [t[-1] for t in w.packed]
        got = torch.ops.fp4.mm(codes, *last, scale, None, factor, **options)
        assert error(got, values @ w.values[-1].T) < BOUND[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("m", [1, 40, 300])
def test_groups_along_k(m, dtype):
    n, k = 128, 336
    w = Weights(n, k, format="nvfp4")
    a = torch.randn(m, k, device="cuda").bfloat16()
    scale, values = None, a.double()
    if dtype == torch.float8_e4m3fn:
        a, scale = torch.ops.fp4.quantize_fp8(a, layout="sm90")
        values = plain_order(a).double()[:, :k] * scale.double()[:, None]
    ends = [0, 16, 16, 128, 336]
    offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
    got = torch.ops.fp4.grouped_mm_k(a, *w.packed, offs, scale, out_dtype=torch.float32, **w.options)
    # Sums of 16 products, of which one row has 128: their error strays about FP8_BOUND by a tenth of it.
    bound = BOUND[torch.float32] if scale is None else 2 * FP8_BOUND
    for g, (begin, end) in enumerate(zip([0, *ends], ends)):
        want = values[:, begin:end] @ w.values[:, begin:end].T
        assert error(got[g], want) < bound if end > begin else not got[g].any()


def test_small_block_scales_in_fp8(kernel):
    """Scales below 0.25 leave the range of the table and take the slow path."""
    groups, n, k, m = 2, 128, 512, 300
    w = Weights(groups, n, k, format="nvfp4")
    scale = torch.randint(1, 60, (groups, n, k // 16), device="cuda", dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )
    plain = w.plain[0], scale, w.plain[2]
    packed = torch.ops.fp4.prepack(*plain, "nvfp4", "sm90")
    values = torch.ops.fp4.dequantize(*plain, "nvfp4", torch.float64)
    a, a_scale = torch.ops.fp4.quantize_fp8(torch.randn(m, k, device="cuda").bfloat16(), layout="sm90")
    _, ordered, offs = routed(m, groups)
    got = torch.ops.fp4.grouped_mm(a, *packed, offs, a_scale, **w.options)
    want = by_row(values, plain_order(a).double() * a_scale[:, None].double(), ordered)
    assert error(got, want) < FP8_BOUND


def fp8_block_bound(tokens: int) -> float:
    """Bound of a whole block in fp8: e4m3 rounds both sides of both products, by 2.6e-2 on average, and a
    gate has two parts, so 6e-2 to 7e-2 in all. That varies by a tenth over rows, and by more than half for
    one."""
    return 0.16 if tokens == 1 else 0.1


HALF_STEP = 2.0**-9
"""Largest relative error of one rounding to bfloat16."""
GATES = ["silu", "gelu", "gelu_tanh", "swigluoai", "silu_interleaved", "relu2", "silu(limit=2)", "situ"]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "layout, a_format", [(n, a) for n in LAYOUT_NAMES for a in LAYOUTS[n].a_formats if HOPPER.takes(a, n)]
)
def test_moe(kernel, layout, a_format, format, gate):
    experts, hidden, inter, top_k = 16, 512, 192, 4
    up, down = (
        Weights(experts, n, k, format=format, layout=layout)
        for n, k in ((reference.rows_per_column(gate) * inter, hidden), (hidden, inter))
    )
    b13, b2 = (
        torch.randn(experts, up.values.shape[1], device="cuda"),
        torch.randn(experts, hidden, device="cuda"),
    )
    for tokens in (1, 9, 40, 700):
        x = torch.randn(tokens, hidden, device="cuda").bfloat16() / 16
        ids = torch.randint(-1, experts + 1, (tokens, top_k), device="cuda")
        ids[0, 0] = 0
        weights = torch.rand(tokens, top_k, device="cuda")
        fp4 = a_format in FORMATS
        operands = x.double(), ids, weights, up.values, down.values, b13.double()
        how = {"activation": gate, "a_format": a_format if fp4 else "none"}
        want = reference.moe(*operands, b2.double(), **how)
        args = (x, ids, weights, *up.packed, *down.packed, b13, b2)
        options = {"activation": gate, "a_format": a_format, **up.options}
        got = torch.ops.fp4.moe(*args, **options)
        exact = a_format == "none" or (a_format == "auto" and kernel == "decode")
        # bfloat16 rounds what a gate takes, what it gives, each expert's row and their sum, by 2e-3 each.
        # Most averages out, but where one hidden value outweighs the rest of its row: it has the roundings of
        # both parts of the gate, or relu2's one twice, and 3 more.
        one_value = tokens == 1 or gate == "relu2"
        of_bf16 = 5 * HALF_STEP if one_value else 6e-3
        bound = 2e-2 if fp4 else of_bf16 if exact else fp8_block_bound(tokens)
        # A hidden value near a tie of FP4 may fall to its other side.
        either = reference.moe_between_codes(*operands, **how)
        assert (got.double() - want).norm().item() < bound * want.norm().item() + either
        assert torch.equal(got, torch.ops.fp4.moe(*args, **options)), "not deterministic"


@pytest.mark.parametrize("gate", ["swigluoai", "silu(limit=2)", "silu"])
@pytest.mark.parametrize("tokens", [1, 9, 200])
def test_moe_keeps_a_nan(kernel, tokens, gate):
    """A limit does not make an ordinary number of a NaN, and other tokens do not get it."""
    up, down = (
        Weights(4, n, k, format="nvfp4", layout=layout_for(torch.bfloat16))
        for n, k in ((384, 512), (512, 192))
    )
    x = torch.randn(tokens, 512, device="cuda").bfloat16()
    ids, weights = torch.randint(0, 4, (tokens, 2), device="cuda"), torch.rand(tokens, 2, device="cuda")
    x[bad := tokens // 2, 7] = torch.nan
    got = torch.ops.fp4.moe(x, ids, weights, *up.packed, *down.packed, activation=gate, **up.options)
    assert got[bad].isnan().all() and got[[i for i in range(tokens) if i != bad]].isfinite().all()


def interleaved_weight():
    """Random gate and up rows that take turns in a PackedWeight, and what they are, gate before up."""
    experts, inter, k = 3, 96, 256
    plain = torch.ops.fp4.quantize(torch.randn(experts, 2 * inter, k, device="cuda"), "nvfp4")
    want = torch.ops.fp4.dequantize(*plain, "nvfp4", torch.float32)
    mixed = interleave(plain[0]), interleave(plain[1].view(torch.uint8)).view(plain[1].dtype), plain[2]
    packed = torch.ops.fp4.prepack(*mixed, "nvfp4", "sm90")
    return PackedWeight(*packed, "nvfp4", "sm90", k, interleaved=True), want


def test_interleaved_rows_come_back():
    w, want = interleaved_weight()
    assert torch.equal(w.dequantize(), want)
    there, _ = interleaved_weight()
    there.load_state_dict(w.state_dict())
    assert there.interleaved and torch.equal(there.dequantize(), want)


@pytest.mark.hardware
def test_interleaved_rows_come_back_from_the_gpu():
    w, want = interleaved_weight()
    w.cpu()
    assert not w.interleaved and w.layout != "sm90"
    assert torch.equal(w.dequantize(), want.cpu())


@pytest.mark.hardware
@WITH_GEMV
def test_two_streams_at_once(kernel):
    w = Weights(16, 256, 512, format="nvfp4")
    inputs = [torch.randn(m, 512, device="cuda").bfloat16() for m in (16, 300, 7)]
    routes = [routed(len(a), 16)[2] for a in inputs]
    want = [torch.ops.fp4.grouped_mm(a, *w.packed, o, **w.options) for a, o in zip(inputs, routes)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(20):
        got = []
        for stream, a, offs in zip(streams, inputs, routes):
            with torch.cuda.stream(stream):
                got.append(torch.ops.fp4.grouped_mm(a, *w.packed, offs, **w.options))
        torch.cuda.synchronize()
        for a, b in zip(got, want):
            assert torch.equal(a, b)


@pytest.mark.hardware
@WITH_GEMV
@pytest.mark.parametrize("layout, a_format", [("sm90", "auto"), ("mma_bf16", "none")])
@pytest.mark.parametrize("tokens", [1, 30, 600])
def test_replay_with_changed_routing(kernel, tokens, layout, a_format):
    up, down = (Weights(32, 256, k, format="nvfp4", layout=layout) for k in (256, 128))
    x = torch.randn(tokens, 256, device="cuda").bfloat16()
    ids = torch.zeros(tokens, 4, dtype=torch.int64, device="cuda")
    weights = torch.rand(tokens, 4, device="cuda")

    def call() -> torch.Tensor:
        return torch.ops.fp4.moe(x, ids, weights, *up.packed, *down.packed, a_format=a_format, **up.options)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(5):
        ids.random_(-1, 33)
        x.normal_()
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, call())


@pytest.mark.hardware
@WITH_GEMV
@pytest.mark.parametrize("a_format", ["none", "fp8"])
@pytest.mark.parametrize("tokens", [4, 400])
def test_what_was_written_just_before_is_read(kernel, tokens, a_format):
    """Kernels that begin while others run ask for weights and routing first: both change before each call."""
    experts, hidden, inter, top_k = 16, 1024, 512, 2
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    rows_of = torch.randn(tokens * top_k, hidden, device="cuda").bfloat16()
    a, scale = (rows_of, None) if a_format == "none" else torch.ops.fp4.quantize_fp8(rows_of, layout="sm90")
    weights = torch.rand(tokens, top_k, device="cuda")
    options = {"format": "nvfp4", "layout": "sm90"}

    def draw() -> list[torch.Tensor]:
        up, down = (
            Weights(experts, 2 * inter, hidden, format="nvfp4"),
            Weights(experts, hidden, inter, format="nvfp4"),
        )
        ids = torch.randint(0, experts, (tokens, top_k), device="cuda")
        return [
            *up.packed,
            *down.packed,
            ids,
            torch.bincount(ids.flatten(), minlength=experts).cumsum(0).int(),
        ]

    def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        up, down, ids, offs = tensors[:3], tensors[3:6], *tensors[6:]
        block = torch.ops.fp4.moe(x, ids, weights, *up, *down, a_format=a_format, **options)
        return [block, torch.ops.fp4.grouped_mm(a, *up, offs, scale, **options)]

    sets = [draw(), draw()]
    want = [run(s) for s in sets]
    held = [t.clone() for t in sets[0]]
    torch.cuda.synchronize()
    got = []
    for i in [0, 1] * 20:
        for to, t in zip(held, sets[i], strict=True):
            to.copy_(t)
        got.append((i, run(held)))
    assert all(torch.equal(g, w) for i, outs in got for g, w in zip(outs, want[i], strict=True))


@pytest.mark.parametrize("m", [50, 5])
def test_bad_offsets_do_not_fault(m):
    w = Weights(4, 64, 128, format="nvfp4")
    a = torch.randn(m, 128, device="cuda").bfloat16()
    fp8 = torch.ops.fp4.quantize_fp8(a, layout="sm90")
    for ends in ([60, 3, -5, 1000], [-1, -1, -1, -1], [50, 50, 50, 10**9], [5, 4, 3, 2]):
        offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
        torch.ops.fp4.grouped_mm(a, *w.packed, offs, **w.options)
        torch.ops.fp4.grouped_mm(fp8[0], *w.packed, offs, fp8[1], **w.options)
    torch.cuda.synchronize()


def test_int8_rows_are_refused():
    up, down = (Weights(2, n, k, format="nvfp4", layout="mma_bf16") for n, k in ((256, 128), (128, 128)))
    x = torch.randn(9, 128, device="cuda").bfloat16()
    ids, weights = torch.zeros(9, 1, dtype=torch.int64, device="cuda"), torch.ones(9, 1, device="cuda")
    with pytest.raises(RuntimeError, match="'int8', but Hopper GPUs have no kernel"):
        torch.ops.fp4.moe(x, ids, weights, *up.packed, *down.packed, a_format="int8", **up.options)
