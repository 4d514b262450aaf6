"""Loops over the experts; some skip experts without rows. See moe_style_base.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from moe_style_base import FusedStyle, ListStyle, StackedStyle, style
from torch import Tensor, nn

# --- loops over the experts ---


@style("where loop")
class WhereLoop(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


@style("one-hot loop (transformers 4)")
class OneHotLoop(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros((x.shape[0], self.H), dtype=x.dtype, device=x.device)
        mask = F.one_hot(ids, num_classes=self.E).permute(2, 1, 0)
        for e in range(self.E):
            slot, token = torch.where(mask[e])
            current = x[None, token].reshape(-1, self.H)
            current = self.list[e](current) * weights[token, slot, None]
            out.index_add_(0, token, current.to(x.dtype))
        return out


@style("token mask loop")
class TokenMaskLoop(FusedStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.E):
            chosen = ids == e
            mask = chosen.any(-1)
            out[mask] += self.expert(e, x[mask]) * (weights * chosen).sum(-1)[mask].unsqueeze(-1)
        return out


@style("slot mask loop (boolean masks)")
class SlotMaskLoop(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            for j in range(self.k):
                mask = ids[:, j] == e
                out[mask] += weights[:, j].unsqueeze(1)[mask] * expert(x[mask])
        return out


@style("flat mask loop (index_put)")
class FlatMaskLoop(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        flat = ids.view(-1)
        rows = x.repeat_interleave(self.k, dim=0)
        y = torch.empty_like(rows)
        for e, expert in enumerate(self.list):
            y[flat == e] = expert(rows[flat == e])
        return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


@style("scatter_add loop, 3D parameters")
class ScatterAddLoop(StackedStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], self.H, dtype=torch.float32, device=x.device)
        for e in range(self.E):
            where = torch.nonzero(ids == e)
            token, slot = where[:, 0], where[:, 1]
            y = self.expert(e, x[token]) * weights[token, slot].unsqueeze(1)
            out = out.scatter_add(0, token.unsqueeze(1).expand(-1, self.H), y.float())
        return out.to(x.dtype)


@style("index_put loop, accumulate")
class IndexPutLoop(StackedStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.E):
            token, slot = (ids == e).nonzero(as_tuple=True)
            y = weights[token, slot].unsqueeze(-1) * self.expert(e, x.index_select(0, token))
            out.index_put_((token,), y, accumulate=True)
        return out


@style("where loop between two Linears (Nemotron-3's latent experts)")
class LatentLoop(WhereLoop):
    """The experts' x is a product of what the router reads."""

    def build(self) -> None:
        super().build()
        self.fc1 = nn.Linear(self.H, self.H, bias=self.bias)
        self.fc2 = nn.Linear(self.H, self.H, bias=self.bias)

    def latent(self, x: Tensor) -> Tensor:
        return self.fc1(x)

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.fc2(super().experts_of(self.latent(x), ids, weights))


# --- loops that skip experts without rows ---


@style("where loop, `if token.numel() == 0: continue`")
class SkippingLoop(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


@style("one-hot loop, `if token.shape[0] > 0:` (DeepSeek-V3)")
class GuardedLoop(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x, dtype=weights.dtype)
        mask = F.one_hot(ids, num_classes=self.E).permute(2, 0, 1)
        for e in range(len(self.list)):
            token, slot = torch.where(mask[e])
            if token.shape[0] > 0:
                chosen = weights[token, slot]
                y = self.list[e](x[token]) * chosen.unsqueeze(-1)
                out.index_add_(0, token, y)
        return out.type(x.dtype)


@style("token mask loop, `if mask.any():`")
class AnyLoop(FusedStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.E):
            chosen = ids == e
            mask = chosen.any(dim=-1)
            if mask.any():
                weight = (weights * chosen).sum(-1)
                out[mask] += self.expert(e, x[mask]) * weight[mask].unsqueeze(-1)
        return out


@style("slot mask loop, `if mask.sum() == 0: continue`")
class SumLoop(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for j in range(self.k):
            for e, expert in enumerate(self.list):
                mask = ids[:, j] == e
                if mask.sum() == 0:
                    continue
                out[mask] += weights[:, j].unsqueeze(1)[mask] * expert(x[mask])
        return out


@style("where loop, `if not torch.any(chosen): continue`")
class TorchAnyLoop(StackedStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.E):
            chosen = ids == e
            if not torch.any(chosen):
                continue
            token, slot = torch.where(chosen)
            y = self.expert(e, x[token]) * weights[token, slot].unsqueeze(-1)
            out.index_put_((token,), y, accumulate=True)
        return out


@style("where loop, `if len(token):`")
class LenLoop(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            if len(token):
                out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out
