"""A loop over experts is captured without torch's cache of results of fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorder import Recorder
from torch._subclasses.fake_tensor import FakeTensorMode

from fp4_ops.compile_passes.dynamo.extend import CAPTURE


def _kept(experts: int, backend: Any) -> int:
    """How many results Dynamo keeps while it captures a loop."""

    def loop(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e in range(experts):
            token, _ = torch.where(ids == e)
            out.index_add_(0, token, x[token].relu())
        return out

    torch._dynamo.reset()
    FakeTensorMode.cache_clear()
    before = FakeTensorMode.cache_info().misses
    with torch.no_grad(), torch._dynamo.config.patch(fake_tensor_cache_enabled=True, **CAPTURE):
        torch.compile(loop, backend=backend, fullgraph=True)(torch.randn(6, 8), torch.randint(0, 4, (6, 2)))
    return FakeTensorMode.cache_info().misses - before


class _Nothing(Recorder):
    """Only Dynamo, no passes after it."""

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return gm.forward


class _Other(_Nothing):
    sees_through_branches = False


def test_no_results_of_sizes_that_only_the_data_knows_are_kept() -> None:
    few, many = (_kept(experts, _Nothing()) for experts in (3, 9))
    assert many - few <= 6  # the masks, `ids == e`


def test_other_backends_keep_the_cache() -> None:
    few, many = (_kept(experts, _Other()) for experts in (3, 9))
    assert many - few > 6


@pytest.mark.parametrize("experts", [3, 9])
def test_each_expert_makes_one_fake_tensor(experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The indices that `nonzero` gives; Dynamo has made those of all that is read of them."""
    from fp4_ops.compile_passes.trace.copier import Copier

    made: list[Any] = []
    like = Copier._like
    monkeypatch.setattr(Copier, "_like", lambda self, *a: made.append(a) or like(self, *a))

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            make = (
                torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(3))
                for _ in range(experts)
            )
            self.experts = torch.nn.ModuleList(make)
            self.router = torch.nn.Linear(64, experts, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, ids = torch.topk(self.router(x).softmax(-1), 2)
            out = torch.zeros_like(x)
            for e, (gate, up, down) in enumerate(self.experts):
                token, choice = torch.where(ids == e)
                y = down(F.silu(gate(x[token])) * up(x[token]))
                out.index_add_(0, token, y * weights[token, choice, None])
            return out

    torch._dynamo.reset()
    backend = Recorder()
    with torch.no_grad(), torch._dynamo.config.patch(CAPTURE):
        torch.compile(Experts().bfloat16(), backend=backend, fullgraph=True)(
            torch.randn(6, 64, dtype=torch.bfloat16)
        )
    assert backend.ops == ["fp4::moe"]
    assert len(made) < experts + 3
