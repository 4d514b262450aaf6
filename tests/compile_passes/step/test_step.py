"""A decoding step with fewer kernels: a norm and products, a product and the residual."""

from __future__ import annotations

import contextlib
import random
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import SEED
from families import tiny
from moe_models import Recorder, build, relative_error
from one_pass import copied
from torch import nn
from torch._guards import TracingContext, detect_fake_mode
from torch._inductor.utils import run_and_get_code

import fp4_ops
from fp4_ops.backends.hopper import trust
from fp4_ops.compile_passes.neighbours import topk
from fp4_ops.compile_passes.options import parse
from fp4_ops.compile_passes.pipeline import compile_graph
from fp4_ops.compile_passes.step import cache, cached, linears
from fp4_ops.compile_passes.step.linears import CPU, HOPPER, limits, write_linears
from fp4_ops.runtime import first_use, native

expecttest = pytest.importorskip("expecttest")
K, BF16 = 64, torch.bfloat16


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """A Hopper GPU whose kernel was never used; its error is in the dict."""
    found = {"error": 1e-3}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trust, "linears_error", lambda: found["error"])
    monkeypatch.setattr(native, "family", lambda index: native.HOPPER)
    monkeypatch.setattr(native, "build", lambda family: "a build")
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    properties = types.SimpleNamespace(name="an H100", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    first_use.forget()
    yield found
    first_use.forget()


@pytest.mark.parametrize("error, right", [(1e-3, True), (1e-2, False), (float("nan"), False)])
def test_a_kernel_whose_first_use_is_wrong_is_not_used(hopper, error, right, caplog):
    hopper["error"] = error
    assert limits(torch.device("cuda", 1)) is (HOPPER if right else None)
    assert limits(torch.device("cpu")) is CPU
    assert ("torch is used instead" in caplog.text) is not right


def test_the_check_finds_what_is_wrong(monkeypatch):
    """By torch's operations, which serve a CPU; then with a result that has a wrong element in a hundred."""
    assert max(trust._linears_error(BF16, "cpu", rows) for rows in trust.ROWS) < trust.BOUND

    def wrong(*args, **options):
        made = right(*args, **options)
        made[-1][:, ::100] += 1
        return made

    right = torch.ops.fp4.linears
    monkeypatch.setattr(torch.ops.fp4, "linears", wrong)
    assert trust._linears_error(BF16, "cpu", 1) > 10 * trust.BOUND


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_the_check_of_update_cache(monkeypatch, dtype):
    """By torch's operations; then with a wrong place in the cache, and with queries that are not normed."""
    assert max(trust._update_cache_error(dtype, "cpu", n) for n in (1, 5)) < trust.BOUND
    right = torch.ops.fp4.update_cache
    wrong = [
        lambda *given: right(*given[:10], given[10] + 1),
        lambda *given: right(*given[:5], None, *given[6:]),
    ]
    for one in wrong:
        monkeypatch.setattr(torch.ops.fp4, "update_cache", one)
        assert trust._update_cache_error(dtype, "cpu", 5) > 10 * trust.BOUND


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_the_check_of_top_experts(monkeypatch, dtype):
    """By torch's operations; then with other experts, and with other weights."""
    assert max(trust._top_experts_error(dtype, "cpu", n) for n in (1, 70)) < trust.BOUND
    right = torch.ops.fp4.top_experts

    def others(logits, k, **options):
        weights, ids = right(logits, k, **options)
        return weights, ids.flip(-1)

    monkeypatch.setattr(torch.ops.fp4, "top_experts", others)
    assert trust._top_experts_error(dtype, "cpu", 1) == float("inf")
    monkeypatch.setattr(
        torch.ops.fp4, "top_experts", lambda x, k, **options: right(x, k, **{**options, "normalize": True})
    )
    assert trust._top_experts_error(dtype, "cpu", 1) > 10 * trust.BOUND


@pytest.mark.parametrize(
    "runs, error",
    [
        (cache.runs, "update_cache_error"),
        (cached.runs, "cached_attention_error"),
        (topk.has_kernel, "top_experts_error"),
    ],
)
def test_other_kernels_whose_first_use_is_wrong_are_not_used(hopper, monkeypatch, runs, error):
    for found in (1e-3, float("inf")):
        monkeypatch.setattr(trust, error, lambda found=found: found)
        first_use.forget()
        first_use.cache_file().unlink(missing_ok=True)
        assert runs(torch.device("cuda", 1)) is (found < trust.BOUND)
    assert runs(torch.device("cpu")) is (runs is not topk.has_kernel)  # operators of a CPU need no check


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Up to 8 rows are rewritten here, and the CPU stands for a GPU."""
    allow(monkeypatch)


def allow(monkeypatch, **changes):
    """Replaces the limits of all devices by Hopper's, with these changes."""
    most = replace(HOPPER, **{**dict.fromkeys(("rows", "norm_rows", "residual_rows"), 8), **changes})
    monkeypatch.setattr(linears, "limits", lambda device: most)


class Rewriter:
    """A backend that captures, runs the pass alone, and runs the graph."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.Graph] = []

    def __call__(self, gm, inputs):
        context = TracingContext.try_get()
        mode = context.fake_mode if context is not None else detect_fake_mode(inputs)
        fakes = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
        made = copied(gm, fakes, mode)
        given = made.graph.find_nodes(op="placeholder")
        parameters = {n for n, x in zip(given, inputs) if isinstance(x, nn.Parameter)}
        self.also = write_linears(made.graph, parameters)
        made.graph.eliminate_dead_code()
        made.graph.lint()
        made.recompile()
        self.graphs.append(made.graph)
        return made.forward

    def calls(self, name: str) -> list[torch.fx.Node]:
        target = getattr(torch.ops.fp4, name).default
        return [n for graph in self.graphs for n in graph.find_nodes(op="call_function", target=target)]


def run(module: nn.Module, *args: Any, dynamic: bool = False) -> Rewriter:
    """`module` rewritten computes what it does, up to rounding."""
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(module, backend=(done := Rewriter()), dynamic=dynamic, fullgraph=True)(*args)
        want = module(*args)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert relative_error(a, b.double()) < 1e-2
    return done


class Norm(nn.Module):
    def __init__(self, k: int = K) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(k))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Square(Norm):
    """Written in another way."""

    def forward(self, x):
        wide = x.to(torch.float32)
        inverse = torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + 1e-5)
        return (inverse * wide).to(x.dtype) * self.weight


class Gemma(Norm):
    def forward(self, x):
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (scaled * (1.0 + self.weight.float())).to(x.dtype)


class Late(Norm):
    """Rounds after it multiplies by its weight."""

    def forward(self, x):
        wide = x.float()
        return (self.weight.float() * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6))).to(
            x.dtype
        )


class LateWeight(Norm):
    """The same, with a weight that is not widened first (gpt-oss)."""

    def forward(self, x):
        wide = x.float()
        return (self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


class Whole(Norm):
    """The mean is one of all rows."""

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(dim=(1, 2), keepdim=True) + 1e-6)).to(
            x.dtype
        )


class Cube(Norm):
    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(4).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Centred(Norm):
    def forward(self, x):
        wide = x.float()
        centred = wide - wide.mean(-1, keepdim=True)
        return self.weight * (centred * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Attention(nn.Module):
    """Norm, three products of its result, one that is added to the residual, norm and a router."""

    def __init__(self, norm=Norm, bias: bool = False) -> None:
        super().__init__()
        self.first, self.second = norm(), norm()
        self.q, self.k, self.v = (nn.Linear(K, n, bias=bias) for n in (64, 16, 16))
        self.o, self.router = nn.Linear(K, K, bias=bias), nn.Linear(K, 5, bias=False)

    def forward(self, x):
        h = self.first(x)
        q, k, v = self.q(h), self.k(h), self.v(h)
        x = x + self.o(q * k.sum(-1, keepdim=True) * v.mean(-1, keepdim=True).sigmoid())
        h = self.second(x).view(-1, K)
        return x, F.softmax(self.router(h), -1), h * 2


def draw(device: str, *shape: int, dtype=BF16) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)


@pytest.mark.parametrize("norm", [Norm, Square])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_norms_products_and_residuals(device, norm, bias, dtype):
    module = Attention(norm, bias).to(device, dtype)
    done = run(module, draw(device, random.Random(SEED).randint(1, 8), 1, K, dtype=dtype))
    calls = done.calls("linears")
    assert [(len(c.args[1]), c.args[3] is not None, c.args[5] is not None) for c in calls] == [
        (3, True, False), (1, False, True), (1, True, False),
    ]  # fmt: skip
    assert [c.kwargs.get("keep_norm", False) for c in calls] == [False, False, True]
    assert len(done.also) == 2 and all("fp4::linears" in said for said in done.also)
    assert not [n for n in done.graphs[0].nodes if "rsqrt" in n.name or n.name.startswith(("mm", "addmm"))]


def test_weights_are_early_behind_a_kernel_of_the_graph(device):
    """The kernel before the first one may be one that writes the weights."""
    done = run(Attention().to(device, BF16), draw(device, 2, 3, K)[:, :1])
    assert [c.kwargs.get("early", False) for c in done.calls("linears")] == [False, True, True]


class Four(nn.Module):
    """A norm and the products of a Qwen2-MoE block: a router, a shared expert, and the gate of that."""

    def __init__(self, norm=Norm) -> None:
        super().__init__()
        self.norm = norm()
        self.layers = nn.ModuleList(nn.Linear(K, n, bias=False) for n in (5, 32, 32, 1))

    def forward(self, x):
        h = self.norm(x).view(-1, K)
        return tuple(layer(h) for layer in self.layers)


def test_three_of_four_products_share_a_kernel_with_the_norm(device):
    done = run(Four().to(device, BF16), draw(device, 3, 1, K))
    (call,) = done.calls("linears")
    assert [tuple(w.meta["val"].shape) for w in call.args[1]] == [(5, K), (32, K), (32, K)]
    assert call.kwargs["keep_norm"]
    assert not [n for n in done.graphs[0].nodes if "rsqrt" in n.name]


def test_products_whose_weights_are_too_large_are_left(device, monkeypatch):
    allow(monkeypatch, nbytes=2 * K * (5 + 32 + 1))
    done = run(Four().to(device, BF16), draw(device, 3, 1, K))
    (call,) = done.calls("linears")
    assert [w.meta["val"].shape[0] for w in call.args[1]] == [5, 32, 1]
    allow(monkeypatch, nbytes=K)
    assert not run(Four().to(device, BF16), draw(device, 3, 1, K)).calls("linears")


def test_a_layer_norm_is_refused_with_the_reason(device):
    done = run(Four(lambda: nn.LayerNorm(K)).to(device, BF16), draw(device, 3, 1, K))
    assert not done.calls("linears") and any("LayerNorm" in said for said in done.also)


@pytest.mark.parametrize("norm", [Gemma, Whole, Cube, Centred])
def test_other_norms_stay(device, norm):
    done = run(Attention(norm).to(device, BF16), draw(device, 3, 1, K))
    assert [c.args[3] for c in done.calls("linears")] == [None]  # the residual


@pytest.mark.parametrize("norm", [Late, LateWeight])
def test_a_norm_that_rounds_after_its_weight(device, norm):
    done = run(Attention(norm).to(device, BF16), draw(device, 3, 1, K))
    calls = done.calls("linears")
    assert [c.kwargs.get("norm_in_float", False) for c in calls] == [c.args[3] is not None for c in calls]
    assert len(calls) == len(run(Attention().to(device, BF16), draw(device, 3, 1, K)).calls("linears"))


def test_a_norm_that_rounds_twice_stays(device):
    class Twice(Norm):
        def forward(self, x):
            wide = x.float()
            rounded = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
            return (self.weight.float() * rounded).to(x.dtype)

    done = run(Attention(Twice).to(device, BF16), draw(device, 3, 1, K))
    assert [c.args[3] for c in done.calls("linears")] == [None]
    assert any("rounded at other places" in said for said in done.also)


def test_gemma_is_refused_with_the_reason(device):
    class Rounded(Gemma):
        def forward(self, x):
            wide = x.float()
            return (1 + self.weight) * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(
                x.dtype
            )

    done = run(Attention(Rounded).to(device, BF16), draw(device, 3, 1, K))
    assert any("1 + w" in said for said in done.also)


@pytest.mark.parametrize("shape", [(1, 9, K), (9, 1, K), (3, 3, K)])
def test_many_rows_stay(device, shape):
    assert not run(Attention().to(device, BF16), draw(device, *shape)).calls("linears")


def test_the_most_rows_are_those_whose_kernels_are_checked(device, monkeypatch):
    """With more rows the norm comes before the products; then the router is a product alone, which stays."""
    norm_rows, residual_rows, most = HOPPER.norm_rows, HOPPER.residual_rows, HOPPER.rows
    assert {norm_rows, residual_rows, most} <= set(trust.ROWS)
    monkeypatch.setattr(linears, "limits", lambda device: HOPPER)
    module = Attention().to(device, BF16)
    normed, joined, residual = (3, True, False), (3, False, False), (1, False, True)
    for rows, want in (
        (norm_rows, [normed, residual, (1, True, False)]),
        (norm_rows + 1, [joined, residual]),
        (residual_rows, [joined, residual]),
        (residual_rows + 1, [joined]),
        (most, [joined]),
        (most + 1, []),
    ):
        calls = run(module, draw(device, rows, 1, K)).calls("linears")
        found = [(len(c.args[1]), c.args[3] is not None, c.args[5] is not None) for c in calls]
        assert found == want, rows


def test_large_weights_of_many_rows_stay(device, monkeypatch):
    monkeypatch.setattr(linears, "limits", lambda device: replace(HOPPER, many_nbytes=1))
    module = Attention().to(device, BF16)
    assert not run(module, draw(device, HOPPER.norm_rows + 1, 1, K)).calls("linears")


def test_rows_of_a_symbolic_number_stay(device):
    assert not run(Attention().to(device, BF16), draw(device, 3, 1, K), dynamic=True).calls("linears")


def test_float32_stays(device):
    assert not run(Attention().to(device), draw(device, 3, 1, K, dtype=torch.float32)).calls("linears")


class Products(nn.Module):
    """Products that no operator takes, by name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.o = kind, nn.Linear(K, K, bias=False)
        self.row = nn.Parameter(torch.randn(K))

    def forward(self, x, other):
        if self.kind == "read twice":
            y = self.o(other)
            return x + y, y * 2
        if self.kind == "broadcast":
            return x[:1] + self.o(other)
        if self.kind == "scaled":
            return torch.add(x, self.o(other), alpha=2)
        if self.kind == "itself":
            y = self.o(other)
            return y + y
        if self.kind == "computed":
            return x + F.linear(other, self.o.weight * 2)
        if self.kind == "wider":
            return x.float() + self.o(other)
        assert self.kind == "argument"
        return x + F.linear(x, other)


@pytest.mark.parametrize(
    "kind", ["read twice", "broadcast", "scaled", "itself", "computed", "wider", "argument"]
)
def test_products_that_stay(device, kind):
    other = draw(device, K, K) if kind == "argument" else draw(device, 3, 1, K)
    assert not run(Products(kind).to(device, BF16), draw(device, 3, 1, K), other).calls("linears")


def test_a_product_without_a_norm_or_a_residual(device, monkeypatch):
    """It is written only where its kernel alone is faster than torch's, as on a CPU."""
    module, x = Products("read twice").to(device, BF16), draw(device, 3, 1, K)
    allow(monkeypatch, alone=True)
    done = run(module, x, x)
    (call,) = done.calls("linears")
    assert call.args[3:] == (None, 0.0, None) and not [n for n in done.graphs[0].nodes if "mm" in n.name]
    allow(monkeypatch, alone=True, nbytes=K)
    assert not run(module, x, x).calls("linears")


def test_a_bias_of_one_element_stays(device):
    """addmm repeats it; fp4::linears does not."""
    weight, bias = nn.Parameter(draw(device, 64, K)), nn.Parameter(draw(device, 1))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = weight, bias

        def forward(self, x):
            return x + F.linear(x, self.weight, self.bias)

    assert not run(Layer(), draw(device, 3, K)).calls("linears")


@pytest.mark.slow
@pytest.mark.parametrize("option", ["cpp_wrapper", None])
def test_a_wrapper_in_cpp(monkeypatch, option):
    """Inductor's C++ wrapper cannot call an operator that takes lists of tensors."""
    monkeypatch.setattr(linears, "limits", limits)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = build("qwen3_moe", BF16, "grouped_mm", num_hidden_layers=1).model.layers[0].mlp
            self.other = nn.Linear(64, 64)

        def forward(self, x):
            return self.block(x[None]), self.other(x)

    layer, x = Layer().to(BF16).eval(), draw("cpu", 2, 64)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(layer, backend="fp4", options={option: True} if option else None)
        (got, y), code = run_and_get_code(compiled, x)
        assert relative_error(y, layer.other(x).double()) < 1e-2 and got.isfinite().all()
    assert ("fp4.linears" in "".join(code)) is (option is None)


def test_a_step_on_the_cpu(monkeypatch):
    """As users have it: bfloat16 of up to four rows."""
    monkeypatch.setattr(linears, "limits", limits)
    bf16 = Attention().to(BF16)
    assert len(run(bf16, draw("cpu", 4, 1, K)).calls("linears")) == 3
    assert not run(bf16, draw("cpu", 5, 1, K)).calls("linears")
    assert not run(Attention().half(), draw("cpu", 1, 1, K, dtype=torch.float16)).calls("linears")


# --- a model ---


def qwen3(device: str):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True, vocab_size=128,
        max_position_embeddings=256,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).eval().to(device, BF16)
    for name, p in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(p, 1.0, 0.2)
    fp4_ops.prepare(model, format="nvfp4")
    return transformers, model


