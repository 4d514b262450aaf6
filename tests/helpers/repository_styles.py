"""Adds small versions of the styles of public repositories to STYLES."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from moe_styles import FusedStyle, ListStyle, SlicedLoop, StackedStyle, style
from torch import Tensor, nn

# --- rows sorted by expert, counted up to the largest id ---


@style("sorted slices, NumPy's ends of `bincount(ids)` (DeepSeek-MoE's `moe_infer`)")
class NumpyEnds(ListStyle):
    @torch.no_grad()
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        order = ids.view(-1).argsort()
        ends = torch.bincount(ids.view(-1)).cpu().numpy().cumsum(0)
        token, scale, out = order // self.k, weights.view(-1, 1), torch.zeros_like(x)
        for e, end in enumerate(ends):
            start = 0 if e == 0 else ends[e - 1]
            if start == end:
                continue
            own = token[start:end]
            y = self.list[e](x[own])
            y.mul_(scale[order[start:end]])
            out.scatter_reduce_(0, own.view(-1, 1).repeat(1, x.shape[-1]), y, reduce="sum")
        return out


@style("sorted slices, NumPy's ends of `bincount(ids)`, assigned with others: `ends, token = ..., ...`")
class EndsWithOthers(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        flat, out = ids.view(-1), torch.zeros_like(x)
        order = flat.argsort()
        scale, ends, token = weights.view(-1, 1), flat.bincount().cpu().numpy().cumsum(0), order // self.k
        for e, end in enumerate(ends):
            start = 0 if e == 0 else ends[e - 1]
            if start == end:
                continue
            own = token[start:end]
            out.index_add_(0, own, self.list[e](x[own]) * scale[order[start:end]])
        return out


@style("rows and slots as lists, assigned together: `tokens, slots = token.tolist(), slot.tolist()` (Grok-1)")
class ListsAssignedTogether(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        mask, out = F.one_hot(ids, self.E).permute(2, 1, 0), torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            slot, token = torch.where(mask[e])
            if token.shape[0] == 0:
                continue
            tokens, slots = token.tolist(), slot.tolist()
            rows = x[None, tokens].reshape(-1, self.H)
            out.index_add_(0, token, expert(rows) * weights[tokens, slots, None])
        return out


@style("sorted slices, each written to a buffer, `bincount(ids).tolist()`")
class SlicesToABuffer(SlicedLoop):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if torch.__version__.startswith("2.11."):
            pytest.skip("torch 2.11 cannot tell that a slice has as many rows as what is written to it")
        super().__init__(*args, **kwargs)

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        order, rows = self.sorted(x, ids)
        out, start = torch.empty_like(rows), 0
        for expert, n in zip(self.list, torch.bincount(ids.view(-1)).tolist()):
            out[start : start + n] = expert(rows[start : start + n])
            start += n
        return self.restored(out, order, ids, weights)


@style("sorted slices, ends as a list")
class EndsAsAList(SlicedLoop):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        order, rows = self.sorted(x, ids)
        out, start = torch.zeros_like(x), 0
        for e, end in enumerate(torch.bincount(ids.view(-1)).cumsum(0).tolist()):
            own = order[start:end]
            y = self.list[e](rows[start:end]) * weights.view(-1)[own, None]
            out.index_add_(0, own // self.k, y)
            start = end
        return out


@style("sorted splits, outputs in a list of those experts that have rows, `[... if len(part)]` (LLaMA-MoE)")
class ListOfThoseWithRows(SlicedLoop):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        order, rows = self.sorted(x, ids)
        parts = rows.split(torch.bincount(ids.view(-1), minlength=self.E).tolist())
        outs = [self.list[e](parts[e]) for e in range(self.E) if len(parts[e]) > 0]
        y = torch.cat(outs, 0) * weights.view(-1)[order, None]
        return torch.zeros_like(x).index_add(0, order // self.k, y)


@style("sorted slices, a loop for each product, `enumerate(counts.cpu().numpy())` (OLMo-core)")
class LoopsOfProducts(StackedStyle):
    def product(self, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        start, parts = 0, []
        for e, n in enumerate(counts.cpu().numpy()):
            parts.append(rows[start : start + n] @ weight[e].T)
            start += n
        return torch.cat(parts)

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        flat = ids.flatten()
        counts, order = torch.bincount(flat, minlength=self.E), flat.argsort(stable=True)
        rows = x[order // self.k]
        h = self.act(self.product(rows, self.w1, counts)) * self.product(rows, self.w3, counts)
        y = self.product(h, self.w2, counts) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // self.k, y)


# --- masks ---


@style("one-hot loop, rows of `torch.eye(E)`")
class EyeLoop(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        mask, out = torch.eye(self.E)[ids].permute(2, 1, 0), torch.zeros_like(x)
        for e in range(self.E):
            slot, token = torch.where(mask[e])
            out.index_add_(0, token, self.list[e](x[token]) * weights[token, slot, None])
        return out


@style("rows that a mask has in any column, `weights[mask]`, `elif self.training:` (MiniMind)")
class AnyColumn(ListStyle):
    def build(self) -> None:
        super().build()
        self.eval()

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            mask = ids == e
            if mask.any():
                token = mask.any(dim=-1).nonzero().flatten()
                out.index_add_(0, token, expert(x[token]) * weights[mask].view(-1, 1))
            elif self.training:
                out = out + 0 * sum(p.sum() for p in expert.parameters())
        return out


@style("masks [B, T] and the same in one dimension, `out[mask] += ...` (makeMoE)")
class MasksOfBoth(ListStyle):
    def forward(self, x: Tensor) -> Tensor:
        x, flat = x.unsqueeze(0), x
        scores = self.router(x)
        best, ids = scores.topk(self.k)
        gates = torch.full_like(scores, -torch.inf).scatter(-1, ids, best).softmax(-1).view(-1, self.E)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            mask = (ids == e).any(dim=-1)
            own = mask.view(-1)
            if own.any():
                out[mask] += expert(flat[own]) * gates[own, e].unsqueeze(1)
        return out[0]


@style("rows by the columns of `torch.argwhere(mask).T`")
class ColumnsOfPlaces(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = torch.argwhere(ids == e).T
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


@style("dense loop, `weights.masked_fill(ids != e, 0)`")
class MaskedWeights(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            out += expert(x) * weights.masked_fill(ids != e, 0.0).sum(-1, keepdim=True)
        return out


@style("dense loop, `torch.where(~chosen, 0, weights)`")
class WhereNot(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            mine = torch.where(~(ids == e), torch.zeros_like(weights), weights)
            out = out + expert(x) * mine.sum(-1, keepdim=True)
        return out


@style("dense loop, `torch.where(ids == e, weights, 0.0)`")
class WhereNumber(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            out += expert(x) * torch.where(ids == e, weights, 0.0).sum(-1, keepdim=True)
        return out


@style("dense loop, `torch.where(ids == torch.tensor(e), weights, torch.tensor(0.0))`")
class WhereTensor(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            chosen = ids == torch.tensor(e)
            out += expert(x) * torch.where(chosen, weights, torch.tensor(0.0)).sum(-1, keepdim=True)
        return out


@style("rows by `masked_select`, put back by `masked_scatter`")
class MaskedSelect(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            mask = (ids == e).any(-1, keepdim=True)
            y = expert(x.masked_select(mask).view(-1, self.H))
            mine = torch.where(ids == e, weights, 0).sum(-1, keepdim=True)
            out = out + torch.zeros_like(x).masked_scatter(mask.expand_as(x), y) * mine
        return out


@style("scores by `masked_select`, scaled rows put back by `masked_scatter`")
class MaskedScores(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        full, out = x.new_zeros(len(x), self.E).scatter(1, ids, weights), torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            mask = (ids == e).any(-1)
            y = expert(x[mask]) * full[:, e].masked_select(mask).unsqueeze(1)
            out += torch.zeros_like(x).masked_scatter(mask[:, None], y)
        return out


@style("`out.masked_scatter(mask, out[mask] + y)`")
class MaskedScatter(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            mask = (ids == e).any(-1)
            mine = (weights * (ids == e)).sum(-1)[mask]
            out = out.masked_scatter(mask[:, None], out[mask] + expert(x[mask]) * mine[:, None])
        return out


@style("scores by `weights.masked_select(ids == e)`")
class MaskedElements(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, _ = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights.masked_select(ids == e)[:, None])
        return out


@style("dense loop, `torch.addcmul`")
class AddProducts(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            out = torch.addcmul(out, expert(x), (weights * (ids == e)).sum(-1, keepdim=True))
        return out


@style("rows by `mask[:, e].nonzero()`, a mask of zeros and ones")
class NonzeroOfNumbers(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        mask, out = x.new_zeros(len(x), self.E).scatter(1, ids, 1.0), torch.zeros_like(x)
        full = torch.zeros_like(mask).scatter(1, ids, weights)
        for e, expert in enumerate(self.list):
            token = mask[:, e].nonzero().squeeze(-1)
            out[token] += full[token, e, None] * expert(x[token])
        return out


class AddedTogether(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        tokens, rows = [], []
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            tokens.append(token)
            rows.append(expert(x[token]) * weights[token, slot, None])
        return self.add(torch.zeros_like(x), self.joined(tokens), torch.cat(rows))

    def joined(self, tokens: list[Tensor]) -> Tensor:
        return torch.cat(tokens)


@style("all experts' rows added together, `index_add(0, torch.cat(tokens), torch.cat(rows))`")
class IndexAddTogether(AddedTogether):
    def add(self, out: Tensor, token: Tensor, rows: Tensor) -> Tensor:
        return out.index_add(0, token, rows)


@style("all experts' rows added together by `scatter_add`")
class ScatterAddTogether(AddedTogether):
    def add(self, out: Tensor, token: Tensor, rows: Tensor) -> Tensor:
        return out.scatter_add(0, token[:, None].expand_as(rows), rows)


@style("a mask that is written out twice, `out[(ids == e).any(-1)] += ...`")
class MaskTwice(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            mine = (weights * (ids == e)).sum(-1)[(ids == e).any(-1)]
            out[(ids == e).any(-1)] += expert(x[(ids == e).any(-1)]) * mine[:, None]
        return out


@style("each expert's rows put into zeros, `index_put((token,), y)`")
class PutIntoZeros(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            y = expert(x[token]) * weights[token, slot, None]
            out = out + torch.zeros_like(x).index_put((token,), y)
        return out


@style("all experts stacked, gathered by ids")
class StackedAndGathered(ListStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        every = torch.stack([expert(x) for expert in self.list], dim=1)
        chosen = every.gather(1, ids.unsqueeze(-1).expand(*ids.shape, self.H))
        return (chosen * weights.unsqueeze(-1)).sum(1)


@style("gathered by `F.embedding`, of matrices as rows")
class LookedUp(StackedStyle):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        w1, w3, w2 = (
            F.embedding(ids, w.flatten(1)).view(*ids.shape, *w.shape[1:]) for w in (self.w1, self.w3, self.w2)
        )
        h = self.act(torch.einsum("th,tkih->tki", x, w1)) * torch.einsum("th,tkih->tki", x, w3)
        return torch.einsum("tki,tkhi,tk->th", h, w2, weights)


@style("all experts stacked, one-hot gates with a gradient: `hard + soft - soft.detach()`")
class StraightThrough(ListStyle):
    def forward(self, x: Tensor) -> Tensor:
        soft = torch.softmax(self.router(x), -1)
        gates = F.one_hot(soft.argmax(-1), self.E).to(x.dtype) + soft - soft.detach()
        every = torch.stack([expert(x) for expert in self.list], dim=-1)
        return (every * gates.unsqueeze(1)).sum(-1)


# --- experts ---


@style("where loop, F.glu")
class GluLoop(FusedStyle):
    """The gate is the second half."""

    def expert(self, e: int, x: Tensor) -> Tensor:
        return F.glu(x @ self.w13[e], dim=-1) @ self.w2[e]

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.E):
            token, slot = torch.where(ids == e)
            out[token] += self.expert(e, x[token]) * weights[token, slot, None]
        return out


@style("dense einsum, F.glu")
class GluEinsum(GluLoop):
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        full = torch.zeros(x.shape[0], self.E).scatter(1, ids, weights)
        h = F.glu(torch.einsum("th,ehi->tei", x, self.w13))
        return torch.einsum("tei,eih,te->th", h, self.w2, full)


class OneVector(ListStyle):
    """All weights are parts of one parameter of one dimension."""

    def build(self) -> None:
        self.every = nn.Parameter(torch.randn(3 * self.E * self.H * self.I) / self.H**0.5)

    def parts(self, e: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return w1 and w3 [I, H], and w2 [H, I]."""
        raise NotImplementedError

    def matrices(self, e: int) -> list[list[Tensor]]:
        w1, w3, w2 = self.parts(e)
        return [[w1.data, w3.data], [w2.data]]

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.E):
            w1, w3, w2 = self.parts(e)
            token, slot = torch.where(ids == e)
            h = self.act(F.linear(x[token], w1)) * F.linear(x[token], w3)
            out.index_add_(0, token, F.linear(h, w2) * weights[token, slot, None])
        return out


