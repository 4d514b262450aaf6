"""One sum over the experts and their inner dimension, and blocks that end in a product itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from recorder import Recorder, fake_quantised, relative_error
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
E, H, N = 4, 64, 96


def matrices(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 8)


class AfterTrunk(nn.Module):
    """Experts of one layer after a layer that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.gate = nn.Linear(H, N), nn.Linear(N, E)
        self.down, self.other = matrices(E, N, H), matrices(E, N, H)

    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x).tanh()
        return torch.einsum("te,tn,enh->th", self.gate(h).softmax(-1), h, self.down)


class TwoSums(AfterTrunk):
    """Two such blocks, which are added."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x).tanh()
        scores = self.gate(h)
        y = torch.einsum("te,tn,enh->th", scores.softmax(-1), h, self.down)
        return y + torch.einsum("te,tn,enh->th", scores.sigmoid(), h, self.other)


class ThenDense(nn.Module):
    """The block ends in one product of all hidden values. A dense FFN comes after it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = matrices(E, H, N), nn.Linear(H, E), matrices(E, N, H)
        self.ffn = nn.Sequential(nn.Linear(H, N), nn.SiLU(), nn.Linear(N, H))

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(torch.einsum("th,ehn->ten", x, self.up))
        h = h * self.gate(x).softmax(-1)[..., None]
        return self.ffn(h.flatten(1) @ self.down.flatten(0, 1))


class BesideNoScores(ThenDense):
    """The other sum has factors that nothing limits."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(torch.einsum("th,ehn->ten", x, self.up))
        y = torch.einsum("ten,enh->th", h * (self.gate(x) > 0)[..., None], self.down)
        return y + torch.einsum("te,ten,enh->th", self.gate(x).softmax(-1).cumsum(-1), h, self.down)


@pytest.mark.parametrize("kind", [AfterTrunk, ThenDense, *map(more, (TwoSums, BesideNoScores))])
@torch.no_grad()
def test_one_sum_over_experts_and_their_inner_dimension(kind):
    module, recorder = kind(), Recorder(activation="bf16")
    run = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    inputs = torch.randn(9, H), torch.randn(3, H)
    got = [run(x) for x in inputs]
    assert recorder.sites and all(site.rewritten for site in recorder.sites)
    for name, weight in module.named_parameters(recurse=False):
        setattr(module, name, nn.Parameter(fake_quantised(weight, "nvfp4", transposed=True)))
    module.double()
    for y, x in zip(got, inputs, strict=True):
        assert relative_error(y.double(), module(x.double())) < 1e-5


class OneOutput(nn.Module):
    """Each expert has one output, its row of one matrix, after a layer whose results a vector scales."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.gate, self.rows = nn.Linear(H, N), nn.Linear(H, E), nn.Linear(N, E)
        self.gains = matrices(8, N)

    def forward(self, x: Tensor) -> Tensor:
        y = self.rows(self.trunk(x).relu() * self.gains[3])
        return x + (self.gate(x).softmax(-1) * y).sum(-1, keepdim=True)


@torch.no_grad()
def test_experts_of_one_output_keep_their_weights():
    module, recorder = OneOutput(), Recorder()
    x = torch.randn(9, H)
    got = torch.compile(module, backend=recorder, fullgraph=True)(x)
    assert relative_error(got, module(x)) < 1e-5
    assert not recorder.ops
