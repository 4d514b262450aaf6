"""Loops over the experts among the ids: other ways to write them, and loops that must stay loops."""

from __future__ import annotations

import torch
from branch_loops import Loop


class Named(Loop):
    def named(self, ids):
        return torch.unique(ids)

    def rows(self, ids, e):
        return torch.where(ids == e)

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e in self.named(ids):
            token, slot = self.rows(ids, e)
            self.work(out, x, token, slot, weights, self.list[e])
            self.more(ids, out, e)
        return out

    def more(self, ids, out, e):
        pass


class NamedByAMethod(Named):
    def named(self, ids):
        return ids.flatten().unique(sorted=True)

    def rows(self, ids, e):
        return torch.where(e == ids)


class NamedByItem(Named):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for t in torch.unique(ids):
            e = t.item()
            token, slot = (ids == e).nonzero(as_tuple=True)
            if len(token) == 0:
                continue
            self.work(out, x, token, slot, weights, self.list[e])
        return out


class NamedWithTheirCounts(Named):
    def named(self, ids):
        names, _counts = torch.unique(ids, return_counts=True)
        return names.cpu()


OTHERS = [NamedByAMethod, NamedByItem, NamedWithTheirCounts]


class NamedByTheFirstChoice(Named):
    """The loop leaves out experts that are only second choices."""

    def named(self, ids):
        return ids[:, 0].unique()


class NamedOfMore(Named):
    def rows(self, ids, e):
        return torch.where(ids >= e)


class NamedOfTheNext(Named):
    def rows(self, ids, e):
        return torch.where(ids == (e + 1) % self.E)


class NamedIdsThatChange(Named):
    def more(self, ids, out, e):
        ids[:, 1] = e


class NamedIdsThatChanged(Named):
    """The loop iterates over the ids from before a change."""

    def named(self, ids):
        names = torch.unique(ids)
        ids[:1] = 4
        return names


class NamedAndCounted(Named):
    def more(self, ids, out, e):
        self.calls += 1


class NamedAndAdded(Named):
    def more(self, ids, out, e):
        out += 1


BRANCHES = [NamedByTheFirstChoice, NamedOfMore, NamedIdsThatChanged, NamedAndCounted]
MORE_BRANCHES = [NamedOfTheNext, NamedIdsThatChange, NamedAndAdded]
