"""Loops over the experts that are hit: other ways to write them, those that read the expert's number as a
tensor, and those that must not be traced over all experts."""

from __future__ import annotations

import torch
from branch_loops import Loop


class Hits(Loop):
    """A loop over the experts that are hit."""

    def hit(self, ids):
        self.mask = torch.nn.functional.one_hot(ids, self.E).permute(2, 1, 0)
        return (self.mask.sum((1, 2)) > 0).nonzero()

    def more(self, e, out):
        pass

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        hit = self.hit(ids)
        mask = self.mask
        for e in hit:
            e = e[0]
            slot, token = torch.where(mask[e])
            self.work(out, x, token, slot, weights, self.list[e])
            self.more(e, out)
        return out


class HitsByItem(Hits):
    """A loop as in longcat_flash. Its branch is removed first."""

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        hit = self.hit(ids)
        for t in hit:
            e = int(t.item())
            slot, token = torch.where(self.mask[e].squeeze(0))
            if token.numel() == 0:
                continue
            self.work(out, x, token, slot, weights, self.list[e])
            self.more(e, out)
        return out


class HitsInARow(HitsByItem):
    """A loop as in nemotron_h."""

    def hit(self, ids):
        return super().hit(ids).squeeze(-1)


class HitsByItemAndReadsIt(Hits):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        hit = self.hit(ids)
        for t in hit:
            e = t.item()
            slot, token = torch.where(self.mask[e])
            self.work(out, x * (t > 1), token, slot, weights, self.list[e])
        return out


class HitsByItemAndCounts(HitsByItem):
    def more(self, e, out):
        self.calls += 1


class HitsThatBreak(Hits):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        hit = self.hit(ids)
        for e in hit:
            e = e[0]
            slot, token = torch.where(self.mask[e])
            if token.numel() == 0:
                break
            self.work(out, x, token, slot, weights, self.list[e])
        return out


class HitsThatMarkOthers(Hits):
    """Without rows it writes nothing. With rows it gives rows to an expert that was not hit."""

    def more(self, e, out):
        self.mask[self.E - 1, 0].index_fill_(0, torch.where(self.mask[e])[1], 1)


class HitsThatChange(Hits):
    def hit(self, ids):
        hit = super().hit(ids)
        hit.clamp_(max=2)
        return hit


class HitsOfTokens(Loop):
    """The loop has a round for each token, not for each expert."""

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        mask = torch.nn.functional.one_hot(ids, self.E)
        for t in (mask.sum((1, 2)) > 0).nonzero():
            t = t[0]
            slot, expert = torch.where(mask[t])
            out.index_add_(0, slot * 0 + t, x[t] * (weights[t, slot] * (1 + expert))[:, None])
        return out


class HitsOften(Hits):
    def hit(self, ids):
        super().hit(ids)
        return (self.mask.sum((1, 2)) > 1).nonzero()


class HitsOfFewTokens(Hits):
    def hit(self, ids):
        super().hit(ids)
        return (self.mask[:, :, :1].sum((1, 2)) > 0).nonzero()


class HitsOfAnotherMask(Hits):
    def hit(self, ids):
        hit = super().hit(ids)
        self.mask = self.mask.roll(1, 0)
        return hit


class HitsOfAMaskThatChanges(Hits):
    def hit(self, ids):
        hit = super().hit(ids)
        self.mask.zero_()
        return hit


class HitsOfAMaskThatIsFilled(Hits):
    def hit(self, ids):
        hit = super().hit(ids)
        self.mask[2][:1] = 1
        return hit


class HitsOfIdsThatChange(Hits):
    def hit(self, ids):
        ids.add_(1)
        self.mask = torch.nn.functional.one_hot(ids, self.E + 1).permute(2, 1, 0)
        return (self.mask.sum((1, 2)) > 0).nonzero()

    def experts_of(self, x, ids, weights):
        self.list.append(self.list[0])
        out = super().experts_of(x, ids, weights)
        del self.list[-1]
        return out


