"""Soft MoE of a batch: a softmax mixes each sequence's tokens into slots, and slots into tokens."""

from __future__ import annotations

import pytest
import torch
from conftest import more
from recorder import Recorder, fake_quantised, relative_error
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
E, S, H, N = 4, 3, 64, 96


class Slots(nn.Module):
    """FFNs that each read their slots of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(H, E, S) / 8)
        self.ups = nn.ModuleList(nn.Linear(H, N) for _ in range(E))
        self.downs = nn.ModuleList(nn.Linear(N, H) for _ in range(E))

    def combine(self, logits: Tensor) -> Tensor:
        return logits.flatten(2).softmax(-1).view_as(logits)

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.einsum("bth,hes->btes", x, self.phi)
        rows = torch.einsum("btes,bth->besh", logits.softmax(1), x)
        each = [down(up(rows[:, e]).relu()) for e, (up, down) in enumerate(zip(self.ups, self.downs))]
        return torch.einsum("btes,besh->bth", self.combine(logits), torch.stack(each, 1))


class OverSlots(Slots):
    """Attention over the slots of each FFN, which are then added up. Nothing weights the FFNs."""

    def combine(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)


def ran(module: nn.Module, dynamic: bool) -> tuple[Recorder, Tensor, Tensor]:
    recorder, x = Recorder(activation="bf16"), torch.randn(2, 7, H)
    got = torch.compile(module, backend=recorder, dynamic=dynamic, fullgraph=True)(x)
    return recorder, got, x


@pytest.mark.parametrize("dynamic", [False, more(True)])
@torch.no_grad()
def test_experts_of_slots_in_a_batch_are_packed(dynamic):
    module = Slots()
    recorder, got, x = ran(module, dynamic)
    assert recorder.ops == ["fp4::indexed_mm"]
    for layer in (*module.ups, *module.downs):
        layer.weight.data = fake_quantised(layer.weight, "nvfp4")
    assert relative_error(got.double(), module.double()(x.double())) < 1e-5


@pytest.mark.parametrize("dynamic", [False, more(True)])
@torch.no_grad()
def test_attention_over_the_slots_of_each_is_no_router(dynamic):
    module = OverSlots()
    recorder, got, x = ran(module, dynamic)
    assert not recorder.ops and relative_error(got, module(x)) < 1e-5
    assert any("nothing routes rows" in site.reason for f in recorder.frames for site in f.unrouted)
