"""Inputs of [batch, length, hidden]: which experts run in 4 bits does not depend on earlier calls.

The first call has static sizes. When sizes change, Dynamo makes the batch, the length, or both symbolic.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from moe_models import Recorder, relative_error
from moe_style_loops import TokenMaskLoop
from moe_styles import ListStyle, StackedStyle, Style
from torch import Tensor

EXACT = 1e-5
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class DenseLoop(ListStyle):
    """Every expert for every token, by a matrix of weights that is zero for all but k."""

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        gates = torch.zeros(*x.shape[:-1], self.E, dtype=x.dtype).scatter(-1, ids, weights)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            out = out + gates[..., e, None] * expert(x)
        return out


class DenseLoopLast(DenseLoop):
    """The same, with the dimension counted from the front."""

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        gates = torch.zeros(*x.shape[:-1], self.E, dtype=x.dtype).scatter_(x.dim() - 1, ids, weights)
        return sum(gates[..., e : e + 1] * expert(x) for e, expert in enumerate(self.list))


class MaskedSoftmax(ListStyle):
    """Scores of the others are minus infinity before the softmax."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        top, ids = scores.topk(self.k, -1)
        gates = torch.full_like(scores, float("-inf")).scatter(-1, ids, top).softmax(-1)
        return torch.stack([gates[..., e, None] * expert(x) for e, expert in enumerate(self.list)]).sum(0)


class AllExperts(ListStyle):
    """A soft mixture: all experts process every token."""

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        outs = torch.stack([expert(x) for expert in self.list], -2)
        return (gates.unsqueeze(-1) * outs).sum(-2)


class WhereLoop(ListStyle):
    """Rows by batch and position."""

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            b, t, j = torch.where(ids == e)
            out.index_put_((b, t), weights[b, t, j, None] * expert(x[b, t]), accumulate=True)
        return out


class FlatInside(ListStyle):
    """Flattened for router and experts, and three-dimensional again."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, self.H)
        ids, weights = self.route(flat)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.list):
            token, j = torch.where(ids == e)
            out.index_add_(0, token, weights[token, j, None] * expert(flat[token]))
        return out.view(x.shape)


class Einsum(StackedStyle):
    """All experts at once, over named dimensions."""

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        gates = (F.one_hot(ids, self.E).to(x.dtype) * weights[..., None]).sum(-2)
        gate, up = (torch.einsum("bth,eih->btei", x, w) for w in (self.w1, self.w3))
        return torch.einsum("btei,ehi,bte->bth", self.act(gate) * up, self.w2, gates)


class EinsumAtOnce(StackedStyle):
    """One product sums over experts and their inner dimension, of hidden values with their weights."""

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        gates = (F.one_hot(ids, self.E).to(x.dtype) * weights[..., None]).sum(-2)
        gate, up = (torch.einsum("bth,eih->btei", x, w) for w in (self.w1, self.w3))
        return torch.einsum("bte,btei,ehi->bth", gates, self.act(gate) * up, self.w2)


class FlatAtOnce(StackedStyle):
    """The same by a plain product, of all experts' hidden values side by side."""

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        gates = (F.one_hot(ids, self.E).to(x.dtype) * weights[..., None]).sum(-2)
        gate, up = (torch.einsum("bth,eih->btei", x, w) for w in (self.w1, self.w3))
        h = self.act(gate) * up * gates[..., None]
        return h.flatten(-2) @ self.w2.transpose(1, 2).flatten(0, 1)


class OneHotLoop(ListStyle):
    """A weight for each token, summed over its choices."""

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            out += expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
        return out


class Gathered(StackedStyle):
    """Each choice's own matrices."""

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        gate = torch.einsum("bth,btkih->btki", x, self.w1[ids])
        up = torch.einsum("bth,btkih->btki", x, self.w3[ids])
        out = torch.einsum("btki,btkhi->btkh", self.act(gate) * up, self.w2[ids])
        return (out * weights[..., None]).sum(-2)


class BesideAnother(DenseLoop):
    """A shared expert of all tokens, and the residual."""

    def build(self) -> None:
        super().build()
        self.shared = torch.nn.Linear(self.H, self.H)

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return x + super().experts_of(x, ids, weights) + self.shared(x)


class SubscriptLoop(ListStyle):
    """Rows by batch and position, added in place."""

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            batch, token, slot = torch.where(ids == e)
            out[batch, token] += expert(x[batch, token]) * weights[batch, token, slot, None]
        return out


class ScatteredWeights(ListStyle):
    """Only the chosen experts need run."""

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        every = torch.zeros(*x.shape[:-1], self.E).scatter(-1, ids, weights)
        return sum(every[..., e, None] * expert(x) for e, expert in enumerate(self.list))


