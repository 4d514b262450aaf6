"""Loops over hundreds of experts, and many layers of loops, compiled at a large depth of the call stack."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from moe_style_base import Style, twin_of
from recorder import Recorder, relative_error
from torch import Tensor, nn

from fp4_ops.compile_passes import advice
from fp4_ops.compile_passes.index import terms
from fp4_ops.compile_passes.index.reader import Reader
from fp4_ops.compile_passes.recognise.mixture import Matcher

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

H, INTER, FRAMES = 32, 32, 500
T = TypeVar("T")


def below(frames: int, f: Callable[[], T]) -> T:
    """Call `f` with this number of additional frames on Python's stack, as in a server or a framework."""
    return below(frames - 1, f) if frames else f()


class Experts(Style):
    """Two parameters hold all experts. `experts_of` yields the experts one after the other."""

    def build(self) -> None:
        self.up = nn.Parameter(torch.randn(self.E, 2 * INTER, H) * H**-0.5)
        self.down = nn.Parameter(torch.randn(self.E, H, INTER) * INTER**-0.5)

    def matrices(self, e: int) -> list[list[Tensor]]:
        return [[self.up[e]], [self.down[e]]]

    def expert(self, e: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.up[e]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down[e])

    def weight(self, e: int, ids: Tensor, weights: Tensor) -> Tensor:
        return (weights * (ids == e)).sum(-1, keepdim=True)


class Plus(Experts):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.E):
            out = out + self.expert(e, x) * self.weight(e, ids, weights)
        return out


class IndexAdd(Experts):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.E):
            token, choice = torch.where(ids == e)
            out.index_add_(0, token, self.expert(e, x[token]) * weights[token, choice, None])
        return out


class Where(Experts):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.E):
            mask = (ids == e).any(-1, keepdim=True)
            out = torch.where(mask, out + self.expert(e, x) * self.weight(e, ids, weights), out)
        return out


class WhereNot(Experts):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.E):
            others = (ids != e).all(-1, keepdim=True) if self.k > 1 else ids != e
            out = torch.where(others, out, self.expert(e, x) * self.weight(e, ids, weights) + out)
        return out


class IndexPut(Experts):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.E):
            mask = (ids == e).any(-1)
            out[mask] += self.expert(e, x[mask]) * self.weight(e, ids, weights)[mask]
        return out


class Stack(Experts):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        outputs = [self.expert(e, x) * self.weight(e, ids, weights) for e in range(self.E)]
        return torch.stack(outputs).sum(0)


