"""`prepare` on experts that are modules of their own, in a list (transformers 4)."""

from __future__ import annotations

import copy

import pytest
import torch
from moe_models import Recorder, relative_error
from moe_styles import STYLES
from torch import nn

import fp4_ops

LOOP = STYLES["loop over the experts that are hit, each a tensor of one element (transformers 4.57)"]


class Block(LOOP):
    """Its list is called what models call it."""

    def build(self) -> None:
        super().build()
        self.experts = self.list
        del self.list

    @property
    def list(self) -> nn.ModuleList:
        return self.experts

    @list.setter
    def list(self, experts: nn.ModuleList) -> None:
        self._modules["list"] = experts

    @list.deleter
    def list(self) -> None:
        del self._modules["list"]


class Model(nn.Module):
    H = 32

    def __init__(self, **how: object) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(**how), Block(**how)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x

    def twin(self, format: str) -> Model:
        twin = copy.deepcopy(self)
        with torch.no_grad():
            for name, p in twin.named_parameters():
                if ".experts." in name and p.dim() == 2:
                    p.copy_(fp4_ops.quantize(p.detach(), format).dequantize())
        return twin


@pytest.mark.one_in(2)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_products_of_each_expert_are_in_4_bits(format):
    torch._dynamo.reset()
    model = Model()
    twin, original = model.twin(format), copy.deepcopy(model)
    report = fp4_ops.prepare(model, format)
    assert [m.name for m in report.prepared] == ["layers.0.experts", "layers.1.experts"]
    assert report.bytes_after < 0.16 * report.bytes_before  # float32 before
    assert "6 experts as modules, 48x32 48x32 32x48" in str(report)
    recorder = Recorder(activation="bf16")
    compiled = torch.compile(model, backend=recorder, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for n in (11, 4):
            x = torch.randn(n, Model.H)
            want = twin(x)
            assert relative_error(model(x), want) < 1e-5
            assert relative_error(compiled(x), want) < 1e-5
            assert relative_error(original(x), want) > 1e-2
    assert recorder.ops == ["fp4::moe"] * 2, recorder.reasons


def test_state_dicts_hold_the_4_bits(tmp_path):
    model = Model()
    fp4_ops.prepare(model)
    other = Model()
    fp4_ops.prepare(other)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=False))
    x = torch.randn(5, Model.H)
    with torch.no_grad():
        assert torch.equal(model(x), other(x))


def test_a_weight_that_experts_share_is_packed_once():
    model = Model()
    experts = model.layers[0].experts
    experts[1].w1.weight = experts[0].w1.weight
    fp4_ops.prepare(model)
    assert experts[1].w1.weight is experts[0].w1.weight


def odd(experts: nn.ModuleList) -> None:
    experts[2].w1 = nn.Linear(32, 50, bias=False)


def a_parameter(experts: nn.ModuleList) -> None:
    experts[2].scale = nn.Parameter(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (odd, "its experts have different shapes"),
        (a_parameter, "an expert's weights are not those of Linears"),
    ],
)
def test_other_lists_are_left_alone_and_the_report_says_why(change, reason):
    model = Model()
    change(model.layers[1].experts)
    report = fp4_ops.prepare(model)
    assert [bool(m.reason) for m in report.modules] == [False, True]
    assert reason in str(report)
    assert type(model.layers[1].experts[0].w1.weight) is nn.Parameter
    assert "it is prepared already" in str(_error(lambda: fp4_ops.prepare(model)))


def _error(call) -> ValueError:
    with pytest.raises(ValueError) as error:
        call()
    return error.value


def test_what_such_experts_cannot_have_is_an_error_and_nothing_has_changed():
    model = Model()
    assert "whose activations stay as they are" in str(
        _error(lambda: fp4_ops.prepare(model, activation="int8"))
    )
    assert "no gradients" in str(_error(lambda: fp4_ops.prepare(model, trainable_inputs=True)))
    model.layers[1].experts[3].w2.weight.data[0, 0] = float("nan")
    assert "layers.1.experts.3.w2.weight holds NaN" in str(_error(lambda: fp4_ops.prepare(model)))
    assert all(type(p) is nn.Parameter for p in model.parameters())
