"""If a layout's kernels need interleaved gate and up rows, every form of experts packs them so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import more
from moe_models import Block, Recorder, relative_error
from moe_styles import STYLES
from torch import nn

from fp4_ops.meta import layouts


@pytest.fixture(autouse=True)
def interleaved(fresh_dynamo, monkeypatch):
    """The CPU's kernels of the plain layout, said to be of that kind: the sums can be compared."""
    monkeypatch.setitem(layouts.LAYOUTS, "plain", replace(layouts.LAYOUTS["plain"], interleaved=True))
    monkeypatch.setitem(layouts._preferred, "cpu", lambda: ("plain",))


def activations_of(module: nn.Module, x: torch.Tensor) -> list[str]:
    """Return the activations that `fp4::moe` gets.

    First check that the module computes what its twin does.
    """
    recorder = Recorder(activation="bf16")
    with torch.no_grad():
        got, want = torch.compile(module, backend=recorder, fullgraph=True, dynamic=True)(x), module.twin()(x)
    assert recorder.ops == ["fp4::moe"], recorder.reasons
    assert relative_error(got, want) < 1e-5
    assert [s.activation for s in recorder.sites] == ["silu"]  # the model's own, in the report
    calls = [n for n in recorder.graphs[0].graph.nodes if n.target is torch.ops.fp4.moe.default]
    return [n.kwargs["activation"] for n in calls]


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
def test_blocks_of_one_parameter(form):
    assert activations_of(Block(form), torch.randn(9, Block.H)) == ["silu_interleaved"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "name",
    ["where loop", more("dense einsum"), more("gather + bmm"), more("sorted grouped_mm (torchtitan)")],
)
def test_every_other_form(name, bias):
    module = STYLES[name](bias=bias)
    for p in module.parameters():
        if p.dim() == 1:
            nn.init.normal_(p)
    assert activations_of(module, torch.randn(9, module.H)) == ["silu_interleaved"]


def test_an_activation_of_no_gate_is_left():
    class Squared(STYLES["where loop"]):
        def build(self):
            self.act, self.gated = lambda x: torch.relu(x).square(), False
            super().build()

    module, recorder = Squared(), Recorder(activation="bf16")
    x = torch.randn(9, module.H)
    with torch.no_grad():
        assert (
            relative_error(
                torch.compile(module, backend=recorder, fullgraph=True, dynamic=True)(x), module.twin()(x)
            )
            < 1e-5
        )
    assert recorder.sites[0].activation == "relu2"