class HitsOfCountsThatCancel(Hits):
    def hit(self, ids):
        self.mask = torch.nn.functional.one_hot(ids, self.E).permute(2, 1, 0) - 1
        return (self.mask.sum((1, 2)) > 0).nonzero()


class HitsAndCounts(Hits):
    def more(self, e, out):
        self.calls += 1


class HitsAndAdds(Hits):
    def more(self, e, out):
        out += 1


class HitsAndStops(Loop):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        mask = torch.nn.functional.one_hot(ids, self.E).permute(2, 1, 0)
        for e in (mask.sum((1, 2)) > 0).nonzero():
            e = e[0]
            slot, token = torch.where(mask[e])
            self.work(out, x, token, slot, weights, self.list[e])
            if e == 3:
                break
        return out


class HitsAndRemembers(Loop):
    def experts_of(self, x, ids, weights):
        out, e = torch.zeros_like(x), 0
        mask = torch.nn.functional.one_hot(ids, self.E).permute(2, 1, 0)
        for e in (mask.sum((1, 2)) > 0).nonzero():
            e = e[0]
            slot, token = torch.where(mask[e])
            self.work(out, x, token, slot, weights, self.list[e])
        return out * e


class HitsAsTensors(Loop):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        mask = torch.nn.functional.one_hot(ids, self.E).permute(2, 1, 0)
        for e in (mask.sum((1, 2)) > 0).nonzero():
            e = e[0]
            slot, token = torch.where(mask[e])
            self.work(out, x * e.float(), token, slot, weights, self.list[e])
        return out


class HitsDoubled(Loop):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        mask = torch.nn.functional.one_hot(ids, self.E).permute(2, 1, 0)
        for e in (mask.sum((1, 2)) > 0).nonzero():
            d = e * 1
            slot, token = torch.where(mask[d[0]])
            self.work(out, x, token, slot, weights, self.list[d[0]])
        return out


class HitsByTensor(Hits):
    """A loop as in switch_transformers: its variable stays a tensor of one element."""

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        hit = self.hit(ids)
        mask = self.mask
        for t in hit:
            slot, token = torch.where(mask[t].squeeze(0))
            self.work(out, x, token, slot, weights, self.list[t[0]])
            self.more(t[0], out)
        return out


class HitsByTensorUpToACapacity(HitsByTensor):
    def hit(self, ids):
        hot = torch.nn.functional.one_hot(ids, self.E)
        self.mask = (hot * (hot.cumsum(0) <= 1)).permute(2, 1, 0)
        return torch.greater(self.mask.sum(dim=(-1, -2)), 0).nonzero()


class HitsByTensorAndCounts(HitsByTensor):
    def more(self, e, out):
        self.calls += 1


class HitsByTensorThatChange(HitsByTensor):
    def hit(self, ids):
        return super().hit(ids).clamp_(max=2)


class HitsByTensorOfFactorsThatCancel(HitsByTensor):
    def hit(self, ids):
        hot = torch.nn.functional.one_hot(ids, self.E)
        sign = 1 - 2 * (torch.arange(self.k) % 2)
        self.mask = (hot * sign[:, None]).permute(2, 1, 0)
        return (self.mask.sum((1, 2)) > 0).nonzero()


class HitsByTensorOfCountsThatChanged(HitsByTensor):
    def hit(self, ids):
        hot = torch.nn.functional.one_hot(ids, self.E)
        hot.sub_(1)
        self.mask = (hot * (hot.cumsum(0) <= 1)).permute(2, 1, 0)
        return (self.mask.sum((1, 2)) > 0).nonzero()


class HitsByTensorAndReadsIt(Hits):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        hit = self.hit(ids)
        mask = self.mask
        for t in hit:
            slot, token = torch.where(mask[t].squeeze(0))
            self.work(out, x * (t > 1), token, slot, weights, self.list[t[0]])
        return out


