"""[batch, length, hidden], kept three-dimensional: what runs in 4 bits depends on no call before.

The first call has static sizes; once they change, Dynamo makes symbols of the batch, the length, or both.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from fp4_ops.compile_passes.dynamo import capture_loops
from moe_models import Recorder, relative_error
from moe_styles import ListStyle, StackedStyle
from torch import Tensor

EXACT = 1e-5


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch.set_num_threads(1)
    capture_loops()


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
    """A soft mixture: all experts serve every token."""

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


TOPS = {
    DenseLoop: 2, DenseLoopLast: 2, MaskedSoftmax: 2, AllExperts: 6, WhereLoop: 2, FlatInside: 2, Einsum: 2,
    OneHotLoop: 2, Gathered: 2, BesideAnother: 2,
}  # fmt: skip
"""How many experts a token meets."""

CALLS = {
    "both": [(2, 8), (4, 9), (3, 5), (2, 8)],
    "the length": [(2, 8), (2, 9), (2, 5)],
    "the batch": [(2, 8), (4, 8), (3, 8)],
}


def run(style: type, shapes: list[tuple[int, int]], **options) -> tuple[Recorder, int]:
    module, recorder = style(), Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, **options)
    twin = module.twin()
    with torch.no_grad():
        for shape in shapes:
            x = torch.randn(*shape, module.H)
            want, got = twin(x), compiled(x)
            assert got.shape == want.shape and relative_error(got, want) < EXACT, shape
    return recorder, recorder.compilations


@pytest.mark.parametrize("calls", ["both", more("the length"), more("the batch")])
@pytest.mark.parametrize("style", TOPS, ids=lambda s: s.__name__)
def test_sizes_that_change(style, calls):
    recorder, compilations = run(style, CALLS[calls])
    assert compilations == 2
    assert recorder.ops == ["fp4::moe"] * 2
    assert all(f"top {TOPS[style]}," in s.shape for s in recorder.sites)


@pytest.mark.more
@pytest.mark.parametrize("style", TOPS, ids=lambda s: s.__name__)
def test_sizes_that_are_symbols_from_the_start(style):
    recorder, compilations = run(style, CALLS["both"], dynamic=True)
    assert compilations == 1 and recorder.ops == ["fp4::moe"]
