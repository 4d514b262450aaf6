"""int4 x fp8 on Hopper (layout sm90_int4) against float64 over the quantised rows and the folded weights.

The kernel multiplies e4m3(code x scale), `reference.fold_int4`. So the only errors are the rounding of the
output and the sums of e4m3 products. Compared with the exact weights, the error also has the rounding of each
weight, FOLD.
"""

import copy

import pytest
import reference
import torch
from development import development
from families import expert_block, tiny
from test_sm90_gpu import (
    CONFIGS,
    PREFILL_SHAPES,
    ROWS,
    SHAPES,
    by_row,
    error,
    fp8_block_bound,
    plain_order,
    pytestmark,
    routed,
)

import fp4_ops
from fp4_ops.meta.layouts import LAYOUTS

decode, prefill, product = map(development, ("decode", "prefill", "product"))

__all__ = ["pytestmark"]

FOLD = 4e-2
"""In the root mean square the nearest e4m3 is off by 2^-3 / 12^.5 = 3.6e-2 of its binade's start, and weights
are 1.31 to 1.47 of that (those of a code fill an octave, which begins somewhere in a binade): 2.45 to 2.75e-2
of a product's norm. No weight is off by more than 1/17. Of the fewest weights here, 64 rows of 16 with a
scale each, that norm's own deviation is a twentieth: this is nine away."""


def sums(k: int) -> float:
    """Bound of the error of the tensor cores' sums of e4m3 products: twice the measured 2.1e-7 a K."""
    return max(4e-3, 4e-7 * k)


class Int4Weights:
    """Random int4 weights in layout sm90_int4, the values they stand for and those that are multiplied."""

    def __init__(self, *shape: int, format: str, wide: bool = False) -> None:
        spread = torch.rand(*shape[:-1], 1, device="cuda") * 4 + 0.01
        codes, scale, _ = torch.ops.fp4.quantize(torch.randn(*shape, device="cuda") * spread, format)
        if wide:  # numbers that bfloat16 does not have
            scale = scale.float() * (1 + torch.rand(scale.shape, device="cuda") / 256)
        self.plain = codes, scale
        self.made = torch.ops.fp4.prepack(codes, scale, None, format, "sm90_int4")
        self.values = reference.fold_int4(codes, scale, format)
        self.exact = torch.ops.fp4.dequantize(codes, scale, None, format, torch.float64)
        self.options = {"format": format, "layout": "sm90_int4"}


