"""options={"strict": True}: if experts keep their original weights, an error says which experts and why."""

from __future__ import annotations

import pytest
import torch
from moe_styles import STYLES
from recorder import Recorder
from test_lookalikes import OneExpertTwice

from fp4_ops.compile_passes.options import parse

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def run(module: torch.nn.Module, **options: bool) -> torch.Tensor:
    compiled = torch.compile(module, backend=Recorder(**options), fullgraph=True)
    return compiled(torch.randn(9, module.H))


def test_experts_that_are_rewritten_are_no_error():
    with torch.no_grad():
        run(STYLES["where loop"](), strict=True)


def test_experts_that_stay_are_an_error_with_the_reason():
    with torch.no_grad():
        run(OneExpertTwice())  # a warning without the option
        torch._dynamo.reset()
        with pytest.raises(
            Exception, match=r"strict=True, but not all experts run in 4 bits(.|\n)*left alone"
        ):
            run(OneExpertTwice(), strict=True)


def test_a_graph_that_is_left_to_inductor_whole_is_an_error():
    with pytest.raises(Exception, match=r"strict=True(.|\n)*gradients may be asked for"):
        run(STYLES["where loop"](), strict=True)


def test_a_graph_without_experts_is_no_error():
    class Norm(torch.nn.Module):
        H = 8

        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x)

    with torch.no_grad():
        run(Norm(), strict=True)


def test_what_it_is_not():
    with pytest.raises(ValueError, match="strict is 1; it must be True or False"):
        parse(None, {"strict": 1})
