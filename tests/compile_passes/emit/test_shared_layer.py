"""A layer that all experts share, before experts of one Linear each: it runs once, and is no expert."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from recorder import Recorder, fake_quantised, relative_error
from torch import Tensor, nn

import fp4_ops

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FORMS = (
    *("dense", "routed"),
    *map(more, ("stacked", "routed, shared layer in the loop", "gated", "no activation")),
)


class Shared(nn.Module):
    """x -> a layer -> experts of one Linear each. Its input may be narrow."""

    def __init__(self, form: str, hidden: int, experts: int = 4) -> None:
        super().__init__()
        self.form, self.hidden = form, hidden
        self.gate, self.up = nn.Linear(hidden, experts), nn.Linear(hidden, 96)
        self.other = nn.Linear(hidden, 96, bias=False)
        self.experts = nn.ModuleList(nn.Linear(96, 64) for _ in range(experts))

    def first(self, x: Tensor) -> Tensor:
        if self.form == "gated":
            return F.silu(self.up(x)) * self.other(x)
        return self.up(x) if self.form == "no activation" else self.up(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        h = self.first(x)
        if self.form == "stacked":
            return (torch.stack([expert(h) for expert in self.experts], 1) * scores[..., None]).sum(1)
        if not self.form.startswith("routed"):
            return sum(scores[:, e, None] * expert(h) for e, expert in enumerate(self.experts))
        weights, ids = scores.topk(2)
        out = x.new_zeros(len(x), 64)
        for e, expert in enumerate(self.experts):
            row, slot = torch.where(ids == e)
            own = self.first(x[row]) if "in the loop" in self.form else h[row]
            out.index_add_(0, row, expert(own) * weights[row, slot, None])
        return out

    def twin(self, dense: str = "") -> nn.Module:
        twin = copy.deepcopy(self)
        for layer in twin.experts:
            layer.weight.data = fake_quantised(layer.weight, "nvfp4")
        for layer in (twin.up, twin.other) if dense else ():
            layer.weight.data = fake_quantised(layer.weight, dense)
        return twin.double()


def errors(module: nn.Module, recorder: Recorder, twin: nn.Module) -> list[float]:
    run = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    with torch.no_grad():
        xs = [torch.randn(n, module.hidden) for n in (9, 5)]
        return [relative_error(run(x).double(), twin(x.double())) for x in xs]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("hidden", [64, more(8)])
def test_only_the_experts_are_packed_and_each_once(form, hidden):
    module, recorder = Shared(form, hidden), Recorder(activation="bf16")
    assert max(errors(module, recorder, module.twin())) < 1e-5
    (site,) = recorder.sites
    assert site.op == "fp4::indexed_mm" and not site.reason
    assert site.weights == tuple(f"experts[{e}].weight" for e in range(4))
    calls = [str(n.target).removeprefix("aten.") for n in recorder.graphs[0].graph.nodes]
    assert sum("fp4.indexed_mm" in call for call in calls) == 1
    dense = sum(call.startswith(("mm", "addmm", "linear")) for call in calls)
    assert dense == (3 if form == "gated" else 2)  # the router is one


@pytest.mark.parametrize("form", ["gated", more("routed"), more("routed, shared layer in the loop")])
def test_options_pack_the_shared_layer(form):
    module, recorder = Shared(form, 64), Recorder(activation="bf16", dense="mxfp4")
    assert max(errors(module, recorder, module.twin("mxfp4"))) < 1e-5
    assert {"up.weight", "experts[0].weight"} <= {w for site in recorder.sites for w in site.weights}


@pytest.mark.parametrize("format", ["nvfp4", more("mxfp4")])
@pytest.mark.parametrize("form", ["routed, shared layer in the loop", more("routed"), more("gated")])
def test_a_shared_layer_in_4_bits_stays_in_its_format(form, format):
    module, recorder = Shared(form, 64), Recorder(activation="bf16")
    twin = module.twin(format)
    for layer in (module.up, module.other):
        layer.weight = nn.Parameter(fp4_ops.quantize(layer.weight.detach(), format), requires_grad=False)
    assert max(errors(module, recorder, twin)) < 1e-5
    assert {"up.weight", "experts[0].weight"} <= {w for site in recorder.sites for w in site.weights}
    (site,) = (s for s in recorder.sites if "experts[0].weight" in s.weights)
    assert ("weights from FP4Tensor" in site.form) == ("in the loop" in form)


class Kernel(Shared):
    """A bilinear layer (CondConv): what the shared layer computes weights the outputs, and nothing routes."""

    def __init__(self, hidden: int) -> None:
        super().__init__("", hidden)
        self.layers = self.experts  # a name without "expert"
        del self.experts

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return sum(h[:, e, None] * layer(h) for e, layer in enumerate(self.layers))


@pytest.mark.parametrize("hidden", [64, 8])
def test_what_no_router_weights_is_no_expert(hidden):
    module, recorder = Kernel(hidden), Recorder(activation="bf16")
    assert max(errors(module, recorder, copy.deepcopy(module).double())) < 1e-5
    assert not recorder.ops
