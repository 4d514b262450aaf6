"""Branches that skip experts without rows: removed if both paths are proved equal, and kept otherwise."""

from __future__ import annotations

import branch_loops
import count_loops
import hit_loops
import named_loops
import pytest
import torch
from branch_loops import Loop
from conftest import more
from hit_loops import (
    Hits,
    HitsByItem,
    HitsByTensor,
    HitsByTensorUpToACapacity,
    HitsInARow,
    HitsOfIdsThatChange,
    HitsOfTokens,
)
from moe_models import Recorder, relative_error
from moe_styles import STYLES
from torch import nn

import fp4_ops  # noqa: F401
from fp4_ops.compile_passes.dynamo.branches import KEPT, SEEN_THROUGH
from fp4_ops.compile_passes.dynamo.extend import CAPTURE, extend_dynamo
from fp4_ops.compile_passes.refusal import Kind

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

counters = torch._dynamo.utils.counters
SKIPPING = STYLES["where loop, `if token.numel() == 0: continue`"]


def inputs(module: nn.Module) -> list[torch.Tensor]:
    """Few tokens, so that most experts have no rows."""
    return [torch.randn(n, module.H) for n in (1, 2, 3, 9)]


LOOPS = branch_loops, count_loops, hit_loops, named_loops
BRANCHES = [style for loops in LOOPS for style in loops.BRANCHES]
BRANCHES += [more(style) for loops in LOOPS for style in loops.MORE_BRANCHES]


@pytest.mark.one_in(7)
@pytest.mark.parametrize("style", BRANCHES, ids=lambda s: s.__name__)
def test_what_matters_without_rows_stays_a_branch(style):
    module, recorder = style(), Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, dynamic=True)
    with torch.no_grad(), torch._dynamo.config.patch(CAPTURE):
        # The same experts idle for both tokens, then few or none. One token would be compiled once more.
        for x in (torch.randn(1, module.H).repeat(2, 1), torch.randn(9, module.H)):
            calls = module.calls
            want = module(x)
            made = module.calls - calls
            assert torch.allclose(compiled(x), want, rtol=1e-5, atol=1e-5)
            assert module.calls - calls == 2 * made
    assert not counters[SEEN_THROUGH] and "fp4::moe" not in recorder.ops


@pytest.mark.parametrize(
    "style",
    [
        *(HitsByItem, count_loops.ByCounts),
        *map(
            more,
            [HitsByTensor, Loop, Hits, HitsInARow, HitsByTensorUpToACapacity, count_loops.ByCountsOfOneHot],
        ),
    ],
)
def test_the_plain_loop_is_seen_through(style):
    """The branches above are variants of this loop."""
    module, recorder = style(), Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for x in inputs(module)[::3]:
            assert relative_error(compiled(x), module.twin()(x)) < 1e-5
    assert set(recorder.ops) == {"fp4::moe"} and not KEPT


def the_graph_says_the_same(module, **options):
    """As captured and not rewritten, with no branch left that rows decide."""

    def as_captured(gm, inputs):
        return gm

    as_captured.sees_through_branches = True
    extend_dynamo()
    with torch.no_grad(), torch._dynamo.config.patch(CAPTURE):
        for n in (3, 9):
            torch._dynamo.reset()
            x = torch.randn(n, module.H)
            got = torch.compile(module, backend=as_captured, **options)(x)
            assert relative_error(got, module(x)) < 1e-5
            assert counters[SEEN_THROUGH] and not KEPT


@pytest.mark.parametrize("style", [HitsOfTokens, HitsOfIdsThatChange])
def test_how_many_experts_were_chosen_from_is_not_always_how_many_are_hit(style):
    the_graph_says_the_same(style(), dynamic=False)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("style", [hit_loops.HitsFlat, *named_loops.OTHERS, *map(more, hit_loops.OTHERS[1:])])
def test_hits_may_be_written_in_other_ways(style):
    module, recorder = style(), Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for x in inputs(module)[::3]:
            assert relative_error(compiled(x), module.twin()(x)) < 1e-5
    assert set(recorder.ops) == {"fp4::moe"} and not KEPT


@pytest.mark.parametrize("style", [hit_loops.NUMBERS[0], *map(more, hit_loops.NUMBERS[1:])])
def test_the_number_of_a_hit_expert_stays_a_tensor(style):
    """The graph gives the same result for any use of the expert's number."""
    the_graph_says_the_same(style(), dynamic=True, fullgraph=True)


def test_what_is_done_otherwise_in_training_alone():
    """The branch is removed in eval() and kept in train()."""
    module, recorder = branch_loops.DoesOtherwiseInTraining().eval(), Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, dynamic=True)
    x = torch.randn(2, module.H)
    with torch.no_grad(), torch._dynamo.config.patch(CAPTURE):
        assert relative_error(compiled(x), module.twin()(x)) < 1e-5
        assert recorder.ops == ["fp4::moe"]
        module.train()
        assert relative_error(compiled(x), module(x)) < 1e-5
        assert not torch.equal(module(x), module.eval()(x))
        exact, twin = module(x), module.twin()(x)  # train() may have left it to Python, as Dynamo does
        assert min(relative_error(compiled(x), y) for y in (exact, twin)) < 1e-5


def test_random_numbers_keep_the_branch():
    class Drops(Loop):
        def work(self, out, x, token, slot, weights, expert):
            super().work(out, self.dropout(x), token, slot, weights, expert)

    with torch.no_grad(), torch._dynamo.config.patch(CAPTURE):
        module = Drops()
        torch.compile(module, backend=Recorder(), dynamic=True)(torch.randn(3, module.H))
    assert not counters[SEEN_THROUGH] and any(kept.why.kind is Kind.RANDOM for kept in KEPT.values())


def test_gradients_keep_the_branch():
    """An expert without rows has no gradient, and one that meets no rows a gradient of zeros."""
    module = SKIPPING()
    compiled = torch.compile(module, backend=Recorder(), dynamic=True)
    with torch._dynamo.config.patch(CAPTURE):
        compiled(torch.randn(1, module.H)).sum().backward()
    assert [e.w1.weight.grad is None for e in module.list].count(True) == module.E - module.k
    assert not counters[SEEN_THROUGH] and any(kept.why.kind is Kind.GRADIENTS for kept in KEPT.values())


def test_other_backends_see_the_branch():
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm

    module = SKIPPING()
    Recorder()  # extends Dynamo
    with torch.no_grad(), torch._dynamo.config.patch(CAPTURE):
        torch.compile(module, backend=backend)(torch.randn(3, module.H))
    assert not counters[SEEN_THROUGH] and not KEPT


@pytest.mark.more
def test_under_inductor_with_most_experts_idle():
    """Also where nothing is rewritten: the graph computes with no rows at all."""

    class Shifted(Loop):
        def work(self, out, x, token, slot, weights, expert):
            y = expert(x[token] + out[token].cumsum(0).tanh()) * weights[token, slot, None]
            out.index_add_(0, token, y)

    for module, rewritten in ((SKIPPING(), True), (Shifted(experts=4, k=1), False)):
        options = {"activation": "bf16"}
        compiled = torch.compile(module, backend="fp4", options=options, fullgraph=True, dynamic=True)
        with torch.no_grad():
            twin = module.twin() if rewritten else module
            for x in inputs(module) if rewritten else inputs(module)[1:]:
                assert relative_error(compiled(x), twin(x)) < 1e-5
