"""Experts other than gate/up, an activation and down: each of their products runs in 4 bits by itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from product_styles import (
    EXPERTS,
    Added,
    Bmm,
    Columns,
    E,
    Einsum,
    Extraction,
    Gates,
    H,
    Listed,
    Masked,
    Stack,
    UnnamedExtraction,
    Where,
)  # fmt: skip
from recorder import Recorder, relative_error
from torch import Tensor, nn

from fp4_ops.compile_passes.recognise import alike

expecttest = pytest.importorskip("expecttest")
pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FORMS = [
    (Gates, "BatchNorm and Dropout (torch-rechub)"), (Added, "one Linear"), (Stack, "three Linears"),
    (UnnamedExtraction, "Linear, ReLU"),
]  # fmt: skip
FORMS_TOO = [
    (Where, "gated, LayerNorm at the end"), (Columns, "a residual"), (Einsum, "LayerNorm at the end"),
    (Bmm, "one Linear"), (Masked, "RMSNorm of its own at the end"), (Gates, "one Linear"),
    (Extraction, "gated, LayerNorm at the end"), (Where, "three Linears"), (Columns, "Linear, ReLU"),
    (Extraction, "a residual"), (Extraction, "Linear, ReLU"), (UnnamedExtraction, "one Linear"),
]  # fmt: skip


def compiled(module: nn.Module) -> tuple[Recorder, list[Tensor], list[Tensor]]:
    """The recorder, and inputs and outputs at two lengths of one compilation."""
    for norm in (m for m in module.modules() if isinstance(m, nn.BatchNorm1d)):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    recorder = Recorder(activation="bf16", format="mxfp4")
    run = torch.compile(module.eval(), backend=recorder, dynamic=True, fullgraph=True)
    with torch.no_grad():
        xs = [torch.randn(n, H) for n in (9, 7)]
        got = [run(x) for x in xs]
    assert recorder.compilations == 1
    return recorder, xs, got


@pytest.mark.parametrize(("cls", "expert"), [*FORMS, *(more(*form) for form in FORMS_TOO)])
def test_each_product_is_in_4_bits(cls, expert):
    module = cls(EXPERTS[expert])
    recorder, xs, got = compiled(module)
    twin = module.twin()
    with torch.no_grad():
        assert all(relative_error(y.double(), twin(x.double())) < 1e-5 for x, y in zip(xs, got))
    assert set(recorder.ops) == {"fp4::mm"}, recorder.reasons
    assert all(s.reason.startswith("not one operator: ") and s.change for s in recorder.sites)
    of_experts = {n for n, p in module.named_parameters() if p.dim() == 2 and n.startswith(("list", "exp"))}
    assert sum(int(s.shape.split()[0]) for s in recorder.sites) == len(of_experts)


class Golden(expecttest.TestCase):
    def test_graph_of_one_layer(self) -> None:
        recorder, _, _ = compiled(Gates(EXPERTS["one Linear"]))
        calls = [n for n in recorder.graphs[0].graph.nodes if n.op == "call_function"]
        text = "\n".join(str(n.target).removesuffix(".default") for n in calls if "fp4" in str(n.target))
        self.assertExpectedInline(
            text,
            """\
fp4.mm
fp4.mm
fp4.mm
fp4.mm""",
        )


# --- no experts, or not alike ---


class NoRouter(Listed):
    """An ensemble."""

    def forward(self, x: Tensor) -> Tensor:
        return self.stacked(x).mean(1) + self.scores(x).sum()


class LearnedWeights(Listed):
    def __init__(self, expert) -> None:
        super().__init__(expert)
        self.alpha = nn.Parameter(torch.randn(E))

    def forward(self, x: Tensor) -> Tensor:
        return (self.alpha.softmax(-1)[:, None] * self.stacked(x)).sum(1) * self.scores(x).sum(-1, True)


class InputsOfTheirOwn(Listed):
    """Gated fusion: each layer has another part of the input."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.stack([layer(x.roll(e, -1)) for e, layer in enumerate(self.list)], 1)
        return (self.scores(x)[..., None] * y).sum(1)


class OneScoreForAll(Listed):
    """A gate that scales the sum: nothing chooses among the layers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x)[:, :1] * self.stacked(x).sum(1)


class OneAfterAnother(Listed):
    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(x)
        for e, layer in enumerate(self.list):
            x = x + scores[:, e, None] * layer(x)
        return x


class SameColumnTwice(Listed):
    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(x)
        return sum(scores[:, min(e, 2), None] * layer(x) for e, layer in enumerate(self.list))


class Routers(Listed):
    """A product that goes into a softmax is a router, whatever its outputs are weighted by."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.stack([layer(x).softmax(-1) for layer in self.list], 1)
        return (self.scores(x)[..., None] * y).sum(1)


class OneIsOther(Listed):
    """Experts of which one ends in another function: all stay, or none."""

    def forward(self, x: Tensor) -> Tensor:
        y = [F.relu(layer(x)) if e else F.tanh(layer(x)) for e, layer in enumerate(self.list)]
        return (self.scores(x)[..., None] * torch.stack(y, 1)).sum(1)


class OneMatrixForAll(Listed):
    """Layers that share their matrix are not experts."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.list[0].weight
        y = torch.stack([F.linear(x, first, layer.bias) for layer in self.list], 1)
        return (self.scores(x)[..., None] * y).sum(1)


REFUSED = [NoRouter, LearnedWeights, InputsOfTheirOwn, OneScoreForAll]
REFUSED_TOO = [OneAfterAnother, SameColumnTwice, Routers, OneMatrixForAll, OneIsOther]


@pytest.mark.parametrize("cls", [*REFUSED, *map(more, REFUSED_TOO)], ids=lambda c: c.__name__)
def test_layers_that_are_no_experts_stay(cls):
    module = cls(EXPERTS["one Linear"])
    recorder, xs, got = compiled(module)
    assert not recorder.ops, recorder.sites
    with torch.no_grad():
        assert all(torch.equal(y, module(x)) for x, y in zip(xs, got))


def test_narrow_experts_stay():
    module = Gates(lambda: nn.Sequential(nn.Linear(H, 16), nn.Linear(16, H), nn.LayerNorm(H)))
    recorder, _, _ = compiled(module)
    assert not recorder.ops and "4 bits save little" in recorder.reasons


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).sin()
        return x


@pytest.mark.parametrize("most", [4, 5])
def test_whole_networks_stay(most, monkeypatch):
    monkeypatch.setattr(alike, "_MOST", most)
    recorder, _, _ = compiled(Gates(Network))
    assert bool(recorder.ops) == (most == 5), recorder.sites


@pytest.mark.slow
def test_by_inductor():
    module = Gates(EXPERTS["BatchNorm and Dropout (torch-rechub)"]).eval()
    run = torch.compile(
        module, backend="fp4", options={"format": "mxfp4", "activation": "bf16"}, dynamic=True
    )
    twin = module.twin()
    with torch.no_grad():
        for n in (9, 5):
            x = torch.randn(n, H)
            got = run(x)
            assert relative_error(got.double(), twin(x.double())) < 1e-5
            assert relative_error(got, module(x)) > 1e-3
