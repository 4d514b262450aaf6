"""Loops over experts with a branch that skips those without rows, and loops whose branch must stay."""

from __future__ import annotations

import torch
from moe_styles import ListStyle
from torch import nn


class Loop(ListStyle):
    """A loop over experts with the branch; `work` is what it skips."""

    def __init__(self, experts: int = 5, k: int = 2) -> None:
        super().__init__(experts, k)
        self.calls = 0
        self.dropout = nn.Dropout()

    def rows(self, ids, e):
        return torch.where(ids == e)

    def work(self, out, x, token, slot, weights, expert):
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = self.rows(ids, e)
            if token.numel() == 0:
                continue
            self.work(out, x, token, slot, weights, expert)
        return out


class LocalIsReadLater(Loop):
    def experts_of(self, x, ids, weights):
        out, last = torch.zeros_like(x), torch.zeros_like(x[:1])
        for e, expert in enumerate(self.list):
            token, _slot = self.rows(ids, e)
            if token.numel() == 0:
                continue
            last = x[token[:1]]
            out.index_add_(0, token, expert(x[token]))
        return out + last


class ACounter(Loop):
    def experts_of(self, x, ids, weights):
        out, busy = torch.zeros_like(x), 0
        for e, expert in enumerate(self.list):
            token, slot = self.rows(ids, e)
            if token.numel() == 0:
                continue
            busy += 1
            self.work(out, x, token, slot, weights, expert)
        return out / busy


class AList(Loop):
    def experts_of(self, x, ids, weights):
        out, parts = torch.zeros_like(x), []
        for e, expert in enumerate(self.list):
            token, slot = self.rows(ids, e)
            if token.numel() == 0:
                continue
            parts.append(e)
            self.work(out, x, token, slot, weights, expert)
        return out * len(parts)


class ADictionaryOfTheCaller(Loop):
    def experts_of(self, x, ids, weights):
        self.seen = {}
        out = super().experts_of(x, ids, weights)
        return out * len(self.seen)

    def work(self, out, x, token, slot, weights, expert):
        super().work(out, x, token, slot, weights, expert)
        self.seen[expert] = 1


class AnAttribute(Loop):
    def work(self, out, x, token, slot, weights, expert):
        super().work(out, x, token, slot, weights, expert)
        self.calls += 1


class AClosure(Loop):
    def experts_of(self, x, ids, weights):
        out, busy = torch.zeros_like(x), 0

        def count():
            nonlocal busy
            busy += 1

        for e, expert in enumerate(self.list):
            token, slot = self.rows(ids, e)
            if token.numel() == 0:
                continue
            count()
            self.work(out, x, token, slot, weights, expert)
        return out / busy


class AGenerator(Loop):
    def experts_of(self, x, ids, weights):
        out, factors = torch.zeros_like(x), (1.0 + i for i in range(self.E))
        for e, expert in enumerate(self.list):
            token, slot = self.rows(ids, e)
            if token.numel() == 0:
                continue
            factor = next(factors)
            self.work(out, x * factor, token, slot, weights, expert)
        return out


class AnIterator(AGenerator):
    def experts_of(self, x, ids, weights):
        out, factors = torch.zeros_like(x), iter([1.0 + i for i in range(self.E)])
        for e, expert in enumerate(self.list):
            token, slot = self.rows(ids, e)
            if token.numel() == 0:
                continue
            factor = next(factors)
            self.work(out, x * factor, token, slot, weights, expert)
        return out


class ATensorOfCounts(Loop):
    def experts_of(self, x, ids, weights):
        out, busy = torch.zeros_like(x), torch.zeros(self.E)
        for e, expert in enumerate(self.list):
            token, slot = self.rows(ids, e)
            if token.numel() == 0:
                continue
            busy[e] += 1
            self.work(out, x, token, slot, weights, expert)
        return out / busy.sum()


class AWholeTensor(Loop):
    def work(self, out, x, token, slot, weights, expert):
        super().work(out, x, token, slot, weights, expert)
        out.mul_(0.5)


