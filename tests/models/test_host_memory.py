"""Weights on a CPU: they are in huge pages, and the output head is not copied."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from moe_models import build, tokens
from torch.utils._python_dispatch import TorchDispatchMode

import fp4_ops

PAGE = 2 << 20


def asks_for_huge_pages(t: torch.Tensor) -> bool:
    """Whether the kernel was asked for huge pages in the middle of the tensor's memory."""
    middle, inside = t.data_ptr() + t.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(x, 16) for x in first.split("-"))
            inside = begin <= middle < end
        elif inside and first == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError("no mapping has this address")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_packed_weights_lie_in_huge_pages():
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no transparent huge pages")
    model = build("qwen3_moe", torch.bfloat16, "grouped_mm", hidden_size=1 << 15, num_hidden_layers=1)
    fp4_ops.prepare(model, "nvfp4")
    experts = model.model.layers[0].mlp.experts
    packed, _, _ = experts.gate_up_proj()
    assert packed.nbytes > 4 * PAGE and asks_for_huge_pages(packed)
    weight = fp4_ops.quantize(torch.ones(1 << 15, 4096), "nvfp4").prepack("tile16")
    assert weight.block_scale.nbytes == 4 * PAGE and asks_for_huge_pages(weight.block_scale)
    assert not asks_for_huge_pages(torch.empty(8 * PAGE, dtype=torch.uint8))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("prompts", [1, 3])
def test_the_last_tokens_of_prompts_do_not_copy_the_head(prompts):
    """F.linear of hidden[:, -1:] calls bmm, which copies the weight, where the weight needs no gradient."""
    model, ids = build("qwen3_moe", torch.bfloat16, "grouped_mm"), tokens(prompts, 7)
    model.requires_grad_(False)
    fp4_ops.prepare(model, "nvfp4")
    with torch.no_grad(), Operators() as called:
        got = model(ids, use_cache=False, logits_to_keep=1).logits
    assert called.names and "aten.bmm.default" not in called.names
    with torch.no_grad():
        hidden = model.model(ids, use_cache=False).last_hidden_state
        want = torch.nn.functional.linear(hidden[:, -1:].float(), model.lm_head.weight.float())
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)