class HitsByTensorOfAnotherMask(Hits):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        hit = self.hit(ids)
        mask = self.mask
        for t in hit:
            slot, token = torch.where(mask[t].squeeze(0))
            self.work(out, x, token, slot, weights, self.list[t[0]])
            mask = mask.roll(1, 0)
        return out


class HitsByTensorAndRemembers(Hits):
    def experts_of(self, x, ids, weights):
        out, t = torch.zeros_like(x), [0]
        hit = self.hit(ids)
        mask = self.mask
        for t in hit:
            slot, token = torch.where(mask[t].squeeze(0))
            self.work(out, x, token, slot, weights, self.list[t[0]])
        return out * t[0]


class HitsByTensorOfSeveral(Hits):
    """Reads `mask[t, 0]`, one of the choices."""

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        hit = self.hit(ids)
        mask = self.mask
        for t in hit:
            token = torch.where(mask[t, 0].squeeze(0))[0]
            self.work(out, x, token, token * 0, weights, self.list[t[0]])
        return out


class HitsByTensorsOfNoDimension(Hits):
    """Reads `mask[t]`, which has one dimension fewer."""

    def hit(self, ids):
        return super().hit(ids).squeeze(-1)

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        hit = self.hit(ids)
        mask, factors = self.mask, torch.arange(float(self.E))
        for t in hit:
            slot, token = torch.where(mask[t])
            self.work(out, x * factors[t], token, slot, weights, self.list[0])
        return out


class HitsByTensorAndWrites(Hits):
    """Reads a copy: t is a tensor, so `mask[t]` is not a view."""

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        factors = torch.ones(self.E)
        hit = self.hit(ids)
        mask = self.mask
        for t in hit:
            slot, token = torch.where(mask[t].squeeze(0))
            factor = factors[t]
            factor.mul_(3)
            self.work(out, x * factor, token, slot, weights, self.list[t[0]])
        return out * factors.sum()


# --- other ways to write the tensor that the loop iterates over ---


class HitsFlat(HitsByTensor):
    """Loops over the hit experts of each choice of a token."""

    def hit(self, ids):
        return super().hit(ids).flatten()

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e in self.hit(ids):
            slot, token = torch.where(self.mask[e])
            self.work(out, x, token, slot, weights, self.list[e])
            self.more(e, out)
        return out


class HitsInAColumn(HitsFlat):
    def hit(self, ids):
        return Hits.hit(self, ids)[:, 0]


class HitsInATuple(HitsFlat):
    def hit(self, ids):
        hot = torch.nn.functional.one_hot(ids, self.E)
        self.mask = hot.transpose(0, 2)
        return torch.nonzero(hot.sum(0).sum(0), as_tuple=True)[0]


class HitsWhere(HitsFlat):
    def hit(self, ids):
        self.mask = torch.nn.functional.one_hot(ids, self.E).bool().permute(2, 1, 0)
        return torch.where(self.mask.any(-1).any(-1))[0]


class HitsAsNumbers(HitsFlat):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e in self.hit(ids).tolist():
            slot, token = torch.where(self.mask[e])
            self.work(out, x, token, slot, weights, self.list[e])
        return out


class HitsAsRowsOfNumbers(Hits):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        hit = self.hit(ids).tolist()
        for (e,) in hit:
            slot, token = torch.where(self.mask[e])
            self.work(out, x, token, slot, weights, self.list[e])
        return out


class HitsInTheLastDimension(Hits):
    """The masks are over tokens, because the choices of a token are added up first."""

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        hot = torch.nn.functional.one_hot(ids, self.E)
        full = torch.zeros(x.shape[0], self.E).scatter(1, ids, weights)
        chosen = hot.sum(1).bool()
        for e in hot.view(-1, self.E).sum(0).nonzero():
            token = torch.where(chosen[:, e[0]])[0]
            out.index_add_(0, token, self.list[e](x[token]) * full[token, e, None])
        return out


class HitsByItsNumber(Hits):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for t in self.hit(ids):
            slot, token = torch.where(self.mask[t.item()])
            self.work(out, x, token, slot, weights, self.list[int(t)])
        return out


