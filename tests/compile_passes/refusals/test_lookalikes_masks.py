"""Masks and sums that are similar to those of experts but differ from them, and parts of one vector."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import more
from moe_models import Recorder, relative_error
from moe_styles import ListStyle
from repository_styles import OneVector

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def dense(mine):
    """All experts for all tokens, weighted by mine(ids, weights, e)."""

    class Dense(ListStyle):
        def experts_of(self, x, ids, weights):
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.list):
                out += expert(x) * mine(ids, weights, e).sum(-1, keepdim=True)
            return out

    return Dense


def reduced(reduce, include_self):
    class Reduced(ListStyle):
        def experts_of(self, x, ids, weights):
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.list):
                token, slot = torch.where(ids == e)
                rows, y = token[:, None].expand(-1, self.H), expert(x[token]) * weights[token, slot, None]
                out = out.scatter_reduce(0, rows, y, reduce=reduce, include_self=include_self)
            return out

    return Reduced


OTHERS = {
    "filled with ones": dense(lambda ids, w, e: w.masked_fill(ids != e, 1.0)),
    "all but this expert": dense(lambda ids, w, e: w.masked_fill(ids == e, 0.0)),
    "experts below this one": dense(lambda ids, w, e: w.masked_fill(ids >= e, 0.0)),
    "ones elsewhere": dense(lambda ids, w, e: torch.where(ids == e, w, 1.0)),
    "not this expert": dense(lambda ids, w, e: torch.where(ids == e, 0.0, w)),
    "the largest": reduced("amax", True),
    "a mean": reduced("mean", True),
    "a sum without what was there": reduced("sum", False),
}
REDUCED = ("the largest", "a mean", "a sum without what was there")
"""No sums, but a router chose each expert's rows: the products are in 4 bits, each by itself."""
FIRST = ("all but this expert", "a sum without what was there")


@pytest.mark.parametrize("name", [n if n in FIRST else more(n) for n in OTHERS])
def test_other_masks_and_sums_are_no_block(name):
    module, recorder = OTHERS[name](experts=4), Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    with torch.no_grad():
        x = torch.randn(9, module.H)
        got = compiled(x)
        want = module.twin()(x) if name in REDUCED else module(x)
        assert relative_error(got, want) < 1e-5
    assert set(recorder.ops) == ({"fp4::mm"} if name in REDUCED else set()) and recorder.reasons


class IdsOfTwoRouters(ListStyle):
    """A token may have one expert twice, and then fewer rows than weights."""

    def experts_of(self, x, ids, weights):
        ids = torch.stack([ids[:, 0], (ids[:, 0] + 1 + (x[:, 0] > 9)) % self.E], 1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            mask = ids == e
            token = mask.any(-1).nonzero().flatten()
            out.index_add_(0, token, expert(x[token]) * weights[mask].view(-1, 1))
        return out


class WeightsOfAnotherMask(ListStyle):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token = (ids == e).any(-1).nonzero().flatten()
            out.index_add_(0, token, expert(x[token]) * weights.flip(1)[ids == e].view(-1, 1))
        return out


class WeightsInTheOrderOfChoices(ListStyle):
    """First of those whose first choice it is."""

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token = (ids == e).any(-1).nonzero().flatten()
            out.index_add_(0, token, expert(x[token]) * weights.T[(ids == e).T].view(-1, 1))
        return out


@pytest.mark.one_in(2)
@pytest.mark.parametrize("cls", [IdsOfTwoRouters, WeightsOfAnotherMask, WeightsInTheOrderOfChoices])
def test_weights_that_a_mask_chooses_for_rows_of_its_any(cls):
    """Rewritten or not: it computes what the module does."""
    module, recorder = cls(experts=4), Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for n in (9, 6):
            x = torch.randn(n, module.H)
            got = compiled(x)
            want = module.twin()(x) if recorder.ops else module(x)
            assert relative_error(got, want) < 1e-5
    assert ("fp4::moe" in recorder.ops) is (cls is WeightsOfAnotherMask), recorder.reasons


class TakenAlong(ListStyle):
    """torch computes ids % E here, for ids that count from the end."""

    def experts_of(self, x, ids, weights):
        every = torch.stack([expert(x) for expert in self.list], 1)
        return (weights.unsqueeze(1) @ torch.take_along_dim(every, ids.unsqueeze(-1), 1)).squeeze(1)


class TakenAlongOfFewer(ListStyle):
    """Ids modulo fewer experts are other ids."""

    def experts_of(self, x, ids, weights):
        every = torch.stack([expert(x) for expert in self.list[1:]], 1)
        return (weights.unsqueeze(1) @ torch.take_along_dim(every, ids.unsqueeze(-1) - 1, 1)).squeeze(1)


@pytest.mark.parametrize("cls", [TakenAlong, TakenAlongOfFewer])
def test_take_along_dim(cls):
    """Rewritten or not: it computes what the module does."""
    module, recorder = cls(experts=4, k=3), Recorder(activation="bf16")
    with torch.no_grad():
        x = torch.randn(9, module.H)
        got = torch.compile(module, backend=recorder, fullgraph=True)(x)
        assert relative_error(got, module.twin()(x) if recorder.ops else module(x)) < 1e-5
    assert ("fp4::moe" in recorder.ops) is (cls is TakenAlong), recorder.reasons


class OfTheNextExpert(OneVector):
    def parts(self, e):
        parts = self.every.split(self.H * self.I)
        w1, w3, w2 = parts[3 * ((e + 1) % self.E)], parts[3 * e + 1], parts[3 * e + 2]
        return w1.view(self.I, self.H), w3.view(self.I, self.H), w2.view(self.H, self.I)


class Overlapping(OneVector):
    def parts(self, e):
        size = self.H * self.I
        w1, w3, w2 = self.every[e * self.H : e * self.H + 3 * size].split(size)
        return w1.view(self.I, self.H), w3.view(self.I, self.H), w2.view(self.H, self.I)


class InTurns(OneVector):
    def parts(self, e):
        w1, w3, w2 = self.every.view(-1, 3 * self.E)[:, 3 * e : 3 * e + 3].unbind(1)
        return w1.reshape(self.I, self.H), w3.reshape(self.I, self.H), w2.reshape(self.H, self.I)


@pytest.mark.parametrize("cls", [OfTheNextExpert, more(Overlapping), more(InTurns)])
def test_parts_of_one_vector(cls):
    """Each part is read at its own place."""

    def exact(w):
        packed = torch.ops.fp4.quantize(w.detach().contiguous(), "nvfp4")
        return torch.ops.fp4.dequantize(*packed, "nvfp4", torch.float32)

    module, recorder = cls(experts=4), Recorder(activation="bf16")
    twin = copy.deepcopy(module)

    def parts(e):
        w1, w3, w2 = cls.parts(twin, e)
        return (*exact(torch.cat([w1, w3])).split(module.I), exact(w2))

    twin.parts = parts
    with torch.no_grad():
        x = torch.randn(9, module.H)
        compiled = torch.compile(module, backend=recorder, fullgraph=True)
        assert relative_error(compiled(x), twin(x)) < 1e-5
    assert recorder.ops == ["fp4::moe"], recorder.reasons
