"""`out[token] += y` adds all rows only if `token` has no index twice."""

from __future__ import annotations

import pytest
import torch
from moe_models import Recorder, relative_error
from package_styles import IncrementLoop
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fp4_ops.compile_passes.index.ids import distinct


class RepeatedIds(IncrementLoop):
    """Two routers choose one expert each, which may be the same."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.stack((self.router(x), self.router(x.flip(-1))), 1).softmax(-1)
        weights, ids = scores.max(-1)
        return ids, weights


class RepeatedTopk(IncrementLoop):
    """Columns of the ids come from several topk."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = [torch.topk(self.router(r).softmax(-1), 1) for r in (x, x.flip(-1))]
        return torch.cat([c[1] for c in chosen], -1), torch.cat([c[0] for c in chosen], -1)


class RowsForget(IncrementLoop):
    """Only the result of a token's last expert is kept."""

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            out[token] = weights[token, slot, None] * expert(x[token])
        return out


class AddedToAnother(IncrementLoop):
    """The tensor that is added to is not the one that is written."""

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out, before = torch.zeros_like(x), torch.ones_like(x)
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            out[token] = before[token] + weights[token, slot, None] * expert(x[token])
        return out


class AddedElsewhere(IncrementLoop):
    """Rows are read at some indices and written at others."""

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            other = (token + 1) % x.shape[0]
            out[token] = out[other] + weights[token, slot, None] * expert(x[token])
        return out


@pytest.mark.one_in(3)
@pytest.mark.parametrize("cls", [RepeatedIds, RepeatedTopk, RowsForget, AddedToAnother, AddedElsewhere])
def test_rows_that_may_meet_are_not_added(cls):
    torch._dynamo.reset()
    module, recorder = cls(experts=4), Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    with torch.no_grad():
        x = torch.randn(12, module.H)
        assert relative_error(compiled(x), module(x)) < 0.3  # of products in 4 bits
    assert recorder.ops == ["fp4::mm"]  # each by itself: no block
    told = " | ".join(s.change for s in recorder.sites)
    assert ("index_add" if cls is AddedElsewhere else "forgets what other experts wrote") in told, told


IDS = {
    "topk": (lambda s: s.topk(2)[1], True),
    "some of topk, as int32": (lambda s: s.topk(3)[1][:, 1:].int(), True),
    "sort": (lambda s: s.sort(-1, descending=True)[1][:, :2], True),
    "topk of [B, T, E], flattened": (lambda s: s.view(4, 2, 6).topk(2)[1].view(8, 2), True),
    "one each": (lambda s: s.argmax(-1, keepdim=True), True),
    "topk over tokens": (lambda s: s.topk(2, dim=0)[1], False),
    "topk over tokens, reshaped": (lambda s: s.topk(2, dim=0)[1].view(6, 2), False),
    "topk, cut anew": (lambda s: s.topk(2)[1].view(4, 4), False),
    "values of topk": (lambda s: s.topk(2)[0].long(), False),
    "halves of topk": (lambda s: s.topk(2)[1] // 2, False),
}


@pytest.mark.parametrize("name", IDS)
def test_which_ids_name_no_expert_twice(name):
    function, expected = IDS[name]
    graph = make_fx(function, tracing_mode="fake")(torch.randn(8, 6)).graph
    assert distinct(graph.output_node().args[0]) is expected
