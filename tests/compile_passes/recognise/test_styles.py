"""Every way of writing a Mixture-of-Experts layer becomes one operator and computes what the layer does."""

from __future__ import annotations

import copy
import random

import package_styles  # noqa: F401  adds its styles to STYLES
import pytest
import repository_styles  # noqa: F401  its, too
import score_styles  # noqa: F401  its, too
import torch
import torch.nn.functional as F
from both_captures import Both
from conftest import SEED, more
from moe_models import Recorder, relative_error
from moe_styles import STYLES, Expert, ListStyle, relu2
from torch import nn

from fp4_ops.compile_passes import pipeline

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

MOE, PAIR = "fp4::moe", "fp4::indexed_mm"
SEVERAL = (11, 7)  # lengths, where what a single token compiles to is not the point


class ComparesCaptures(Recorder):
    """Recorder whose `both` also captures the first graph as a whole, and compares the two at run time."""

    def __init__(self, both: Both, **options: str) -> None:
        super().__init__(**options)
        self.both = both

    def __call__(self, gm, inputs):
        if self.compilations:
            return super().__call__(gm, inputs)
        with self.both.monkeypatch.context() as patch:
            patch.setattr(pipeline, "capture", self.both.capture)
            run = super().__call__(gm, inputs)
        compare = self.both.compared(gm, inputs)
        return lambda *args: (compare(*args), run(*args))[1]


def check(
    module: nn.Module,
    ops: str | list[str],
    lengths=(11, 7, 1),
    format: str = "nvfp4",
    both: Both | None = None,
) -> Recorder:
    """Runs prefill, another length with the same compilation, and a single token, which is compiled
    separately."""
    options = {"activation": "bf16", "format": format}
    recorder = ComparesCaptures(both, **options) if both else Recorder(**options)
    twin = module.twin(format)
    compiled = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for n in lengths:
            x = torch.randn(n, module.H)
            assert relative_error(compiled(x), twin(x)) < 1e-5, recorder.reasons
    compilations = 1 + (1 in lengths)
    assert recorder.compilations == compilations
    assert recorder.ops == ([ops] if isinstance(ops, str) else ops) * compilations, recorder.reasons
    return recorder


NAMES = [n for n in STYLES if not n.startswith("capacity")]
BUFFERS = ("slices of", "slots that")
EACH_KIND = {
    "where loop", "slot mask loop (boolean masks)", "where loop, `if len(token):`", "dense einsum",
    "loop over the experts that are hit (transformers 5, eager)", "gather + bmm",
    "sorted grouped_mm (torchtitan)", "sorted splits, `bincount(...).tolist()`",
    "slices of a buffer, `chunk` and `cat` (DeepSpeed, Tutel)",
}  # fmt: skip
EACH_KIND_FIRST = [name if name in EACH_KIND else more(name) for name in NAMES]


def operator_of(name: str) -> str:
    return PAIR if "vector of each" in name or "F.glu" in name else MOE


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", NAMES)
def test_every_style(name):
    check_graphs(check(STYLES[name](experts=3), operator_of(name), SEVERAL), name)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", EACH_KIND_FIRST)
def test_every_style_for_one_token_and_captured_both_ways(monkeypatch, name):
    both = Both(monkeypatch)
    check_graphs(check(STYLES[name](experts=3), operator_of(name), both=both), name)
    # They take numbers out of tensors, or have rows of two masks, which are as many.
    parts = ("sorted splits", "sorted slices", "by `bincount", "unique().tolist()", COUNTED)
    parts += (
        "(MiniMind)",
        "(makeMoE)",
        "scores by `masked_select`",
        "weights.masked_select(",
        "written out twice",
    )
    copied = not any(part in name for part in parts)
    assert both.runs and both.copied == [copied]


COUNTED = "as many classes as the data says"
"""The router's own number stays."""


