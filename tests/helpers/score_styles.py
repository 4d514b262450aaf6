"""Adds more styles to STYLES: scores that choose experts without topk, and counts that skip experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from moe_styles import ListStyle, style
from torch import Tensor


@style("dense loop, scores by ReLU (ReMoE)")
class ReluScores(ListStyle):
    def forward(self, x: Tensor) -> Tensor:
        scores, out = F.relu(self.router(x)), torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            out = out + scores[:, e : e + 1] * expert(x)
        return out


@style("rows whose score is above a threshold")
class Threshold(ListStyle):
    def forward(self, x: Tensor) -> Tensor:
        scores, out = torch.sigmoid(self.router(x)), torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            (token,) = torch.where(scores[:, e] > 0.5)
            out.index_add_(0, token, expert(x[token]) * scores[token, e, None])
        return out


@style("rows whose scattered weight is above zero, `out[mask] += ...`")
class PositiveWeights(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        full = torch.zeros(x.shape[0], self.E, dtype=x.dtype).scatter(1, ids, weights)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            chosen = full[:, e] > 0
            if not chosen.any():
                continue
            out[chosen] += expert(x[chosen]) * full[chosen][:, e, None]
        return out


@style("where loop, experts skipped by `bincount(...).tolist()` (DeepSeek-V3's inference code)")
class SkippedByCounts(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        counts = torch.bincount(ids.flatten(), minlength=self.E).tolist()
        for e, expert in enumerate(self.list):
            if counts[e] == 0:
                continue
            token, slot = torch.where(ids == e)
            out[token] += expert(x[token]) * weights[token, slot, None]
        return out
