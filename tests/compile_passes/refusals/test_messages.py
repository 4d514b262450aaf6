"""Tests of reports on refused blocks: the true cause, the user's names and lines, a change that works."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.parametrizations
import torch.nn.utils.prune
from conftest import more
from lookalikes import GRAPHS_OWN
from moe_models import Recorder, relative_error
from moe_style_base import twin_of
from moe_styles import STYLES, Expert, StackedStyle
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Loop = STYLES["where loop"]


def told(module: nn.Module, **options: object) -> Recorder:
    """Compiles the module, checks its results at two lengths, and returns the recorder."""
    recorder, twin = Recorder(activation="bf16", **options), copy.deepcopy(module)
    compiled = torch.compile(module, backend=recorder, dynamic=True)
    with torch.no_grad():
        for n in (9, 7):
            x = torch.randn(n, 32)
            got = compiled(x)
            if not options:
                exact = twin_of(twin) if recorder.ops else twin
                assert relative_error(got, exact(x)) < 1e-5, recorder.reasons
    for site in recorder.sites:
        assert not GRAPHS_OWN.search(site.reason), site.reason
        assert bool(site.reason) == bool(site.change) and not GRAPHS_OWN.search(site.change)
    return recorder


# --- blocks whose experts are added to one tensor ---


class OneTensor(nn.Module):
    def __init__(self, experts: int = 3, others: int = 3) -> None:
        super().__init__()
        self.a, self.b = Loop(experts=experts), Loop(experts=others)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for block in (self.a, self.b):
            ids, weights = block.route(x)
            for e, expert in enumerate(block.list):
                token, slot = torch.where(ids == e)
                out = self.add(out, token, weights[token, slot, None] * expert(x[token]))
        return out

    def add(self, out: Tensor, token: Tensor, y: Tensor) -> Tensor:
        return out.index_add_(0, token, y)


class OneTensorByIndexPut(OneTensor):
    def add(self, out: Tensor, token: Tensor, y: Tensor) -> Tensor:
        out[token] += y
        return out


class OneTensorOntoX(OneTensor):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class OneTensorDense(OneTensor):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for block in (self.a, self.b):
            weights = block.router(x).softmax(-1)
            for e, expert in enumerate(block.list):
                out = out + weights[:, e, None] * expert(x)
        return out


class InTurns(OneTensor):
    """Expert 0 of both, expert 1 of both, ..."""

    def forward(self, x: Tensor) -> Tensor:
        out, routes = torch.zeros_like(x), [block.route(x) for block in (self.a, self.b)]
        for e in range(self.a.E):
            for (ids, weights), block in zip(routes, (self.a, self.b)):
                token, slot = torch.where(ids == e)
                out.index_add_(0, token, weights[token, slot, None] * block.list[e](x[token]))
        return out


@pytest.mark.parametrize("others", [3, more(4)])
@pytest.mark.parametrize(
    "make",
    [OneTensor, OneTensorDense, more(OneTensorByIndexPut), more(OneTensorOntoX)],
    ids=lambda c: c.__name__,
)
def test_blocks_added_to_one_tensor(make, others):
    assert told(make(others=others)).ops == ["fp4::moe"] * 2


def test_blocks_added_in_turns():
    (site,) = told(InTurns()).sites
    assert site.reason == "experts of 2 blocks are added to one tensor, in turns"
    assert "out = a(x) + b(x)" in site.change  # which OneTensor's neighbours in test_several_blocks.py are


# --- tokens that a mask chose ---


class Modalities(nn.Module):
    """Text and image tokens have a router and experts of their own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.text, self.image = (STYLES[name](experts=3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        image, out = x[:, 0] > 0, torch.zeros_like(x)
        out[image] = self.image(x[image])
        out[~image] = self.text(x[~image])
        return out


@pytest.mark.parametrize(
    "name",
    [
        "where loop",
        more("slot mask loop (boolean masks)"),
        more("one-hot loop (transformers 4)"),
        more("dense stack"),
    ],
)
def test_experts_of_masked_tokens(name):
    recorder = told(Modalities(name))
    assert recorder.ops == ["fp4::moe"] * 2, recorder.reasons


class Kinds(nn.Module):
    """An FFN for text and one for image tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(32, 48, F.silu, True, False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.softmax(x, -1) + x
        image, out = x[:, 0] > 0.1, torch.zeros_like(x)
        out[image] = self.experts[1](x[image])
        out[~image] = self.experts[0](x[~image])
        return out


class KindsByNumber(Kinds):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.softmax(x, -1) + x
        ids, out = torch.where(x[:, 0] > 0.1, 1, 0), torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out[ids == e] = expert(x[ids == e])
        return out


def test_an_ffn_for_each_kind_of_token():
    (site,) = told(Kinds()).sites
    assert re.match(r"an expert's rows are selected by \w+ \(`.*`\), not by expert ids", site.reason)
    assert "ids = torch.where(image, 1, 0)" in site.change
    torch._dynamo.reset()
    module, recorder, x = KindsByNumber(), Recorder(activation="bf16", format="mxfp4"), torch.randn(9, 32)
    with torch.no_grad():
        torch.compile(module, backend=recorder)(x)
    assert recorder.ops == ["fp4::moe"]


# --- experts of three layers ---


class Three(nn.Module):
    def __init__(self, h: int, i: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in ((h, i), (i, i), (i, h)))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.layers
        return c(F.relu(b(F.relu(a(x)))))


class ThreeLayers(Loop):
    def build(self) -> None:
        self.list = nn.ModuleList(Three(self.H, self.I) for _ in range(self.E))


class ThreeLayersDense(ThreeLayers):
    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return sum(weights[:, e, None] * expert(x) for e, expert in enumerate(self.list))


@pytest.mark.parametrize("make", [ThreeLayers, ThreeLayersDense], ids=lambda c: c.__name__)
def test_experts_of_three_layers(make):
    """Each product is in 4 bits by itself, without an option that asks for it."""
    recorder = Recorder()
    with torch.no_grad():
        torch.compile(make(experts=4), backend=recorder, fullgraph=True)(torch.randn(9, 32))
    (site,) = recorder.sites
    assert site.op == "fp4::packed_linears" and site.shape.startswith("12 products of 4 experts")


# --- weights that the graph writes to ---


class Written(StackedStyle):
    def build(self) -> None:
        super().build()
        for name in ("w1", "w3", "w2"):
            weight = getattr(self, name).data
            delattr(self, name)
            self.register_buffer(name, weight)

    def forward(self, x: Tensor) -> Tensor:
        self.write()
        weights = self.router(x).softmax(-1)
        h = self.act(torch.einsum("th,eih->tei", x, self.w1)) * torch.einsum("th,eih->tei", x, self.w3)
        return (torch.einsum("tei,ehi->teh", h, self.w2) * weights.unsqueeze(-1)).sum(1)

    def write(self) -> None:
        self.w1.mul_(0.5)


class SliceWritten(Written):
    def write(self) -> None:
        self.w1[1].mul_(0.5)


class LoopWritten(Written):
    def forward(self, x: Tensor) -> Tensor:
        self.write()
        return sum(
            w * self.expert(e, x) for e, w in enumerate(self.router(x).softmax(-1).unsqueeze(-1).unbind(1))
        )


class ParameterWritten(Loop):
    def forward(self, x: Tensor) -> Tensor:
        self.list[1].w3.weight.data.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize(
    "make", [Written, ParameterWritten, more(SliceWritten), more(LoopWritten)], ids=lambda c: c.__name__
)
def test_weights_written_to_in_the_graph(make):
    recorder = told(make(experts=3))
    assert recorder.ops == []  # all of a block, or nothing
    name = "list[1].w3.weight" if make is ParameterWritten else "w1"
    assert {s.reason for s in recorder.sites} == {f"the graph writes to the weight {name}"}


class Counted(Loop):
    """How many tokens each expert had: `+=` makes the buffer an output of the graph."""

    def build(self) -> None:
        super().build()
        self.register_buffer("load", torch.zeros(self.E))

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        self.load += torch.bincount(ids.flatten(), minlength=self.E)
        return self.experts_of(x, ids, weights)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["recorded", "fp4"])
def test_a_counter_beside_the_experts(backend):
    module = Counted(experts=3)
    twin, load, recorder = module.twin(), module.load, Recorder(activation="bf16")
    options = {"options": {"activation": "bf16", "strict": True}} if backend == "fp4" else {}
    compiled = torch.compile(module, backend="fp4" if backend == "fp4" else recorder, **options)
    with torch.no_grad():
        for n in (9, 9, 6):
            x = torch.randn(n, module.H)
            assert relative_error(compiled(x), twin(x)) < 1e-5
            assert module.load is load and torch.equal(load, twin.load)
    if backend == "recorded":
        assert set(recorder.ops) == {"fp4::moe"}


# --- names ---


def test_a_weight_is_called_as_the_user_calls_it():
    """A function over a model that is held by a closure, a dictionary of experts, and an argument."""
    stack = Written(experts=3)
    experts = nn.ModuleDict({"blocks": stack})

    def apply(x: Tensor) -> Tensor:
        return experts["blocks"](x)

    recorder = Recorder()
    with torch.no_grad():
        torch.compile(apply, backend=recorder)(torch.randn(9, 32))
    assert recorder.reasons.endswith("the graph writes to the weight blocks.w1"), recorder.reasons

    def with_weight(x: Tensor, ids: Tensor, table: Tensor) -> Tensor:
        return torch.bmm(table[ids], x.unsqueeze(-1))

    torch._dynamo.reset()
    recorder = Recorder(linear=True)
    with torch.no_grad():
        torch.compile(with_weight, backend=recorder)(
            torch.randn(4, 8), torch.arange(4) % 3, torch.randn(3, 6, 8)
        )
    assert recorder.reasons == "the weight table is not a parameter or buffer"


def test_a_step_is_told_with_its_line():
    class Odd(Loop):
        def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.list):
                token, slot = torch.where(ids == e)
                out.index_add_(0, token, expert(x[token]).cumsum(-1) * weights[token, slot, None])
            return out

    (site,) = told(Odd(experts=3)).sites
    assert "cumsum (`out.index_add_(0, token, expert(x[token]).cumsum(-1) * " in site.reason
    assert site.op == "fp4::mm"


def test_rows_that_topk_chose_of_each_expert():
    """`topk` gives a pair, which is no mask: the step that adds up is named."""

    class ExpertsChoose(Loop):
        def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            affinity = x.new_zeros(len(x), len(self.list)).scatter(1, ids, weights)
            values, tokens = torch.topk(affinity.T, 3)
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.list):
                out[tokens[e]] += values[e, :, None] * expert(x[tokens[e]])
            return out

    (site,) = told(ExpertsChoose(experts=4)).sites
    assert "index_put (`out[tokens[e]] += " in site.reason


def pruned(linear: nn.Linear) -> None:
    torch.nn.utils.prune.l1_unstructured(linear, "weight", 0.3)


def normed(linear: nn.Linear) -> None:
    torch.nn.utils.parametrizations.weight_norm(linear)


@pytest.mark.parametrize("change", [pruned, more(normed)])
def test_weights_that_the_graph_computes_are_told(change):
    module, recorder = STYLES["where loop"](experts=4), Recorder(activation="bf16")
    for linear in [m for m in module.list.modules() if isinstance(m, nn.Linear)]:
        change(linear)
    x = torch.randn(9, module.H)
    with torch.no_grad():
        assert torch.allclose(torch.compile(module, backend=recorder)(x), module(x), atol=1e-5)
    (site,) = recorder.sites
    assert "products are computed in the graph" in site.reason and "prune.remove" in site.change


# --- products that are corrected ---


class Corrected(nn.Module):
    """LoRA, as PEFT has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, 4, bias=False)
        self.lora_b = nn.Linear(4, base.out_features, bias=False)
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y if self.merged else y + self.lora_b(self.lora_a(F.dropout(x, 0.1, training=False))) * 0.5

    @torch.no_grad()
    def merge(self) -> None:
        self.base.weight.data += 0.5 * self.lora_b.weight @ self.lora_a.weight
        self.merged = True


@pytest.mark.parametrize("names", [("w1", "w2"), more(["w1"]), more(["w2"]), more(["w1", "w3", "w2"])])
def test_a_correction_is_told_and_merged(names):
    module = Loop(experts=4)
    corrected = [(expert, name) for expert in module.list for name in names]
    for expert, name in corrected:
        setattr(expert, name, Corrected(getattr(expert, name)))
    before = copy.deepcopy(module)
    recorder = Recorder(activation="bf16")
    with torch.no_grad():
        x = torch.randn(9, 32)
        assert relative_error(torch.compile(module, backend=recorder)(x), before(x)) < 1e-5
    assert not recorder.ops
    (site,) = recorder.sites
    assert re.search(rf"product with list\[\d\]\.{names[0]}\.base\.weight is corrected", site.reason)
    assert "merge" in site.change
    for expert, name in corrected:
        getattr(expert, name).merge()
    torch._dynamo.reset()
    recorder = Recorder(activation="bf16")
    with torch.no_grad():
        torch.compile(module, backend=recorder)(x)
    assert recorder.ops == ["fp4::moe"], recorder.reasons


def test_one_weight_that_the_graph_computes():
    class Twice(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w * 2

    module, recorder = Loop(experts=4), Recorder(activation="bf16")
    torch.nn.utils.parametrize.register_parametrization(module.list[1].w1, "weight", Twice())
    with torch.no_grad():
        torch.compile(module, backend=recorder)(torch.randn(9, 32))
    (site,) = recorder.sites
    assert site.reason.startswith("the weight of a product is computed in the graph, by mul (`return w * 2`)")