def check_graphs(recorder: Recorder, name: str) -> None:
    """No operator of the loop remains. The rows of buffers are gathered and scattered by products."""
    buffers = name.startswith(BUFFERS)
    for graph in recorder.graphs:
        names = {str(n.target) for n in graph.graph.nodes if n.op == "call_function"}
        assert "aten.nonzero.default" not in names
        assert buffers or "aten.bmm.default" not in names
        if COUNTED in name:
            continue
        assert "aten._assert_scalar.default" not in names
        assert not any("_local_scalar_dense" in name or "item" in name.split(".")[1:2] for name in names)


def test_buffers_of_fixed_capacity_become_masked_products(monkeypatch):
    """Gate and up are packed separately here, in a format without a global scale (mxfp4)."""
    style = STYLES["capacity dispatch/combine (GShard)"]
    both = Both(monkeypatch)
    recorder = check(style(experts=3), ["fp4::grouped_mm_masked"] * 3, format="mxfp4", both=both)
    assert both.runs and both.copied == [True]
    assert "same number for each expert" in recorder.sites[0].form


@pytest.mark.parametrize(
    "name", ["where loop", more("slot mask loop (boolean masks)"), "gather + bmm", "dense einsum"]
)
def test_odd_sizes_and_mxfp4(name):
    check(STYLES[name](experts=4, k=3, hidden=34, inter=38), MOE, SEVERAL, "mxfp4")


@pytest.mark.parametrize(
    "name", ["one-hot loop (transformers 4)", "flat mask loop (index_put)", more("dense stack")]
)
def test_one_choice_a_token(name):
    check(STYLES[name](experts=3, k=1), MOE, SEVERAL)


ACTIVATIONS = {
    "gelu": (F.gelu, True, MOE),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), True, MOE),
    "silu spelled out": (lambda x: x * torch.sigmoid(x), True, MOE),
    "relu gated": (F.relu, True, PAIR),
    "hardswish": (F.hardswish, False, PAIR),
    "relu": (F.relu, False, PAIR),
    "relu2": (relu2, False, MOE),
    "relu2 by a power": (lambda x: F.relu(x) ** 2, False, MOE),
    "relu2 as a product": (lambda x: F.relu(x) * F.relu(x), False, MOE),
    "relu2 by clamp": (lambda x: x.clamp(min=0).square(), False, MOE),
    "relu3": (lambda x: F.relu(x) ** 3, False, PAIR),
    "squared gelu": (lambda x: F.gelu(x).square(), False, PAIR),
    "clamped square": (lambda x: x.clamp(min=0.1).square(), False, PAIR),
    "relu2 of what is clamped above": (lambda x: x.clamp(0, 0.2).square(), False, PAIR),
    "relu2 gated": (relu2, True, PAIR),
    "gelu ungated": (F.gelu, False, PAIR),
    "silu of what is clamped": (lambda x: F.silu(x.clamp(max=0.1)), True, PAIR),  # up is not
    "tanh clamped": (lambda x: torch.tanh(x).clamp(max=0.5), True, PAIR),
}
# Biases with each operator, gated and not.
BIASED = ("gelu", "gelu tanh", "relu gated", "relu2")
ACTIVATIONS_AND_BIASES = [(name, True) for name in BIASED]
ACTIVATIONS_AND_BIASES += [more(name, False) if name in BIASED else (name, False) for name in ACTIVATIONS]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("name", "bias"), ACTIVATIONS_AND_BIASES)
def test_activations_and_biases(name, bias):
    act, gated, op = ACTIVATIONS[name]
    check(STYLES["where loop"](experts=3, act=act, gated=gated, bias=bias), op, SEVERAL)


@pytest.mark.parametrize("name", ["dense loop, scattered weights", "soft mixture of all experts"])
@pytest.mark.parametrize("bias", [more(False), True])
def test_dense_loops_with_an_activation_of_the_models_own(name, bias):
    check(STYLES[name](experts=3, act=F.relu, gated=False, bias=bias), PAIR, SEVERAL)


def soft(x, cap):
    return cap * torch.tanh(x / cap)


