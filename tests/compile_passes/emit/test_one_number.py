"""Expert blocks that are multiplied by a tensor of one element: a learned scale, a maximum, a count."""

from __future__ import annotations

import pytest
import torch
from conftest import more
from moe_models import Recorder, relative_error
from moe_styles import STYLES
from torch import nn

NUMBERS = {
    "a parameter": lambda m, out, x: out * m.scale,
    "a parameter, outside": lambda m, out, x: m.scale * out,
    "one of floats": lambda m, out, x: out * x.abs().amax(),
    "one of integers": lambda m, out, x: out * (x > 0).sum(),
    "one of booleans": lambda m, out, x: out * (x > -100).all(),
    "by one of integers": lambda m, out, x: out / (x > 0).sum(),
    "of one dimension": lambda m, out, x: out * x.abs().amax().reshape(1),
    "a constant tensor": lambda m, out, x: out * torch.tensor(3),
    "two of them": lambda m, out, x: out * m.scale * x.abs().amax(),
}


class Scaled(nn.Module):
    def __init__(self, block: nn.Module, number: str, scale: nn.Parameter) -> None:
        super().__init__()
        self.block, self.number, self.scale = block, number, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return NUMBERS[self.number](self, self.block(x), x)


@pytest.mark.parametrize(
    "number", [n if n in ("a parameter", "by one of integers") else more(n) for n in NUMBERS]
)
@pytest.mark.parametrize(
    "name",
    ["dense einsum", more("where loop"), more("gather + bmm"), more("sorted grouped_mm (torchtitan)")],
)
def test_a_block_times_one_number(name, number, fresh_dynamo):
    block, scale = STYLES[name](), nn.Parameter(torch.rand(()) + 0.5)
    module, twin = Scaled(block, number, scale), Scaled(block.twin(), number, scale)
    x, recorder = torch.randn(9, block.H), Recorder(activation="bf16")
    with torch.no_grad():
        got = torch.compile(module, backend=recorder, fullgraph=True, dynamic=True)(x)
        want = twin(x)
    assert recorder.ops == ["fp4::moe"], recorder.reasons
    assert relative_error(got, want) < 1e-5
