"""Ids and weights that several rows share: the rows of a sequence, an image, a task, or a position."""

from __future__ import annotations

import pytest
import torch
from conftest import more
from moe_models import Recorder, relative_error
from moe_styles import ListStyle
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

STYLES: dict[str, type[nn.Module]] = {}


def named(cls: type[nn.Module]) -> type[nn.Module]:
    STYLES[cls.__name__] = cls
    return cls


class OfSequences(ListStyle):
    """The mean token of a sequence [T, H] chooses for all of its tokens."""

    def inputs(self, n: int) -> tuple[Tensor, ...]:
        return (torch.randn(n, 3, self.H),)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts_of(x, *self.route(x.flatten(1, -2).mean(1)))


@named
class IndexAdd(OfSequences):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            b, slot = torch.where(ids == e)
            out.index_add_(0, b, expert(x[b]) * weights[b, slot, None, None])
        return out


@named
class Increment(OfSequences):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            b, slot = torch.where(ids == e)
            if b.numel() == 0:
                continue
            out[b] += expert(x[b]) * weights[b, slot].view(-1, 1, 1)
        return out


@named
class Pictures(IndexAdd):
    """[B, height, width, channels]"""

    def inputs(self, n):
        return (torch.randn(n, 2, 3, self.H),)

    def experts_of(self, x, ids, weights):
        shape = x.shape
        return super().experts_of(x.flatten(1, 2), ids, weights).view(shape)


@named
class Dense(OfSequences):
    def forward(self, x):
        scores, out = torch.softmax(self.router(x.mean(1)), -1), torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            out = out + scores[:, e, None, None] * expert(x)
        return out


@named
class Scattered(OfSequences):
    def experts_of(self, x, ids, weights):
        full = weights.new_zeros(x.shape[0], self.E).scatter(1, ids, weights)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            out = out + full[:, e].view(-1, 1, 1) * expert(x)
        return out


@named
class Task(ListStyle):
    """The expert of each sample is an input."""

    def inputs(self, n):
        return torch.randn(n, 3, self.H), torch.randint(self.E, (n,))

    def forward(self, x, task):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            out[task == e] = expert(x[task == e])
        return out


@named
class Position(ListStyle):
    """All samples have a position's expert."""

    def inputs(self, n):
        return torch.randn(2, n, self.H), torch.randint(self.E, (n,))

    def forward(self, x, ids):
        return sum((ids == e)[None, :, None] * expert(x) for e, expert in enumerate(self.list))


FIRST = ("IndexAdd", "Task", "Dense")


@pytest.mark.parametrize("name", [n if n in FIRST else more(n) for n in STYLES])
def test_tokens_that_share_their_experts(name):
    """Also of a single sequence: then there is nothing that the weights differ along."""
    module, recorder = STYLES[name](experts=4), Recorder(activation="bf16", format="mxfp4")
    compiled, twin = torch.compile(module, backend=recorder), module.twin("mxfp4")
    with torch.no_grad():
        for n in (6, 4, 1):
            given = module.inputs(n)
            assert relative_error(compiled(*given), twin(*given)) < 1e-5
    assert recorder.compilations == 3 and recorder.ops == ["fp4::moe"] * 3, recorder.reasons
