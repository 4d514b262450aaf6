"""Lists of counts that end at the largest id in the data: which loops over them cover all experts."""

from __future__ import annotations

import pytest
import repository_styles  # noqa: F401  adds its styles to STYLES
import torch
from conftest import more
from moe_models import Recorder, relative_error
from moe_styles import STYLES, SlicedLoop

from fp4_ops.compile_passes.dynamo.branches import KEPT
from fp4_ops.compile_passes.dynamo.extend import CAPTURE, extend_dynamo

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

E = 4


class Counted(SlicedLoop):
    """A loop over the counts in which each round, and what comes after, is a subclass's."""

    def experts_of(self, x, ids, weights):
        order, rows = self.sorted(x, ids)
        counts = torch.bincount(ids.view(-1)).tolist()
        return self.loop(x, order, rows, weights.view(-1), counts)

    def loop(self, x, order, rows, weights, counts):
        raise NotImplementedError

    def one(self, out, e, start, n, order, rows, weights):
        own = order[start : start + n]
        out.index_add_(0, own // self.k, self.list[e](rows[start : start + n]) * weights[own, None])


class HandedOn(Counted):
    """Another function may ask for the length."""

    def loop(self, x, order, rows, weights, counts):
        out, start = torch.zeros_like(x), 0
        for e, n in enumerate(counts):
            self.one(out, e, start, n, order, rows, weights)
            start += n
        return out


class Own(Counted):
    """The list stays in the function."""

    def experts_of(self, x, ids, weights):
        order, rows = self.sorted(x, ids)
        out, start, other = torch.zeros_like(x), 0, self.before(x)
        counts = torch.bincount(ids.view(-1)).tolist()
        for e, n in enumerate(counts):
            self.one(out, e, start, n, order, rows, weights.view(-1))
            start += n
            other = self.after(other)
        return out + other

    def before(self, x):
        return 0

    def after(self, other):
        return other


class RoundsAreCounted(Own):
    def after(self, other):
        return other + 1


class LengthIsAsked(Counted):
    def experts_of(self, x, ids, weights):
        order, rows = self.sorted(x, ids)
        out, start = torch.zeros_like(x), 0
        counts = torch.bincount(ids.view(-1)).tolist()
        for e, n in enumerate(counts):
            self.one(out, e, start, n, order, rows, weights.view(-1))
            start += n
        return out * len(counts)


class LastIsRead(Counted):
    def experts_of(self, x, ids, weights):
        order, rows = self.sorted(x, ids)
        out, start = torch.zeros_like(x), 0
        counts = torch.bincount(ids.view(-1)).tolist()
        for e, n in enumerate(counts):
            self.one(out, e, start, n, order, rows, weights.view(-1))
            start += n
        return out * (counts[-1] > 0)


class NumberIsReadLater(Counted):
    def experts_of(self, x, ids, weights):
        order, rows = self.sorted(x, ids)
        out, start, e = torch.zeros_like(x), 0, 0
        for e, n in enumerate(torch.bincount(ids.view(-1)).tolist()):
            self.one(out, e, start, n, order, rows, weights.view(-1))
            start += n
        return out * e


class WithElse(Counted):
    def experts_of(self, x, ids, weights):
        order, rows = self.sorted(x, ids)
        out, start = torch.zeros_like(x), 0
        counts = torch.bincount(ids.view(-1)).cpu().numpy()
        for e, n in enumerate(counts):
            if e == E - 1:
                break
            self.one(out, e, start, n, order, rows, weights.view(-1))
            start += n
        else:
            out = out + 1
        return out


class EachAddsOne(Counted):
    def experts_of(self, x, ids, weights):
        order, rows = self.sorted(x, ids)
        out, start = torch.zeros_like(x), 0
        ends = torch.bincount(ids.view(-1)).cpu().numpy().cumsum(0)
        for e, end in enumerate(ends):
            self.one(out, e, start, end - start, order, rows, weights.view(-1))
            start = end
            out += 1
        return out


class OutputsAreListed(Counted):
    def experts_of(self, x, ids, weights):
        order, rows = self.sorted(x, ids)
        parts, start = [], 0
        for e, n in enumerate(torch.bincount(ids.view(-1)).tolist()):
            parts.append(self.list[e](rows[start : start + n]))
            start += n
        return self.restored(torch.cat(parts), order, ids, weights) * len(parts)


class EndsAreWritten(Counted):
    def experts_of(self, x, ids, weights):
        order, rows = self.sorted(x, ids)
        out, start = torch.zeros_like(x), 0
        ends = torch.bincount(ids.view(-1)).cpu().numpy().cumsum(0)
        ends[0] = 0
        for e, end in enumerate(ends):
            self.one(out, e, start, end - start, order, rows, weights.view(-1))
            start = end
        return out


CASES = {
    Own: True,
    HandedOn: None,
    RoundsAreCounted: False,
    LengthIsAsked: False,
    LastIsRead: False,
    NumberIsReadLater: False,
    WithElse: None,
    EachAddsOne: False,
    OutputsAreListed: False,
    EndsAreWritten: None,
}
"""Whether it runs over all experts; None: either, if the result is right."""
FIRST = (Own, RoundsAreCounted)


def without_the_last(module):
    """No token chooses the last expert, so that lists have one number less."""
    forward = module.router.forward
    module.router.forward = lambda x: forward(x) - 99 * (torch.arange(module.E) == module.E - 1)
    return module


def check(module, everything):
    KEPT.clear()
    recorder, twin = Recorder(activation="bf16"), without_the_last(module.twin())
    without_the_last(module)
    recorder.sees_through_branches = True
    extend_dynamo()
    compiled = torch.compile(module, backend=recorder, dynamic=True)
    with torch.no_grad(), torch._dynamo.config.patch(CAPTURE):
        for n in (9, 5):
            x = torch.randn(n, module.H)
            got = compiled(x)
            assert relative_error(got, (twin if recorder.ops else module)(x)) < 1e-5, recorder.reasons
    if everything is not None:
        assert recorder.ops == (["fp4::moe"] if everything else []), recorder.reasons


@pytest.mark.parametrize(
    ("cls", "everything"), [(c, a) if c in FIRST else more(c, a) for c, a in CASES.items()]
)
def test_what_a_loop_asks_of_the_list(cls, everything):
    check(cls(experts=E), everything)


NAMES = [n for n in STYLES if "NumPy's ends" in n or "written to a buffer" in n or "ends as a list" in n]


@pytest.mark.parametrize("name", [NAMES[0], *map(more, NAMES[1:])])
def test_lists_that_are_shorter(name):
    check(STYLES[name](experts=E), True)


def test_ids_that_topk_did_not_choose_stay():
    """No one knows how many experts there are."""

    class Given(Own):
        def forward(self, x, ids):
            return self.experts_of(x, ids, torch.softmax(self.router(x), -1)[:, : self.k].contiguous())

    module, recorder = Given(experts=E), Recorder(activation="bf16")
    recorder.sees_through_branches = True
    extend_dynamo()
    with torch.no_grad(), torch._dynamo.config.patch(CAPTURE):
        x, ids = torch.randn(9, module.H), torch.randint(0, 2, (9, 2))
        compiled = torch.compile(module, backend=recorder)
        assert relative_error(compiled(x, ids), module(x, ids)) < 1e-5
    assert not recorder.ops
