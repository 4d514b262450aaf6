"""`e in ids` has Python's answer where Dynamo has the ids as symbols."""

from __future__ import annotations

import pytest
import torch
from conftest import more
from recorder import Recorder, relative_error
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
E, H = 4, 64


class Hits(nn.Module):
    """A loop over experts takes its rows from a list of the ids of each token."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.router = form, nn.Linear(H, E)
        self.ffns = nn.ModuleList(nn.Linear(H, H) for _ in range(E))

    def is_in(self, e: int, ids: list[int]) -> bool:
        if self.form == "not in":
            return not e not in ids
        return e in (tuple(ids) if self.form == "tuple" else ids)

    def forward(self, x: Tensor) -> Tensor:
        ids, y = self.router(x).topk(2).indices.tolist(), torch.zeros_like(x)
        for e, ffn in enumerate(self.ffns):
            rows = torch.tensor([t for t, own in enumerate(ids) if self.is_in(e, own)], dtype=torch.long)
            y[rows] += ffn(x[rows])
        return y


@pytest.mark.parametrize("form", ["in", more("not in"), more("tuple")])
@torch.no_grad()
def test_ids_in_a_list(form):
    module, recorder = Hits(form), Recorder(activation="bf16")
    run = torch.compile(module, backend=recorder, dynamic=True)
    for n in (7, 7, 3):
        x = torch.randn(n, H)
        assert relative_error(run(x), module(x)) < 1e-5
