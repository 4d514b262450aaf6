"""Experts whose values have several users: every use runs in 4 bits, or none does."""

from __future__ import annotations

import pytest
import torch
from conftest import more
from moe_models import Recorder, relative_error
from moe_styles import FusedStyle, ListStyle, StackedStyle
from torch import Tensor, nn

EXACT = 1e-5
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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


def gated(outs: Tensor, x: Tensor, gates: nn.ModuleList) -> tuple[Tensor, ...]:
    """outs [T, E, H]"""
    return tuple((gate(x).softmax(-1).unsqueeze(-1) * outs).sum(1) for gate in gates)


class Stacked(StackedStyle):
    """MMoE whose experts are three 3D parameters."""

    def build(self) -> None:
        super().build()
        self.gates = nn.ModuleList(nn.Linear(self.H, self.E) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = torch.einsum("th,eih->tei", x, self.w1), torch.einsum("th,eih->tei", x, self.w3)
        return gated(torch.einsum("tei,ehi->teh", self.act(h[0]) * h[1], self.w2), x, self.gates)


class StackedByExpert(Stacked):
    """The experts' dimension first."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = torch.einsum("th,eih->eti", x, self.w1), torch.einsum("th,eih->eti", x, self.w3)
        return gated(
            torch.einsum("eti,ehi->eth", self.act(h[0]) * h[1], self.w2).transpose(0, 1), x, self.gates
        )


class Fused(FusedStyle):
    """Gate and up in one 3D parameter."""

    def build(self) -> None:
        super().build()
        self.gates = nn.ModuleList(nn.Linear(self.H, self.E) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        gate, up = torch.einsum("th,ehn->ten", x, self.w13).chunk(2, -1)
        return gated(torch.einsum("tei,eih->teh", self.act(gate) * up, self.w2), x, self.gates)


class FusedBmm(Fused):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        gate, up = torch.bmm(x.expand(self.E, -1, -1), self.w13).chunk(2, -1)
        return gated(torch.bmm(self.act(gate) * up, self.w2).transpose(0, 1), x, self.gates)


class FusedMatmul(Fused):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        gate, up = torch.matmul(x, self.w13).chunk(2, -1)
        return gated(torch.matmul(self.act(gate) * up, self.w2).transpose(0, 1), x, self.gates)


class NoGate(Stacked):
    """Outputs of all experts that no gate weights."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outs = super().forward(x)
        h = torch.einsum("th,eih->tei", x, self.w1), torch.einsum("th,eih->tei", x, self.w3)
        return *outs, torch.einsum("tei,ehi->teh", self.act(h[0]) * h[1], self.w2).var(1)


class SomeRows(ListStyle):
    """Half of one expert's gate is looked at, too."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        weights = self.router(x).softmax(-1)
        out = sum(weights[:, e, None] * expert(x) for e, expert in enumerate(self.list))
        return out, x @ self.list[1].w1.weight[8:20].T


class Penalty(ListStyle):
    """A product with a weight on the other side, which no operator has."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        weights = self.router(x).softmax(-1)
        out = sum(weights[:, e, None] * expert(x) for e, expert in enumerate(self.list))
        return out, self.list[1].w1.weight @ x.T


REWRITTEN = [Gates, Stacked, OutputsRead, OneAlone, Fused]
REWRITTEN_TOO = [StackedByExpert, Spread, RowsRead, FusedBmm, FusedMatmul, NoGate, SomeRows]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "kwargs", [{}, more({"bias": True}), more({"gated": False, "act": torch.relu})], ids=" ".join
)
@pytest.mark.parametrize("make", [*REWRITTEN, *map(more, REWRITTEN_TOO)], ids=lambda c: c.__name__)
def test_every_use(make, kwargs):
    """At two lengths under one compilation, and for one token."""
    if kwargs and not issubclass(make, ListStyle):
        pytest.skip("experts of modules have biases, or no gate")
    module, recorder = make(**kwargs), Recorder(activation="bf16")
    twin = module.twin()
    compiled = torch.compile(module, backend=recorder, dynamic=True)
    with torch.no_grad():
        for n in (9, 5, 1):
            x = torch.randn(n, module.H)
            got, want = compiled(x), twin(x)
            assert all(relative_error(g, w) < EXACT for g, w in zip(got, want)), recorder.reasons
    assert recorder.compilations == 2
    assert all(s.rewritten and s.change for s in recorder.sites)
    assert not any("moe" in op for op in recorder.ops)  # nothing is computed twice


def test_every_use_with_quantised_activations():
    module, recorder = Gates(), Recorder()
    x = torch.randn(9, module.H)
    with torch.no_grad():
        got, want = torch.compile(module, backend=recorder)(x), module.twin()(x)
    assert all(1e-4 < relative_error(g, w) < 0.1 for g, w in zip(got, want))
    calls = [n for n in recorder.graphs[0].graph.nodes if "packed_linears" in str(n.target)]
    quantised = [n for n in recorder.graphs[0].graph.nodes if "quantize_int8" in str(n.target)]
    assert len(calls) + len(quantised) == 1 + module.E  # x once for all experts


def test_or_none():
    module, recorder = Penalty(), Recorder(activation="bf16")
    x = torch.randn(9, module.H)
    with torch.no_grad():
        got = torch.compile(module, backend=recorder)(x)
        assert all(relative_error(g, w) < EXACT for g, w in zip(got, module(x)))
    (site,) = recorder.sites
    assert not site.rewritten and site.change
    assert "a product of list[1].w1.weight has other users than this block, at " in site.reason
    assert "the block stays as it is" in site.reason


class WrittenTo(Stacked):
    """A weight that the graph writes to stays, and the others of its experts with it."""

    def build(self) -> None:
        super().build()
        w1 = self.w1.data
        del self.w1
        self.register_buffer("w1", w1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outs = super().forward(x)
        self.w1.mul_(1.0)
        return outs


def test_none_of_a_block_that_has_to_stay():
    module, recorder = WrittenTo(), Recorder(activation="bf16")
    x = torch.randn(9, module.H)
    with torch.no_grad():
        got = torch.compile(module, backend=recorder)(x)
        assert all(relative_error(g, w) < EXACT for g, w in zip(got, module(x)))
    assert recorder.sites and not recorder.ops
    assert "writes to the weight w1" in recorder.reasons


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
        assert all(relative_error(g, w) < EXACT for g, w in zip(gates, module.first.twin()(x)))
    assert sorted(recorder.ops) == ["fp4::mm", "fp4::moe"]


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


@pytest.mark.gpu
@pytest.mark.parametrize("make", [Gates, Fused], ids=lambda c: c.__name__)
@pytest.mark.parametrize("sizes", [(32, 48), (256, 512)], ids=str)
def test_every_use_on_a_gpu(make, sizes):
    """One expert's part of what is packed for all, in the layout of that device."""
    module = make(hidden=sizes[0], inter=sizes[1]).to("cuda", torch.bfloat16)
    twin, recorder = module.twin(), Recorder(activation="bf16")
    x = torch.randn(9, module.H, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        got, want = torch.compile(module, backend=recorder)(x), twin(x)
    assert all(relative_error(g, w) < 3e-2 for g, w in zip(got, want))
    assert recorder.ops and all(s.rewritten for s in recorder.sites)
