"""Calls that Dynamo leaves to Python have no effect on other calls: these still run in 4 bits."""

from __future__ import annotations

import copy
import logging
import random

import pytest
import torch
from moe_models import Recorder, relative_error
from moe_styles import STYLES, ListStyle
from repository_styles import NumpyEnds
from torch import Tensor, nn

EXACT = 1e-5
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Loop(ListStyle):
    """`breaks()` says when Dynamo cannot go on within the loop."""

    def breaks(self) -> bool:
        return self.training

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            if self.breaks():
                torch._dynamo.graph_break()
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Written(NumpyEnds):
    """The training's way with masks in `forward`, other calls' with sorted rows (MiniMind)."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        flat = ids.view(-1)
        if self.training:
            rows = x.repeat_interleave(self.k, dim=0)
            y = torch.empty_like(rows)
            for e, expert in enumerate(self.list):
                own = expert(rows[flat == e])
                if own.shape[0] > 0:
                    y[flat == e] = own
                else:
                    y[flat == e] = own + 0 * sum(p.sum() for p in expert.parameters())
            return (y.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)
        return self.experts_of(x, ids, weights)


def exact(module: ListStyle) -> nn.Module:
    return module.twin().train(module.training)


def runs_in_4_bits(compiled: nn.Module, module: ListStyle, n: int) -> bool:
    x = torch.randn(n, module.H)
    with torch.no_grad():
        y, twin = compiled(x), exact(module)(x)
        in_4_bits = relative_error(y, twin) < EXACT
        assert in_4_bits or relative_error(y, module(x)) < EXACT
    return in_4_bits


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", [Loop, Written])
@pytest.mark.parametrize("first", ["train", "eval"])
def test_training_mode_in_between(kind, first):
    module = kind()
    compiled = torch.compile(module, backend=Recorder(activation="bf16"))
    calls = [(mode, n) for mode in ("train", "eval") for n in (11, 7, 1)]
    random.shuffle(calls)
    calls.sort(key=lambda call: call[0] != first)
    for mode, n in calls + random.sample(calls, 4):
        module.train(mode == "train")
        assert runs_in_4_bits(compiled, module, n) == (mode == "eval"), (mode, n)


def test_backend_by_its_name():
    module = Written().train()
    compiled = torch.compile(module, backend="fp4", options={"activation": "bf16"})
    assert not runs_in_4_bits(compiled, module, 9)
    module.eval()
    assert runs_in_4_bits(compiled, module, 9)


class Flagged(Loop):
    flag = False

    def breaks(self) -> bool:
        return self.flag


def test_another_model_of_the_same_class():
    broken, whole = Flagged(), Flagged()
    broken.flag = True
    compiled = [torch.compile(m, backend=Recorder(activation="bf16")) for m in (broken, whole)]
    for n in (9, 6):
        assert not runs_in_4_bits(compiled[0], broken, n)
        assert runs_in_4_bits(compiled[1], whole, n)


def test_layers_of_one_model():
    """The first does not go on; the code of both is the same."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Flagged(), Flagged()
            self.first.flag = True

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    module = Two()
    recorder = Recorder(activation="bf16")
    compiled, twin = torch.compile(module, backend=recorder), copy.deepcopy(module)
    twin.second = module.second.twin()
    for n in (9, 5):
        x = torch.randn(n, module.first.H)
        with torch.no_grad():
            assert relative_error(compiled(x), twin(x)) < EXACT
    assert set(recorder.ops) == {"fp4::moe"}


class Numbered(nn.Module):
    """A layer that runs in Python, and reads its number before."""

    def __init__(self, number: int, moe: nn.Module) -> None:
        super().__init__()
        self.number, self.moe = number, moe

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1):
            if self.number < 0:
                return x
            torch._dynamo.graph_break()
        return x + self.moe(x)


def test_more_layers_than_the_limit_of_recompilations():
    """Functions that the last ones call are compiled, as with other backends."""
    styles = ["where loop"] * 5 + ["gather + bmm"]
    model = nn.Sequential(*(Numbered(n, STYLES[style]()) for n, style in enumerate(styles)))
    recorder = Recorder(activation="bf16")
    with torch._dynamo.config.patch(recompile_limit=3), torch.no_grad():
        compiled = torch.compile(model, backend=recorder)
        compiled(torch.randn(9, 32))
        assert recorder.ops.count("fp4::moe") == 2
        compiled(torch.randn(1, 32))
        assert recorder.ops.count("fp4::moe") > 2  # another length


class Asked(Loop):
    """An argument says it."""

    def forward(self, x: Tensor, loads: dict[str, int] | None = None, ready: bool = True) -> Tensor:  # type: ignore[override]
        if not ready:
            return x
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            if loads is not None:
                loads[str(e)] = int(token.numel())
                torch._dynamo.graph_break()
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


@pytest.mark.one_in(2)
@pytest.mark.parametrize("given", [{"loads": {}}, {"ready": False}], ids=["breaks", "nothing to do"])
def test_a_call_with_other_arguments(given):
    module = Asked()
    compiled = torch.compile(module, backend=Recorder(activation="bf16"))
    for n in (8, 5):
        with torch.no_grad():
            x = torch.randn(n, module.H)
            expected = module(x, **copy.deepcopy(given))
            assert relative_error(compiled(x, **copy.deepcopy(given)), expected) < EXACT
        assert runs_in_4_bits(compiled, module, n)


def test_said_when_a_later_call_is_left(caplog):
    caplog.set_level(logging.WARNING, "fp4_ops")
    module = Written().eval()
    compiled = torch.compile(module, backend=Recorder(activation="bf16"))
    assert runs_in_4_bits(compiled, module, 9) and not caplog.records
    module.train()
    for n in (9, 7, 9):
        assert not runs_in_4_bits(compiled, module, n)
    (said,) = [r.getMessage() for r in caplog.records if r.name == "fp4_ops"]
    assert "list" in said and "if own.shape[0] > 0:" in said
