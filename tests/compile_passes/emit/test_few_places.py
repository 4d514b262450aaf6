"""Buffers with few places for each expert, for any number of tokens, also for one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from moe_models import Recorder, relative_error
from moe_styles import ListStyle
from torch import Tensor

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class FewPlaces(ListStyle):
    """A token's choices take places in turn; what finds none is dropped (Hunyuan)."""

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        tokens = x.shape[0]
        capacity = max(self.k, self.k * tokens // self.E)
        mask = F.one_hot(ids, self.E).transpose(0, 1).reshape(-1, self.E)
        place = (mask.cumsum(0) * mask - 1).view(self.k, tokens, self.E).amax(0)
        taken = (place >= 0) & (place < capacity)
        slots = F.one_hot(place.masked_fill(~taken, 0), capacity).bool() & taken.unsqueeze(-1)
        gates = torch.zeros(tokens, self.E).scatter(1, ids, weights)
        rows = torch.einsum("tec,th->ech", slots.to(x.dtype), x).chunk(self.E)
        outs = torch.cat([expert(part) for expert, part in zip(self.list, rows)])
        return torch.einsum("te,tec,ech->th", gates, slots.to(x.dtype), outs)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("sizes", [(6, 2), (3, 1), more((5, 3))], ids=str)
def test_each_number_of_tokens(sizes):
    """What is in 4 bits does not depend on it. With one token, a slice is of that, where it has a place."""
    module, recorder = FewPlaces(*sizes), Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, fullgraph=True)
    with torch.no_grad():
        for n in (1, 9, 2, 5):
            x = torch.randn(n, module.H)
            assert relative_error(compiled(x), module.twin()(x)) < 1e-5
    assert recorder.ops == ["fp4::moe"] * recorder.compilations, recorder.reasons
