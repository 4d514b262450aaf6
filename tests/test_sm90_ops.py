"""The operators on layouts sm90 and sm90_bf16, each kernel replaced by what it says it computes."""

from __future__ import annotations

import pytest
import reference
import torch
from fp4_ops.meta.formats import ACTIVATIONS, known_activation
from fp4_ops.meta.layouts import LAYOUTS

from fp4_ops.sm90 import choice, decode, gemv, int4, ops, prefill, rows
from fp4_ops.sm90.decode import Routing

F8 = torch.float8_e4m3fn
INT4 = {128: "int4", 64: "int4_g64", 32: "int4_g32"}
FEW = 30
"""Rows up to which decode is taken for faster."""
A_FORMATS = ["none", "fp8", "nvfp4", "mxfp4"]
fp4 = torch.ops.fp4


class Kernels:
    """Stands in for csrc/sm90 in plain torch; `seen` are the names of those that ran."""

    def __init__(self, monkeypatch) -> None:
        self.seen: list[str] = []
        monkeypatch.setattr(ops, "multiprocessors", lambda index: 132)
        monkeypatch.setattr(choice, "decode_us", lambda product, kernel, sms: product.rows)
        monkeypatch.setattr(choice, "prefill_us", lambda product, fp8, sms: FEW)
        for module, name in (
            *((module, "run") for module in (decode, gemv, prefill, int4)),
            *((rows, "route"), (rows, "quantize_fp8")),
            *(
                (rows, "quantize_fp4"),
                (rows, "to_half"),
                (rows, "same"),
                (rows, "combine"),
            ),
        ):
            mine = f"{module.__name__.rsplit('.', 1)[1]}_run" if name == "run" else name
            monkeypatch.setattr(module, name, getattr(self, mine))

    def product(self, x, x_scale, w, expert, source, gate=None):
        """w[expert[r]] @ x[source[r]] + bias in float64; zeros where the expert is -1."""
        a = (logical(x) if x.dtype == F8 else x).double()
        assert x.shape[-1] == w.kp or x.dtype != F8
        a = torch.nn.functional.pad(a, (0, w.kp - a.shape[-1]))[source]
        if x_scale is not None:
            assert x_scale.shape == x.shape[:1] and x_scale.dtype == torch.float32
            a = a * x_scale.double()[source, None]
        codes, scales = w.codes.view(w.groups, w.n, -1), w.scales.view(w.groups, w.n, -1)
        if isinstance(w, int4.Int4Weight):
            operands = codes, scales, w.factor.view(-1), INT4[w.group]
        else:
            operands = codes, scales, w.global_scale.view(-1), "nvfp4"
        values = fp4.dequantize(*operands, torch.float64, layout=w.layout.name)
        bias = None if w.bias is None else w.bias.view(w.groups, w.n).double()
        y = reference.indexed_mm(a, values, expert, bias)
        return y if gate is None else reference.activate(y, gate.name)

    def decode_run(
        self, x, w, route, routing, m, out, *, x_scale=None, sorted_rows=None, a_div=1, max_m=0, gate=None,
        early=False,
    ):  # fmt: skip
        self.seen.append("decode")
        assert (x.dtype == F8) <= (x_scale is not None) and x.dtype != torch.float32
        expert = experts_of(route, routing, w, m, max_m)
        row = torch.arange(m) if sorted_rows is None else sorted_rows.long()
        out[row] = self.product(x, x_scale, w, expert, row // a_div, gate).to(out.dtype)

    def gemv_run(
        self, x, w, route, routing, m, out, *, x_scale=None, a_div=1, gate=None, early=False,
        topk_weights=None,
    ):  # fmt: skip
        assert not early or self.seen[-1] in ("gemv", "quantize", "gate")
        size = routing, m, -(-m // a_div), w.n, w.kp, topk_weights is not None, 132
        assert gemv.configure(*size) is not None
        each = torch.empty(m, w.n if gate is None else w.n // 2, dtype=torch.float64)
        self.decode_run(x, w, route, routing, m, each, x_scale=x_scale, a_div=a_div, gate=gate)
        self.seen[-1] = "gemv"
        if topk_weights is not None:
            each = (each.view(*topk_weights.shape, -1) * topk_weights.double()[..., None]).sum(1)
        out.copy_(each)

    def prefill_run(self, x, x_scale, w, route, routing, m, out, gate=None, early=False):
        made = ("half", "same", "gate", "quantize", "prefill")
        assert not early or self.seen[-1] in made, "x is not all that may be under way"
        self.seen.append("prefill")
        if x.dtype == torch.bfloat16:
            assert w.layout.name == "sm90_bf16" and w.kp - 128 < x.shape[-1] <= w.kp
        else:
            assert w.layout.name != "sm90_bf16" and x.shape[-1] == w.kp and x_scale is not None
        if x.dtype == torch.float16:
            x = reference.plain_rows(x)
        rows_of = out.shape[0]
        expert = experts_of(route, routing, w, rows_of, m)
        assert gate is None or prefill.gates(gate, out.dtype)
        out.copy_(self.product(x, x_scale, w, expert, torch.arange(rows_of), gate))

    def int4_run(self, x, x_scale, w, route, routing, m, out, gate=None, early=False):
        assert x.dtype == F8 and isinstance(w, int4.Int4Weight)
        self.prefill_run(x, x_scale, w, route, routing, m, out, gate, early)
        self.seen[-1] = "int4"

    def route(self, ids, groups):
        self.seen.append("route")
        key = ids.flatten().long()
        key = torch.where((key >= 0) & (key < groups), key, groups)
        order = key.argsort(stable=True)
        offs = torch.bincount(key, minlength=groups + 1)[:groups].cumsum(0)
        return offs.int(), order.int(), order.argsort().int()

    def taken(self, x, gate, position, end):
        """What is quantised, row by row of the result, and how many of them; the rest is never read."""
        x = x.double() if gate is None else reference.activate(x.double(), gate.name)
        if position is not None:
            assert position.dtype == torch.int32 and position.numel() % x.shape[0] == 0
            x = torch.empty(position.numel(), x.shape[1], dtype=x.dtype).index_copy_(
                0, position.flatten().long(), x.repeat_interleave(position.numel() // x.shape[0], 0)
            )
        return x, x.shape[0] if end is None else int(end)

    def follows(self, dependent, position, *products):
        """What is made by a kernel that may still run, x or position, is made by the one before."""
        assert not dependent or self.seen[-1] in (products if position is None else ("route",))

    def quantize_fp8(self, x, gate=None, position=None, end=None, *, dependent=False):
        self.follows(dependent, position, "prefill", "int4")
        self.seen.append("quantize")
        assert x.dtype != torch.float32
        values, live = self.taken(x, gate, position, end)
        codes, scale = fp4.quantize_fp8(values.float(), layout="sm90")
        codes.view(torch.uint8)[live:] = 0x7F  # NaN
        scale[live:] = float("nan")
        return codes, scale

    def to_half(self, x, gate=None, position=None, end=None, *, dependent=False):
        self.follows(dependent, position, "prefill", "int4")
        self.seen.append("half")
        assert x.dtype != torch.float32
        values, live = self.taken(x, gate, position, end)
        half, factor = reference.half_rows(values)
        half[live:], factor[live:] = float("nan"), float("nan")
        return half, factor

    def quantize_fp4(self, x, gate=None, position=None, end=None, *, format):
        self.seen.append("quantize")
        values, _ = self.taken(x, gate, position, end)
        codes, scale, factor = fp4.quantize(values.float()[:, None], format)
        has = factor.numel() > 0
        ones = torch.ones(codes.shape[0])
        values = fp4.dequantize(codes, scale, ones if has else None, format, torch.bfloat16)
        return values[:, 0], factor if has else ones

    def same(self, x, gate=None, position=None, end=None, *, dependent=False):
        assert gate is not None or position is not None, "nothing to do"
        self.follows(dependent, position, "prefill")
        self.seen.append("same" if gate is None else "gate")
        values, live = self.taken(x, gate, position, end)
        values = values.to(x.dtype)
        values[live:] = float("nan")
        return values

    def combine(self, y, position, ids, weights, bias, groups, out):
        y = y.double() if position is None else y.double()[position.long()]
        y = y.view(*ids.shape, -1)
        valid = (ids >= 0) & (ids < groups)
        if bias is not None:
            y = y + bias.double()[ids.clamp(0, groups - 1)]
        out.copy_((torch.where(valid[..., None], y, 0) * weights.double()[..., None]).sum(1))


def logical(codes: torch.Tensor) -> torch.Tensor:
    """fp8 rows of the layout, in the order of k."""
    return codes.view(*codes.shape[:-1], -1, 4, 4, 4).transpose(-2, -3).reshape(codes.shape)


def experts_of(route, routing, w, m, max_m):
    row = torch.arange(m)
    if routing == Routing.DENSE:
        return torch.zeros(m, dtype=torch.long)
    if routing in (Routing.IDS32, Routing.IDS64):
        assert (route.dtype == torch.int64) == (routing == Routing.IDS64)
        expert = route.flatten().long()
    elif routing == Routing.MASKED:
        expert = torch.where(row % max_m < route[row // max_m], row // max_m, -1)
    else:
        expert = torch.searchsorted(route, row.int(), right=True)
    return torch.where((expert >= 0) & (expert < w.groups), expert, -1)


@pytest.fixture
def kernels(monkeypatch) -> Kernels:
    return Kernels(monkeypatch)


def weight(*shape: int, bias: bool = False, layout: str = "sm90") -> tuple[decode.Weight, torch.Tensor]:
    w = reference.random_weight("nvfp4", *shape)
    packed = fp4.prepack(*w.operands(), "nvfp4", layout)
    *lead, n, _ = shape
    b = torch.randn(*lead, n) if bias else None
    groups = lead[0] if lead else 1
    kp = packed[0].shape[-1] * 2
    return decode.Weight(*packed, b, groups, n, kp, LAYOUTS[layout]), w.dense.double()


@pytest.mark.parametrize("activation", ["silu", "swigluoai", "gelu_interleaved", "relu2", "silu(limit=2)"])
@pytest.mark.parametrize(
    "layout, a_format", [*(("sm90", a) for a in A_FORMATS), ("sm90_bf16", "none"), ("sm90_bf16", "nvfp4")]
)
@pytest.mark.parametrize("tokens", [3, 60])
def test_block(kernels, tokens, layout, a_format, activation):
    experts, hidden, inter, top_k = 4, 192, 64, 2
    rows = reference.rows_per_column(activation) * inter
    up, w13 = weight(experts, rows, hidden, bias=True, layout=layout)
    down, w2 = weight(experts, hidden, inter, bias=True, layout=layout)
    x = torch.randn(tokens, hidden).bfloat16()
    ids = torch.randint(-1, experts + 1, (tokens, top_k))
    ids[0] = torch.arange(top_k)
    weights = torch.rand(tokens, top_k)
    got = ops.moe(x, ids, weights, up, down, activation, a_format, torch.float32)
    few = ids.numel() < FEW
    assert few == (tokens == 3)
    act = known_activation(activation)
    in_product = act.interleaved if few else prefill.gates(act, torch.bfloat16)
    want = reference.moe(
        x.double(), ids, weights, w13, w2, up.bias.double(), down.bias.double(), activation=activation,
        a_format=a_format, between=torch.bfloat16 if a_format == "fp8" else None, gated=in_product,
    )  # fmt: skip
    # Between the products: rounded to bfloat16, for fp8 before that is quantised; for FP4 quantised from
    # float32, where a tie that falls to the other side moves one value of thousands.
    # relu2 squares what was rounded, so twice as many values are near a tie.
    quantised = 2e-2 if activation == "relu2" else 1e-2
    assert reference.relative_error(got, want) < (5e-3 if a_format == "none" else quantised)
    assert kernels.seen.count("decode" if few else "prefill") == 2
    assert kernels.seen.count("quantize") == (0 if a_format == "none" else 2)
    plain = layout == "sm90_bf16"
    assert kernels.seen.count("half") == (0 if few or plain or a_format == "fp8" else 2)
    assert kernels.seen.count("same") == (plain and not few and a_format == "none")
    assert kernels.seen.count("gate") == (
        a_format == "none" and (few or plain) and act.gated and not in_product
    )


@pytest.mark.parametrize("activation", ["silu", "silu_interleaved"])
@pytest.mark.parametrize("layout, a_format", [("sm90", "fp8"), ("sm90_bf16", "none")])
def test_block_of_few_rows(kernels, layout, a_format, activation):
    """Where n tiles go round evenly, the second product combines."""
    experts, hidden, inter, tokens, top_k = 4, 16 * 132, 512, 2, 3
    up, w13 = weight(experts, 2 * inter, hidden, bias=True, layout=layout)
    down, w2 = weight(experts, hidden, inter, bias=True, layout=layout)
    x, weights = torch.randn(tokens, hidden).bfloat16(), torch.rand(tokens, top_k)
    ids = torch.randint(-1, experts + 1, (tokens, top_k))
    ids[0] = torch.arange(top_k)
    got = ops.moe(x, ids, weights, up, down, activation, a_format, torch.float32)
    want = reference.moe(
        x.double(), ids, weights, w13, w2, up.bias.double(), down.bias.double(), activation=activation,
        a_format=a_format, between=torch.bfloat16 if a_format == "fp8" else None,
        gated=ACTIVATIONS[activation].interleaved,
    )  # fmt: skip
    assert reference.relative_error(got, want) < (5e-3 if a_format == "none" else 1e-2)
    seen = [name for name in kernels.seen if name not in ("quantize", "gate")]
    assert seen == ["gemv", "gemv"]


@pytest.mark.parametrize(
    "layout, rows_each, seen",
    [
        ("sm90", 2, ["gemv"]),
        ("sm90", 10, ["decode"]),
        ("sm90", 40, ["half", "prefill"]),
        ("sm90_bf16", 40, ["prefill"]),
    ],
)
def test_rows_are_put_in_order_where_the_layout_asks_for_it(kernels, layout, rows_each, seen):
    groups, n, k = 2, 64, 176
    w, dense = weight(groups, n, k, bias=True, layout=layout)
    a = torch.randn(rows_each * groups, k).bfloat16()
    offs = torch.tensor([rows_each, 2 * rows_each], dtype=torch.int32)
    got = ops.grouped_mm(a, None, w, offs, torch.float32)
    ids = torch.arange(groups).repeat_interleave(rows_each)
    want = reference.indexed_mm(a.double(), dense, ids, w.bias.double())
    assert reference.relative_error(got, want) < 1e-6
    assert kernels.seen == seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, F8])
@pytest.mark.parametrize("m", [1, 5])
def test_groups_along_k(kernels, m, dtype):
    n, k = 64, 336
    w, dense = weight(n, k)
    a = torch.randn(m, k).bfloat16()
    scale, values = None, a.double()
    if dtype == F8:
        a, scale = fp4.quantize_fp8(a, layout="sm90")
        values = logical(a).double()[:, :k] * scale.double()[:, None]
    ends = [0, 16, 16, 128, 336]
    got = ops.grouped_mm_k(a, scale, w, torch.tensor(ends, dtype=torch.int32), torch.float32)
    assert got.shape == (len(ends), m, n)
    for g, (begin, end) in enumerate(zip([0, *ends], ends)):
        want = values[:, begin:end] @ dense[:, begin:end].T
        assert reference.relative_error(got[g], want) < 1e-6
        assert end > begin or not got[g].any()


@pytest.mark.parametrize("layout", ["sm90", "sm90_bf16"])
@pytest.mark.parametrize("m", [3, 200])
def test_rows_by_id_with_factors(kernels, m, layout):
    """As packed FP4 rows come: bfloat16 with a float32 factor each."""
    groups, n, k = 4, 64, 128
    w, dense = weight(groups, n, k, bias=True, layout=layout)
    a, factor = torch.randn(m, k).bfloat16(), torch.rand(m) + 0.5
    ids = torch.randint(-1, groups, (m,))
    ids[0] = 0
    got = ops.indexed_mm(a, factor, w, ids, torch.float32)
    want = reference.indexed_mm(a.double() * factor.double()[:, None], dense, ids, w.bias.double())
    assert reference.relative_error(got, want) < 1e-6
    assert ("prefill" in kernels.seen) == (m == 200)


# --- int4: one kernel, of fp8 rows ---


def int4_weight(group: int, *shape: int, bias: bool = False) -> tuple[int4.Int4Weight, torch.Tensor]:
    w = reference.random_weight(INT4[group], *shape, layout="sm90_int4")
    *lead, n, _ = shape
    b = torch.randn(*lead, n) if bias else None
    shape = lead[0] if lead else 1, n, 2 * w.packed.shape[-1]
    made = int4.Int4Weight(w.packed, w.scale, w.global_scale, group, b, *shape)
    return made, w.dense.double()


@pytest.mark.parametrize("activation", ["silu", "swigluoai", "gelu_interleaved", "relu2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("a_format", ["fp8", "auto"])
@pytest.mark.parametrize("group", INT4)
@pytest.mark.parametrize("tokens", [1, 60])
def test_int4_block(kernels, tokens, group, a_format, dtype, activation):
    experts, hidden, inter, top_k = 4, 192, 96 if activation != "relu2" else 128, 2
    rows = reference.rows_per_column(activation) * inter
    up, w13 = int4_weight(group, experts, rows, hidden, bias=True)
    down, w2 = int4_weight(group, experts, hidden, inter, bias=True)
    x = torch.randn(tokens, hidden).to(dtype)
    ids = torch.randint(-1, experts + 1, (tokens, top_k))
    ids[0] = torch.arange(top_k)
    weights = torch.rand(tokens, top_k)
    got = ops.moe(x, ids, weights, up, down, activation, a_format, torch.float32)
    want = reference.moe(
        x.double(), ids, weights, w13, w2, up.bias.double(), down.bias.double(), activation=activation,
        a_format="fp8",
    )  # fmt: skip
    # Rounded to bfloat16 between the products and, a float32 x, before them; then quantised.
    assert reference.relative_error(got, want) < 4e-2
    assert kernels.seen == ["route", "quantize", "int4", "quantize", "int4"]


@pytest.mark.parametrize("group", INT4)
@pytest.mark.parametrize("m", [1, 200])
def test_int4_products(kernels, m, group):
    groups, n, k = 4, 64, 208
    w, dense = int4_weight(group, groups, n, k, bias=True)
    bias = w.bias.double()
    a, scale = fp4.quantize_fp8(torch.randn(m, k).bfloat16(), layout="sm90")
    values = logical(a).double()[:, :k] * scale.double()[:, None]
    ids = torch.randint(-1, groups, (m,))
    ids[0] = 0
    got = ops.indexed_mm(a, scale, w, ids, torch.float32)
    assert reference.relative_error(got, reference.indexed_mm(values, dense, ids, bias)) < 1e-6
    offs = torch.tensor([m // 2, m // 2, m, m], dtype=torch.int32)
    want = reference.indexed_mm(values, dense, reference.m_indices(offs, m), bias)
    assert reference.relative_error(ops.grouped_mm(a, scale, w, offs, torch.float32), want) < 1e-6
    one = w._replace(codes=w.codes[2], scales=w.scales[2], factor=w.factor[2], bias=w.bias[2], groups=1)
    want = values @ dense[2].T + bias[2]
    assert reference.relative_error(ops.mm(a, scale, one, torch.float32), want) < 1e-6
    masked = a.expand(groups, *a.shape).contiguous(), scale.expand(groups, m).contiguous()
    counts = torch.tensor([m, 0, 1, m // 2], dtype=torch.int32)
    got = ops.grouped_mm_masked(*masked, w, counts, torch.float32)
    live = (torch.arange(m) < counts[:, None])[..., None]
    want = torch.where(live, values @ dense.mT + bias[:, None], 0)
    assert reference.relative_error(got, want) < 1e-6
    bare, ends = one._replace(bias=None), [0, 128, 208]
    got = ops.grouped_mm_k(a, scale, bare, torch.tensor(ends, dtype=torch.int32), torch.float32)
    for g, (begin, end) in enumerate(zip([0, *ends], ends)):
        want = values[:, begin:end] @ dense[2][:, begin:end].T
        assert reference.relative_error(got[g], want) < 1e-6 if end > begin else not got[g].any()
    assert set(kernels.seen) == {"route", "int4"}