OTHERS = [
    HitsFlat, HitsInAColumn, HitsInATuple, HitsWhere, HitsAsNumbers, HitsAsRowsOfNumbers, HitsByItsNumber,
]  # fmt: skip


# --- numbers of hits that a loop over all experts does not have ---


class HitsAsNumbersThatAreCounted(HitsAsNumbers):
    def experts_of(self, x, ids, weights):
        hit = Hits.hit(self, ids).flatten().tolist()
        out = torch.zeros_like(x)
        for e in hit:
            slot, token = torch.where(self.mask[e])
            self.work(out, x, token, slot, weights, self.list[e])
        return out * len(hit)


class HitsAsNumbersThatAreNumbered(HitsAsNumbers):
    def experts_of(self, x, ids, weights):
        hit = Hits.hit(self, ids).flatten().tolist()
        out = torch.zeros_like(x)
        for i, e in enumerate(hit):
            slot, token = torch.where(self.mask[e])
            self.work(out, x * i, token, slot, weights, self.list[e])
        return out


class HitsAsNumbersOfFewTokens(HitsAsNumbers):
    def hit(self, ids):
        Hits.hit(self, ids)
        return self.mask[:, :, :1].sum((1, 2)).nonzero().flatten()


class HitsOfMoreThanOne(HitsAsNumbers):
    def hit(self, ids):
        Hits.hit(self, ids)
        return torch.where(self.mask.sum((1, 2)) >= 2)[0]


class HitsOfNarrowCounts(HitsFlat):
    """A count of 256 that is cast to 8 bits is 0."""

    def hit(self, ids):
        Hits.hit(self, ids)
        return (self.mask.sum((1, 2)) * 128).to(torch.int8).nonzero().flatten()


class HitsOfACopyThatChanges(HitsFlat):
    """The loop reads a copy of the mask, in which another expert has got rows."""

    def hit(self, ids):
        hot = torch.nn.functional.one_hot(ids, self.E)
        self.mask = hot.permute(2, 1, 0).clone()
        self.mask[2, :, :1] = 1
        return hot.sum((0, 1)).nonzero().flatten()


class HitsThatChangeTheirNumber(Hits):
    """The loop's variable is written to, and read again."""

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for t in self.hit(ids):
            slot, token = torch.where(self.mask[t[0]])
            t += 1
            self.work(out, x, token, slot, weights, self.list[t.item() % self.E])
        return out


BRANCHES = [
    HitsThatBreak, HitsThatMarkOthers, HitsThatChange, HitsOfFewTokens, HitsOfAnotherMask,
    HitsOfCountsThatCancel, HitsAndCounts, HitsAndAdds, HitsAndRemembers, HitsAndStops,
    HitsOfACopyThatChanges, HitsAsNumbersThatAreCounted, HitsThatChangeTheirNumber,
]  # fmt: skip
# These stay loops, each for a reason that a loop or a branch above has, too.
MORE_BRANCHES = [
    HitsByTensorAndCounts, HitsByTensorThatChange, HitsByTensorOfFactorsThatCancel,
    HitsByTensorOfCountsThatChanged, HitsByTensorAndRemembers, HitsByTensorOfAnotherMask, HitsByItemAndCounts,
    HitsOften, HitsOfAMaskThatChanges, HitsOfAMaskThatIsFilled, HitsOfMoreThanOne, HitsOfNarrowCounts,
    HitsAsNumbersThatAreNumbered, HitsAsNumbersOfFewTokens,
]  # fmt: skip
# These are captured, but they are not mixtures of experts: each expert's number is used in another
# computation.
NUMBERS = [
    HitsByTensorAndReadsIt, HitsByTensorAndWrites, HitsAsTensors, HitsByItemAndReadsIt, HitsDoubled,
    HitsByTensorOfSeveral, HitsByTensorsOfNoDimension, HitsInTheLastDimension,
]  # fmt: skip
