"""Loops over experts that skip those whose count is 0 and take rows by `torch.where`, right and wrong."""

from __future__ import annotations

import torch
from branch_loops import Loop
from torch import Tensor


class ByCounts(Loop):
    """This is right if the counts are of the same ids that select the rows."""

    def counts(self, ids: Tensor, x: Tensor) -> list[int]:
        return torch.bincount(ids.flatten(), minlength=self.E).tolist()

    def skips(self, counts: list[int], e: int) -> bool:
        return counts[e] == 0

    def experts_of(self, x, ids, weights):
        out, counts = torch.zeros_like(x), self.counts(ids, x)
        for e, expert in enumerate(self.list):
            if self.skips(counts, e):
                continue
            token, slot = torch.where(ids == e)
            self.work(out, x, token, slot, weights, expert)
        return out


class ByCountsOfOneHot(ByCounts):
    def counts(self, ids, x):
        return torch.nn.functional.one_hot(ids, self.E).sum((0, 1)).tolist()

    def skips(self, counts, e):
        return counts[e] < 1


class CountOfTheNext(ByCounts):
    def skips(self, counts, e):
        return counts[(e + 1) % self.E] == 0


class CountsOfOtherIds(ByCounts):
    def counts(self, ids, x):
        return super().counts(torch.topk(-self.router(x), self.k).indices, x)


class CountsOfWhatIdsWere(ByCounts):
    def experts_of(self, x, ids, weights):
        ids = ids.clone()
        counts, out = self.counts(ids, x), torch.zeros_like(x)
        ids.fill_(1)
        for e, expert in enumerate(self.list):
            if counts[e] == 0:
                continue
            token, slot = torch.where(ids == e)
            self.work(out, x, token, slot, weights, expert)
        return out


class Comprehension(Loop):
    """Uses a list of the outputs of the experts that have rows."""

    def joined(self, outs: list[Tensor]) -> Tensor:
        return torch.cat(outs)

    def experts_of(self, x, ids, weights):
        flat = ids.view(-1)
        order = flat.argsort(stable=True)
        parts = x[order // self.k].split(torch.bincount(flat, minlength=self.E).tolist())
        outs = [self.list[e](part) for e, part in enumerate(parts) if len(part)]
        return torch.zeros_like(x).index_add(0, order // self.k, self.joined(outs))


class LengthOfAComprehension(Comprehension):
    def experts_of(self, x, ids, weights):
        order = ids.view(-1).argsort(stable=True)
        parts = x[order // self.k].split(torch.bincount(ids.view(-1), minlength=self.E).tolist())
        outs = [self.list[e](part) for e, part in enumerate(parts) if part.shape[0] > 0]
        return torch.zeros_like(x).index_add(0, order // self.k, torch.cat(outs)) / len(outs)


class LastOfAComprehension(LengthOfAComprehension):
    def experts_of(self, x, ids, weights):
        order = ids.view(-1).argsort(stable=True)
        parts = x[order // self.k].split(torch.bincount(ids.view(-1), minlength=self.E).tolist())
        outs = [self.list[e](part) for e, part in enumerate(parts) if part.shape[0] > 0]
        return torch.zeros_like(x).index_add(0, order // self.k, torch.cat(outs)) + outs[-1].sum(0)


class ComprehensionOfNumbers(LengthOfAComprehension):
    """Each entry is a row, and its place in the list matters."""

    def experts_of(self, x, ids, weights):
        order = ids.view(-1).argsort(stable=True)
        parts = x[order // self.k].split(torch.bincount(ids.view(-1), minlength=self.E).tolist())
        means = torch.cat(
            [self.list[e](part).sum(0, keepdim=True) for e, part in enumerate(parts) if len(part)]
        )
        return x + means[-1]


OTHERS = [ByCounts, ByCountsOfOneHot]
BRANCHES = [CountOfTheNext, CountsOfOtherIds, LengthOfAComprehension, ComprehensionOfNumbers]
MORE_BRANCHES = [CountsOfWhatIdsWere, Comprehension, LastOfAComprehension]
