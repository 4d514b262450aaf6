"""Which experts run in 4 bits never depends on numbers that Python read from the data before a graph
break."""

from __future__ import annotations

import pytest
import torch
from moe_models import Recorder, relative_error
from moe_styles import ListStyle
from torch import Tensor

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

E = 4
IDS = {
    "as many for each": torch.arange(12).view(6, 2) % E,
    "the first two": torch.arange(12).view(6, 2) % 2,
    "by chance": torch.tensor([[0, 3], [3, 1], [2, 3], [3, 0], [3, 2], [1, 3]]),
}


class Given(ListStyle):
    """The ids are an input, so that Dynamo breaks the graph where they are counted."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.experts_of(x, ids, torch.softmax(self.router(x), -1)[:, :2])

    def sorted_rows(self, x, ids, weights):
        order = torch.argsort(ids.flatten(), stable=True)
        counts = torch.histc(ids.float(), bins=E, min=0, max=E).long().tolist()
        return order // 2, x[order // 2] * weights.flatten()[order, None], counts


class SplitUpToTheirSum(Given):
    """As torchtitan has it."""

    def experts_of(self, x, ids, weights):
        token, rows, counts = self.sorted_rows(x, ids, weights)
        parts = torch.split(rows[: sum(counts)], counts, dim=0)
        y = torch.cat([expert(part) for expert, part in zip(self.list, parts)])
        return torch.zeros_like(x).index_add(0, token, y)


class SlicesOfThoseThatHaveRows(Given):
    def experts_of(self, x, ids, weights):
        token, rows, counts = self.sorted_rows(x, ids, weights)
        out, start = [], 0
        for expert, n in zip(self.list, counts):
            if n:
                out.append(expert(rows[start : start + n]))
            start += n
        return torch.zeros_like(x).index_add(0, token, torch.cat(out))


class NamedThatAreCounted(Given):
    def experts_of(self, x, ids, weights):
        named = ids.unique().tolist()
        out = torch.zeros_like(x)
        for e in named:
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.list[e](x[token]) * weights[token, slot, None])
        return out / len(named)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("style", [SplitUpToTheirSum, SlicesOfThoseThatHaveRows, NamedThatAreCounted])
def test_numbers_of_the_data_decide_nothing(style):
    x = torch.randn(6, 32)
    for ids in IDS.values():
        torch._dynamo.reset()
        module, recorder = style(experts=E), Recorder(activation="bf16")
        compiled = torch.compile(module, backend=recorder, dynamic=False)
        with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            assert relative_error(compiled(x, ids), module(x, ids)) < 1e-5
        assert not recorder.ops


def test_other_numbers_that_a_function_is_given_do_not_matter():
    class Capacities(ListStyle):
        def forward(self, x, sizes):
            return super().forward(x) * sizes[0] + sizes[1]

        def experts_of(self, x, ids, weights):
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.list):
                token, slot = torch.where(ids == e)
                out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
            return out

    module, recorder = Capacities(experts=E), Recorder(activation="bf16")
    with torch.no_grad():
        torch.compile(module, backend=recorder, fullgraph=True)(torch.randn(6, 32), [2, 3])
    assert recorder.ops == ["fp4::moe"]