SITU = {  # Kimi-K3's as its code writes it, the same in other words, and look-alikes
    "as written": (lambda g, u: 4.0 * torch.tanh(g / 4.0) * torch.sigmoid(g) * soft(u, 25.0), MOE),
    "multiplied": (lambda g, u: torch.sigmoid(g) * torch.tanh(0.25 * g) * torch.tanh(u * 0.04) * 100, MOE),
    "other limits": (lambda g, u: soft(g, 4.0) * torch.sigmoid(g) * soft(u, 20.0), PAIR),
    "up without limit": (lambda g, u: soft(g, 4.0) * torch.sigmoid(g) * u, PAIR),
    "limited gate in the sigmoid": (
        lambda g, u: soft(g, 4.0) * torch.sigmoid(soft(g, 4.0)) * soft(u, 25.0),
        PAIR,
    ),
    "another factor": (lambda g, u: torch.tanh(g / 4) * torch.sigmoid(g) * soft(u, 25.0), PAIR),
    "tanh squared": (lambda g, u: soft(g, 4.0) * torch.tanh(g / 4) * torch.sigmoid(g) * soft(u, 25.0), PAIR),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SITU)
def test_soft_limits_of_gate_and_up(name):
    act, op = SITU[name]

    class Situ(Expert):
        def forward(self, x):
            return self.w2(act(self.w1(x), self.w3(x)))

    module = STYLES["where loop"](experts=3)
    for expert in module.list:
        expert.__class__ = Situ
        expert.w1.weight.data.mul_(5), expert.w3.weight.data.mul_(20)
    check(module, op, SEVERAL)


class Capped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cap = 2.0

    def forward(self, x):
        return torch.tanh(x / self.cap) * self.cap


def test_python_floats_of_a_module_inside_the_experts_are_constants():
    """Their values are part of the activation, so other values are compiled again."""
    module = STYLES["scatter_add loop, 3D parameters"](experts=3, act=Capped())
    recorder = Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    for cap in (2.0, 0.5):
        module.act.cap = cap
        with torch.no_grad():
            x = torch.randn(9, 32)
            assert relative_error(compiled(x), module.twin()(x)) < 1e-5
        assert set(recorder.ops) == {PAIR}, recorder.reasons
        assert f"div(gate, {cap})" in recorder.sites[-1].activation


def test_weights_that_a_number_scales():
    """A router that does not normalise weights may scale them. The number is a symbol with dynamic=True."""

    class Scaled(STYLES["where loop"]):
        factor = 1.5

        def route(self, x):
            scores = torch.sigmoid(self.router(x))
            ids = torch.topk(scores, self.k).indices
            return ids, scores.gather(1, ids) * self.factor

    check(Scaled(experts=3), MOE, SEVERAL)


def test_experts_may_share_a_parameter():
    module = STYLES["where loop"](experts=5)
    module.list[3] = module.list[1]
    recorder = check(module, MOE)
    assert len(recorder.sites[0].weights) == (module.E - 1) * 3


def test_lists_are_packed_once_for_prefill_and_decode_and_again_when_one_changes():
    module = STYLES["where loop"](experts=3)
    recorder = check(module, MOE)
    compiled = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    with torch.no_grad():
        module.list[2].w2.weight.mul_(-1.0)
        x = torch.randn(9, module.H)
        assert relative_error(compiled(x), module.twin()(x)) < 1e-5


def test_an_ordinary_ffn_is_no_expert():
    class Dense(ListStyle):
        def forward(self, x):
            weights, _ = torch.topk(torch.softmax(self.router(x), -1), 2)
            return self.list[0](x) + self.list[1](x) * weights.sum(-1, keepdim=True)

    module, recorder = Dense(), Recorder()
    x = torch.randn(5, module.H)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, backend=recorder)(x), module(x))
    assert recorder.sites == []