class SoftmaxOfScattered(StackedStyle):
    """Scattered scores, and their softmax."""

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.router(x).topk(self.k, dim=-1)
        every = torch.full_like(self.router(x), float("-inf")).scatter(-1, ids, scores).softmax(-1)
        return sum(every[:, :, e].unsqueeze(-1) * self.expert(e, x) for e in range(self.E))


class DenseEinsum(StackedStyle):
    """All experts for every token, in one product with the scores."""

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(self.router(x), -1)
        h = F.silu(torch.einsum("bth,eih->btei", x, self.w1)) * torch.einsum("bth,eih->btei", x, self.w3)
        return torch.einsum("btei,ehi,bte->bth", h, self.w2, scores)


class UnnormalisedScores(ListStyle):
    """Sigmoids that add up to anything."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid()
        ids = scores.topk(self.k)[1]
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            weight = (scores[..., e] * (ids == e).any(-1)).unsqueeze(-1)
            out = out + weight * expert(x)
        return out


FORMS = (
    DenseLoop, DenseLoopLast, MaskedSoftmax, AllExperts, WhereLoop, FlatInside, Einsum, EinsumAtOnce,
    OneHotLoop, Gathered, BesideAnother,
)  # fmt: skip
FURTHER = (
    SubscriptLoop, TokenMaskLoop, ScatteredWeights, SoftmaxOfScattered, DenseEinsum, UnnormalisedScores,
    FlatAtOnce,
)  # fmt: skip
FEW = (SubscriptLoop, ScatteredWeights, DenseEinsum)
ALL_EXPERTS = (AllExperts, DenseEinsum)
"""A token meets all of them."""

CALLS = {
    "both": [(2, 8), (4, 9), (3, 5), (2, 8)],
    "the length": [(2, 8), (2, 9), (2, 5)],
    "the batch": [(2, 8), (4, 8), (3, 8)],
    "both, and 1": [(2, 8), (4, 9), (3, 5), (5, 9), (1, 7), (2, 1), (1, 1)],
}


def run(style: type[Style], calls: str, format: str = "nvfp4", **options: Any) -> int:
    """Returns how often the module was compiled. Each compilation must run in 4 bits."""
    module, recorder = style(), Recorder(activation="bf16", format=format)
    compiled, twin = torch.compile(module, backend=recorder, **options), module.twin(format)
    with torch.no_grad():
        for shape in CALLS[calls]:
            x = torch.randn(*shape, module.H)
            want, got = twin(x), compiled(x)
            assert got.shape == want.shape and relative_error(got, want) < EXACT, (shape, recorder.reasons)
    assert recorder.ops == ["fp4::moe"] * recorder.compilations, recorder.reasons
    top = module.E if style in ALL_EXPERTS else module.k
    assert all(f"top {top}," in s.shape for s in recorder.sites)
    return recorder.compilations


def named(style: type[Style]) -> str:
    return style.__name__


ASKED = 2 * torch.backends.opt_einsum.is_available()
"""Dynamo guards on what opt_einsum, where it is installed, asks of sizes."""


@pytest.mark.one_in(6)
@pytest.mark.parametrize("calls", ["both", more("the length"), more("the batch")])
@pytest.mark.parametrize("style", FORMS, ids=named)
def test_sizes_that_change(style, calls):
    assert 2 <= run(style, calls) <= 2 + ASKED


class ScalesFirst:
    """In place of the package opt_einsum, which may not be installed: the first operand with the last."""

    @staticmethod
    def contract_path(equation: str, *operands: Tensor, optimize: str) -> Any:
        return ([(0, 2), (0, 1)],) if len(operands) == 3 else ([(0, 1)],)


def test_opt_einsum_changes_nothing(monkeypatch):
    settings = torch.backends.opt_einsum.m
    for name, value in {
        "_opt_einsum": ScalesFirst, "is_available": lambda: True, "strategy": "auto", "enabled": True
    }.items():  # fmt: skip
        monkeypatch.setattr(settings, name, value)
    assert run(Einsum, "both") == 2


@pytest.mark.more
@pytest.mark.parametrize("style", FORMS, ids=named)
def test_sizes_that_are_symbols_from_the_start(style):
    assert 1 <= run(style, "both", dynamic=True) <= 1 + ASKED


@pytest.mark.one_in(3)
@pytest.mark.parametrize("style", [s if s in FEW else more(s) for s in (*FURTHER, *FORMS)], ids=named)
def test_one_graph_also_for_one_sequence_or_token(style):
    assert run(style, "both, and 1", "mxfp4", fullgraph=True)
