"""Prepared models and FP4Tensors in pickles, state dicts, shared memory and other processes."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from moe_models import Logits, build, tokens
from torch import nn

import fp4_ops
from fp4_ops.experts.packed import PackedWeight
from fp4_ops.meta.formats import FORMATS
from fp4_ops.meta.layouts import byte_view
from fp4_ops.tensor import FP4Tensor

FLOAT8 = ("nvfp4", "mxfp4")
"""The formats whose block scales are float8."""


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits


def prepared(format: str, family: str = "qwen3_moe") -> nn.Module:
    """With a linear layer in 4 bits, as some folders have them."""
    model = build(family, torch.float32, "grouped_mm", num_hidden_layers=1)
    fp4_ops.prepare(model, format)
    weight = fp4_ops.quantize(model.lm_head.weight, format).prepack("tile16")
    model.lm_head.weight = nn.Parameter(weight, requires_grad=False)
    return model


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "deepcopy": copy.deepcopy,
    "torch.save": saved,
    "twice": lambda model: pickle.loads(pickle.dumps(saved(model))),
}


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace warns of each branch that it fixes
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "int4"])
def test_torchscript_traces(format):
    """Triton Inference Server and libtorch programs load such traces."""
    model, ids = build("qwen3_moe", torch.float32, "grouped_mm", num_hidden_layers=1), tokens(2, 5)
    fp4_ops.prepare(model, format)
    with torch.no_grad():
        traced = torch.jit.trace(Logits(model).eval(), (ids,), check_trace=False)
        file = io.BytesIO()
        torch.jit.save(traced, file)
        file.seek(0)
        assert torch.equal(torch.jit.load(file)(ids), logits(model, ids))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "int4"])
@pytest.mark.parametrize("way", WAYS)
def test_whole_models_are_copied(way, format):
    model, ids = prepared(format), tokens(2, 5)
    copied = WAYS[way](model)
    assert isinstance(copied.lm_head.weight, FP4Tensor) and isinstance(copied.lm_head.weight, nn.Parameter)
    assert torch.equal(logits(copied, ids), logits(model, ids))


def states(format: str) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A model, one of other weights, and ids."""
    return prepared(format), prepared(format), tokens(2, 5)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "int4"])
def test_state_dicts(format, assign, swap):
    model, other, ids = states(format)
    want = logits(model, ids)
    assert not torch.equal(logits(other, ids), want)
    state = pickle.loads(pickle.dumps(model.state_dict()))
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        other.load_state_dict(state, assign=assign)
        assert torch.equal(logits(other, ids), want)
        other.to(torch.bfloat16).float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    rounded = logits(model.to(torch.bfloat16).float(), ids)  # all but the 4-bit weights
    assert torch.equal(logits(other, ids), rounded)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("format", FLOAT8)
def test_state_dicts_and_pickles_with_float8_scales(format, assign):
    """As earlier releases wrote them."""
    model, other, ids = states(format)
    want = logits(model, ids)
    old = copy.deepcopy(model)
    for module in old.modules():
        if isinstance(module, PackedWeight):
            module._buffers["block_scale"] = module()[1]
    state = old.state_dict()
    assert FORMATS[format].scale_dtype in {t.dtype for t in state.values()}
    other.load_state_dict(state, assign=assign)
    assert torch.equal(logits(other, ids), want)
    again = copy.deepcopy(old) if assign else saved(old)
    assert torch.equal(logits(again, ids), want)
    assert not any(b.dtype.is_floating_point and b.dtype.itemsize == 1 for b in again.buffers())


