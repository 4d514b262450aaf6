"""Branches that skip experts without rows: seen through where that is proved, and branches otherwise."""

from __future__ import annotations

import pytest
import torch
from fp4_ops.compile_passes.branches import KEPT, SEEN_THROUGH
from fp4_ops.compile_passes.dynamo import CAPTURE, extend_dynamo
from moe_models import Recorder, relative_error
from moe_styles import STYLES, ListStyle
from torch import nn

import fp4_ops  # noqa: F401

counters = torch._dynamo.utils.counters
SKIPPING = STYLES["where loop, `if token.numel() == 0: continue`"]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.set_num_threads(1)


class Loop(ListStyle):
    """A loop over experts with the branch; `work` is what it skips."""

    def __init__(self) -> None:
        super().__init__()
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
    """The branch asks about other rows than those the work is about."""

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
    """As longcat_flash has it: with a branch in it, which is seen through first."""

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
    """As nemotron_h has it."""

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
    """Without rows that writes nothing; with rows it gives rows to an expert that was not hit."""

    def more(self, e, out):
        self.mask[self.E - 1, 0].index_fill_(0, torch.where(self.mask[e])[1], 1)


class HitsThatChange(Hits):
    def hit(self, ids):
        hit = super().hit(ids)
        hit.clamp_(max=2)
        return hit


class HitsOfTokens(Loop):
    """As many tokens as there are, not as many as there are experts."""

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
    """As switch_transformers has it: what the loop is over stays a tensor of one element."""

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
    """`mask[t, 0]`: one of the choices."""

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        hit = self.hit(ids)
        mask = self.mask
        for t in hit:
            token = torch.where(mask[t, 0].squeeze(0))[0]
            self.work(out, x, token, token * 0, weights, self.list[t[0]])
        return out


class HitsByTensorsOfNoDimension(Hits):
    """`mask[t]` has a dimension less."""

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
    """A copy where t is a tensor."""

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


BRANCHES = [
    HitsByTensorAndCounts, HitsByTensorThatChange, HitsByTensorOfFactorsThatCancel,
    HitsByTensorOfCountsThatChanged, HitsByTensorAndReadsIt, HitsByTensorOfAnotherMask,
    HitsByTensorAndRemembers, HitsByTensorOfSeveral, HitsByTensorAndWrites, HitsByTensorsOfNoDimension,
    LocalIsReadLater, ACounter, AList, ADictionaryOfTheCaller, AnAttribute, AClosure, AGenerator, AnIterator,
    ATensorOfCounts, AWholeTensor, AViewOfATensor, RowsOfAnother, MaskOfAnother, FewRows, Breaks, Returns,
    HitsByItemAndReadsIt, HitsByItemAndCounts, HitsThatBreak, HitsThatMarkOthers, HitsThatChange,
    HitsOften, HitsOfFewTokens, HitsOfAnotherMask, HitsOfAMaskThatChanges, HitsOfAMaskThatIsFilled,
    HitsOfCountsThatCancel,
    HitsAndCounts, HitsAndAdds, HitsAndStops, HitsAndRemembers, HitsAsTensors, HitsDoubled, DoesOtherwise,
    FailsWithoutRows, ChangesTheMask, ChangesTheMaskBefore, ReshapesTheRows,
]  # fmt: skip


def inputs(module: nn.Module) -> list[torch.Tensor]:
    """Few tokens, so that most experts have no rows."""
    return [torch.randn(n, module.H) for n in (1, 2, 3, 9)]


@pytest.mark.parametrize("style", BRANCHES, ids=lambda s: s.__name__)
def test_what_matters_without_rows_stays_a_branch(style):
    module, recorder = style(), Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, dynamic=True)
    with torch.no_grad(), torch._dynamo.config.patch(CAPTURE):
        for x in inputs(module):
            calls = module.calls
            want = module(x)
            made = module.calls - calls
            assert torch.allclose(compiled(x), want, rtol=1e-5, atol=1e-5)
            assert module.calls - calls == 2 * made
    assert not counters[SEEN_THROUGH] and "fp4::moe" not in recorder.ops


@pytest.mark.parametrize(
    "style", [Loop, Hits, HitsByItem, HitsInARow, HitsByTensor, HitsByTensorUpToACapacity]
)
def test_the_plain_loop_is_seen_through(style):
    """What the branches above differ from."""
    module, recorder = style(), Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for x in inputs(module):
            assert relative_error(compiled(x), module.twin()(x)) < 1e-5
    assert set(recorder.ops) == {"fp4::moe"} and not counters[KEPT]


@pytest.mark.parametrize("style", [HitsOfTokens, HitsOfIdsThatChange])
def test_how_many_experts_were_chosen_from_is_not_always_how_many_are_hit(style):
    def as_captured(gm, inputs):
        return gm

    as_captured.sees_through_branches = True
    extend_dynamo()
    module = style()
    with torch.no_grad(), torch._dynamo.config.patch(CAPTURE):
        for n in (3, 9):
            torch._dynamo.reset()
            x = torch.randn(n, module.H)
            got = torch.compile(module, backend=as_captured, dynamic=False)(x)
            assert relative_error(got, module(x)) < 1e-5
            assert counters[SEEN_THROUGH] and not counters[KEPT]


def test_random_numbers_keep_the_branch():
    class Drops(Loop):
        def work(self, out, x, token, slot, weights, expert):
            super().work(out, self.dropout(x), token, slot, weights, expert)

    with torch.no_grad(), torch._dynamo.config.patch(CAPTURE):
        module = Drops()
        torch.compile(module, backend=Recorder(), dynamic=True)(torch.randn(3, module.H))
    assert not counters[SEEN_THROUGH] and any("random" in why for why in counters[KEPT])


def test_gradients_keep_the_branch():
    """An expert without rows has no gradient, and one that meets no rows a gradient of zeros."""
    module = SKIPPING()
    compiled = torch.compile(module, backend=Recorder(), dynamic=True)
    with torch._dynamo.config.patch(CAPTURE):
        compiled(torch.randn(1, module.H)).sum().backward()
    assert [e.w1.weight.grad is None for e in module.list].count(True) == module.E - module.k
    assert not counters[SEEN_THROUGH] and any("gradients" in why for why in counters[KEPT])


def test_other_backends_see_the_branch():
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm

    module = SKIPPING()
    Recorder()  # extends Dynamo
    with torch.no_grad(), torch._dynamo.config.patch(CAPTURE):
        torch.compile(module, backend=backend)(torch.randn(3, module.H))
    assert not counters[SEEN_THROUGH] and not counters[KEPT]


def test_under_inductor_with_most_experts_idle():
    """Also where nothing is rewritten: the graph computes with no rows at all."""

    class Shifted(Loop):
        def work(self, out, x, token, slot, weights, expert):
            y = expert(x[token] + out[token].cumsum(0).tanh()) * weights[token, slot, None]
            out.index_add_(0, token, y)

    for module, rewritten in ((SKIPPING(), True), (Shifted(), False)):
        options = {"activation": "bf16"}
        compiled = torch.compile(module, backend="fp4", options=options, fullgraph=True, dynamic=True)
        with torch.no_grad():
            twin = module.twin() if rewritten else module
            for x in inputs(module):
                assert relative_error(compiled(x), twin(x)) < 1e-5