@style("where loop, weights cut from one vector")
class CutFromOneVector(OneVector):
    def parts(self, e: int) -> tuple[Tensor, Tensor, Tensor]:
        w1, w3, w2 = self.every.split(self.H * self.I)[3 * e : 3 * e + 3]
        return w1.view(self.I, self.H), w3.view(self.H, self.I).t(), w2.view(self.H, self.I)


@style("where loop, weights as views of one vector")
class ViewsOfOneVector(OneVector):
    def parts(self, e: int) -> tuple[Tensor, Tensor, Tensor]:
        w1, w3, w2 = self.every.view(self.E, 3, -1)[e]
        return w1.view(self.I, self.H), w3.view(self.I, self.H), w2.view(self.I, self.H).t()


@style("dense einsum, stacks cut from one vector")
class StacksOfOneVector(OneVector):
    def parts(self, e: int) -> tuple[Tensor, Tensor, Tensor]:
        w1, w3, w2 = self.stacks()
        return w1[e], w3[e], w2[e]

    def stacks(self) -> tuple[Tensor, Tensor, Tensor]:
        w1, w3, w2 = self.every.chunk(3)
        rows = (self.E, self.I, self.H)
        return w1.view(rows), w3.view(rows), w2.view(self.E, self.H, self.I)

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        w1, w3, w2 = self.stacks()
        full = torch.zeros(x.shape[0], self.E).scatter(1, ids, weights)
        h = self.act(torch.einsum("th,eih->tei", x, w1)) * torch.einsum("th,eih->tei", x, w3)
        return torch.einsum("tei,ehi,te->th", h, w2, full)