def test_an_fp4_tensor_that_an_earlier_release_saved():
    w = fp4_ops.quantize(torch.randn(4, 32, 64), "nvfp4")
    state = dict(w.__dict__)
    state["block_scale"] = state.pop("held_scale").view(torch.float8_e4m3fn)
    other = fp4_ops.quantize(torch.randn(4, 32, 64), "nvfp4")
    other.__setstate__(state)
    assert torch.equal(other.dequantize(), w.dequantize())
    assert "block_scale" not in other.__dict__ and other.held_scale.dtype == torch.uint8


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "int4"])
def test_scales_are_held_as_bytes_and_not_copied(format):
    model = prepared(format)
    for module in model.modules():
        if isinstance(module, PackedWeight):
            scale = module()[1]
            assert scale.dtype == FORMATS[format].scale_dtype
            assert scale.data_ptr() == module.block_scale.data_ptr()
            assert module.block_scale.dtype in (torch.uint8, torch.bfloat16)
    w = model.lm_head.weight
    assert w.block_scale.dtype == FORMATS[format].scale_dtype
    assert w.block_scale.data_ptr() == w.held_scale.data_ptr()
    assert byte_view(w.block_scale).dtype == w.held_scale.dtype


@pytest.mark.parametrize("format", FLOAT8)
def test_safetensors_of_a_state_dict(format, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, other, ids = states(format)
    linear = {"lm_head.weight"}  # an FP4Tensor, which only `save_pretrained` writes
    state = {name: t for name, t in model.state_dict().items() if name not in linear}
    safetensors.save_file(state, tmp_path / "state.safetensors")
    loaded = safetensors.load_file(tmp_path / "state.safetensors")
    assert set(other.load_state_dict(loaded, strict=False).missing_keys) == linear
    other.lm_head.weight = model.lm_head.weight
    assert torch.equal(logits(other, ids), logits(model, ids))


def test_meta_and_back():
    """As `to_empty` and `load_state_dict(assign=True)` fill models that were made without memory."""
    model, other, ids = states("nvfp4")
    empty = copy.deepcopy(other).to("meta")
    assert empty.lm_head.weight.device.type == "meta"
    buffers = {n: b for n, b in other.named_buffers() if n.endswith("inv_freq")}  # not in the state dict
    for fill in ("to_empty", "assign"):
        filled = copy.deepcopy(empty)
        if fill == "to_empty":
            filled.to_empty(device="cpu")
        filled.load_state_dict(model.state_dict(), assign=fill == "assign")
        for name, buffer in buffers.items():
            owner, _, attribute = name.rpartition(".")
            filled.get_submodule(owner)._buffers[attribute] = buffer
        assert torch.equal(logits(filled, ids), logits(model, ids)), fill


# --- other processes ---


def run_shared(rank: int, model: nn.Module, ids: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(logits(model, ids))


@pytest.mark.parametrize("linear", [False, True])
def test_shared_memory(linear):
    model, ids = prepared("nvfp4"), tokens(1, 5)
    if not linear:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.dequantize())
    want = logits(model, ids)
    model.share_memory()
    assert all(t.is_shared() for t in [*model.parameters(), *model.buffers()])
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    queue.put(model)
    assert torch.equal(logits(queue.get(), ids), want)


@pytest.mark.more
@pytest.mark.slow
def test_shared_memory_and_processes_that_are_spawned():
    model, ids = prepared("nvfp4"), tokens(1, 5)
    want = logits(model, ids)
    model.share_memory()
    w = model.lm_head.weight
    assert w.is_shared() and w.packed.is_shared() and w.held_scale.is_shared() and w.global_scale.is_shared()
    assert all(t.is_shared() for t in [*model.parameters(), *model.buffers()])
    assert torch.equal(logits(model, ids), want)
    out = torch.full_like(want, float("nan")).share_memory_()
    torch.multiprocessing.spawn(run_shared, (model, ids, out), nprocs=1)
    assert torch.equal(out, want)


def test_an_fp4_tensor_is_pinned_whole():
    """Pinning needs a GPU; without one, what is asked of it."""
    w = fp4_ops.quantize(torch.randn(32, 64), "nvfp4")
    assert not w.is_shared()
    if torch.cuda.is_available():
        assert w.pin_memory().packed.is_pinned() and w.pin_memory().is_pinned()
    else:
        assert not w.is_pinned()
