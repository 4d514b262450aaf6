"""options={"attention": ..., "dense": ..., "head": ..., "linear": True}: layers outside the experts."""

from __future__ import annotations

import pytest
import torch
from moe_models import Recorder, build, fake_quantised, relative_error, tokens
from torch import nn

import fp4_ops
from fp4_ops.compile_passes.options import parse
from fp4_ops.tensor import FP4Tensor

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


KINDS = ("attention", "dense", "head")


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
    assert recorder.ops == ["fp4::packed_linears"] * 2
    assert 1e-3 < relative_error(got, plain) < 0.2


@pytest.mark.more
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


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_its_own_format(kind):
    """The layers of the kind compute with the values of their codes, and no other layer changes."""
    net, x = Net(), torch.randn(3, 5, 34)
    recorder = Recorder(activation="bf16", **{kind: "mxfp4"})
    layers = {"attention": (net.attn,), "dense": (net.up, net.down), "head": (net.lm_head,)}[kind]
    with torch.no_grad():
        got = torch.compile(net, backend=recorder)(x)
        for layer in layers:
            layer.weight.copy_(fake_quantised(layer.weight[None], "mxfp4")[0])
        assert relative_error(got, net(x)) < 1e-5
    assert [s.format for s in recorder.sites] == ["mxfp4"] * len(layers)


def test_the_same_layers_as_prepare():
    """Three formats in one graph. The router, the embeddings and the experts' own format stay."""
    model, ids = build("deepseek_v3", torch.float32, "grouped_mm"), tokens(1, 6)
    formats = {"attention": "int4_g32", "dense": "mxfp4", "head": "nvfp4"}
    recorder = Recorder(activation="bf16", **formats)
    with torch.no_grad():
        got = torch.compile(model, backend=recorder)(ids, use_cache=False).logits
        fp4_ops.prepare(model, "nvfp4", activation="bf16", **formats)
        assert relative_error(got, model(ids, use_cache=False).logits) < 1e-4
    assert recorder.compilations == 1
    prepared = {f"{n}.weight": m.weight for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    wanted = {n: w.format for n, w in prepared.items() if isinstance(w, FP4Tensor)}
    sites = {s.weights[0]: s.format for s in recorder.sites if s.op == "fp4::mm"}
    assert {n.replace("[", ".").replace("]", ""): f for n, f in sites.items()} == wanted


class Tied(nn.Module):
    """The head has the embeddings' weight, under a name that is neither's."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(64, 34)
        self.up = nn.Linear(34, 34)

    def forward(self, ids):
        return nn.functional.linear(self.up(self.wte(ids)), self.wte.weight)


@pytest.mark.parametrize("kind", ["dense", "head"])
def test_a_tied_head_is_a_head(kind):
    net, ids = Tied(), torch.randint(64, (2, 5))
    recorder = Recorder(activation="bf16", **{kind: "nvfp4"})
    with torch.no_grad():
        got = torch.compile(net, backend=recorder)(ids)
        rows, up, head = net.wte(ids), net.up.weight.clone(), net.wte.weight.clone()
        if kind == "dense":
            up = fake_quantised(up[None], "nvfp4")[0]
        else:
            head = fake_quantised(head[None], "nvfp4")[0]
        want = nn.functional.linear(nn.functional.linear(rows, up, net.up.bias), head)
    assert relative_error(got, want) < 1e-5
    assert [s.weights[0] for s in recorder.sites] == ["up.weight" if kind == "dense" else "wte.weight"]


def test_words_that_are_no_formats():
    with pytest.raises(ValueError, match="head is 'fp4'; it must be one of: keep, nvfp4"):
        parse(None, {"head": "fp4"})
    with pytest.raises(ValueError, match="activation is 'nvfp4' and the weights' format is 'int4'"):
        parse(None, {"activation": "nvfp4", "attention": "int4"})
    assert parse(None, dict.fromkeys(KINDS, "keep")).outside == {}
    assert parse(None, {"linear": True, "format": "int4"}).outside == {"dense": "int4"}
    assert parse(None, {"linear": True, "dense": "nvfp4"}).outside == {"dense": "nvfp4"}
    for other in ("keep", "mxfp4"):
        with pytest.raises(ValueError, match=f"linear is True and dense is '{other}'; .* Leave one of the"):
            parse(None, {"linear": True, "dense": other})
