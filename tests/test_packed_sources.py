"""Models that hold packed experts and dequantise them in their forward: the rewrite loses nothing."""

from __future__ import annotations

import pytest
import torch
from moe_models import Recorder, relative_error
from moe_styles import STYLES, FusedStyle, StackedStyle


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch.set_num_threads(1)


def packed(style: type, format: str) -> torch.nn.Module:
    """A style whose w13 [E, 2I, H] and w2 [E, H, I] are packed buffers."""

    class Packed(style):
        def build(self):
            shapes = {"w13": (self.E, 2 * self.I, self.H), "w2": (self.E, self.H, self.I)}
            for name, shape in shapes.items():
                parts = torch.ops.fp4.quantize(torch.randn(shape) / 6, format)
                for part, tensor in zip(("", "_scale", "_global"), parts):
                    self.register_buffer(f"packed_{name}{part}", tensor)

        def weight(self, name: str) -> torch.Tensor:
            parts = [getattr(self, f"packed_{name}{part}") for part in ("", "_scale", "_global")]
            return torch.ops.fp4.dequantize(*parts, format, torch.float32).transpose(1, 2)

        def experts_of(self, x, ids, weights):
            self.w13, self.w2 = self.weight("w13"), self.weight("w2")
            out = super().experts_of(x, ids, weights)
            del self.w13, self.w2
            return out

    return Packed()


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("name", ["token mask loop", "gather + bmm", "dense bmm"])
def test_dequantised_experts(name, format):
    assert issubclass(STYLES[name], FusedStyle) and not issubclass(STYLES[name], StackedStyle)
    module, recorder = packed(STYLES[name], format), Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for n in (9, 5):
            x = torch.randn(n, 32)
            assert relative_error(compiled(x), module(x)) < 1e-5
    (site,) = recorder.sites
    assert (site.op, site.format, site.layout) == ("fp4::moe", format, "plain")
    assert site.weights[0] == "packed_w13"
    targets = {str(n.target) for n in recorder.graphs[0].graph.nodes}
    assert "fp4.dequantize.default" not in targets
