"""Inductor traces the rewritten graph again, and its decompositions give some results other strides.

An example is `cat` of an empty tensor and a transposed one: the result is contiguous from torch's kernel, but
transposed from the decomposition. The first step of transformers' caches computes such a `cat`.
"""

from __future__ import annotations

import pytest
import torch
from moe_models import Block, Recorder, relative_error
from retraced import retraced
from torch import nn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@torch.library.custom_op("fp4_test_strides::rows", mutates_args=())
def rows(x: torch.Tensor) -> torch.Tensor:
    """As many kernels: they read the memory of a tensor that the caller has made contiguous."""
    assert x.is_contiguous()
    return x * 2


@rows.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    assert x.is_contiguous()
    return torch.empty_like(x)


T = 6
USES = {
    "view": lambda z: z.reshape(-1),
    "flatten and expand": lambda z: z.unsqueeze(0).expand(2, -1, -1).reshape(2, -1),
    "complex": lambda z: torch.view_as_real(torch.view_as_complex(z.reshape(-1, 2))),
    "complex of rows": lambda z: torch.view_as_real(torch.view_as_complex(z.contiguous()[:, :2])),
    "bits": lambda z: z.contiguous().view(torch.float16).view(torch.float32),
    "as_strided": lambda z: z.contiguous().as_strided((5, 4), (T, 1)),
    "as_strided of a slice": lambda z: z.contiguous()[1:].as_strided((5, 4), (T, 1), 2),
    "as_strided, transposed": lambda z: z.contiguous().t().as_strided((T, 4), (1, T)),
    "as_strided is written to": lambda z: torch.as_strided_scatter(z.contiguous(), z[:2], (2, T), (T, 1), 3),
    "operator": lambda z: rows(z.contiguous()),
    "returned": lambda z: z.contiguous(),
}


class Cached(nn.Module):
    """An expert block whose transposed result joins an empty cache, and what reads that."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.block, self.use = Block("grouped_mm"), use

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.block(x)
        return y, USES[self.use](torch.cat([torch.tensor([]), y.t()], 0))

    def twin(self) -> Cached:
        twin = Cached(self.use)
        twin.block = self.block.twin()
        return twin


def check(model: Cached, compiled: nn.Module) -> None:
    x = torch.randn(T, Block.H)
    with torch.no_grad():
        got, want = compiled(x), model.twin()(x)
    for a, b in zip(got, want):
        assert relative_error(a, b) < 1e-5
        assert a.is_contiguous() or not b.is_contiguous()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("use", USES)
def test_a_tensor_that_is_laid_out_in_another_way(use):
    model, recorder = Cached(use), Recorder(activation="bf16", run=retraced)
    check(model, torch.compile(model, backend=recorder, fullgraph=True))
    assert recorder.ops == ["fp4::moe"]


@pytest.mark.more
def test_through_inductor():
    model = Cached("view")
    check(model, torch.compile(model, backend="fp4", fullgraph=True, options={"activation": "bf16"}))


def test_views_of_inputs_stay_views():
    """A returned view of an input shares the input's memory, also where the graph writes to the input."""

    class Views(Block):
        def forward(self, x, kept, written):
            written.view(-1)[:3].add_(1)
            return super().forward(x), kept.view(2, -1)[:, 1:], kept.t().view(torch.int32)

    model, recorder = Views("grouped_mm"), Recorder(activation="bf16", run=retraced)
    x, kept, written = torch.randn(T, Block.H), torch.randn(8, 4), torch.zeros(2, 4)
    with torch.no_grad():
        y, part, bits = torch.compile(model, backend=recorder)(x, kept, written)
        assert relative_error(y, model.twin()(x, kept, torch.zeros(2, 4))[0]) < 1e-5
    assert written.sum() == 3 and recorder.ops == ["fp4::moe"]
    kept.zero_()
    assert not part.any() and not bits.any()
