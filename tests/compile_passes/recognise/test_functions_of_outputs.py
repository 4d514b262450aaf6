"""Experts with an elementwise function of their outputs before these are weighted and added."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from moe_models import Recorder, relative_error
from moe_styles import ListStyle, StackedStyle
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Loop(ListStyle):
    def inside(self, e: int, rows: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(self.list[e](rows)) * weight

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.E):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.inside(e, x[token], weights[token, slot, None]))
        return out


class Sigmoid(Loop):
    """Not zero where the output is."""

    def inside(self, e, rows, weight):
        return torch.sigmoid(self.list[e](rows) - 1) * weight


class Dense(Loop):
    def experts_of(self, x, ids, weights):
        y = torch.stack([F.relu(expert(x)) for expert in self.list], 1)
        return (self.router(x).softmax(-1)[..., None] * y).sum(1)


class Gates(Dense):
    """Two tasks, as MMoE has them; each has its gate."""

    def build(self):
        super().build()
        self.gates = nn.ModuleList(nn.Linear(self.H, self.E) for _ in range(2))

    def experts_of(self, x, ids, weights):
        y = torch.stack([F.relu(expert(x)) for expert in self.list], 1)
        return torch.cat([(g(x).softmax(-1)[..., None] * y).sum(1) for g in self.gates], -1)


class OfTheSum(StackedStyle):
    """The function does not belong to the experts, although each token has one: the router weights the
    experts' outputs."""

    def experts_of(self, x, ids, weights):
        ids = ids[:, 0]
        h = self.act(torch.bmm(self.w1[ids], x.unsqueeze(-1))) * torch.bmm(self.w3[ids], x.unsqueeze(-1))
        return F.relu(torch.bmm(self.w2[ids], h).squeeze(-1))


class OneHasNone(Loop):
    def inside(self, e, rows, weight):
        return super().inside(e, rows, weight) if e else self.list[e](rows) * weight


class OfTheWeighted(Loop):
    def inside(self, e, rows, weight):
        return torch.tanh(self.list[e](rows) * weight)


class WithItsInput(Loop):
    def inside(self, e, rows, weight):
        return torch.tanh(self.list[e](rows) + rows) * weight


REFUSED = {OneHasNone: "change their outputs differently"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("cls", "op"),
    [
        (Loop, "fp4::moe"),
        (Gates, "fp4::mm"),
        (OfTheWeighted, "fp4::mm"),
        (WithItsInput, "fp4::mm"),
        (OfTheSum, "fp4::moe"),
        more(Sigmoid, "fp4::moe"),
        more(Dense, "fp4::moe"),
        *((cls, "") for cls in REFUSED),
    ],
)
def test_functions_of_outputs(cls, op):
    module, recorder = cls(experts=4), Recorder(activation="bf16")
    twin, compiled = module.twin(), torch.compile(module, backend=recorder, dynamic=True)
    with torch.no_grad():
        for n in (9, 7):
            x = torch.randn(n, module.H)
            exact = (twin if op else module)(x)
            assert relative_error(compiled(x), exact) < 1e-5, recorder.reasons
    assert recorder.ops == ([op] if op else []), recorder.reasons
    if not op:
        (site,) = recorder.sites
        assert REFUSED[cls] in site.reason and site.change, site
    forms = [site.form for site in recorder.sites if site.rewritten]
    assert any("each output becomes" in form for form in forms) == (op == "fp4::moe" and cls is not OfTheSum)
