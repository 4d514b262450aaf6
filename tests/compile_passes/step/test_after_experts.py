"""A layer that reads experts' outputs is rewritten, or stays, but never ends the passes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from recorder import Recorder, relative_error
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
E, H, N = 4, 64, 96


class ThenLayer(nn.Module):
    """Experts whose sum a layer reads, directly or through views."""

    def __init__(self, act: str, views: bool) -> None:
        super().__init__()
        self.act, self.views = getattr(F, act), views
        self.gate, self.head = nn.Linear(H, E), nn.Linear(H, 32)
        self.ups = nn.ModuleList(nn.Linear(H, N) for _ in range(E))
        self.downs = nn.ModuleList(nn.Linear(N, H) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        each = torch.stack([down(self.act(up(x))) for up, down in zip(self.ups, self.downs)], 1)
        y = (each * scores[..., None]).sum(1)
        return self.head(y[None])[0] if self.views else self.head(y)


@pytest.mark.parametrize("act, views", [("gelu", False), more("gelu", True), more("silu", False)])
@pytest.mark.parametrize("rows", [2, more(9)])
@torch.no_grad()
def test_a_layer_after_experts(act, views, rows):
    module, recorder = ThenLayer(act, views).bfloat16(), Recorder(activation="bf16")
    x = torch.randn(rows, H, dtype=torch.bfloat16)
    got = torch.compile(module, backend=recorder, fullgraph=True)(x)
    assert recorder.ops
    assert relative_error(got.double(), module.double()(x.double())) < 0.3
