"""Adds small versions of the styles of other people's packages (tests/real/) to STYLES."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from moe_styles import Expert, ListStyle, StackedSlices, StackedStyle, style
from torch import Tensor, nn

# --- out[token] += y adds every row, because no token has one expert twice ---


@style("where loop, `out[token] += ...` (mistral-inference)")
class IncrementLoop(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            out[token] += weights[token, slot, None] * expert(x[token])
        return out


@style("loop over masks of all experts, `out[token] += ...` (litgpt)")
class MasksLoop(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        masks = (ids.unsqueeze(-1) == torch.arange(self.E, device=x.device)).permute(2, 0, 1)
        out = torch.zeros_like(x)
        for mask, expert in zip(masks, self.list):
            token, slot = torch.where(mask)
            out[token] = out[token] + expert(x[token]) * weights[token, slot, None]
        return out


@style("`out[token] += ...`, ids by argsort")
class SortedChoices(StackedStyle):
    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.softmax(self.router(x), -1)
        ids = torch.argsort(scores, dim=-1, descending=True)[:, : self.k]
        return ids, scores.gather(-1, ids)

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.E):
            token, slot = (ids.int() == e).nonzero(as_tuple=True)
            out[token] += weights[token, slot].unsqueeze(1) * self.expert(e, x[token])
        return out


# --- experts' rows are written over others ---


@style("rows put over a copy of x, which tokens beyond a capacity keep (Switch in transformers 4)")
class PutOverInputs(ListStyle):
    def forward(self, x: Tensor) -> Tensor:
        scores, out = torch.softmax(self.router(x), -1), x.clone()
        one_hot = F.one_hot(scores.argmax(-1), self.E)
        mask = (one_hot * (one_hot.cumsum(0) <= 2)).bool()
        for e in torch.nonzero(mask.sum(0), as_tuple=True)[0].tolist():
            out[mask[:, e]] = self.list[e](x[mask[:, e]])
        return scores.amax(-1, keepdim=True) * out


@style("slices of a masked buffer, each written over by its expert (NLLB-MoE)")
class MaskedSlices(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        probs = torch.zeros(x.shape[0], self.E).scatter(1, ids, weights)
        rows = torch.einsum("th,te->eth", x, probs.bool())
        for e, expert in enumerate(self.list):
            chosen = probs.bool()[:, e]
            rows[e, chosen] = torch.einsum("t,th->th", probs[chosen, e], expert(rows[e, chosen]))
        return rows.sum(0)


@style("slices of a buffer, places by `one_hot` of as many classes as the data says (ST-MoE)")
class SlicesOfCountedPlaces(StackedSlices):
    def places(self, ids: Tensor) -> Tensor:
        c = max(ids.shape[0] // 2, 4)
        mask = F.one_hot(ids, self.E).view(-1, self.E)
        position = ((mask.cumsum(0) - 1) * mask).sum(-1)
        slots = F.one_hot(position, max(position.max() + 1, c))[..., :c]
        return (mask.unsqueeze(-1) * slots.unsqueeze(-2)).view(*ids.shape, self.E, c)


# --- routers ---


@style("dense loop, weights of two choices added up as matrices, which may name one expert twice")
class AddedMatrices(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        second = (ids[:, 0] + x[:, 0].gt(0)) % self.E
        first, other = (F.one_hot(i, self.E) * w[:, None] for i, w in zip((ids[:, 0], second), weights.T))
        gates = first + other
        return sum(expert(x) * gates[:, e, None] for e, expert in enumerate(self.list))


@style("where loop, finite routing asserted with a message (pytorch-mixtures)")
class AssertedRouting(IncrementLoop):
    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = super().route(x)
        for name, t in (("x", x), ("weights", weights)):
            assert torch.isfinite(t).all(), f"{name} must be finite"
        return ids, weights


@style("first choice of two, rows overwritten (OmegaViT)")
class FirstChoice(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            mask = ids[:, 0] == e
            if mask.any():
                out[mask] = expert(x[mask]) * weights[mask, 0].unsqueeze(-1)
        return out


# --- experts ---


class GainedExpert(Expert):
    def __init__(self, h: int, i: int, bias: bool) -> None:
        super().__init__(h, i, F.gelu, True, bias)
        self.gain = nn.Parameter(torch.rand(i) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)) * self.w3(x) * self.gain)


@style("where loop, a vector of each expert's own scales the activation (ST-MoE)")
class Gained(IncrementLoop):
    def build(self) -> None:
        self.list = nn.ModuleList(GainedExpert(self.H, self.I, self.bias) for _ in range(self.E))
