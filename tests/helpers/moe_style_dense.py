"""Every expert for every token, weights gathered for each token, and one expert a token by argmax.

See moe_style_base.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from moe_style_base import FusedStyle, ListStyle, StackedStyle, style
from torch import Tensor, nn

# --- every expert sees every token ---


@style("dense loop, scattered weights")
class DenseLoop(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        full = torch.zeros(x.shape[0], self.E, dtype=x.dtype).scatter(1, ids, weights)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            out = out + expert(x) * full[:, e, None]
        return out


@style("dense loop, masked sum")
class DenseMaskedLoop(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return sum(
            expert(x) * (weights * (ids == e)).sum(-1, keepdim=True) for e, expert in enumerate(self.list)
        )


@style("where loop, each output normalised before it is weighted (Muse Spark)")
class NormedLoop(ListStyle):
    def build(self) -> None:
        super().build()
        self.gain = nn.Parameter(torch.randn(self.H) / 4)

    def normed(self, y: Tensor, e: int) -> Tensor:
        y = y.float() * (1.0 + self.gain).float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(self.gain)

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.normed(expert(x[token]), e) * weights[token, slot, None])
        return out


@style("soft mixture of all experts")
class SoftLoop(ListStyle):
    def forward(self, x: Tensor) -> Tensor:
        full = torch.softmax(self.router(x), -1)
        out: Any = 0
        for e, expert in enumerate(self.list):
            out = out + full[:, e : e + 1] * expert(x)
        return out


@style("dense stack")
class DenseStack(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        full = torch.zeros(x.shape[0], self.E, dtype=x.dtype).scatter_(1, ids, weights)
        y = torch.stack([expert(x) for expert in self.list], dim=1)
        return (y * full.unsqueeze(-1)).sum(1)


@style("dense einsum")
class DenseEinsum(StackedStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        full = (F.one_hot(ids, self.E).to(x.dtype) * weights.unsqueeze(-1)).sum(1)
        h = self.act(torch.einsum("th,eih->tei", x, self.w1)) * torch.einsum("th,eih->tei", x, self.w3)
        return torch.einsum("teh,te->th", torch.einsum("tei,ehi->teh", h, self.w2), full)


@style("dense bmm")
class DenseBmm(FusedStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        full = torch.zeros_like(self.router(x)).scatter_(1, ids, weights)
        rows = x.repeat(self.E, 1).view(self.E, -1, self.H)
        gate, up = torch.bmm(rows, self.w13).chunk(2, dim=-1)
        y = torch.bmm(up * self.act(gate), self.w2)
        y = y.view(self.E, x.shape[0], self.H) * full.transpose(0, 1)[..., None]
        return y.sum(dim=0)


@style("dense bmm, scaled inputs (Llama 4)")
class ScaledBmm(FusedStyle):
    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        top, ids = torch.topk(logits, self.k, dim=1)
        scores = torch.sigmoid(torch.full_like(logits, float("-inf")).scatter_(1, ids, top).float())
        rows = x.repeat(self.E, 1) * scores.to(x.dtype).transpose(0, 1).reshape(-1, 1)
        gate, up = torch.bmm(rows.view(self.E, -1, self.H), self.w13).chunk(2, dim=-1)
        y = torch.bmm(up * self.act(gate), self.w2).view(-1, self.H)
        return y.reshape(self.E, -1, self.H).sum(dim=0)


# --- weights gathered for each token ---


@style("gather + einsum (gpt-fast)")
class GatherEinsum(StackedStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        w1, w3, w2 = self.w1[ids], self.w3[ids], self.w2[ids]
        h = self.act(torch.einsum("ti,taoi->tao", x, w1)) * torch.einsum("ti,taoi->tao", x, w3)
        return torch.einsum("tai,ta->ti", torch.einsum("tao,taio->tai", h, w2), weights)


@style("gather + bmm")
class GatherBmm(FusedStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        rows = x.unsqueeze(1).expand(-1, self.k, -1).reshape(-1, 1, self.H)
        gate, up = torch.bmm(rows, self.w13.index_select(0, flat)).chunk(2, -1)
        y = torch.bmm(self.act(gate) * up, self.w2.index_select(0, flat)).view(-1, self.k, self.H)
        return torch.bmm(weights.unsqueeze(1), y).squeeze(1)


# --- one expert a token, by argmax ---


class Argmax(ListStyle):
    """ids [T], and each token's score for its one expert."""

    def scores(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.softmax(self.router(x), -1), self.router(x).argmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.scores(x)
        return self.experts_of(x, ids, scores.gather(-1, ids.unsqueeze(-1)))


@style("argmax router, gathered scores, boolean masks (Switch)")
class ArgmaxLoop(Argmax):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for e, expert in enumerate(self.list):
            mask = ids == e
            out[mask] = expert(x[mask])
        return out * weights


@style("argmax router, index_add of weighted rows")
class ArgmaxIndexAdd(Argmax):
    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.scores(x)
        weights = scores[torch.arange(x.shape[0]), ids]
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token = (ids == e).nonzero().squeeze(-1)
            out.index_add_(0, token, expert(x[token]) * weights[token].unsqueeze(-1))
        return out


@style("argmax router, kept dimension, dense loop")
class ArgmaxDense(Argmax):
    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(self.router(x), -1)
        ids = scores.argmax(-1, keepdim=True)
        weights, out = scores.gather(-1, ids), torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            out = out + expert(x) * (weights * (ids == e))
        return out


@style("argmax router, rows sorted and split by `bincount(...).tolist()` (BASE)")
class ArgmaxSplits(Argmax):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        order = ids.argsort()
        parts = x[order].split(torch.bincount(ids, minlength=self.E).tolist())
        y = torch.cat([expert(part) for expert, part in zip(self.list, parts)])
        out = torch.empty_like(y)
        out[order] = y
        return out * weights


@style("argmax router, gathered weights, bmm")
class ArgmaxBmm(FusedStyle):
    def forward(self, x: Tensor) -> Tensor:
        scores, ids = torch.softmax(self.router(x), -1).max(-1)
        gate, up = torch.bmm(x.unsqueeze(1), self.w13[ids]).chunk(2, -1)
        return torch.bmm(self.act(gate) * up, self.w2[ids]).squeeze(1) * scores[:, None]
