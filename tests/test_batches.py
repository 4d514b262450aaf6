"""Experts of [B, T, H] that is never flattened, with both sizes symbolic: 4 bits whatever ran before."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from moe_models import Recorder, relative_error
from moe_styles import FusedStyle, ListStyle, StackedStyle, Style
from torch import Tensor

FORMS: dict[str, type[Style]] = {}


def form(cls: type[Style]) -> type[Style]:
    FORMS[cls.__name__] = cls
    return cls


@form
class WhereLoop(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            batch, token, slot = torch.where(ids == e)
            out[batch, token] += expert(x[batch, token]) * weights[batch, token, slot, None]
        return out


@form
class MaskLoop(FusedStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.E):
            chosen = ids == e
            mask = chosen.any(-1)
            out[mask] += self.expert(e, x[mask]) * (weights * chosen).sum(-1)[mask].unsqueeze(-1)
        return out


@form
class ScatteredWeights(ListStyle):
    """Only the chosen experts need run."""

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        every = torch.zeros(*x.shape[:-1], self.E).scatter(-1, ids, weights)
        return sum(every[..., e, None] * expert(x) for e, expert in enumerate(self.list))


@form
class SoftmaxOfScattered(StackedStyle):
    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.router(x).topk(self.k, dim=-1)
        every = torch.full_like(self.router(x), float("-inf")).scatter(-1, ids, scores).softmax(-1)
        return sum(every[:, :, e].unsqueeze(-1) * self.expert(e, x) for e in range(self.E))


@form
class DenseEinsum(StackedStyle):
    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(self.router(x), -1)
        h = F.silu(torch.einsum("bth,eih->btei", x, self.w1)) * torch.einsum("bth,eih->btei", x, self.w3)
        return torch.einsum("btei,ehi,bte->bth", h, self.w2, scores)


@form
class UnnormalisedScores(ListStyle):
    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid()
        ids = scores.topk(self.k)[1]
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            weight = (scores[..., e] * (ids == e).any(-1)).unsqueeze(-1)
            out = out + weight * expert(x)
        return out


FEW = ("WhereLoop", "ScatteredWeights", "DenseEinsum")


@pytest.mark.parametrize("name", [name if name in FEW else more(name) for name in FORMS])
def test_batch_and_length_both_change(name):
    torch._dynamo.reset()
    torch.set_num_threads(1)
    module, recorder = FORMS[name](experts=4), Recorder(activation="bf16", format="mxfp4")
    twin, compiled = module.twin("mxfp4"), torch.compile(module, backend=recorder, fullgraph=True)
    with torch.no_grad():
        for batch, length in ((2, 8), (4, 9), (3, 5), (5, 9), (1, 7), (2, 1), (1, 1)):
            x = torch.randn(batch, length, module.H)
            assert relative_error(compiled(x), twin(x)) < 1e-5, (batch, length, recorder.reasons)
    assert recorder.ops == ["fp4::moe"] * recorder.compilations, recorder.reasons
    tops = {s.shape.split(",")[1] for s in recorder.sites}
    assert tops == {f" top {module.E if name == 'DenseEinsum' else module.k}"}
