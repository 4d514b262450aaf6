"""fp4::moe, the whole expert block, against float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from conftest import poisoned
from reference import (
    GATES,
    KERNEL_FORMATS,
    assert_close,
    moe,
    moe_between_codes,
    random_weight,
    rows_per_column,
)

fp4 = torch.ops.fp4


@dataclass(frozen=True)
class Case:
    name: str
    tokens: int
    top_k: int
    experts: int
    hidden: int
    inner: int
    outside: bool = False  # some ids are on no expert of this rank

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("odd", tokens=11, top_k=3, experts=7, hidden=94, inner=62, outside=True),
    Case("decode", tokens=1, top_k=2, experts=8, hidden=128, inner=96),
    Case("short_block", tokens=5, top_k=2, experts=3, hidden=48, inner=40),
    Case("no_tokens", tokens=0, top_k=2, experts=3, hidden=64, inner=32),
    Case("one_expert", tokens=9, top_k=1, experts=1, hidden=64, inner=64),
    Case("prefill", tokens=67, top_k=4, experts=5, hidden=128, inner=64, outside=True),
)
LAYOUTS = ("plain", "tile16")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
BOUND = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3}
"""Two products and an activation; with int8 activations a code may land on its neighbour (see `bound`)."""


# The second quantisation sees a hidden state with float32 rounding, so a few codes differ by one step from
# those of the float64 reference: amax / 127 for int8, an eighth of the value for fp8, up to a half for FP4.
NEIGHBOUR = {"none": 0.0, "int8": 2e-3, "fp8": 4e-3, "nvfp4": 2e-2, "mxfp4": 2e-2}


def bound(dtype: torch.dtype, a_format: str) -> float:
    return max(BOUND[dtype], NEIGHBOUR[a_format])


def assert_moe_close(got, want, dtype, a_format, more=0.0):
    assert_close(
        got,
        want,
        dtype,
        1,
        factor=bound(dtype, a_format)
        / {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}[dtype],
        more=more,
    )


def make(case, format, dtype, device, layout, bias, activation="silu"):
    x = torch.randn(case.tokens, case.hidden).to(dtype).to(device)
    low, high = (-1, case.experts + 1) if case.outside else (0, case.experts)
    ids = torch.randint(low, high, (case.tokens, case.top_k), device=device)
    weights = torch.rand(case.tokens, case.top_k).to(device)
    rows = rows_per_column(activation) * case.inner
    w13 = random_weight(format, case.experts, rows, case.hidden, device=device, layout=layout)
    w2 = random_weight(format, case.experts, case.hidden, case.inner, device=device, layout=layout)
    biases = (None, None)
    if bias:
        biases = (
            torch.randn(case.experts, rows).to(dtype).to(device),
            torch.randn(case.experts, case.hidden).to(device),
        )
    return x, ids, weights, w13, w2, biases


@pytest.fixture(params=CASES, ids=str)
def case(request) -> Case:
    return request.param


@pytest.fixture(params=LAYOUTS)
def layout(request, device) -> str:
    if device == "cuda" and request.param == "tile16":
        pytest.skip("tile16 is a CPU layout")
    return request.param


@pytest.mark.one_in(5)
@pytest.mark.parametrize("a_format", NEIGHBOUR)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", KERNEL_FORMATS)
def test_moe(case, format, dtype, a_format, layout, device):
    if device == "cuda" and a_format == "int8":
        pytest.skip("int8 activations run on the CPU only")
    dtype = DTYPES[dtype]
    for activation, bias in (("silu", False), ("swigluoai", True), ("relu2", True), ("silu(limit=2)", False)):
        x, ids, weights, w13, w2, biases = make(case, format, dtype, device, layout, bias, activation)
        with poisoned():
            out = fp4.moe(
                x, ids, weights, *w13.operands(), *w2.operands(), *biases,
                **w13.options(), activation=activation, a_format=a_format,
            )  # fmt: skip
        inside = torch.where((ids >= 0) & (ids < case.experts), ids, -1)
        given = x, inside, weights, w13.dense, w2.dense
        want = moe(*given, *biases, activation=activation, a_format=a_format)
        more = moe_between_codes(*given, biases[0], activation=activation, a_format=a_format)
        assert_moe_close(out, want, dtype, a_format, more)
        assert (out[(inside < 0).all(-1)] == 0).all()


@pytest.mark.parametrize("activation", GATES)
def test_activations(activation, device):
    case = Case("", tokens=13, top_k=2, experts=4, hidden=64, inner=96)
    x, ids, weights, w13, w2, biases = make(case, "nvfp4", torch.float32, device, "plain", True, activation)
    x = x * 20  # far enough out that clamps matter
    out = fp4.moe(
        x, ids, weights, *w13.operands(), *w2.operands(), *biases, **w13.options(), activation=activation
    )
    want = moe(x, ids, weights, w13.dense, w2.dense, *biases, activation=activation)
    assert_moe_close(out, want, torch.float32, "none")


def test_situ_is_bounded():
    """Its parts are 4 tanh(gate / 4) sigmoid(gate) and 25 tanh(up / 25), however large gate and up are."""
    values = torch.tensor([-3e38, -1e4, -1e3, 1e3, 1069.0, 1e4, 3e38])
    x = torch.zeros(len(values), 64).index_fill_(1, torch.tensor(0), 1.0) * values[:, None]
    first = torch.zeros(1, 64, 64)
    first[0, :, 0] = 1  # gates and ups are x's first column
    down = fp4.quantize(torch.eye(64, 32)[None], "mxfp4")
    ids, weights = torch.zeros(len(values), 1, dtype=torch.int64), torch.ones(len(values), 1)
    options = {"format": "mxfp4", "activation": "situ", "a_format": "none"}
    got = fp4.moe(x, ids, weights, *fp4.quantize(first, "mxfp4"), *down, **options)
    want = 4 * (values / 4).tanh() * values.sigmoid() * 25 * (values / 25).tanh()
    torch.testing.assert_close(got[:, 0], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 70])
def test_many_experts(tokens, device):
    """Kimi-K3 has 896 experts, and 16 for each token."""
    case = Case("", tokens=tokens, top_k=16, experts=896, hidden=64, inner=32)
    x, ids, weights, w13, w2, _ = make(case, "mxfp4", torch.bfloat16, device, "plain", False, "situ")
    out = fp4.moe(x, ids, weights, *w13.operands(), *w2.operands(), **w13.options(), activation="situ")
    want = moe(x, ids, weights, w13.dense, w2.dense, activation="situ")
    assert_moe_close(out, want, torch.bfloat16, "none")


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=["ids32", "ids64"])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(ids, out, weight, device):
    case = Case("", tokens=6, top_k=2, experts=4, hidden=64, inner=32)
    x, topk, weights, w13, w2, _ = make(case, "mxfp4", torch.bfloat16, device, "plain", False)
    topk, weights = topk.to(ids), weights.to(weight)
    got = fp4.moe(x, topk, weights, *w13.operands(), *w2.operands(), **w13.options(), out_dtype=out)
    assert_moe_close(got, moe(x, topk, weights, w13.dense, w2.dense), out, "none")


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16], ids=str)
def test_what_lies_between_the_products_is_as_exact_as_the_output(out):
    """The second matrix picks single values of h, so that what they were rounded to shows."""
    inner, options = 32, {"activation": "silu", "out_dtype": out}
    x = torch.randn(8, 64)
    up = random_weight("mxfp4", 1, 2 * inner, 64)
    eye = fp4.quantize(torch.eye(64, inner)[None], "mxfp4")
    ids, weights = torch.zeros(8, 1, dtype=torch.int64), torch.full((8, 1), 1 + 2.0**-7)
    got = fp4.moe(x, ids, weights, *up.operands(), *eye, **up.options(), **options)
    gate, up_values = (x.double() @ up.dense[0].double().T).chunk(2, 1)
    h = (torch.nn.functional.silu(gate) * up_values).float()
    want = (h.to(out).float() * weights).to(out)
    # The last bit of h in float32 may be another, and with it, seldom, the one it is rounded to.
    off = (got[:, :inner].double() - want.double()).abs()
    assert (off <= 1e-6 * want.double().abs() + 1e-7).double().mean() > 0.98


@pytest.mark.parametrize("experts", [5, 200])
def test_more_tokens_than_scratch_memory_holds(experts):
    """They are taken in chunks. With many experts these are larger."""
    case = Case("", tokens=700, top_k=8, experts=experts, hidden=32, inner=1024)  # 46 MB of gates and ups
    x, ids, weights, w13, w2, _ = make(case, "nvfp4", torch.float32, "cpu", "tile16", False)
    got = fp4.moe(x, ids, weights, *w13.operands(), *w2.operands(), **w13.options())
    assert_moe_close(got, moe(x, ids, weights, w13.dense, w2.dense), torch.float32, "none")


def test_the_same_expert_twice_counts_twice(device):
    case = Case("", tokens=4, top_k=2, experts=3, hidden=64, inner=32)
    x, ids, weights, w13, w2, _ = make(case, "nvfp4", torch.float32, device, "plain", False)
    ids[:, 1] = ids[:, 0]
    got = fp4.moe(x, ids, weights, *w13.operands(), *w2.operands(), **w13.options())
    assert_moe_close(got, moe(x, ids, weights, w13.dense, w2.dense), torch.float32, "none")


@pytest.mark.parametrize("a_format", NEIGHBOUR)
def test_deterministic(a_format, device):
    if device == "cuda" and a_format == "int8":
        pytest.skip("int8 activations run on the CPU only")
    x, ids, weights, w13, w2, biases = make(CASES[-1], "nvfp4", torch.bfloat16, device, "plain", True)

    def run():
        return fp4.moe(
            x, ids, weights, *w13.operands(), *w2.operands(), *biases, **w13.options(), a_format=a_format
        )

    first = run()
    assert all(torch.equal(first, run()) for _ in range(3))


@pytest.mark.parametrize("a_format", NEIGHBOUR)
def test_a_token_does_not_depend_on_its_batch(a_format, device):
    """Routing of other tokens changes tiles, not values beyond rounding; nor does a NaN token spread."""
    if device == "cuda" and a_format == "int8":
        pytest.skip("int8 activations run on the CPU only")
    case = Case("", tokens=20, top_k=2, experts=4, hidden=64, inner=64)
    x, ids, weights, w13, w2, _ = make(case, "nvfp4", torch.float32, device, "plain", False)
    x[7] = torch.nan
    options = {**w13.options(), "a_format": a_format}
    out = fp4.moe(x, ids, weights, *w13.operands(), *w2.operands(), **options)
    assert out[7].isnan().all()
    rows = [t for t in range(20) if t != 7]
    given = x[rows], ids[rows], weights[rows], w13.dense, w2.dense
    want, between = (f(*given, a_format=a_format) for f in (moe, moe_between_codes))
    assert_moe_close(out[rows], want, torch.float32, a_format, between)


@pytest.mark.parametrize("a_format", ["none", "int8", "fp8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("gate", GATES)
def test_a_token_that_is_not_finite(gate, a_format):
    """A maximum, a limit or a rounding makes no ordinary numbers of its NaN or infinity, and other tokens do
    not get it."""
    hidden, inner = 96, 64
    for layout in LAYOUTS:
        up = random_weight("nvfp4", 3, rows_per_column(gate) * inner, hidden, layout=layout)
        down = random_weight("nvfp4", 3, hidden, inner, layout=layout)
        for dtype in DTYPES.values():
            for tokens in (1, 4, 40):
                for bad in (torch.nan, torch.inf, -torch.inf):
                    x, at = torch.randn(tokens, hidden).to(dtype), tokens // 2
                    x[at, int(torch.randint(0, hidden, ()))] = bad
                    ids, weights = torch.randint(0, 3, (tokens, 2)), torch.rand(tokens, 2)
                    got = fp4.moe(
                        x, ids, weights, *up.operands(), *down.operands(), activation=gate,
                        a_format=a_format, **up.options(),
                    )  # fmt: skip
                    assert got[at].isnan().all() if bad != bad else not got[at].isfinite().any()
                    got[at] = 0
                    assert got.isfinite().all()
