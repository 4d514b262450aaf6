"""Slices of sorted rows with bounds that Python adds up: which slices are the rows of one expert."""

from __future__ import annotations

import pytest
import torch
from conftest import more
from moe_models import Recorder, relative_error
from moe_styles import BinnedSlices, SlicedLoop

from fp4_ops.compile_passes.dynamo.branches import KEPT, SEEN_THROUGH
from fp4_ops.compile_passes.dynamo.extend import CAPTURE

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

counters = torch._dynamo.utils.counters


class InOneBranch(BinnedSlices):
    """The same in other words."""

    def experts_of(self, x, ids, weights):
        order, rows = self.sorted(x, ids)
        counts = self.counted(ids).numpy()
        outputs, start = [], 0
        for expert, n in zip(self.list, counts):
            if n > 0:
                outputs.append(expert(rows[start : start + n]))
                start += n
        return self.restored(torch.cat(outputs), order, ids, weights)


class TheListIsCounted(SlicedLoop):
    def experts_of(self, x, ids, weights):
        order, rows = self.sorted(x, ids)
        counts, outputs, start = self.counted(ids).tolist(), [], 0
        for e, n in enumerate(counts):
            if n == 0:
                continue
            outputs.append(self.list[e](rows[start : start + n]))
            start += n
        return self.restored(torch.cat(outputs), order, ids, weights) * len(outputs)


class TheListIsRead(SlicedLoop):
    def experts_of(self, x, ids, weights):
        order, rows = self.sorted(x, ids)
        counts, outputs, start = self.counted(ids).tolist(), [], 0
        for e, n in enumerate(counts):
            if n == 0:
                continue
            outputs.append(self.list[e](rows[start : start + n]))
            start += n
        return self.restored(torch.cat(outputs), order, ids, weights) + outputs[-1].sum(0)


class TheListHasAnotherName(SlicedLoop):
    def experts_of(self, x, ids, weights):
        order, rows = self.sorted(x, ids)
        outputs = same = []
        counts, start = self.counted(ids).tolist(), 0
        for e, n in enumerate(counts):
            if n == 0:
                continue
            outputs.append(self.list[e](rows[start : start + n]))
            start += n
        return self.restored(torch.cat(outputs), order, ids, weights) * len(same)


class OneOutputInDouble(SlicedLoop):
    """All are, once it is joined to the others, and only then."""

    def experts_of(self, x, ids, weights):
        order, rows = self.sorted(x, ids)
        counts, outputs, start = self.counted(ids).tolist(), [], 0
        for e, n in enumerate(counts):
            if n == 0:
                continue
            y = self.list[e](rows[start : start + n])
            outputs.append(y.double() if e == 3 else y)
            start += n
        y = torch.cat(outputs)
        return self.restored(y, order, ids, weights) * y.dtype.itemsize


class OneRowForEachExpert(SlicedLoop):
    def experts_of(self, x, ids, weights):
        _, rows = self.sorted(x, ids)
        counts, outputs, start = self.counted(ids).tolist(), [], 0
        for e, n in enumerate(counts):
            if n == 0:
                continue
            outputs.append(self.list[e](rows[start : start + n]).sum(0, keepdim=True) + 1)
            start += n
        return torch.cat(outputs).sum(0) + x


class PerhapsNoneHasRows(SlicedLoop):
    def experts_of(self, x, ids, weights):
        _, rows = self.sorted(x, ids)
        counts, outputs, start = self.counted(ids).tolist(), [], 0
        for e, n in enumerate(counts[:1]):
            if n == 0:
                continue
            outputs.append(self.list[e](rows[start : start + n]))
            start += n
        return torch.cat(outputs).sum(0) + x if len(outputs) else x - 1


class SlicesOneRowLater(BinnedSlices):
    def experts_of(self, x, ids, weights):
        order, rows = self.sorted(x, ids)
        rows = torch.cat([rows[-1:], rows])
        counts, outputs, start = self.counted(ids).tolist(), [], 1
        for e, n in enumerate(counts):
            outputs.append(self.list[e](rows[start : start + n]))
            start += n
        return self.restored(torch.cat(outputs), order, ids, weights)