@torch.no_grad()
def logits_of_steps(transformers, model, tokens, backend=None) -> torch.Tensor:
    """Runs a prompt of four tokens, then a step of each of the others, which `backend` compiles."""
    torch._dynamo.reset()
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    run = torch.compile(model, backend=backend) if backend is not None else model
    logits = [model(tokens[:, :4], past_key_values=cache).logits[:, -1:]]
    for i in range(4, tokens.shape[1]):
        logits.append(run(tokens[:, i : i + 1], past_key_values=cache).logits)
    return torch.cat(logits, 1)


@pytest.mark.slow
def test_a_model_takes_its_steps_in_fewer_kernels(device):
    transformers, model = qwen3(device)
    tokens = torch.randint(0, 128, (2, 9), device=device)
    plain = logits_of_steps(transformers, model, tokens)
    ours = logits_of_steps(transformers, model, tokens, recorder := Recorder())
    assert relative_error(ours, plain.double()) < 3e-2
    assert recorder.compilations == 1 and len(recorder.graphs) == 1
    names = [str(n.target) for n in recorder.graphs[0].graph.nodes]
    # Two layers of two and a router, and the last norm with the head.
    assert [names.count(f"fp4.{name}.default") for name in ("linears", "router")] == [5, 2]
    assert names.count("aten.mm.default") == 0
    assert sum(said.endswith("one kernel (fp4::linears)") for said in recorder.frames[0].also) == 2


