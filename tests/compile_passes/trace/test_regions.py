"""Regions of `torch.compiler.nested_compile_region`, and graphs within graphs beside experts."""

from __future__ import annotations

import pytest
import torch
from conftest import more
from moe_models import Recorder, relative_error
from moe_styles import GatherEinsum, WhereLoop
from torch import nn

from fp4_ops import explain

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Region(nn.Module):
    """Calls a block as a region, within another one if `nested`."""

    def __init__(self, block, nested=False):
        super().__init__()
        self.block, self.nested = block, nested

    @torch.compiler.nested_compile_region
    def inner(self, x):
        return self.block(x).tanh()

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return x + (self.inner(x) if self.nested else self.block(x))


def check(module, twin, hidden, ops):
    recorder = Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, fullgraph=True)
    with torch.no_grad():
        for n in (9, 5):
            x = torch.randn(n, hidden)
            assert relative_error(compiled(x), twin(x)) < 1e-5
    assert recorder.ops and set(recorder.ops) == ops, recorder.reasons


@pytest.mark.parametrize("nested", [True, more(False)])
@pytest.mark.parametrize("style", [GatherEinsum, more(WhereLoop)])
def test_experts_in_regions(style, nested):
    """The second layer's region has the code and sizes of the first, and other weights."""
    blocks = [style(), style()]
    module = nn.Sequential(*(Region(b, nested) for b in blocks))
    twin = nn.Sequential(*(Region(b.twin(), nested) for b in blocks))
    check(module, twin, blocks[0].H, {"fp4::moe"})


class BesideALoop(nn.Module):
    """A `while_loop` over what experts give, a condition on it, and activations that are checkpointed."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        y = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
        start = torch.zeros((), dtype=torch.int64)
        _, y = torch._higher_order_ops.while_loop(
            lambda i, t: i < 2, lambda i, t: (i + 1, t * 0.5), (start, y.clone())
        )
        return torch.cond(y.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (y,)) + x


def test_graphs_within_graphs_beside_experts(caplog):
    block = GatherEinsum()
    check(BesideALoop(block), BesideALoop(block.twin()), block.H, {"fp4::moe"})
    assert "failed" not in caplog.text


class NotRead(nn.Module):
    """A stack of matrices in a region, none of them an expert's."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 16, 16) / 4)

    @torch.compiler.nested_compile_region
    def forward(self, x):
        ids = x.argmax(-1) % 3
        return x + torch.einsum("td,tdh->th", x.cumsum(-1), self.weights[ids].cos())


@pytest.mark.slow
def test_a_region_without_experts_goes_to_inductor_as_it_was():
    module, x = nn.Sequential(NotRead(), NotRead()), torch.randn(6, 16)
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        got = torch.compile(module, backend="fp4")(x)
        assert relative_error(got, module(x)) < 1e-5
    torch._dynamo.reset()
    with torch.no_grad():
        assert not [s for s in explain(module, x).sites if s.rewritten]