class Layers(nn.Module):
    """Blocks of several styles one after the other, with norms, residuals and an FFN that is no expert."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(STYLES[n](experts=3) for n in names)
        self.norm = nn.RMSNorm(32)
        self.dense = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))

    def forward(self, x):
        for block in self.blocks:
            h = self.norm(x)
            x = x + block(h) + self.dense(h)
        return x

    def twin(self) -> nn.Module:
        twin = copy.deepcopy(self)
        twin.blocks = nn.ModuleList(b.twin() for b in self.blocks)
        return twin


LAYERS = ["where loop", "dense einsum", "gather + bmm", "slot mask loop (boolean masks)", "where loop"]


def test_a_model_of_many_styles():
    model, recorder = Layers(LAYERS), Recorder(activation="bf16")
    compiled = torch.compile(model, backend=recorder, dynamic=True, fullgraph=True)
    twin = model.twin()
    with torch.inference_mode():
        for n in (9, 5):
            x = torch.randn(n, 32)
            assert relative_error(compiled(x), twin(x)) < 1e-4
    assert recorder.ops == [MOE] * len(LAYERS), recorder.reasons
    assert recorder.compilations == 1


def test_layers_that_share_code_share_one_compilation():
    model, recorder = Layers(["where loop"] * 3), Recorder(activation="bf16")
    for block in model.blocks:
        block.compile(backend=recorder, dynamic=True, fullgraph=True)
    twin = Layers(["where loop"] * 3)
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        x = torch.randn(9, 32)
        assert relative_error(model(x), twin.twin()(x)) < 1e-4
    assert recorder.compilations == 1


@pytest.mark.parametrize("name", ["where loop", "dense stack", "gather + bmm"])
def test_a_region_without_the_router(name):
    """The graph has no router: ids and weights are inputs."""
    module, recorder = STYLES[name](experts=3), Recorder(activation="bf16", format="mxfp4")
    compiled = torch.compile(module.experts_of, backend=recorder, fullgraph=True)
    x = torch.randn(9, module.H)
    with torch.no_grad():
        routing = module.route(x)
        got, want = compiled(x, *routing), module.twin("mxfp4").experts_of(x, *routing)
    assert recorder.ops == [MOE], recorder.reasons
    assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize(
    "is_of",
    [lambda ids, e: e == ids, torch.eq, torch.Tensor.eq],
    ids=["the number first", "torch.eq", "a method"],
)
def test_a_region_where_experts_are_named_otherwise(is_of):
    class Named(STYLES["where loop"]):
        def experts_of(self, x, ids, weights):
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.list):
                token, slot = torch.where(is_of(ids, e))
                out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
            return out

    module, recorder = Named(experts=3), Recorder(activation="bf16", format="mxfp4")
    x = torch.randn(9, module.H)
    with torch.no_grad():
        routing = module.route(x)
        got = torch.compile(module.experts_of, backend=recorder, fullgraph=True)(x, *routing)
        assert relative_error(got, module.twin("mxfp4").experts_of(x, *routing)) < 1e-5
    assert recorder.ops == [MOE], recorder.reasons


def test_inputs_with_a_batch_dimension():
    class Batched(STYLES["where loop"]):
        def forward(self, x):
            return super().forward(x.view(-1, self.H)).view(x.shape)

    module, recorder = Batched(experts=3), Recorder(activation="bf16")
    compiled, twin = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True), module.twin()
    with torch.no_grad():
        for shape in ((2, 5, 32), (3, 4, 32)):
            x = torch.randn(shape)
            assert relative_error(compiled(x), twin(x)) < 1e-5
    assert recorder.ops == [MOE], recorder.reasons


@pytest.mark.parametrize(
    ("name", "how"),
    [
        more("one-hot loop (transformers 4)", "bfloat16"),
        more("one-hot loop (transformers 4)", "autocast"),
        ("loop over the experts that are hit (transformers 5, eager)", "autocast"),
        ("dense stack", "bfloat16"),
        more("gather + einsum (gpt-fast)", "autocast"),
        more("sorted grouped_mm (torchtitan)", "bfloat16"),
        more("sorted grouped_mm (torchtitan)", "autocast"),
        more("sorted splits, `bincount(...).tolist()`", "autocast"),
    ],
)
def test_casts_are_seen_through(name, how):
    """They only round: 0.4 % a step, where 4 bits are 10 % off the original."""
    module, recorder = STYLES[name](experts=3), Recorder(activation="bf16", format="mxfp4")
    x = torch.randn(9, module.H)
    if how == "bfloat16":
        module, x = module.bfloat16(), x.bfloat16()
    compiled = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        assert relative_error(compiled(x), module.twin("mxfp4")(x)) < 0.05
    assert recorder.ops == [MOE], recorder.reasons


@pytest.mark.slow
@pytest.mark.parametrize("name", ["where loop", more("flat mask loop (index_put)"), more("dense bmm")])
def test_through_inductor_without_fullgraph(name):
    """The backend by its name captures loops by itself, and int8 activations are its default on CPU."""
    module = STYLES[name](experts=3)
    compiled, twin = torch.compile(module, backend="fp4", dynamic=True), module.twin()
    with torch.no_grad():
        for n in (9, 6):
            x = torch.randn(n, module.H)
            assert 1e-4 < relative_error(compiled(x), twin(x)) < 3e-2


def test_a_shared_expert_of_the_same_shape_beside_routed_ones():
    class Shared(STYLES["dense bmm, scaled inputs (Llama 4)"]):
        def build(self):
            super().build()
            self.shared = Expert(self.H, self.I, F.silu, gated=True, bias=False)

        def forward(self, x):
            return self.shared(x) + super().forward(x)

    check(Shared(experts=3), MOE, SEVERAL)


# Those that need all choices, and one of each kind of the others; then others in each run.
CHOICES = ["slot mask loop (boolean masks)", "sorted grouped_mm (torchtitan)", "where loop", "dense einsum"]
OTHERS = sorted(random.Random(SEED).sample([n for n in NAMES if n not in CHOICES], 8))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [*CHOICES, *map(more, OTHERS)])
def test_some_of_a_tokens_choices(name):
    """Ids and weights that are read through a slice: the other choices do not count."""

    class SomeChoices(STYLES[name]):
        def route(self, x):
            weights, ids = torch.topk(torch.softmax(self.router(x), -1), self.k + 1)
            return ids[:, : self.k].contiguous(), weights[:, : self.k].contiguous()

    module, recorder = SomeChoices(experts=3), Recorder(activation="bf16", format="mxfp4")
    compiled = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for n in (9, 5):
            x = torch.randn(n, module.H)
            got = compiled(x)
            assert relative_error(got, (module.twin("mxfp4") if recorder.ops else module)(x)) < 1e-5
    # A loop over choices runs each for those that there are, one over experts for all of them.
    apart = ("slot mask", "sorted grouped_mm", "loop over the experts among a choice's ids")
    whole = operator_of(name) == MOE and not name.startswith(apart)
    assert ({"fp4::moe"} == set(recorder.ops)) is whole, recorder.reasons


class Clamped(Expert):
    """Gate clamped above, up on both sides: what fp4::moe takes a limit for."""

    def forward(self, x):
        return self.w2(F.silu(self.w1(x).clamp(max=0.25)) * self.w3(x).clamp(-0.25, 0.25))


class ClampedBelow(Expert):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x).clamp(-0.25, 0.25)) * self.w3(x).clamp(-0.25, 0.25))


class ClampedAfter(Expert):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)).clamp(max=0.25) * self.w3(x).clamp(-0.25, 0.25))


class ClampedApart(Expert):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x).clamp(max=0.25)) * self.w3(x).clamp(-0.5, 0.5))


CLAMPS = {Clamped: "silu(limit=0.25)", **dict.fromkeys((ClampedBelow, ClampedAfter, ClampedApart), "")}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("expert", CLAMPS)
def test_clamps_of_gate_and_up(expert):
    module, activation = STYLES["where loop"](experts=3), CLAMPS[expert]
    for e in range(3):
        module.list[e] = expert(module.H, module.I, F.silu, True, False)
    recorder = check(module, MOE if activation else PAIR, SEVERAL)
    if activation:
        assert {site.activation for site in recorder.sites} == {activation}
