"""Experts whose values have several users: every use runs in 4 bits, or none does."""

from __future__ import annotations

import pytest
import torch
from fp4_ops.compile_passes.dynamo import capture_loops
from moe_models import Recorder, relative_error
from moe_styles import ListStyle, Style
from torch import Tensor, nn

EXACT = 1e-5


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch.set_num_threads(1)
    capture_loops()


class Gates(ListStyle):
    """MMoE: several gates over the same experts."""

    def build(self) -> None:
        super().build()
        self.gates = nn.ModuleList(nn.Linear(self.H, self.E) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outs = torch.stack([expert(x) for expert in self.list], 1)
        return tuple((gate(x).softmax(-1).unsqueeze(-1) * outs).sum(1) for gate in self.gates)


class OutputsRead(ListStyle):
    """The experts' outputs leave the graph, as a hook that keeps them makes them."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        kept = [expert(x) for expert in self.list]
        weights = self.router(x).softmax(-1)
        out = sum(weights[:, e, None] * y for e, y in enumerate(kept))
        return out, kept[2]


class Spread(ListStyle):
    """How far the experts are apart: a loss over their outputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outs = torch.stack([expert(x) for expert in self.list], 1)
        out = (self.router(x).softmax(-1).unsqueeze(-1) * outs).sum(1)
        return out, outs.var(1)


class RowsRead(ListStyle):
    """Rows that were chosen: those of one expert are looked at again."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        ids, weights = self.route(x)
        out, kept = torch.zeros_like(x), x.new_zeros(())
        for e, expert in enumerate(self.list):
            token, j = torch.where(ids == e)
            y = expert(x[token])
            out.index_add_(0, token, weights[token, j, None] * y)
            kept = kept + y.square().sum()
        return out, kept


class OneAlone(ListStyle):
    """One of the experts serves other tokens, too, by itself."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        weights = self.router(x).softmax(-1)
        out = sum(weights[:, e, None] * expert(x) for e, expert in enumerate(self.list))
        return out, self.list[0](x.flip(0) * 2)


MIXED: list[type[Style]] = [Gates, OutputsRead, Spread, RowsRead, OneAlone]


@pytest.mark.parametrize("make", MIXED, ids=lambda c: c.__name__)
def test_every_use_or_none(make):
    module, recorder = make(), Recorder(activation="bf16")
    x = torch.randn(9, module.H)
    with torch.no_grad():
        got = torch.compile(module, backend=recorder)(x)
        as_it_is, in_4_bits = module(x), module.twin()(x)
    told = [max(relative_error(g, w) for g, w in zip(got, want)) < EXACT for want in (as_it_is, in_4_bits)]
    assert told.count(True) == 1
    sites = [s for f in recorder.frames for s in f.sites]
    assert told[1] == all(s.rewritten for s in sites) == any(s.rewritten for s in sites)
    if not told[1]:
        assert all("stays as it is" in s.reason and s.change for s in sites)


class Two(nn.Module):
    """A block of experts that several users read, and one as it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.H = Gates(), Plain(), Gates().H

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return *self.first(x), self.second(x)


class Plain(ListStyle):
    def build(self) -> None:
        self.I += 16
        super().build()

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return sum(weights[:, e, None] * expert(x) for e, expert in enumerate(self.list))


def test_others_in_the_graph_are_rewritten():
    module, recorder = Two(), Recorder(activation="bf16")
    x = torch.randn(9, module.H)
    with torch.no_grad():
        *gates, got = torch.compile(module, backend=recorder)(x)
        assert relative_error(got, module.second.twin()(x)) < EXACT
        assert all(relative_error(g, w) < EXACT for g, w in zip(gates, module.first(x)))
    assert [s.op for s in recorder.frames[0].sites if s.rewritten] == ["fp4::moe"]


class Called(nn.Module):
    """The change: each gate runs the experts by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.H = Gates(), Gates().H

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        experts = list(self.inner.list)
        gates = [gate(x).softmax(-1) for gate in self.inner.gates]
        return tuple(sum(g[:, e, None] * expert(x) for e, expert in enumerate(experts)) for g in gates)

    def twin(self) -> nn.Module:
        twin = Called()
        twin.inner = self.inner.twin()
        return twin


def test_the_change_that_is_told_works():
    module, recorder = Called(), Recorder(activation="bf16")
    x = torch.randn(9, module.H)
    with torch.no_grad():
        got, want = torch.compile(module, backend=recorder)(x), module.twin()(x)
    assert all(relative_error(g, w) < EXACT for g, w in zip(got, want))
    assert recorder.ops == ["fp4::moe"] * 3
