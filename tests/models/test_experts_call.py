"""From transformers' call of prepared experts to the operator: little Python runs, and all hooks run."""

from __future__ import annotations

import sys

import pytest
import torch
from moe_models import build
from torch import nn

import fp4_ops
from fp4_ops.experts.packed import PackedWeight


@pytest.fixture
def block() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    model = build("mixtral", torch.float32, "grouped_mm", num_hidden_layers=1)
    fp4_ops.prepare(model, activation="bf16")
    experts = next(m for m in model.modules() if hasattr(m, "_fp4_recipe"))
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(3)])
    return experts, (torch.randn(3, 64), ids, torch.rand(3, 2))


HOOKS = {
    "pre": lambda m, seen: m.register_forward_pre_hook(lambda *_: seen.append(m)),
    "pre with kwargs": lambda m, seen: m.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(m), with_kwargs=True
    ),
    "after": lambda m, seen: m.register_forward_hook(lambda m, args, out: seen.append(m)),
    "after, always": lambda m, seen: m.register_forward_hook(
        lambda m, args, out: seen.append(m), always_call=True
    ),
    "every module's": lambda m, seen: nn.modules.module.register_module_forward_pre_hook(
        lambda any, args: seen.append(any) if any is m else None
    ),
    "after every module": lambda m, seen: nn.modules.module.register_module_forward_hook(
        lambda any, args, out: seen.append(any) if any is m else None
    ),
}


@pytest.mark.parametrize("kind", HOOKS)
@torch.no_grad()
def test_hooks_of_a_packed_weight_are_called(kind, block):
    experts, inputs = block
    want, seen = experts(*inputs), []
    weight = experts.down_proj
    handle = HOOKS[kind](weight, seen)
    try:
        assert torch.equal(experts(*inputs), want)
    finally:
        handle.remove()
    assert seen == [weight]
    experts(*inputs)
    assert len(seen) == 1


@torch.no_grad()
def test_what_a_hook_gives_is_used(block):
    experts, inputs = block
    weight, want = experts.down_proj, experts(*inputs)
    twice = weight.register_forward_hook(lambda m, args, out: (out[0], out[1], 2 * out[2]))
    torch.testing.assert_close(experts(*inputs), 2 * want)
    twice.remove()
    own = weight.forward
    weight.forward = lambda: (own()[0], own()[1], 4 * own()[2])  # as accelerate replaces it
    torch.testing.assert_close(experts(*inputs), 4 * want)


class Halved(PackedWeight):
    def forward(self):
        packed, scale, factor = super().forward()
        return packed, scale, factor / 2


@torch.no_grad()
def test_a_class_of_ones_own(block):
    experts, inputs = block
    want = experts(*inputs)
    experts.down_proj.__class__ = Halved
    torch.testing.assert_close(experts(*inputs), want / 2)


@torch.no_grad()
def test_new_buffers_are_seen(block):
    """However they come: nothing of them is kept."""
    experts, inputs = block
    want, weight = experts(*inputs), experts.down_proj
    weight.global_scale = 2 * weight.global_scale
    torch.testing.assert_close(experts(*inputs), 2 * want)
    weight.global_scale.mul_(2)
    torch.testing.assert_close(experts(*inputs), 4 * want)
    weight.block_scale.data = torch.zeros_like(weight.block_scale)
    assert not experts(*inputs).any()


@torch.no_grad()
def test_few_python_functions_between_the_module_and_the_operator(block):
    experts, inputs = block
    experts(*inputs)
    names: list[str] = []
    sys.setprofile(lambda f, event, arg: names.append(f.f_code.co_qualname) if event == "call" else None)
    try:
        experts(*inputs)
    finally:
        sys.setprofile(None)
    ours = names[names.index("experts_forward") + 1 :]
    between = ours[: next((i for i, name in enumerate(ours) if name.startswith("OpOverload")), len(ours))]
    assert between.count("_operands") == 2
    assert "Module._call_impl" not in between and len(between) <= 11, between