class TestGolden(expecttest.TestCase):
    def test_an_attention_layer(self) -> None:
        done = run(Attention().to(BF16), draw("cpu", 3, 1, K))
        nodes = [f"{n} = {n.target}{n.args}" for n in done.graphs[0].nodes if n.op == "call_function"]
        self.assertExpectedInline(
            "\n".join(node.replace("_default", "") for node in nodes),
            """\
linears = fp4.linears.default(arg0_1, [arg2_1, arg3_1, arg4_1], [None, None, None], arg1_1, 1e-06, None)
getitem_2 = <built-in function getitem>(linears, 2)
reshape_2 = aten.reshape.default(getitem_2, [-1, 16])
getitem_1 = <built-in function getitem>(linears, 1)
reshape_1 = aten.reshape.default(getitem_1, [-1, 16])
getitem = <built-in function getitem>(linears, 0)
reshape = aten.reshape.default(getitem, [-1, 64])
_unsafe_view = aten._unsafe_view.default(reshape, [3, 1, 64])
_unsafe_view_1 = aten._unsafe_view.default(reshape_1, [3, 1, 16])
_unsafe_view_2 = aten._unsafe_view.default(reshape_2, [3, 1, 16])
sum_1 = aten.sum.dim_IntList(_unsafe_view_1, [-1], True)
mul_2 = aten.mul.Tensor(_unsafe_view, sum_1)
mean_1 = aten.mean.dim(_unsafe_view_2, [-1], True)
sigmoid = aten.sigmoid.default(mean_1,)
mul_3 = aten.mul.Tensor(mul_2, sigmoid)
view_3 = aten.view.default(mul_3, [3, 64])
reshape_3 = aten.reshape.default(arg0_1, [-1, 64])
linears_1 = fp4.linears.default(view_3, [arg5_1], [None], None, 0.0, reshape_3)
getitem_3 = <built-in function getitem>(linears_1, 0)
reshape_4 = aten.reshape.default(getitem_3, [3, 1, 64])
linears_2 = fp4.linears.default(reshape_4, [arg7_1], [None], arg6_1, 1e-06, None)
getitem_5 = <built-in function getitem>(linears_2, 0)
reshape_5 = aten.reshape.default(getitem_5, [-1, 5])
getitem_4 = <built-in function getitem>(linears_2, 1)
view_4 = aten.view.default(getitem_4, [-1, 64])
_softmax = aten._softmax.default(reshape_5, -1, False)
mul_6 = aten.mul.Tensor(view_4, 2)""",
        )


