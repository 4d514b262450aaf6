"""Loops with bounds or branches that depend on the data: they run unchanged, and explain says why."""

from __future__ import annotations

import pytest
import torch
from conftest import more
from moe_models import Recorder, relative_error
from moe_styles import STYLES, ListStyle
from torch import nn

import fp4_ops
from fp4_ops.compile_passes.dynamo.extend import CAPTURE

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Splits(ListStyle):
    """An array that is handed from function to function: what these do with it cannot be seen."""

    def counts(self, ids):
        counts = ids.new_zeros((ids.shape[0], self.E))
        counts.scatter_(1, ids, 1)
        return counts.sum(dim=0).cpu().numpy()

    def outputs(self, rows, counts):
        outputs, start = [], 0
        for e, n in enumerate(counts):
            if n == 0:
                continue
            outputs.append(self.list[e](rows[start : start + n]))
            start += n
        return torch.cat(outputs)

    def experts_of(self, x, ids, weights):
        order = ids.view(-1).argsort()
        y = self.outputs(x[order // self.k], self.counts(ids))
        new = torch.empty_like(y)
        new[order] = y
        return (new.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)


class SplitsByOtherNumbers(Splits):
    """The sizes come from `unique_consecutive`, not from a count of the ids."""

    def outputs(self, rows, counts):
        return torch.cat([expert(part) for expert, part in zip(self.list, rows.split(counts))])

    def counts(self, ids):
        return (
            torch.unique_consecutive(
                torch.cat([torch.arange(self.E), ids.view(-1)]).sort().values, return_counts=True
            )[1]
            .sub(1)
            .tolist()
        )


BRANCH, NUMBERS = "a branch on data keeps a function out", "takes numbers out of tensors"


SORTED = [n for n in STYLES if n.startswith("sorted s") and "bounds" not in n]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [n if "bincount" in n or "numpy" in n else more(n) for n in SORTED])
def test_slices_of_as_many_rows_as_an_expert_has_are_captured(name):
    """Without fullgraph, and through Inductor: no number is left in the graph."""
    module = STYLES[name](experts=4)
    compiled, twin = torch.compile(module, backend="fp4", dynamic=True), module.twin()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with torch.no_grad():
        for n in (9, 6):
            x = torch.randn(n, module.H)
            assert 1e-4 < relative_error(compiled(x), twin(x)) < 3e-2  # int8 activations
    assert not counters["graph_break"]


@pytest.mark.more
def test_numbers_that_are_not_recognised_still_compile():
    """Captured because they look like counts of rows, and left to Inductor."""

    class Halves(nn.Module):
        def forward(self, x):
            counts = torch.nn.functional.one_hot(x.argmax(-1), 4).sum(0).tolist()
            return torch.cat([(e + 1) * part for e, part in enumerate(x.split(counts))])

    others = STYLES["sorted splits, one-hot counts, restored by index_put (DeepSeek-V3's own)"](experts=4)
    others.list[3].act = torch.nn.functional.gelu  # so that they are not one block
    for module, width, lengths in ((others, others.H, (9, 6)), (Halves(), 4, (9, 6, 1))):
        torch._dynamo.reset()
        compiled = torch.compile(module, backend="fp4", options={"activation": "bf16"}, dynamic=True)
        with torch.no_grad():
            for n in lengths:
                x = torch.randn(n, width)
                assert relative_error(compiled(x), module(x)) < 1e-5


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("style", "hint"),
    [(Splits, BRANCH), (SplitsByOtherNumbers, NUMBERS)],
)
def test_they_run_as_they_always_did(style, hint):
    module, recorder = style(), Recorder()
    compiled = torch.compile(module, backend=recorder, dynamic=True)
    with torch.no_grad(), torch._dynamo.config.patch(CAPTURE):
        for n in (9, 5):
            x = torch.randn(n, module.H)
            assert relative_error(compiled(x), module(x)) < 1e-5
    assert not recorder.ops
    torch._dynamo.reset()
    report = fp4_ops.explain(module, torch.randn(9, module.H))
    assert any(hint in h for h in report.hints), report
