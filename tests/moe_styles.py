"""Ways people write a Mixture-of-Experts layer, none of them with fp4_ops in mind.

Each style is a module over x [T, H] that routes and runs its experts. `matrices(e)` gives the weights of
expert e as writable views [N, K], grouped as they are quantised, so that one function makes every twin.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STYLES: dict[str, type[Style]] = {}


def style(name: str) -> Callable[[type], type]:
    def add(cls: type) -> type:
        STYLES[name] = cls
        return cls

    return add


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


class Expert(nn.Module):
    """One expert as its own module: gated if `gated`, with biases if `bias`."""

    def __init__(self, h: int, i: int, act: Callable[..., Tensor], gated: bool, bias: bool) -> None:
        super().__init__()
        self.act = act
        self.w1 = nn.Linear(h, i, bias=bias)
        self.w3 = nn.Linear(h, i, bias=bias) if gated else None
        self.w2 = nn.Linear(i, h, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.w1(x))
        return self.w2(h * self.w3(x) if self.w3 is not None else h)


class Style(nn.Module):
    """Router and sizes; a subclass holds the weights and writes `experts(x, ids, weights)`."""

    def __init__(
        self, experts: int = 6, k: int = 2, hidden: int = 32, inter: int = 48,
        act: Callable[..., Tensor] = F.silu, gated: bool = True, bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.E, self.k, self.H, self.I = experts, k, hidden, inter
        self.act, self.gated, self.bias = act, gated, bias
        self.router = nn.Linear(hidden, experts, bias=False)
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    def matrices(self, e: int) -> list[list[Tensor]]:
        raise NotImplementedError

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        raise NotImplementedError

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.topk(torch.softmax(self.router(x).float(), -1), self.k)
        return ids, (weights / weights.sum(-1, keepdim=True)).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        return self.experts_of(x, ids, weights)

    def twin(self, format: str = "nvfp4") -> Style:
        """The same module over exactly the weights that the packed ones stand for."""
        twin = copy.deepcopy(self)
        with torch.no_grad():
            for e in range(self.E):
                for parts in twin.matrices(e):
                    whole = torch.cat([p.detach().float() for p in parts])
                    packed = torch.ops.fp4.quantize(whole, format)
                    exact = torch.ops.fp4.dequantize(*packed, format, torch.float32)
                    for part, new in zip(parts, exact.split([p.shape[0] for p in parts])):
                        part.copy_(new)
        return twin


class ListStyle(Style):
    """A ModuleList of experts."""

    def build(self) -> None:
        make = (Expert(self.H, self.I, self.act, self.gated, self.bias) for _ in range(self.E))
        self.list = nn.ModuleList(make)

    def matrices(self, e: int) -> list[list[Tensor]]:
        x = self.list[e]
        up = [x.w1.weight.data] + ([x.w3.weight.data] if x.w3 is not None else [])
        return [up, [x.w2.weight.data]]


class StackedStyle(Style):
    """Weights in 3D parameters: w1 and w3 [E, I, H], w2 [E, H, I]."""

    def build(self) -> None:
        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)

        self.w1, self.w3 = parameter(self.E, self.I, self.H), parameter(self.E, self.I, self.H)
        self.w2 = parameter(self.E, self.H, self.I)

    def matrices(self, e: int) -> list[list[Tensor]]:
        return [[self.w1.data[e], self.w3.data[e]], [self.w2.data[e]]]

    def expert(self, e: int, x: Tensor) -> Tensor:
        return (self.act(x @ self.w1[e].T) * (x @ self.w3[e].T)) @ self.w2[e].T


class FusedStyle(Style):
    """Transposed and fused 3D parameters: w13 [E, H, 2I], w2 [E, I, H]."""

    def build(self) -> None:
        self.w13 = nn.Parameter(torch.randn(self.E, self.H, 2 * self.I) / self.H**0.5)
        self.w2 = nn.Parameter(torch.randn(self.E, self.I, self.H) / self.I**0.5)

    def matrices(self, e: int) -> list[list[Tensor]]:
        return [[self.w13.data[e].T], [self.w2.data[e].T]]

    def expert(self, e: int, x: Tensor) -> Tensor:
        gate, up = (x @ self.w13[e]).chunk(2, -1)
        return (self.act(gate) * up) @ self.w2[e]


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


# --- rows sorted by expert ---


def grouped_mm(a: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    if a.dtype == torch.bfloat16:
        return torch._grouped_mm(a, w, offs)
    return torch.ops.transformers.grouped_mm_fallback(a, w, offs)


@style("sorted grouped_mm (torchtitan)")
class SortedGroupedMM(StackedStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        counts = torch.histc(ids.view(-1).float(), bins=self.E, min=0, max=self.E)
        perm = torch.argsort(ids.view(-1), stable=True)
        sorted_weights, token = weights.view(-1)[perm], perm // self.k
        index = token.reshape(-1, 1).expand(-1, self.H)
        rows = torch.gather(x, 0, index)
        offs = torch.cumsum(counts, 0, dtype=torch.int32)
        h = self.act(grouped_mm(rows, self.w1.transpose(-2, -1), offs))
        h = h * grouped_mm(rows, self.w3.transpose(-2, -1), offs)
        y = grouped_mm(h, self.w2.transpose(-2, -1), offs)
        y = (y.float() * sorted_weights.float().reshape(-1, 1)).to(x.dtype)
        return torch.zeros_like(x).scatter_add(0, index, y)


@style("permute, unpermute (Megatron)")
class PermuteUnpermute(FusedStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        flat = ids.flatten()
        counts = F.one_hot(flat, self.E).sum(0)
        perm = torch.argsort(flat, stable=True)
        rows = x.index_select(0, perm // self.k)
        offs = counts.cumsum(0).to(torch.int32)
        gate, up = grouped_mm(rows, self.w13, offs).chunk(2, -1)
        y = grouped_mm(self.act(gate) * up, self.w2, offs)
        restored = torch.zeros_like(y).index_copy(0, perm, y)
        return (restored.view(-1, self.k, self.H) * weights.unsqueeze(-1)).sum(dim=1)


class SortedSplits(StackedStyle):
    """Each expert's rows are a slice of all, of a size that only the data knows."""

    def counts(self, ids: Tensor) -> Tensor:
        raise NotImplementedError

    def each(self, rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        parts = rows.split(counts, dim=0)
        return torch.cat([F.linear(parts[e], weight[e]) for e in range(self.E)], dim=0)

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        counts = self.counts(ids).tolist()
        order = ids.flatten().sort(0).indices
        token = order.div(self.k, rounding_mode="trunc")
        rows = x[token]
        h = self.act(self.each(rows, self.w1, counts)) * self.each(rows, self.w3, counts)
        y = self.each(h, self.w2, counts) * weights.flatten()[order][:, None]
        return torch.zeros_like(x).index_add(0, token, y)


@style("sorted splits, counted in a scatter (JetMoE)")
class ScatteredSplits(SortedSplits):
    def counts(self, ids: Tensor) -> Tensor:
        return torch.zeros([ids.shape[0], self.E], dtype=torch.bfloat16).scatter(1, ids, 1).long().sum(0)


@style("sorted splits, `bincount(...).tolist()`")
class BinnedSplits(SortedSplits):
    def counts(self, ids: Tensor) -> Tensor:
        return torch.bincount(ids.view(-1), minlength=self.E)


@style("sorted splits, one-hot counts, restored by index_put (DeepSeek-V3's own)")
class RestoredSplits(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        counts = F.one_hot(ids.view(-1), self.E).sum(dim=0).tolist()
        order = ids.view(-1).argsort()
        parts = x[order // self.k].split(counts)
        y = torch.cat([expert(part) for expert, part in zip(self.list, parts)])
        new = torch.empty_like(y)
        new[order] = y
        return (new.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)


@style("sorted slices, numpy counts, experts without rows skipped (DeepSeek-V3's `moe_infer`)")
class SlicedLoop(ListStyle):
    def counted(self, ids: Tensor) -> Tensor:
        counts = ids.new_zeros((ids.shape[0], len(self.list)))
        counts.scatter_(1, ids, 1)
        return counts.sum(dim=0)

    def sorted(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        order = ids.view(-1).argsort()
        return order, x[order // ids.shape[1]]

    def restored(self, y: Tensor, order: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        new = torch.empty_like(y)
        new[order] = y
        new = new.view(*ids.shape, -1).type(weights.dtype).mul_(weights.unsqueeze(dim=-1))
        return new.sum(dim=1).type(y.dtype)

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        order, rows = self.sorted(x, ids)
        counts = self.counted(ids).cpu().numpy()
        outputs = []
        start = 0
        for i, n in enumerate(counts):
            end = start + n
            if n == 0:
                continue
            expert = self.list[i]
            outputs.append(expert(rows[start:end]))
            start = end
        y = torch.cat(outputs, dim=0) if len(outputs) else rows.new_empty(0)
        return self.restored(y, order, ids, weights)


@style("sorted slices, `bincount(...).tolist()`, bounds added up in Python")
class BinnedSlices(SlicedLoop):
    def counted(self, ids: Tensor) -> Tensor:
        return torch.bincount(ids.view(-1), minlength=self.E)

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        order, rows = self.sorted(x, ids)
        counts, outputs, start = self.counted(ids).tolist(), [], 0
        for e in range(self.E):
            outputs.append(self.list[e](rows[start : start + counts[e]]))
            start += counts[e]
        y = torch.cat(outputs) * weights.view(-1)[order][:, None]
        return torch.zeros_like(x).index_add(0, order // self.k, y)


# --- a buffer of fixed capacity for each expert ---


class Slices(ListStyle):
    """Expert e takes slice e of a buffer, in which rows have places."""

    capacity = 8

    def places(self, ids: Tensor) -> Tensor:
        """[T, k, E, C]: whether choice j of a token has place c at an expert."""
        mask = F.one_hot(ids, self.E).view(-1, self.E)
        position = (mask.cumsum(0) - 1) * mask
        kept = mask * (position < self.capacity)
        slots = F.one_hot(position.clamp(max=self.capacity - 1), self.capacity) * kept.unsqueeze(-1)
        return slots.view(*ids.shape, self.E, self.capacity)

    def each(self, buffer: Tensor) -> Tensor:
        """The outputs, [E, C, H] as the buffer."""
        raise NotImplementedError

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        slots = self.places(ids).to(x.dtype)
        buffer = torch.einsum("tec,th->ech", slots.sum(1), x)
        combine = (slots * weights[..., None, None]).sum(1)
        return torch.einsum("tec,ech->th", combine, self.each(buffer))


@style("slices of a buffer, `chunk` and `cat` (DeepSpeed, Tutel)")
class ChunkedSlices(Slices):
    def each(self, buffer: Tensor) -> Tensor:
        parts = buffer.chunk(self.E, dim=0)
        return torch.cat([expert(part) for expert, part in zip(self.list, parts)], dim=0)


@style("slices of a buffer for each group of tokens (fairseq)")
class GroupedSlices(Slices):
    def each(self, buffer: Tensor) -> Tensor:
        parts = buffer.view(self.E, 2, -1, self.H).transpose(0, 1).chunk(self.E, dim=1)
        y = torch.cat([expert(part) for expert, part in zip(self.list, parts)], dim=1)
        return y.transpose(0, 1).reshape(self.E, -1, self.H)


@style("slices of a buffer, one by one, and `stack` (GShard over a ModuleList)")
class StackedSlices(Slices):
    def each(self, buffer: Tensor) -> Tensor:
        return torch.stack([expert(buffer[e]) for e, expert in enumerate(self.list)])


@style("slices of a flat buffer")
class FlatSlices(Slices):
    def each(self, buffer: Tensor) -> Tensor:
        rows, c = buffer.reshape(-1, self.H), self.capacity
        y = torch.cat([expert(rows[e * c : (e + 1) * c]) for e, expert in enumerate(self.list)])
        return y.view(self.E, c, self.H)


@style("slots that all tokens are mixed into (Soft MoE)")
class SoftSlots(ListStyle):
    slots = 4

    def build(self) -> None:
        super().build()
        self.keys = nn.Parameter(torch.randn(self.E, self.slots, self.H))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.einsum("td,esd->tes", x, self.keys)
        combine = scores.flatten(1).softmax(-1).view_as(scores)
        mixed = torch.einsum("td,tes->sed", x, scores.softmax(0))
        y = torch.stack([expert(mixed[:, e]) for e, expert in enumerate(self.list)], dim=1)
        return torch.einsum("sed,tes->td", y, combine)


@style("capacity dispatch/combine (GShard)")
class Capacity(StackedStyle):
    capacity = 8

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        mask = F.one_hot(ids, self.E).view(-1, self.E)
        position = (mask.cumsum(0) - 1) * mask
        kept = mask * (position < self.capacity)
        slots = F.one_hot(position.clamp(max=self.capacity - 1), self.capacity) * kept.unsqueeze(-1)
        slots = slots.view(x.shape[0], self.k, self.E, self.capacity).to(x.dtype)
        dispatch, combine = slots.sum(1), (slots * weights[..., None, None]).sum(1)
        rows = torch.einsum("tec,th->ech", dispatch, x)
        h = self.act(torch.einsum("ech,eih->eci", rows, self.w1))
        h = h * torch.einsum("ech,eih->eci", rows, self.w3)
        return torch.einsum("tec,ech->th", combine, torch.einsum("eci,ehi->ech", h, self.w2))


import hit_styles  # noqa: E402, F401  (adds to STYLES)
