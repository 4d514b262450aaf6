"""The counters of the caches in a decoding step become one kernel: which are rewritten, and which are not."""

from __future__ import annotations

import pytest
import torch
from one_pass import OnePass
from torch import nn

from fp4_ops.compile_passes.step import cache

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """The CPU stands for a GPU."""
    monkeypatch.setattr(cache, "COUNTED_ON", ("cpu",))


class Layer(nn.Module):
    def __init__(self, count: torch.Tensor, step: int = 1) -> None:
        super().__init__()
        self.register_buffer("count", count)
        self.step = step

    def forward(self, x):
        places = torch.arange(len(x), device=x.device) + self.count
        self.count.add_(self.step)
        return x * places


class AndReads(Layer):
    def forward(self, x):
        return super().forward(x) + self.count


def run(*layers: nn.Module) -> OnePass:
    """The rewritten model gives and counts what the model does."""
    torch._dynamo.reset()
    model, start = nn.Sequential(*layers), [layer.count.clone() for layer in layers]
    x = torch.randn(3)
    want = model(x)
    counted = [layer.count.clone() for layer in layers]
    for layer, count in zip(layers, start, strict=True):
        layer.count.copy_(count)
    got = torch.compile(model, backend=(done := OnePass(cache.write_counters)), fullgraph=True)(x)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert all(torch.equal(layer.count, count) for layer, count in zip(layers, counted, strict=True))
    return done


def sums(done: OnePass) -> list[int]:
    """How many counters each kernel has."""
    return [len(n.args[0]) for n in done.calls(aten._foreach_add.Scalar)]


def test_the_counters_of_all_layers_are_one_kernel():
    done = run(*(Layer(torch.tensor(7 * i)) for i in range(3)))
    assert sums(done) == [3]
    assert not [n for n in done.calls(aten.copy_.default) if n.args[1].target is aten.add.Tensor]
    assert done.said == ["decoding step: 3 counters of tokens are one kernel (aten._foreach_add)"]


def test_a_second_run_is_undone_as_before():
    done = run(*(Layer(torch.tensor(i)) for i in range(2)))
    before, after = done.undone
    assert after is not None and after == before and [number for _, number in after] == [1, 1]


def test_other_numbers_and_dtypes_are_other_kernels():
    short = torch.tensor(1, dtype=torch.int32)
    done = run(*(Layer(torch.tensor(i), 1 + i // 2) for i in range(4)), Layer(short))
    assert sums(done) == [2, 2]


@pytest.mark.parametrize(
    "other",
    [
        lambda: AndReads(torch.tensor(3)),
        lambda: Layer(torch.tensor([1, 2, 3])),
        lambda: Layer(torch.tensor(0.5)),
    ],
    ids=["its sum is read", "several numbers", "floating point"],
)
def test_others_stay(other):
    assert not sums(run(Layer(torch.tensor(1)), other()))