class Layers(nn.Module):
    def __init__(self, form: type[Experts], layers: int, experts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(form(experts, hidden=H, inter=INTER) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(F.rms_norm(x, (H,)))
        return x


class Attended(Layers):
    """Attention before the experts, and norms whose steps are read."""

    def __init__(self, form: type[Experts], layers: int, experts: int) -> None:
        super().__init__(form, layers, experts)
        self.qkv = nn.ModuleList(nn.Linear(H, 3 * H, bias=False) for _ in range(layers))
        self.o = nn.ModuleList(nn.Linear(H, H, bias=False) for _ in range(layers))

    @staticmethod
    def norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        for layer, qkv, o in zip(self.layers, self.qkv, self.o):
            q, k, v = qkv(self.norm(x)).chunk(3, -1)
            x = x + o((q @ k.T).softmax(-1) @ v)
            x = x + layer(self.norm(x))
        return x


class IntoTheStream(Layers):
    """Each expert's rows are added to the hidden states themselves."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = F.rms_norm(x, (H,))
            ids, weights = layer.route(y)
            for e in range(layer.E):
                token, choice = torch.where(ids == e)
                x = x.index_add(0, token, layer.expert(e, y[token]) * weights[token, choice, None])
        return x


class WhereInTheStream(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = F.rms_norm(x, (H,))
            ids, weights = layer.route(y)
            for e in range(layer.E):
                mask = (ids == e).any(-1, keepdim=True)
                x = torch.where(mask, x + layer.expert(e, y) * layer.weight(e, ids, weights), x)
        return x


def slowly(*values: object) -> object:
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.more])


@pytest.mark.parametrize(
    ("form", "layers", "experts"),
    [
        (Plus, 1, 128),
        more(Plus, 2, 128),
        more(Where, 1, 128),
        more(Stack, 2, 128),
        *(slowly(form, 2, 256) for form in (Plus, IndexAdd, IndexPut, Stack)),
        slowly(IndexAdd, 2, 512),
        slowly(IndexAdd, 60, 8),
    ],
)
def test_each_loop_becomes_one_operator(form, layers, experts):
    """A layer's sum is a chain of all its experts, and half of Python's stack is the caller's."""
    model = Layers(form, layers, experts)
    recorder, x = Recorder(activation="bf16"), torch.randn(24, H)
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    with torch.no_grad():
        got, want = below(FRAMES, lambda: compiled(x)), twin_of(model)(x)
    assert recorder.ops == ["fp4::moe"] * layers, recorder.reasons
    assert recorder.compilations == 1
    assert relative_error(got, want) < 1e-4


@pytest.mark.parametrize(
    ("model", "form"),
    [
        (Attended, Plus),
        (IntoTheStream, IndexAdd),
        more(WhereInTheStream, Where),
        more(Layers, IndexAdd),
        more(Layers, Stack),
    ],
)
def test_the_work_grows_linearly_with_the_layers(model, form, monkeypatch):
    """A layer reads only the layer before it. The test counts the expensive operations and does not measure
    time."""
    done: dict[str, int] = {}

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def count(*args: Any) -> Any:
            done[name] += 1
            return original(*args)

        monkeypatch.setattr(owner, name, count)

    counted(terms, "_rebuilt")  # parts of terms
    counted(Matcher, "match")
    work: dict[int, dict[str, int]] = {}
    for layers in (3, 6):
        done = dict.fromkeys(("_rebuilt", "match"), 0)
        stack, recorder, x = model(form, layers, 4), Recorder(activation="bf16"), torch.randn(24, H)
        with torch.no_grad():
            torch._dynamo.reset()
            got, want = torch.compile(stack, backend=recorder, fullgraph=True)(x), twin_of(stack)(x)
        assert recorder.ops == ["fp4::moe"] * layers, recorder.reasons
        assert relative_error(got, want) < 1e-4
        work[layers] = done
    for name, few in work[3].items():
        assert work[6][name] < 2.5 * few, f"{name}: {few} for 3 layers, {work[6][name]} for 6"


@pytest.mark.parametrize(("form", "k"), [(Where, 2), (WhereNot, 1)])
def test_sums_that_change_where_a_mask_says(form, k):
    model, recorder, x = form(5, k, hidden=H, inter=INTER), Recorder(activation="bf16"), torch.randn(24, H)
    with torch.no_grad():
        got, want = torch.compile(model, backend=recorder, fullgraph=True)(x), model.twin()(x)
    assert recorder.ops == ["fp4::moe"], recorder.reasons
    assert relative_error(got, want) < 1e-4


class OtherThanTheSum(Where):
    """Where the mask is not set, the sum is not what it was."""

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.E):
            mask = (ids == e).any(-1, keepdim=True)
            out = torch.where(mask, out + self.expert(e, x) * self.weight(e, ids, weights), 2 * out)
        return out


class OfTheOneBefore(Where):
    """An expert's output counts where the mask of the one before is set."""

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.E):
            mask = (ids == (e - 1) % self.E).any(-1, keepdim=True)
            out = torch.where(mask, out + self.expert(e, x) * self.weight(e, ids, weights), out)
        return out


@pytest.mark.parametrize("form", [OtherThanTheSum, OfTheOneBefore])
def test_other_sums_under_a_mask_stay(form):
    model, recorder, x = form(5, hidden=H, inter=INTER), Recorder(activation="bf16"), torch.randn(24, H)
    with torch.no_grad():
        got, want = torch.compile(model, backend=recorder, fullgraph=True)(x), model(x)
    assert recorder.ops == [] and relative_error(got, want) < 1e-5


def test_the_reason_is_true_where_the_stack_is_full(monkeypatch, caplog):
    """No message says that a step is not understood or asks for a bug report, because this is not a bug of
    fp4_ops."""

    def full(*_: object) -> None:
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(Reader, "_read", full)
    recorder = Recorder(activation="bf16")
    with torch.no_grad(), caplog.at_level(logging.WARNING, "fp4_ops"):
        torch.compile(Layers(Plus, 1, 4), backend=recorder, fullgraph=True)(torch.randn(3, H))
    (frame,) = recorder.frames
    assert "RecursionError" in frame.note and frame.change == advice.STACK_DEPTH
    assert not frame.sites and "please report" not in caplog.text