class SlicesOfOtherCounts(BinnedSlices):
    def counted(self, ids):
        return super().counted((ids + 1) % self.E)


class CountsThatChange(SlicedLoop):
    """They no longer add up to all rows."""

    def counted(self, ids):
        return super().counted(ids).clamp_(max=1)

    def restored(self, y, order, ids, weights):
        return y.sum(0) + weights.sum()


class OneMarkForTwoChoices(SlicedLoop):
    """A token's ids are not distinct, so that fewer rows are counted than there are."""

    def experts_of(self, x, ids, weights):
        ids = ids.index_put((torch.arange(ids.shape[0]), torch.ones(1, dtype=torch.int64)), ids[:, 0])
        return super().experts_of(x, ids, weights)

    def restored(self, y, order, ids, weights):
        return y.sum(0) + weights.sum()


class ArithmeticOfArrays(SlicedLoop):
    """With a list the same arithmetic would mean something else."""

    def experts_of(self, x, ids, weights):
        _, rows = self.sorted(x, ids)
        counts = self.counted(ids).numpy()
        twice = counts * 2
        outputs = [self.list[e](rows[:n]) for e, n in enumerate(twice) if n]
        return torch.cat(outputs).sum(0) + x * len(twice)


def results(module, recorder, **options):
    """(output, x) for two tokens that leave the same experts without rows, and for more."""
    compiled = torch.compile(module, backend=recorder, dynamic=True, **options)
    with torch.no_grad(), torch._dynamo.config.patch(CAPTURE):
        for x in (torch.randn(1, module.H).repeat(2, 1), torch.randn(9, module.H)):
            yield compiled(x), x


def test_the_same_in_other_words():
    module, recorder = InOneBranch(experts=5), Recorder(activation="bf16")
    for got, x in results(module, recorder, fullgraph=True):
        assert relative_error(got, module.twin()(x)) < 1e-5
    assert set(recorder.ops) == {"fp4::moe"} and recorder.compilations == 1 and not KEPT


@pytest.mark.parametrize("style", [SlicedLoop, more(BinnedSlices)])
def test_the_graph_does_not_grow_with_the_experts_and_has_no_number_of_rows(style):
    computed = []
    for experts in (3, 6):
        torch._dynamo.reset()
        module, recorder = style(experts=experts), Recorder(activation="bf16")
        for _ in results(module, recorder, fullgraph=True):
            pass
        graph = recorder.graphs[-1].graph
        assert not graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default)
        computed.append(sum(n.op == "call_function" for n in graph.nodes))
    assert computed[0] == computed[1]


STAY = {
    TheListIsCounted: "an object changes", TheListIsRead: "an object changes",
    TheListHasAnotherName: "an object changes", OneOutputInDouble: "`outputs`, which is read later, changes",
    OneRowForEachExpert: "`outputs`, which is read later, changes",
    PerhapsNoneHasRows: "`outputs` may be empty",
}  # fmt: skip


# Those of a reason that another has, too.
MORE = {TheListIsCounted, TheListHasAnotherName, OneRowForEachExpert}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("style", [more(s) if s in MORE else s for s in STAY], ids=lambda s: s.__name__)
def test_what_matters_without_rows_stays_a_branch(style):
    module, recorder = style(experts=5), Recorder(activation="bf16")
    for got, x in results(module, recorder):
        assert torch.allclose(got, module(x), rtol=1e-5, atol=1e-5)
    assert not recorder.ops and not counters[SEEN_THROUGH]
    told = [kept.why.reason for kept in KEPT.values()]
    assert any(STAY[style] in reason for reason in told), told


OTHERS = [SlicesOfOtherCounts, OneMarkForTwoChoices, ArithmeticOfArrays]
OTHERS += map(more, [SlicesOneRowLater, CountsThatChange])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("style", OTHERS, ids=lambda s: s.__name__)
def test_other_slices_are_no_experts_rows(style):
    module, recorder = style(experts=5), Recorder(activation="bf16")
    for got, x in results(module, recorder):
        assert torch.allclose(got, module(x), rtol=1e-5, atol=1e-5)
    assert not recorder.ops
