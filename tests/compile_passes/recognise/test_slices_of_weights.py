"""Experts that multiply slices of their weights separately, as with `pretraining_tp`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from moe_models import Recorder, relative_error
from moe_styles import ListStyle
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Sliced(ListStyle):
    parts = 2

    def slices(self, w: Tensor, dim: int) -> tuple[Tensor, ...]:
        return w.split(self.I // self.parts, dim)

    def inside(self, expert: nn.Module, x: Tensor) -> Tensor:
        gate, up = (
            torch.cat([F.linear(x, w) for w in self.slices(m.weight, 0)], -1) for m in (expert.w1, expert.w3)
        )
        hidden = (F.silu(gate) * up).split(self.I // self.parts, -1)
        return sum(F.linear(h, w) for h, w in zip(hidden, self.slices(expert.w2.weight, 1)))

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.inside(expert, x[token]) * weights[token, slot, None])
        return out


class InThree(Sliced):
    parts = 3


class Dense(Sliced):
    def experts_of(self, x, ids, weights):
        y = torch.stack([self.inside(expert, x) for expert in self.list], 1)
        return (self.router(x).softmax(-1)[..., None] * y).sum(1)


class InAnotherOrder(Sliced):
    """Gate's and up's slices change places, down's do not."""

    def slices(self, w, dim):
        parts = super().slices(w, dim)
        return parts if dim else parts[::-1]


class ASliceTwice(Sliced):
    def slices(self, w, dim):
        parts = super().slices(w, dim)
        return parts if dim else (parts[0], parts[0])


class OneIsMissing(Sliced):
    parts = 3

    def inside(self, expert, x):
        hidden = (F.silu(expert.w1(x)) * expert.w3(x)).split(self.I // 3, -1)
        first, _, last = self.slices(expert.w2.weight, 1)
        return F.linear(hidden[0], first) + F.linear(hidden[2], last)


@pytest.mark.parametrize(
    ("cls", "ops"),
    [
        (Sliced, ["fp4::moe"]),
        (Dense, ["fp4::moe"]),
        more(InThree, ["fp4::moe"]),
        (InAnotherOrder, []),
        more(ASliceTwice, []),
        (OneIsMissing, []),
    ],
)
def test_slices_that_are_joined_are_the_weight(cls, ops):
    module, recorder = cls(experts=4), Recorder(activation="bf16")
    twin, compiled = module.twin(), torch.compile(module, backend=recorder, dynamic=True)
    with torch.no_grad():
        for n in (9, 7):
            x = torch.randn(n, module.H)
            assert relative_error(compiled(x), (twin if ops else module)(x)) < 1e-5, recorder.reasons
    assert recorder.ops == ops, recorder.reasons
    assert ops or recorder.reasons