NORM, RESIDUAL = "a norm and the products", "a product and the residual"


def said_of_a_step(model) -> list[str]:
    """Returns the sentences of the backend about a decoding step."""
    transformers = pytest.importorskip("transformers")
    torch._dynamo.reset()
    said: list[str] = []

    def note(frame):
        said.extend(frame.also)

    def backend(gm, inputs):
        return compile_graph(gm, inputs, parse(None, {}), lambda gm, *_, **__: gm.forward, note)

    backend.sees_through_branches = True
    ids, cache = torch.arange(9)[None], transformers.StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
        torch.compile(model, backend=backend)(ids[:, 8:], past_key_values=cache)
    return said


def test_a_model_that_was_prepared_as_batch_invariant_keeps_torchs_sums():
    for invariant in (False, True):
        model = tiny("mixtral", hidden_size=128).to(BF16).eval()
        fp4_ops.prepare(model, batch_invariant=invariant)
        said = " ".join(said_of_a_step(model))
        assert ("fp4::linears" in said, "fp4::top_experts" in said) == (not invariant, not invariant)


@pytest.mark.more
@pytest.mark.parametrize(
    "family, norms, residuals, left",
    [
        ("qwen2_moe", 5, 2, ""),
        ("deepseek_v3", 7, 3, ""),
        ("granitemoe", 5, 0, ""),  # its residuals are scaled
        ("gpt_oss", 5, 2, ""),
        ("phimoe", 0, 2, "LayerNorm"),
    ],
)
def test_what_a_family_gets_and_why_not(family, norms, residuals, left):
    """As docs/compiler.md says. The models have two layers."""
    model = tiny(family, hidden_size=128, q_lora_rank=64, kv_lora_rank=64).to(BF16).eval()
    fp4_ops.prepare(model)
    said = said_of_a_step(model)
    for what, times in ((NORM, norms), (RESIDUAL, residuals)):
        assert [text.split(": ")[0] for text in said if what in text] == (
            [f"decoding step ({times}x)"] if times else []
        )
    assert [left in text for text in said if "left alone" in text] == ([True] if left else [])


class Sum(nn.Module):
    """A block's result is added to the residual; a norm and products of it follow."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = Norm(), nn.Linear(K, 16, bias=False)

    def forward(self, x, y):
        total = x + y.view(x.shape)
        return total, self.linear(self.norm(total)), total * 2


def test_a_sum_before_a_norm_is_in_its_kernel(device):
    x, y = draw(device, 3, 1, K), draw(device, 3, K)
    done = run(Sum().to(device, BF16), x, y)
    (call,) = done.calls("linears")
    assert len(call.args) == 7
    left = {n.target for n in done.graphs[0].nodes}
    assert torch.ops.aten.rsqrt.default not in left
