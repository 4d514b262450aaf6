"""What several operators of a step read is computed once, and what only one reads stays."""

from __future__ import annotations

import re

import pytest
import torch
from one_pass import OnePass
from torch._inductor.utils import run_and_get_code

from fp4_ops.compile_passes.step.shared import write_shared
from fp4_ops.meta.torch_internals import compile_fx, force_stride_order

BF16 = torch.bfloat16
B, Q, K, LENGTH, D = 2, 4, 2, 24, 64


class Layers(torch.nn.Module):
    """Layers that share a mask. `kind` names what they share instead."""

    def __init__(self, number: int = 3, kind: str = "computed") -> None:
        super().__init__()
        self.kind = kind
        self.caches = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(2, B, K, LENGTH, D).to(BF16), requires_grad=False)
            for _ in range(number)
        )
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("seen", torch.arange(LENGTH)[None, None, None] < 9)

    def forward(self, q):
        count = self.count * 1
        mask = torch.arange(LENGTH)[None, None, None] <= count
        if self.kind == "an input":
            mask = self.seen
        if self.kind == "a view":
            mask = self.seen.repeat(1, 1, 1, 2)[..., :LENGTH]
        for keys, values in self.caches:
            own = mask if self.kind != "each its own" else mask & (keys[:1, :1, :, :1].mT < 9)
            q = torch.ops.fp4.attention(q, keys, values, own, 0.3)
        return q


def compiled(layers: Layers) -> tuple[OnePass, str]:
    """Runs the layers with Inductor after the pass, and returns Inductor's code."""
    torch._dynamo.reset()
    one = OnePass(write_shared)

    def backend(gm, inputs):
        one(gm, inputs)
        return compile_fx(torch.fx.GraphModule(gm, one.graph), inputs)

    q = torch.randn(B, 1, Q, D).to(BF16)
    with torch.no_grad():
        want = layers(q)
        run = torch.compile(layers, backend=backend, fullgraph=True)
        got, (code,) = run_and_get_code(run, q)
    assert torch.equal(got, want)
    return one, code


def kernels(code: str) -> int:
    """Returns how many kernels of Inductor's run."""
    return len(re.findall(r"^ {4,}cpp_fused\w*\(", code, re.MULTILINE))


def test_a_mask_is_computed_once_for_all_layers(monkeypatch):
    one, code = compiled(Layers())
    assert one.said == ["decoding step (1x): operands of several operators are computed once"]
    (made,) = one.calls(force_stride_order)
    assert len(made.users) == 3 and kernels(code) == 1
    monkeypatch.setattr("fp4_ops.compile_passes.step.shared.READERS", ())
    assert kernels(compiled(Layers())[1]) == 3  # what Inductor does


@pytest.mark.parametrize("kind", ["an input", "a view", "each its own"])
def test_what_is_not_computed_for_several_stays(kind):
    one, _ = compiled(Layers(kind=kind))
    assert one.said == [] and not one.calls(force_stride_order)


def test_a_mask_of_one_layer_stays():
    assert compiled(Layers(1))[0].said == []
