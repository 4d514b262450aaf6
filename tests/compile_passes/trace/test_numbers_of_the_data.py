"""Calls with a tensor where torch expects a number: some are captured without reading it, others are
reported."""

from __future__ import annotations

import pytest
import torch
from conftest import more
from moe_models import Recorder, relative_error
from moe_styles import STYLES
from torch import Tensor, nn

import fp4_ops
from fp4_ops.compile_passes import advice

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Loop = STYLES["where loop"]
H = 32


def of(step, base=Loop, **sizes) -> nn.Module:
    """A block whose output goes through step(module, x, output, t)."""

    class WithANumber(base):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return step(self, x, super().forward(x), t)

    module = WithANumber(experts=3, hidden=H, **sizes)
    module.scale = nn.Parameter(torch.randn(5, H))
    module.large = nn.Parameter(torch.randn(5, H, 3, 5))
    return module


PARTS = {
    "a row": lambda m, x, y, t: y * m.scale[t],
    "a column": lambda m, x, y, t: y * x[:, t, None],
    "of four dimensions": lambda m, x, y, t: y * m.large[t, :, 0, t],
    "after an ellipsis": lambda m, x, y, t: y + m.large[t, ..., t].sum(-1),
    "beside a list": lambda m, x, y, t: y + m.large[t, :, [0, 1], t].sum(-1),
    "with a new dimension": lambda m, x, y, t: y * m.large[t, None, :, 2, t],
    "rows by ids, of one of several": lambda m, x, y, t: y + m.large[:, :, t, t][x[:, 0].long().abs() % 5],
    "of the experts' output": lambda m, x, y, t: y + y[t],
}


@pytest.mark.parametrize("name", [n if n == "beside a list" else more(n) for n in PARTS])
def test_a_part_by_a_tensor_without_dimensions(name):
    """Dynamo compiles anew for each number; Inductor alone cannot compile such a graph."""
    module, recorder = of(PARTS[name]), Recorder(activation="bf16")
    twin, compiled = module.twin(), torch.compile(module, backend=recorder, fullgraph=True)
    x = torch.randn(9, H)
    with torch.no_grad():
        for t in (2, 0, -1):
            number = torch.tensor(t)
            assert relative_error(compiled(x, number), twin(x, number)) < 1e-5
    assert recorder.ops == ["fp4::moe"] * recorder.compilations, recorder.reasons


@pytest.mark.more
def test_inductor_compiles_it():
    module = of(PARTS["a row"])
    x, t = torch.randn(9, H), torch.tensor(3)
    with torch.no_grad():
        options = {"activation": "bf16", "format": "nvfp4", "strict": True}
        compiled = torch.compile(module, backend="fp4", fullgraph=True, options=options)
        assert relative_error(compiled(x, t), module.twin()(x, t)) < 1e-5


def written(m, x, y, t):
    part = y[t]
    part.mul_(2)
    return y


def written_through_a_view(m, x, y, t):
    y[:, t].view(-1).mul_(2)
    return y


def written_before_it_is_read(m, x, y, t):
    part = y[t]
    y.mul_(2)
    return y + part


def returned(m, x, y, t):
    return y, m.scale[t]


SEVERAL = {f.__name__: f for f in (written, written_through_a_view, written_before_it_is_read, returned)}


@pytest.mark.parametrize("name", [n if n == "written" else more(n) for n in SEVERAL])
def test_a_part_that_is_not_a_copy_stays(name):
    """A write to a part is one to the whole."""
    module = of(SEVERAL[name])
    x, t = torch.randn(9, H), torch.tensor(3)
    with torch.no_grad():
        got, expected = torch.compile(module, backend="fp4")(x, t), module(x, t)
        for a, b in zip(*((t if isinstance(t, tuple) else (t,)) for t in (got, expected)), strict=True):
            assert relative_error(a, b) < 1e-5
    report = fp4_ops.explain(module, x, t)
    (note,) = [frame.note for frame in report.frames if frame.note]
    assert "is written to or returned" in note


TOLD = {
    "narrow": (lambda m, x, y, t: y * m.scale.narrow(0, t, 1), "narrow", advice.INDEX_OF_ONE),
    "select": (lambda m, x, y, t: y * m.scale.select(0, t), "select", advice.INDEX_OF_ONE),
    "arange": (lambda m, x, y, t: y * torch.arange(t).sum(), "arange", advice.PYTHON_NUMBER),
    "histc": (lambda m, x, y, t: y * torch.histc(x, 9, 0, t).sum(), "histc", advice.PYTHON_NUMBER),
    "alpha": (lambda m, x, y, t: torch.add(y, x, alpha=t), "add", advice.PYTHON_NUMBER),
    "setitem": (
        lambda m, x, y, t: (y.__setitem__(t, 0.0), y)[1],
        "a tensor is written to at a place",
        advice.PYTHON_NUMBER,
    ),
}


@pytest.mark.parametrize("name", [n if n in ("narrow", "arange") else more(n) for n in TOLD])
def test_the_call_that_needs_the_number_is_told(name):
    step, what, change = TOLD[name]
    module = of(step)
    report = fp4_ops.explain(module, torch.randn(9, H), torch.tensor(3))
    (frame,) = [f for f in report.frames if f.note]
    assert frame.note.startswith(f"left to Inductor: {what}"), frame.note
    assert "test_numbers_of_the_data.py" in frame.note and "only the data knows" in frame.note
    assert frame.change == change


# --- numbers that scale all rows ---


class Scaled(Loop):
    def build(self) -> None:
        super().build()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("by", torch.tensor(2))
        self.each = nn.Parameter(torch.rand(5, H) + 0.5)


class OfOutputs(Scaled):
    def experts_of(self, x, ids, weights):
        return super().experts_of(x, ids, weights) * self.scale


class OfWeights(Scaled):
    def experts_of(self, x, ids, weights):
        return super().experts_of(x, ids, weights * self.scale / self.by)


class OfTheTokens(Scaled):
    def experts_of(self, x, ids, weights):
        return super().experts_of(x, ids, weights) * x.abs().mean() * self.by


class OfATask(Scaled):
    def experts_of(self, x, ids, weights):
        task = x.argmax().remainder(5).view(1)
        return super().experts_of(x, ids, weights) * self.each[task]


@pytest.mark.parametrize("cls", [OfOutputs, more(OfWeights), more(OfTheTokens), more(OfATask)])
def test_a_number_without_dimensions_scales_all_rows(cls):
    module, recorder = cls(experts=3, hidden=H), Recorder(activation="bf16")
    twin, compiled = module.twin(), torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for n in (9, 7, 1):
            x = torch.randn(n, H)
            assert relative_error(compiled(x), twin(x)) < 1e-5
    assert recorder.ops == ["fp4::moe"] * 2, recorder.reasons
