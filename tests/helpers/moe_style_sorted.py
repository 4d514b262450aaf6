"""Rows sorted by expert, and a buffer of fixed capacity for each expert. See moe_style_base.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from moe_style_base import FusedStyle, ListStyle, StackedStyle, style
from torch import Tensor, nn

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
    """Each expert's rows are a slice of all rows. Its size depends on the data."""

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
    """Expert e reads slice e of a buffer. Each row has a place in the buffer."""

    capacity = 8

    def places(self, ids: Tensor) -> Tensor:
        """Return [T, k, E, C]: whether choice j of a token has place c at an expert."""
        mask = F.one_hot(ids, self.E).view(-1, self.E)
        position = (mask.cumsum(0) - 1) * mask
        kept = mask * (position < self.capacity)
        slots = F.one_hot(position.clamp(max=self.capacity - 1), self.capacity) * kept.unsqueeze(-1)
        return slots.view(*ids.shape, self.E, self.capacity)

    def each(self, buffer: Tensor) -> Tensor:
        """Return the outputs [E, C, H], in the order of the buffer."""
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
