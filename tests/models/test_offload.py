"""accelerate loads weights when a module is called, and unloads them afterwards."""

from __future__ import annotations

import pytest
import torch
from conftest import more
from moe_models import build, tokens
from torch import nn

import fp4_ops
from fp4_ops import backends
from fp4_ops.experts.packed import PackedWeight

accelerate = pytest.importorskip("accelerate")

CPU = torch.device("cpu")


def prepared(family: str, format: str, linear: bool) -> nn.Module:
    model = build(family, torch.float32, "grouped_mm", num_hidden_layers=2)
    fp4_ops.prepare(model, format)
    if linear:
        weight = fp4_ops.quantize(model.lm_head.weight, format).prepack("tile16")
        model.lm_head.weight = nn.Parameter(weight, requires_grad=False)
    return model


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits


def dispatched(model: nn.Module, folder: str) -> nn.Module:
    """One layer from memory, one from disk."""
    places = {name: "cpu" for name in ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    return accelerate.dispatch_model(
        model, places, main_device="cpu", offload_dir=folder, offload_buffers=True
    )


WAYS = {
    "cpu_offload": lambda model, folder: accelerate.cpu_offload(model, CPU, offload_buffers=True),
    "cpu_offload without buffers": lambda model, folder: accelerate.cpu_offload(model, CPU),
    "disk_offload": lambda model, folder: accelerate.disk_offload(model, folder, CPU, offload_buffers=True),
    "dispatch_model": dispatched,
}


@pytest.mark.parametrize(
    "family, format, linear",
    [("qwen3_moe", "nvfp4", False), ("gpt_oss", "mxfp4", False), more("qwen3_moe", "int4", False),
     ("qwen3_moe", "nvfp4", True), more("qwen3_moe", "int4", True)],
)  # fmt: skip
@pytest.mark.parametrize("way", WAYS)
def test_offloaded_models_compute_the_same(way, family, format, linear, tmp_path):
    model, ids = prepared(family, format, linear), tokens(2, 5)
    want = logits(model, ids)
    if linear and way in ("disk_offload", "dispatch_model"):
        with pytest.raises(NotImplementedError, match="cannot be one NumPy array \\(disk offloading"):
            WAYS[way](model, str(tmp_path)) if way == "disk_offload" else model.lm_head.weight.numpy()
        return
    model = WAYS[way](model, str(tmp_path))
    weights = [m for m in model.modules() if isinstance(m, PackedWeight)]
    for _ in range(2):
        assert torch.equal(logits(model, ids), want)
        if way.startswith("dispatch"):
            weights = weights[2:]  # what has a device of its own stays there
        away = way != "cpu_offload without buffers"
        assert all(b.is_meta == away for w in weights for b in w.buffers())


def test_the_gpu_kernels_say_what_to_do_about_a_layout_of_the_cpus():
    with pytest.raises(RuntimeError, match=r"cpu_offload, .* call set_layout\('plain'\) on each"):
        backends.refuse_layout("moe", "tile16", torch.ones(1), layout="tile16")


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_from_the_cpu_to_a_gpu(where):
    """Prepared on either; the GPU gets each layer's bytes when it runs."""
    model, ids = build("qwen3_moe", torch.bfloat16, "grouped_mm"), tokens(2, 5)
    fp4_ops.prepare(model.to(where), activation="bf16")
    want = logits(model.cuda(), ids.cuda())
    model.to(where)
    for module in model.modules():
        if isinstance(module, PackedWeight) and where == "cpu":
            module.set_layout("plain")
    got = logits(accelerate.cpu_offload(model, torch.device("cuda"), offload_buffers=True), ids.cuda())
    assert ((got.double() - want.double()).norm() / want.double().norm()).item() < 2e-2


def test_prepare_after_offloading_says_what_to_type():
    """accelerate leaves the weights of offloaded experts on the meta device."""
    model = build("qwen3_moe", torch.float32, "grouped_mm")
    accelerate.cpu_offload(model, CPU)
    with pytest.raises(ValueError, match=r"gate_up_proj is on the meta device, .*gpu_memory='20GiB'"):
        fp4_ops.prepare(model, "nvfp4")
