"""Loops over the experts that are hit: styles as in moe_styles.py, which imports this file."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from moe_style_base import FusedStyle, ListStyle, StackedStyle, style
from torch import Tensor, nn


@style("loop over the experts that are hit (transformers 5, eager)")
class HitLoop(FusedStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(ids, num_classes=self.E + 1).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for e in hit:
            e = e[0]
            if e == self.E:
                continue
            with torch.no_grad():
                slot, token = torch.where(mask[e])
            y = self.expert(e, x[token]) * weights[token, slot, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out


@style("loop over the experts that are hit, choices made one by one (Phi-MoE)")
class OneByOneHitLoop(HitLoop):
    """Each choice has a softmax of its own, over the experts that are left and near the best."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x)
        left, ids, weights = scores, [], []
        for _ in range(self.k):
            best, chosen = left.max(dim=-1, keepdim=True)
            far = (best - scores) / scores.abs().clamp(min=best) > 0.2
            ids.append(chosen)
            weights.append(torch.softmax(left.masked_fill(far, float("-inf")), -1).gather(-1, chosen))
            left = torch.scatter(left, -1, chosen, float("-inf"))
        return torch.cat(ids, -1), torch.cat(weights, -1)


@style("loop over the experts that are hit, by name and up to a capacity (Switch)")
class NamedHitLoop(ListStyle):
    """Each expert takes few tokens for each choice. It skips the tokens that come later."""

    capacity = 1

    def build(self) -> None:
        super().build()
        self.named = nn.ModuleDict({f"expert_{e}": expert for e, expert in enumerate(self.list)})

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out, hot = torch.zeros_like(x), F.one_hot(ids, self.E)
        mask = (hot * (torch.cumsum(hot, dim=0) <= self.capacity)).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for e in hit:
            slot, token = torch.where(mask[e].squeeze(0))
            current = x[None, token].reshape(-1, self.H)
            y = self.named[f"expert_{e[0]}"](current) * weights[token, slot, None]
            out.index_add_(0, token, y.to(x.dtype))
        return out


class Hit(ListStyle):
    """`hit` and `rows` are written in several ways; the variable of the loop is what `hit` gives."""

    def mask_of(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, num_classes=self.E).permute(2, 1, 0)

    def hit(self, mask: Tensor) -> Tensor:
        return torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out, mask = torch.zeros_like(x), self.mask_of(ids)
        for e in self.hit(mask):
            expert = self.list[e]
            slot, token = torch.where(mask[e].squeeze(0))
            current = x[None, token].reshape(-1, self.H)
            y = expert(current) * weights[token, slot, None]
            out.index_add_(0, token, y.to(x.dtype))
        return out


@style("loop over the experts that are hit, each a tensor of one element (transformers 4.57)")
class TensorHitLoop(Hit):
    pass


@style("loop over the experts that are hit, all of these (GPT-OSS of transformers 4)")
class AllHitLoop(StackedStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        full = torch.zeros(x.shape[0], self.E, dtype=x.dtype).scatter_(1, ids, weights)
        out, mask = torch.zeros_like(x), F.one_hot(ids, num_classes=self.E + 1).permute(2, 1, 0)
        for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()[:]:
            e = e[0]
            if e == self.E:
                continue
            _, token = torch.where(mask[e])
            rows = x[token]
            y = (self.act(rows @ self.w1[e].T) * (rows @ self.w3[e].T)) @ self.w2[e].T
            out.index_add_(0, token, y * full[token, e, None])
        return out


@style("loop over the experts that are hit, as numbers: `tolist()`, rows by a boolean mask (Switch)")
class NumberHitLoop(ListStyle):
    def build(self) -> None:
        super().build()
        self.named = nn.ModuleDict({f"expert_{e}": expert for e, expert in enumerate(self.list)})

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for slot in range(self.k):
            mask = F.one_hot(ids[:, slot], self.E).bool()
            some = mask.reshape(-1, self.E).sum(dim=0)
            hit = torch.nonzero(some, as_tuple=True)[0].tolist()
            one = torch.zeros_like(x)
            for e in hit:
                one[mask[:, e]] = getattr(self.named, f"expert_{e}")(x[mask[:, e]])
            out = out + one * weights[:, slot, None]
        return out


class NamedInIds(ListStyle):
    """`named` is written in several ways; the rows are those of `ids == e`."""

    def named(self, ids: Tensor) -> Tensor:
        return torch.unique(ids)

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in self.named(ids):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.list[e](x[token]) * weights[token, slot, None])
        return out


@style("loop over the experts among the ids: `torch.unique(ids)`")
class UniqueLoop(NamedInIds):
    pass


@style("loop over the experts among a choice's ids: `ids.unique().tolist()`")
class UniqueNumbersLoop(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for slot in range(self.k):
            for e in ids[:, slot].unique().tolist():
                mask = ids[:, slot] == e
                out[mask] += self.list[e](x[mask]) * weights[mask, slot, None]
        return out


@style("one-hot loop, rows indexed by lists: `token.tolist()` (Mixtral's old remote code)")
class ListedRows(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out, mask = torch.zeros_like(x), F.one_hot(ids, num_classes=self.E).permute(2, 1, 0)
        for e in range(self.E):
            slot, token = torch.where(mask[e])
            if token.shape[0] == 0:
                continue
            tokens = token.tolist()
            slots = slot.tolist()
            current = x[None, tokens].reshape(-1, self.H)
            y = self.list[e](current) * weights[tokens, slots, None]
            out.index_add_(0, token, y.to(x.dtype))
        return out
