"""Experts that process all tokens and are not recognised: the report says why. Other modules get no
report."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from moe_models import Recorder
from moe_styles import ListStyle
from torch import nn

import fp4_ops
from fp4_ops.compile_passes import advice
from fp4_ops.compile_passes.dynamo.left_out import expert_parameters

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Towers(nn.Module):
    """FFNs weighted by a softmax, as recommenders have them; `between` is between their products."""

    def __init__(self, between, layers=(32, 48, 40), experts=4):
        super().__init__()
        self.gate = nn.Linear(layers[0], experts)
        self.experts = nn.ModuleList()
        for _ in range(experts):
            h, i, n = layers
            self.experts.append(nn.Sequential(nn.Linear(h, i), *between(i), nn.Linear(i, n)))

    def forward(self, x):
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return torch.matmul(torch.softmax(self.gate(x), -1).unsqueeze(1), outputs).squeeze(1)


BETWEEN = {
    "native_batch_norm": lambda n: [nn.BatchNorm1d(n), nn.ReLU(), nn.Dropout(0.1)],
    "prelu": lambda n: [nn.PReLU()],
    "native_layer_norm": lambda n: [nn.LayerNorm(n), nn.GELU()],
}


@pytest.mark.parametrize("step", ["native_batch_norm", "prelu", more("native_layer_norm")])
def test_a_step_between_the_products_is_named(step):
    """Why the experts are no single operator. Each product is in 4 bits."""
    module = Towers(BETWEEN[step]).eval()
    (site,) = fp4_ops.explain(module, torch.randn(7, 32)).sites
    assert (
        site.op == "fp4::packed_linears"
        and site.reason.startswith(f"not one operator: {step}")
        and site.reason.endswith("of an expert is no activation")
    )
    assert site.change == advice.BETWEEN_PRODUCTS


def test_a_folded_batch_norm_is_an_expert():
    """As the report proposes."""
    module = Towers(BETWEEN["native_batch_norm"]).eval()
    folded = Towers(lambda n: [nn.ReLU()]).eval()
    folded.gate = module.gate
    for old, new in zip(module.experts, folded.experts):
        new[0], new[2] = torch.nn.utils.fusion.fuse_linear_bn_eval(old[0], old[1]), old[4]
    x, recorder = torch.randn(7, 32), Recorder(activation="bf16")
    with torch.no_grad():
        torch.testing.assert_close(folded(x), module(x))
        torch.compile(folded, backend=recorder)(x)
    assert recorder.ops == ["fp4::indexed_mm"], recorder.reasons


def stacked(module, name):
    return torch.stack([getattr(expert, name).weight for expert in module.list])


class StackedInForward(ListStyle):
    def experts_of(self, x, ids, weights):
        w1, w3, w2 = (stacked(self, name)[ids] for name in ("w1", "w3", "w2"))
        h = self.act(torch.einsum("th,tkih->tki", x, w1)) * torch.einsum("th,tkih->tki", x, w3)
        return torch.einsum("tki,tkhi,tk->th", h, w2, weights)


class StackedForVmap(ListStyle):
    def experts_of(self, x, ids, weights):
        full = torch.zeros(x.shape[0], self.E).scatter(1, ids, weights)
        given = {
            n: torch.stack([e.get_parameter(n) for e in self.list])
            for n, _ in self.list[0].named_parameters()
        }
        outputs = torch.vmap(lambda p: torch.func.functional_call(self.list[0], p, (x,)))(given)
        return torch.einsum("eth,te->th", outputs, full)


@pytest.mark.parametrize("style", [StackedInForward, more(StackedForVmap)])
def test_weights_that_are_stacked_in_forward_are_named(style):
    (site,) = fp4_ops.explain(style(experts=3), torch.randn(7, 32)).sites
    assert "the weights of 3 products are put together in the graph, by stack" in site.reason
    assert site.change == advice.ONCE


class OneAfterAnother(Towers):
    def forward(self, x):
        for expert in self.experts:
            x = x + expert(x)
        return x * torch.softmax(self.gate(x), -1)[:, :1]


class OfTheirOwnInputs(Towers):
    def forward(self, x):
        return (
            torch.cat([e(F.normalize(x + i)) for i, e in enumerate(self.experts)], -1) * self.gate(x)[:, :1]
        )


@pytest.mark.parametrize("cls", [OneAfterAnother, OfTheirOwnInputs])
def test_layers_that_are_no_experts_get_no_report(cls):
    module = cls(BETWEEN["prelu"], (32, 48, 32)).eval()
    assert not fp4_ops.explain(module, torch.randn(7, 32)).sites


def of_layers(make):
    model = nn.Module()
    model.experts = nn.ModuleList(make() for _ in range(3))
    model.layers = nn.ModuleList(make() for _ in range(3))
    return model


@pytest.mark.parametrize(
    "make",
    [lambda: nn.Linear(32, 16), lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 3, 1))],
    ids=["one layer each", "convolutions"],
)
def test_layers_that_are_called_experts_look_like_some(make):
    assert list(expert_parameters(of_layers(make))) == ["experts"]
