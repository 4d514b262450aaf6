"""A vector for each expert that scales the input of its down product."""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn.functional as F
from moe_models import Recorder, relative_error
from moe_styles import StackedStyle
from package_styles import Gained
from torch import Tensor, nn


class OneHasNone(Gained):
    def build(self) -> None:
        super().build()
        self.list[1].forward = lambda x, e=self.list[1]: e.w2(F.gelu(e.w1(x)) * e.w3(x))


class OfTheNextExpert(Gained):
    """Which is what it computes, so rewritten."""

    def build(self) -> None:
        super().build()
        gains = [x.gain for x in self.list]
        for e, x in enumerate(self.list):
            x.gain = gains[(e + 1) % self.E]


def scaled_by_its_mean(e: nn.Module, r: Tensor) -> Tensor:
    return e.w2(F.gelu(e.w1(r)) * e.w3(r) * r.mean(-1, keepdim=True))


class OfTheRow(Gained):
    """One number for each row is not a vector of weights, so each product becomes a separate operator."""

    def build(self) -> None:
        super().build()
        for x in self.list:
            x.forward = types.MethodType(scaled_by_its_mean, x)


class Stacked(StackedStyle):
    def build(self) -> None:
        super().build()
        self.gain = nn.Parameter(torch.rand(self.E, self.I) + 0.5)

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.E):
            token, slot = torch.where(ids == e)
            r = x[token]
            h = self.act(r @ self.w1[e].T) * (r @ self.w3[e].T) * self.gain[e]
            out[token] += (h @ self.w2[e].T) * weights[token, slot, None]
        return out


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("cls", "reason"), [(OneHasNone, "gains"), (OfTheNextExpert, ""), (OfTheRow, None), (Stacked, "")]
)
def test_gains(cls, reason):
    torch._dynamo.reset()
    module, recorder = cls(experts=4), Recorder(activation="bf16")
    twin, compiled = module.twin(), torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    with torch.no_grad():
        x = torch.randn(9, module.H)
        got = compiled(x)
        assert relative_error(got, twin(x) if recorder.ops else module(x)) < 1e-5
    if reason == "":
        assert recorder.ops == ["fp4::indexed_mm"], recorder.reasons
        assert "vector of the expert's own" in recorder.reasons
    elif reason is None:
        assert set(recorder.ops) == {"fp4::mm"}, recorder.reasons
    else:
        assert not recorder.ops
        assert reason in recorder.reasons, recorder.reasons
