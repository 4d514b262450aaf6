"""Products of few rows (csrc/device/gemv.cu), by themselves and combined, against float64."""

import pytest
import reference
import torch
from development import development
from test_sm90_gpu import (
    BOUND,
    FORMATS,
    LAYOUT_NAMES,
    ROWS_OF,
    Weights,
    by_row,
    error,
    plain_order,
    pytestmark,
    sums_bound,
)

from fp4_ops.backends.launchers import library, rows
from fp4_ops.meta.formats import ACTIVATIONS
from fp4_ops.runtime import native

gemv, planner = development("gemv"), development("planner")
Routing = planner.Routing

__all__ = ["pytestmark"]

SHAPES = [(8, 192, 768), (130, 64, 2880), (3, 2112, 128), (1, 320, 7168), (300, 64, 64), (5, 128, 14336)]
KINDS = [*ROWS_OF, (torch.float8_e4m3fn, "sm90")]


def takes(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """bfloat16 rows as those of this dtype, their scales, and what both stand for."""
    if dtype == torch.float8_e4m3fn:
        a, scale = rows.quantize_fp8(x)
        return a, scale, plain_order(a)[:, : x.shape[1]].double() * scale.double()[:, None]
    return x.to(dtype), None, x.to(dtype).double()


def few_ids(m: int, groups: int) -> torch.Tensor:
    """Expert ids of which some are of no expert and, as often as not, several the same."""
    ids = torch.randint(-1, groups + 1, (m,), device="cuda")
    same = torch.rand(m, device="cuda") < torch.rand(1, device="cuda") / 2
    ids = torch.where(same, ids[0], ids)
    ids[-1] = groups - 1
    return ids


def of_experts(values: torch.Tensor, a: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    has = ((ids >= 0) & (ids < len(values)))[:, None]
    own = bias[ids.clamp(0, len(values) - 1)].double()
    return by_row(values, a, ids) + torch.where(has, own, 0)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype, layout", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_routing(shape, dtype, layout, format):
    """By id, by offsets, dense; several rows of an expert; rows of x that serve several; odd K."""
    groups, n, k = shape
    w = Weights(*shape, format=format, layout=layout)
    bias = torch.randn(groups, n, device="cuda")
    weight = w.of_kernels(bias)
    for m, a_div in ((1, 1), (8, 8), (5, 1), (8, 4), (8, 1), (7, 2)):
        columns = -(-m // a_div)
        size = m, columns, n, weight.kp, False, library.multiprocessors(0)
        if planner.gemv_config(Routing.IDS64, *size) is None:
            assert m > 1  # a thread block would have too many units, or too little memory
            continue
        power = 10 ** torch.empty(columns, 1, device="cuda").uniform_(-3, 3)
        x, scale, values = takes((torch.randn(columns, k, device="cuda") * power).bfloat16(), dtype)
        values = values.repeat_interleave(a_div, 0)[:m]
        ids = few_ids(m, groups)

        def run(route, routing, got_weight=weight, m=m, x=x, scale=scale, a_div=a_div):
            out = torch.full((m, n), float("nan"), device="cuda")
            gemv.run(x, got_weight, route, routing, m, out, x_scale=scale, a_div=a_div)
            return out

        bound = sums_bound(k)
        for route, routing in ((ids, Routing.IDS64), (ids.int(), Routing.IDS32)):
            assert error(run(route, routing), of_experts(w.values, values, ids, bias)) < bound
        ordered = torch.where((ids < 0) | (ids >= groups), groups, ids).sort().values
        offs = torch.bincount(ordered, minlength=groups + 1)[:groups].cumsum(0).int()
        assert error(run(offs, Routing.OFFS), of_experts(w.values, values, ordered, bias)) < bound
        if m == 1:
            one = weight._replace(**{f: getattr(weight, f)[-1:] for f in ("codes", "scales", "global_scale")})
            one = one._replace(groups=1, bias=bias[-1:])
            want = values @ w.values[-1].T + bias[-1].double()
            assert error(run(None, Routing.DENSE, one), want) < bound


@pytest.mark.parametrize("gate", ["silu_interleaved", "swigluoai"])
@pytest.mark.parametrize("dtype, layout", KINDS)
def test_gates(dtype, layout, gate):
    groups, n, k = 7, 320, 384
    w = Weights(groups, n, k, format="nvfp4", layout=layout)
    bias = torch.randn(groups, n, device="cuda")
    unit = torch.randn(2, k, device="cuda") / (k**0.5 * w.values.square().mean().sqrt())
    x, scale, values = takes(unit.bfloat16(), dtype)
    ids = few_ids(8, groups)
    want = reference.activate(of_experts(w.values, values.repeat_interleave(4, 0), ids, bias), gate)
    want[(ids < 0) | (ids >= groups)] = 0
    for out_dtype in (torch.bfloat16, torch.float16):
        out = torch.full((8, n // 2), float("nan"), device="cuda", dtype=out_dtype)
        gemv.run(
            x, w.of_kernels(bias), ids, Routing.IDS64, 8, out, x_scale=scale, a_div=4,
            gate=ACTIVATIONS[gate],
        )  # fmt: skip
        assert error(out, want) < BOUND[out_dtype]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("tokens, top_k", [(1, 8), (1, 1), (2, 4), (8, 1), (1, 5), (3, 2)])
def test_combined(tokens, top_k, layout, format):
    """Rows of an expert, of none, the same expert twice for a token; weights of every dtype."""
    groups, n, k = 6, 576, 768
    w = Weights(groups, n, k, format=format, layout=layout)
    bias = torch.randn(groups, n, device="cuda")
    m = tokens * top_k
    a = torch.randn(m, k, device="cuda").bfloat16()
    for dtype, of_bias in ((torch.float32, None), (torch.bfloat16, bias), (torch.float16, None)):
        ids, scores = few_ids(m, groups), torch.rand(tokens, top_k, device="cuda").to(dtype)
        weight = w.of_kernels(of_bias)
        each = of_experts(w.values, a, ids, bias if of_bias is not None else torch.zeros_like(bias))
        want = (each.view(tokens, top_k, n) * scores.double()[..., None]).sum(1)
        for out_dtype in (torch.float32, torch.bfloat16):
            out = torch.full((tokens, n), float("nan"), device="cuda", dtype=out_dtype)
            gemv.run(a, weight, ids, Routing.IDS64, m, out, topk_weights=scores)
            assert error(out, want) < max(BOUND[out_dtype], sums_bound(k))


@pytest.mark.parametrize(
    "layout, a_format",
    [("sm90", "none"), ("sm90", "fp8"), ("sm90", "nvfp4"), ("mma_bf16", "none"), ("mma_bf16", "mxfp4")],
)
@pytest.mark.parametrize("tokens, top_k", [(1, 8), (2, 2), (1, 1)])
def test_blocks_are_those_of_decode(tokens, top_k, layout, a_format):
    """The other kernel's sums, in another order; n tiles that blocks share evenly, and not."""
    groups, inter = 16, 192
    for hidden in (64 * library.multiprocessors(0), 320):
        up = Weights(groups, 2 * inter, hidden, format="nvfp4", layout=layout)
        down = Weights(groups, hidden, inter, format="nvfp4", layout=layout)
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        ids = torch.randint(-1, groups, (tokens, top_k), device="cuda")
        scores = torch.rand(tokens, top_k, device="cuda")
        b13, b2 = torch.randn(groups, 2 * inter, device="cuda"), torch.randn(groups, hidden, device="cuda")
        for gate in ("silu_interleaved", "swigluoai", "silu"):
            got = []
            for kernel in ("decode", "gemv"):
                with native.only(kernel):
                    got.append(
                        torch.ops.fp4.moe(
                            x, ids, scores, *up.packed, *down.packed, b13, b2, activation=gate,
                            a_format=a_format, **up.options,
                        )
                    )  # fmt: skip
            assert error(got[1], got[0].double()) < (8e-3 if a_format in ("none", "fp8") else 2.5e-2)
