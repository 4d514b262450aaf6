"""Models that turn gradients off or on themselves, or train beside experts in 4 bits."""

import logging

import pytest
import torch
from moe_models import Block, Recorder, build, relative_error, tokens
from recorder import fake_quantised
from torch import nn

import fp4_ops

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Decorated(Block):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


class Inside(Block):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


class BesideOthers(Block):
    """The experts are in a block without gradients; the router's scores are not."""

    def forward(self, x):
        with torch.no_grad():
            y = super().forward(x)
        return y * self.router.mean()


class WrittenWithGradients(Block):
    """Nothing that is returned has gradients, but a buffer gets them."""

    def forward(self, x):
        y = super().forward(x)
        self.state.copy_(y)
        return y.detach()


def twin(block):
    exact = Block("grouped_mm")
    exact.router = block.router
    for name in ("w13", "w2"):
        getattr(exact, name).data = fake_quantised(getattr(block, name), "nvfp4")
    return exact


@pytest.mark.parametrize("model", [Decorated, Inside])
@pytest.mark.parametrize("backend", [None, pytest.param("fp4", marks=pytest.mark.slow)])
def test_experts_are_rewritten(model, backend):
    block, recorder = model("grouped_mm"), Recorder(activation="bf16")
    x = torch.randn(6, Block.H)
    compiled = torch.compile(block, backend=backend or recorder, options=backend and {"activation": "bf16"})
    got = compiled(x)
    with torch.no_grad():
        want = twin(block)(x)
    assert relative_error(got, want) < (1e-2 if backend else 1e-5) and not got.requires_grad
    if backend is None:
        assert recorder.ops == ["fp4::moe"] and recorder.compilations == 1


@pytest.mark.parametrize("model", [BesideOthers, WrittenWithGradients])
def test_gradients_that_are_left_on_count(model):
    block, recorder = model("grouped_mm"), Recorder()
    block.register_buffer("state", torch.zeros(6, Block.H))
    torch.compile(block, backend=recorder)(torch.randn(6, Block.H))
    assert "gradients may be asked for" in recorder.frames[0].note


class Enabled(Block):
    def forward(self, x):
        with torch.enable_grad():
            return super().forward(x)


class DecoratedOn(Block):
    @torch.enable_grad()
    def forward(self, x):
        return super().forward(x)


class SetOn(Block):
    def forward(self, x):
        torch.set_grad_enabled(True)
        y = super().forward(x)
        torch.set_grad_enabled(False)
        return y


class NoInference(Block):
    def forward(self, x):
        with torch.inference_mode(False):
            return super().forward(x)


class OffAndOn(Block):
    """The experts are in a block without gradients, within one that has them."""

    @torch.enable_grad()
    def forward(self, x):
        with torch.no_grad():
            y = super().forward(x)
        return y * self.router.mean()


class On(Block):
    """Gradients are on after the experts, for nothing that requires them."""

    def forward(self, x):
        y = super().forward(x)
        with torch.inference_mode(False):
            y = y * 2
        return y


@pytest.mark.parametrize("model", [Enabled, DecoratedOn, SetOn, NoInference, OffAndOn])
def test_gradients_that_a_model_turns_on_count(model):
    """Under no_grad outside, the result has gradients as eager's has."""
    block, recorder, x = model("grouped_mm"), Recorder(), torch.randn(6, Block.H)
    with torch.no_grad():
        want, got = block(x), torch.compile(block, backend=recorder)(x)
    assert want.requires_grad and got.requires_grad
    assert "gradients may be asked for" in recorder.frames[0].note
    assert "torch.enable_grad()" in recorder.frames[0].change
    for y in (want, got):
        y.sum().backward()
    assert torch.equal(want.detach(), got.detach()) and block.router.grad is not None


def test_gradients_of_nothing_do_not_count():
    block, recorder, x = On("grouped_mm"), Recorder(activation="bf16"), torch.randn(6, Block.H)
    with torch.no_grad():
        got, want = torch.compile(block, backend=recorder)(x), 2 * twin(block)(x)
    assert relative_error(got, want) < 1e-5 and not got.requires_grad and recorder.ops == ["fp4::moe"]


@pytest.mark.parametrize("model", [Enabled, DecoratedOn])
def test_inference_mode_has_no_gradients(model):
    """Also where a model turns them on."""
    block, recorder = model("grouped_mm"), Recorder(activation="bf16")
    with torch.inference_mode():
        x = torch.randn(6, Block.H)
        got, want = torch.compile(block, backend=recorder)(x), twin(block)(x)
    assert relative_error(got, want) < 1e-5 and not got.requires_grad and recorder.ops == ["fp4::moe"]


def prepared(layers: int = 1):
    model = build("qwen3_moe", torch.float32, "grouped_mm", num_hidden_layers=layers)
    fp4_ops.prepare(model.model.layers[0], trainable_inputs=True)
    return model


def test_a_prepared_model_that_trains_is_not_warned_of(caplog):
    """Its experts run in 4 bits, and gradients pass through them."""
    model, recorder, ids = prepared(), Recorder(strict=True), tokens(2, 5)
    with caplog.at_level(logging.WARNING, "fp4_ops"):
        torch.compile(model, backend=recorder)(ids, labels=ids).loss.backward()
    (frame,) = recorder.frames
    assert [s.op for s in frame.sites] == ["fp4::moe"] and not frame.note
    assert not [r for r in caplog.records if r.name == "fp4_ops"]
    assert model.model.embed_tokens.weight.grad.abs().max() > 0


def test_other_experts_of_such_a_model_are_named():
    recorder = Recorder()
    torch.compile(prepared(layers=2), backend=recorder)(tokens(2, 5))
    assert "gradients may be asked for" in recorder.frames[0].note


class Beside(nn.Module):
    """A prepared model that trains, beside another module."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.model, self.other = prepared(), other
        self.places = nn.Parameter(torch.randn(1, 40, 64))

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.model(ids, labels=ids).loss + self.other(x + self.places).mean()


class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 48) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(expert(x) * x[..., :1].sigmoid() for expert in self.experts)


@pytest.mark.parametrize("other", [nn.Conv1d(40, 64, 3), Looped()], ids=["convolution and table", "experts"])
def test_what_else_trains_beside_prepared_experts(other):
    """A stack of kernels or a table of places is no stack of experts."""
    recorder = Recorder()
    torch.compile(Beside(other), backend=recorder)(tokens(2, 5), torch.randn(2, 40, 64)).backward()
    (frame,) = recorder.frames
    assert [s.op for s in frame.sites] == ["fp4::moe"]
    assert ("gradients may be asked for" in frame.note) == isinstance(other, Looped)