class AViewOfATensor(Loop):
    def work(self, out, x, token, slot, weights, expert):
        super().work(out, x, token, slot, weights, expert)
        out[:1].add_(1)


class RowsOfAnother(Loop):
    """The branch tests other rows than those that the skipped code uses."""

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = self.rows(ids, e)
            other, _slot = self.rows(ids, (e + 1) % self.E)
            if other.numel() == 0:
                continue
            self.work(out, x, token, slot, weights, expert)
        return out


class MaskOfAnother(Loop):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            mask, other = (ids == e).any(-1), (ids == 0).any(-1)
            if other.any():
                out[mask] += expert(x[mask])
        return out


class FewRows(Loop):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = self.rows(ids, e)
            if token.numel() < 2:
                continue
            self.work(out, x, token, slot, weights, expert)
        return out


class Breaks(Loop):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = self.rows(ids, e)
            if token.numel() == 0:
                break
            self.work(out, x, token, slot, weights, expert)
        return out


class Returns(Loop):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = self.rows(ids, e)
            if token.numel() == 0:
                return out
            self.work(out, x, token, slot, weights, expert)
        return out


class DoesOtherwise(Loop):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = self.rows(ids, e)
            if token.numel() == 0:
                out += 1
            else:
                self.work(out, x, token, slot, weights, expert)
        return out


class FailsWithoutRows(Loop):
    def work(self, out, x, token, slot, weights, expert):
        super().work(out, x / x[token].amax(0), token, slot, weights, expert)


class ChangesTheMask(Loop):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            mask = (ids == e).any(-1)
            if mask.any():
                mask.fill_(True)
                out[mask] += expert(x[mask])
        return out


class ChangesTheMaskBefore(Loop):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            mask = (ids == e).any(-1)
            some = mask.any()
            mask.fill_(True)
            if some:
                out[mask] += expert(x[mask])
        return out


class ChangesTheMaskItIsMadeOf(Loop):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            mask = ids == e
            rows = mask.any(-1)
            mask.fill_(True)
            if rows.any():
                out[mask.all(-1)] += expert(x[mask.all(-1)])
                token, _slot = torch.where(mask)
                out.index_add_(0, token, expert(x[token]))
        return out


class MaskOrAnother(Loop):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            mask = (ids == e).any(-1)
            more = mask | (ids == 0).any(-1)
            if mask.any():
                out[more] += expert(x[more])
        return out


class DoesOtherwiseInTraining(Loop):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = self.rows(ids, e)
            if token.numel() > 0:
                self.work(out, x, token, slot, weights, expert)
            elif self.training:
                out = out + 1
        return out


class DoesOtherwiseIfAskedFor(Loop):
    """The branch tests an attribute that is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.adds = torch.ones(())

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = self.rows(ids, e)
            if token.numel() > 0:
                self.work(out, x, token, slot, weights, expert)
            elif self.adds:
                out = out + 1
        return out


class ReshapesTheRows(Loop):
    def experts_of(self, x, ids, weights):
        out, dims = torch.zeros_like(x), 0
        for e, expert in enumerate(self.list):
            token, slot = self.rows(ids, e)
            if token.numel() > 0:
                self.work(out, x, token, slot, weights, expert)
                token.unsqueeze_(0)
            dims += token.dim()
        return out * dims


BRANCHES = [
    LocalIsReadLater, AList, AnAttribute, AViewOfATensor, RowsOfAnother, MaskOfAnother, FewRows, Breaks,
    Returns, DoesOtherwise, DoesOtherwiseInTraining, FailsWithoutRows, ChangesTheMask, ChangesTheMaskBefore,
    ChangesTheMaskItIsMadeOf, MaskOrAnother,
]  # fmt: skip
# These stay branches, each for a reason that a loop above has, too.
MORE_BRANCHES = [
    ACounter, ADictionaryOfTheCaller, AClosure, AGenerator, AnIterator, ATensorOfCounts, AWholeTensor,
    ReshapesTheRows, DoesOtherwiseIfAskedFor,
]  # fmt: skip
