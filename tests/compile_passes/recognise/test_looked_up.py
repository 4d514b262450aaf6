"""Routing weights indexed by more than the ids, and experts that read rows of a parameter."""

from __future__ import annotations

import pytest
import torch
from conftest import more
from moe_models import Recorder, relative_error
from moe_styles import ListStyle
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def compared(module: ListStyle, *batches: Tensor, dynamic: bool | None = True) -> Recorder:
    recorder, twin = Recorder(activation="bf16"), module.twin()
    compiled = torch.compile(module, backend=recorder, dynamic=dynamic)
    with torch.no_grad():
        for x in batches:
            got, exact = compiled(x), (twin if recorder.ops else module)(x)
            assert relative_error(got, exact) < 1e-5, recorder.reasons
    return recorder


class Groups(ListStyle):
    """Two groups of three experts: argmax chooses a group, topk experts of it."""

    def __init__(self) -> None:
        super().__init__()
        self.group, self.scale = nn.Linear(self.H, 2), nn.Parameter(torch.rand(2, self.E) + 0.5)

    def weights(self, w: Tensor, p: Tensor, g: Tensor, ids: Tensor) -> Tensor:
        return w * p.gather(1, g[:, None])

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.reshape(-1, self.H)
        p = self.group(x).softmax(-1)
        g = p.argmax(-1)
        within = self.router(x).view(-1, 2, 3)[torch.arange(x.shape[0]), g]
        w, ids = torch.topk(within.softmax(-1), self.k, -1)
        ids = ids + 3 * g[:, None]
        w, out = self.weights(w, p, g, ids), torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            t, j = torch.where(ids == e)
            out.index_add_(0, t, expert(x[t]) * w[t, j, None])
        return out.reshape(shape)


class ByIndex(Groups):
    def weights(self, w, p, g, ids):
        return w * p[torch.arange(p.shape[0]), g][:, None]


class OfGroupAndExpert(Groups):
    """A factor by the token's group and the expert."""

    def weights(self, w, p, g, ids):
        return w * self.scale[g[:, None], ids]


class OfTheNextToken(Groups):
    """It computes something else, and its results must not change."""

    def weights(self, w, p, g, ids):
        return w * p[torch.arange(p.shape[0]).roll(1), g][:, None]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("cls", [Groups, OfGroupAndExpert, more(ByIndex), more(OfTheNextToken)])
def test_weights_by_a_group(cls):
    """Whatever shape the tokens have."""
    recorder = compared(cls(), torch.randn(2, 7, 32), torch.randn(3, 5, 32))
    assert recorder.ops == ["fp4::moe"], recorder.reasons
    torch._dynamo.reset()
    assert compared(cls(), torch.randn(9, 32)).ops == ["fp4::moe"]


class OverEmbedding(ListStyle):
    """Experts by a hash of the token, over its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, self.H)

    def rows(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        x, ids = self.rows(tokens), tokens % self.E
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            mask = ids == e
            out[mask] = expert(x[mask])
        return out


class ByIndexing(OverEmbedding):
    def rows(self, tokens):
        return self.embedding.weight[tokens]


class Looped(OverEmbedding):
    def forward(self, tokens):
        x = self.rows(tokens)
        w, ids = torch.topk(self.router(x).softmax(-1), self.k)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            t, j = torch.where(ids == e)
            out.index_add_(0, t, expert(x[t]) * w[t, j, None])
        return out


@pytest.mark.parametrize("cls", [OverEmbedding, Looped, more(ByIndexing)])
def test_rows_of_a_parameter(cls):
    recorder = compared(cls(), *(torch.randint(0, 50, (n,)) for n in (9, 7)))
    assert recorder.ops == ["fp4::moe"], recorder.reasons


def test_a_token_that_is_none_is_still_an_error():
    """The row is not that of another token."""
    compiled = torch.compile(OverEmbedding(), backend=Recorder(activation="bf16"))
    with torch.no_grad(), pytest.raises((IndexError, RuntimeError)):
        compiled(torch.tensor([1, 2, 50]))