@pytest.mark.parametrize("config", CONFIGS["w4a8"])
@pytest.mark.parametrize("format", reference.INT4_FORMATS)
@pytest.mark.parametrize("shape", PREFILL_SHAPES, ids=str)
def test_every_int4_candidate(shape, format, config):
    """Scales over many binades, so that tables have subnormal numbers and zeros, too."""
    groups, n, k = shape
    codes = torch.randint(0, 256, (groups, n, k // 2), dtype=torch.uint8, device="cuda")
    scale = torch.randn(groups, n, -(-k // reference.BLOCK[format]), device="cuda").abs()
    scale[:, ::7] *= torch.rand_like(scale[:, ::7]) ** 8
    bias = torch.randn(groups, n, device="cuda")
    packed = torch.ops.fp4.prepack(codes, scale, None, format, "sm90_int4")
    padded = LAYOUTS["sm90_int4"].padded(k)
    w = product.Int4Weight(*packed, reference.BLOCK[format], bias, groups, n, padded)
    folded = reference.fold_int4(codes, scale, format)
    exact = torch.ops.fp4.dequantize(codes, scale, None, format, torch.float64)
    counts = torch.tensor([0, 1, 64, 65, 160, 161, 193, 300, 385], device="cuda")
    counts = counts[torch.randint(0, 9, (groups,), device="cuda")] if groups < 100 else counts[:3].repeat(100)
    counts[0] = 161
    ids = torch.repeat_interleave(torch.arange(groups, device="cuda"), counts)
    m = len(ids)
    a, a_scale = torch.ops.fp4.quantize_fp8(torch.randn(m, k, device="cuda").bfloat16(), layout="sm90")
    values = plain_order(a)[:, :k].double() * a_scale[:, None].double()
    out = torch.full((m, n), float("nan"), device="cuda")
    prefill.run_int4(a, a_scale, w, counts.cumsum(0).int(), decode.Routing.OFFS, m, out, config=config)
    assert error(out, by_row(folded, values, ids) + bias[ids].double()) < sums(k)
    assert error(out - bias[ids], by_row(exact, values, ids)) < FOLD


@pytest.mark.parametrize("wide", [False, True], ids=["bf16 scales", "f32 scales"])
@pytest.mark.parametrize("format", reference.INT4_FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_int4_layout_is_the_cpus(shape, format, wide):
    w = Int4Weights(*shape, format=format, wide=wide)
    there = torch.ops.fp4.prepack(*(t.cpu() for t in w.plain), None, format, "sm90_int4")
    for name, a, b in zip(("packed", "block_scale", "global_scale"), w.made, there, strict=True):
        assert torch.equal(a.cpu(), b), name
    back = torch.ops.fp4.unpack(*w.made, format, "sm90_int4")
    for name, a, b in zip(
        ("packed", "block_scale", "global_scale"),
        back,
        torch.ops.fp4.unpack(*there, format, "sm90_int4"),
        strict=True,
    ):
        assert a.dtype == b.dtype and torch.equal(a.cpu(), b), name
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        got = torch.ops.fp4.dequantize(*w.made, format, dtype, layout="sm90_int4")[..., : shape[-1]]
        assert torch.equal(got, torch.ops.fp4.dequantize(*w.plain, None, format, dtype))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("format", reference.INT4_FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int4_products_of_fp8_rows(shape, format, out_dtype):
    w = Int4Weights(*shape, format=format)
    groups, n, k = shape
    for m in ROWS:
        a, a_scale = torch.ops.fp4.quantize_fp8(torch.randn(m, k, device="cuda").bfloat16(), layout="sm90")
        values = plain_order(a)[:, :k].double() * a_scale[:, None].double()
        bias = torch.randn(groups, n, device="cuda")
        ids, ordered, offs = routed(m, groups)
        options = {**w.options, "out_dtype": out_dtype}

        def biased(rows, ids=ids, bias=bias):
            return rows + torch.where((ids >= 0)[:, None], bias[ids.clamp(min=0)], 0).double()

        got = torch.ops.fp4.grouped_mm(a, *w.made, offs, a_scale, **options)
        assert error(got, by_row(w.values, values, ordered)) < 4e-3
        assert not got[int(offs[-1]) :].any()
        got = torch.ops.fp4.indexed_mm(a, *w.made, ids, a_scale, bias, **options)
        assert error(got, biased(by_row(w.values, values, ids))) < 4e-3
        last = [t[-1] for t in w.made]
        got = torch.ops.fp4.mm(a, *last, a_scale, bias[-1], **options)
        assert error(got, values @ w.values[-1].T + bias[-1].double()) < 4e-3
    max_m = 21
    a, a_scale = torch.ops.fp4.quantize_fp8(torch.randn(groups, max_m, k, device="cuda"), layout="sm90")
    values = plain_order(a)[..., :k].double() * a_scale[..., None].double()
    masked_m = torch.randint(0, max_m + 1, (groups,), device="cuda").int()
    masked_m[0] = max_m
    got = torch.ops.fp4.grouped_mm_masked(a, *w.made, masked_m, a_scale, **w.options)
    live = (torch.arange(max_m, device="cuda") < masked_m[:, None])[..., None]
    assert error(got, torch.where(live, values @ w.values.mT, 0)) < 4e-3
    assert not got[~live.expand_as(got)].any()


@pytest.mark.parametrize("format", reference.INT4_FORMATS)
@pytest.mark.parametrize("m", [1, 40, 300])
def test_int4_groups_along_k(m, format):
    n, k = 128, 336
    w = Int4Weights(n, k, format=format)
    a, scale = torch.ops.fp4.quantize_fp8(torch.randn(m, k, device="cuda").bfloat16(), layout="sm90")
    values = plain_order(a).double()[:, :k] * scale.double()[:, None]
    ends = [0, 128, 128, 256, 336]
    offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
    got = torch.ops.fp4.grouped_mm_k(a, *w.made, offs, scale, out_dtype=torch.float32, **w.options)
    for g, (begin, end) in enumerate(zip([0, *ends], ends)):
        want = values[:, begin:end] @ w.values[:, begin:end].T
        assert error(got[g], want) < 4e-3 if end > begin else not got[g].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "gate", ["silu", "gelu_tanh", "swigluoai", "silu_interleaved", "relu2", "silu(limit=2)"]
)
@pytest.mark.parametrize("format", reference.INT4_FORMATS)
@pytest.mark.parametrize("a_format", ["fp8", "auto"])
def test_int4_moe(a_format, format, gate, dtype):
    experts, hidden, inter, top_k = 16, 512, 192, 4
    rows = reference.rows_per_column(gate) * inter
    up = Int4Weights(experts, rows, hidden, format=format)
    down = Int4Weights(experts, hidden, inter, format=format)
    b13, b2 = torch.randn(experts, rows, device="cuda"), torch.randn(experts, hidden, device="cuda")
    for tokens in (1, 9, 40, 700):
        x = torch.randn(tokens, hidden, device="cuda").to(dtype) / 16
        ids = torch.randint(-1, experts + 1, (tokens, top_k), device="cuda")
        ids[0, 0] = 0
        weights = torch.rand(tokens, top_k, device="cuda")
        want = reference.moe(
            x.double(), ids, weights, up.values, down.values, b13.double(), b2.double(), activation=gate,
        )  # fmt: skip
        args = (x, ids, weights, *up.made, *down.made, b13, b2)
        options = {"activation": gate, "a_format": a_format, **up.options}
        got = torch.ops.fp4.moe(*args, **options)
        assert got.dtype == dtype and error(got, want) < fp8_block_bound(tokens)
        assert torch.equal(got, torch.ops.fp4.moe(*args, **options)), "not deterministic"


@pytest.mark.hardware
@pytest.mark.parametrize("tokens", [1, 300])
def test_int4_moe_replays_with_changed_routing(tokens):
    up, down = (Int4Weights(32, 256, k, format="int4") for k in (256, 128))
    x = torch.randn(tokens, 256, device="cuda").bfloat16()
    ids = torch.zeros(tokens, 4, dtype=torch.int64, device="cuda")
    weights = torch.rand(tokens, 4, device="cuda")
    call = lambda: torch.ops.fp4.moe(x, ids, weights, *up.made, *down.made, a_format="auto", **up.options)  # noqa: E731
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


def test_int4_refuses_what_it_does_not_read():
    w = Int4Weights(4, 64, 128, format="int4")
    a, offs = torch.randn(5, 128, device="cuda").bfloat16(), torch.tensor([1, 2, 2, 5], device="cuda").int()
    with pytest.raises(RuntimeError, match="a has dtype bfloat16; layout 'sm90_int4' reads float8_e4m3fn"):
        torch.ops.fp4.grouped_mm(a, *w.made, offs, **w.options)


@pytest.mark.hardware
@torch.no_grad()
def test_a_model_prepared_in_int4():
    """On Hopper `prepare` and the backend take the layout, and run as the plain weights do but for fp8.

    Both operands of both products are rounded to e4m3, 2.7e-2 each, and gate * up adds the errors of two.
    """
    block = expert_block(tiny("mixtral", "grouped_mm")).to("cuda", torch.bfloat16)
    x = torch.randn(1, 40, 64, device="cuda").bfloat16()
    plain, compiled = copy.deepcopy(block), copy.deepcopy(block)
    report = fp4_ops.prepare(block, "int4", "auto")
    assert report.layout == "sm90_int4" and report.activations == "fp8 (auto)"
    assert fp4_ops.prepare(plain, "int4", "bf16").layout == "plain"
    first = lambda out: out[0] if isinstance(out, tuple) else out  # noqa: E731
    want = first(plain(x)).double()
    assert error(first(block(x)), want) < 0.1
    run = torch.compile(compiled, backend="fp4", options={"format": "int4", "activation": "fp8"})
    assert error(first(run(x)), want) < 0.1
