"""Models that call torch.vmap, and traces that fail inside of it or of autocast."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from moe_models import Recorder, fake_quantised, relative_error
from torch import nn

from fp4_ops.compile_passes.trace import calls, capture
from fp4_ops.meta.torch_internals import enter_autocast, functorch_depth

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class OverTokens(nn.Module):
    """One expert a token. Each token, by itself, takes its expert's matrices."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(64, 4)
        self.w1, self.w2 = nn.Parameter(torch.randn(4, 64, 96) / 8), nn.Parameter(torch.randn(4, 96, 64) / 8)

    def forward(self, x):
        before = x @ x.t()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.training):
            ids = self.router(x).argmax(-1)
            y = torch.vmap(lambda e, row: F.gelu(row @ self.w1[e]) @ self.w2[e])(ids, x)
        return y, before


def test_experts_by_an_id_under_vmap():
    model, recorder = OverTokens().eval(), Recorder(activation="bf16")
    twin = OverTokens().eval()
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        for w in (twin.w1, twin.w2):
            w.copy_(fake_quantised(w, "nvfp4", transposed=True))
        compiled = torch.compile(model, backend=recorder, fullgraph=True)
        for n in (9, 5):
            x = torch.randn(n, 64)
            assert relative_error(compiled(x)[0], twin(x)[0]) < 1e-5
    assert set(recorder.ops) == {"fp4::indexed_mm"}, recorder.reasons


class AutocastInside(OverTokens):
    def forward(self, x):
        def one(e, row):
            with torch.autocast("cpu", torch.bfloat16):
                return F.gelu(row @ self.w1[e]) @ self.w2[e]

        return torch.vmap(one)(self.router(x).argmax(-1), x), x @ x.t()


@pytest.mark.parametrize("model", [OverTokens, AutocastInside])
def test_a_trace_that_fails_inside_leaves_nothing_entered(model, monkeypatch):
    """The graph goes on as captured. Its own trace must not run in the regions of the one that failed."""

    def fail(node):
        if "matmul" in node.name:
            assert functorch_depth() == 1 and torch.is_autocast_enabled("cpu")
            raise NotImplementedError
        return node.target

    monkeypatch.setattr(capture, "as_written", fail)
    found = []

    def run(graph, inputs, config_patches):
        found.append((functorch_depth(), torch.is_autocast_enabled("cpu")))
        return graph

    model, recorder, x = model().train(), Recorder(run), torch.randn(9, 64)
    with torch.no_grad():
        y, before = torch.compile(model, backend=recorder, fullgraph=True)(x)
        assert before.dtype == torch.float32 and relative_error(y.float(), model(x)[0].float()) < 1e-6
    assert found == [(0, False)] and "NotImplementedError" in recorder.frames[0].note


def test_regions_are_left_in_the_reverse_order_of_their_entries(monkeypatch):
    """Autocast inside of a level of torch.func is left before it, and autocast outside of it after it."""
    left = []
    leave, close = calls.leave_functorch_levels, calls.exit_autocast
    monkeypatch.setattr(calls, "leave_functorch_levels", lambda depth: (left.append(depth), leave(depth)))
    monkeypatch.setattr(calls, "exit_autocast", lambda region: (left.append(region), close(region)))
    regions = calls.OpenRegions()

    def enter():
        region = enter_autocast("cpu", torch.bfloat16, True, None)
        regions.ran(enter_autocast, (), region)
        return region

    with pytest.raises(NotImplementedError), regions.ended():
        outside = enter()
        torch._C._functorch._vmap_increment_nesting(3, "error")
        inside = enter()
        torch._C._functorch._vmap_increment_nesting(2, "error")
        raise NotImplementedError
    assert [x for x in left if not isinstance(x, int)] == [inside, outside]
    assert left.index(1) < left.index(inside) < left.index(0) < left.index(outside)
    assert functorch_depth() == 0 and not torch.is_autocast_enabled("cpu")
