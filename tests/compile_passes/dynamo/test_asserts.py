"""Assertions about tensors still work, and they do not separate routers from experts."""

from __future__ import annotations

import pytest
import torch
from assert_loops import ConstantMessage, Denied, InALoop, OfExperts
from moe_models import Recorder
from package_styles import AssertedRouting


@pytest.mark.one_in(3)
@pytest.mark.parametrize("cls", [AssertedRouting, ConstantMessage, InALoop, Denied, OfExperts])
def test_an_assertion_is_part_of_the_graph(cls):
    torch._dynamo.reset()
    module, recorder = cls(experts=3), Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, dynamic=True)
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        x = torch.randn(6, module.H)
        compiled(x)
        assert recorder.compilations == 1 and recorder.ops == ["fp4::moe"]
        if cls is OfExperts:
            return
        x[2, 3] = float("nan")
        with pytest.raises(
            (AssertionError, RuntimeError), match=r"failed at .*(package_styles|assert_loops).py|finite"
        ):
            compiled(x)
