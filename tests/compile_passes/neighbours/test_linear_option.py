"""options={"linear": True}: linear layers outside experts run in 4 bits too."""

from __future__ import annotations

import pytest
import torch
from moe_models import Recorder, build, fake_quantised, relative_error, tokens
from torch import nn

from fp4_ops.compile_passes.options import parse

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(34, 48)
        self.down = nn.Linear(48, 34, bias=False)
        self.attn = nn.Linear(34, 34)
        self.gate = nn.Linear(34, 34)
        self.lm_head = nn.Linear(34, 128, bias=False)

    def forward(self, x):
        x = x + self.down(torch.relu(self.up(x))) * torch.sigmoid(self.gate(x)) + self.attn(x)
        return self.lm_head(x)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_linear_layers(format):
    net, recorder = Net(), Recorder(linear=True, activation="bf16", format=format)
    x = torch.randn(3, 5, 34)
    with torch.no_grad():
        got = torch.compile(net, backend=recorder)(x)
        for layer in (net.up, net.down):
            layer.weight.copy_(fake_quantised(layer.weight[None], format)[0])
        assert relative_error(got, net(x)) < 1e-5
    assert recorder.ops == ["fp4::mm"] * 2
    assert sorted(s.weights[0] for s in recorder.sites) == ["down.weight", "up.weight"]


def test_int8_activations():
    net, recorder = Net(), Recorder(linear=True)
    x = torch.randn(7, 34)
    with torch.no_grad():
        got, plain = torch.compile(net, backend=recorder)(x), net(x)
    assert recorder.ops == ["fp4::mm"] * 2
    assert 1e-3 < relative_error(got, plain) < 0.2


def test_shared_experts_beside_routed_ones():
    model = build("deepseek_v3", torch.float32, "grouped_mm")
    recorder = Recorder(linear=True, activation="bf16")
    with torch.no_grad():
        torch.compile(model, backend=recorder)(tokens(1, 6), use_cache=False)
    assert recorder.ops.count("fp4::moe") == 1
    weights = [s.weights[0] for s in recorder.sites if s.op == "fp4::mm"]
    assert len(weights) == 6
    assert not [w for w in weights if "attn" in w or "lm_head" in w or "gate.weight" in w]


def test_it_is_off_unless_asked_for():
    recorder = Recorder()
    with torch.no_grad():
        torch.compile(Net(), backend=recorder)(torch.randn(7, 34))
    assert recorder.sites == []
    with pytest.raises(ValueError, match="linear is 'yes'"):
        parse(None, {"linear": "yes"})
