"""Cases from ModelOpt's own folders: wider blocks, fused experts in other formats, unexplained codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_folders import (
    BF16,
    HOW,
    MODELOPT,
    dequantised,
    family,
    loaded,
    logits,
    per_expert,
    write_mixed,
)
from checkpoint_samples import code_values, e8m0_values, edit_json, save_tensors, times_blocks
from moe_models import tokens
from safetensors.torch import load_file
from torch import Tensor

import fp4_ops
from fp4_ops.checkpoints import CheckpointError
from fp4_ops.checkpoints.placement import form_of


def wide(block: int) -> Any:
    """nvfp4 with one block scale for `block` elements along K."""

    def write(name: str, n: int, k: int, factor: float) -> tuple[dict[str, Tensor], Tensor]:
        packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
        scale = (torch.rand(n, -(-k // block)) * 64 + 8).to(torch.float8_e4m3fn)
        second = torch.tensor(factor * 1.37)
        tensors = {
            "weight": packed,
            "weight_scale": scale,
            "weight_scale_2": second,
            "input_scale": second + 1,
        }
        value = times_blocks(code_values(packed), scale.double(), block) * second.double()
        return {f"{name}.{key}": t for key, t in tensors.items()}, value

    return write


def e8m0(name: str, n: int, k: int, factor: float) -> tuple[dict[str, Tensor], Tensor]:
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scale = torch.randint(117, 126, (n, k // 32), dtype=torch.uint8)
    value = times_blocks(code_values(packed), e8m0_values(scale), 32)
    return {f"{name}.weight": packed, f"{name}.weight_scale": scale}, value


FOLDERS = {
    "W4A8_NVFP4_FP8": wide(32),
    "W4A8_NVFP4_FP8, blocks of 16": wide(16),
    "W4A16_NVFP4": wide(16),
    "mxfp4": e8m0,  # as ModelOpt 0.47 spells it
    "W4A8_MXFP4_FP8": e8m0,
}


@HOW
@pytest.mark.parametrize("which", FOLDERS)
def test_other_algorithms(which, how, registered, tmp_path):
    model = family("qwen3_moe")
    new, values = per_expert(model, None, FOLDERS[which])
    linear = "model.layers.1.self_attn.o_proj"
    own, values[f"{linear}.weight"] = FOLDERS[which](linear, *model.get_submodule(linear).weight.shape, 2e-4)
    model.save_pretrained(tmp_path)
    stacks = ("gate_proj.weight", "up_proj.weight", "down_proj.weight", f"{linear}.weight")
    tensors = {n: t for n, t in load_file(tmp_path / "model.safetensors").items() if not n.endswith(stacks)}
    save_tensors(tmp_path, tensors | new | own)
    config = {**MODELOPT, "quant_algo": which.partition(",")[0]}
    edit_json(tmp_path / "config.json", lambda c: c.update(quantization_config=config))
    read = loaded(tmp_path, how)
    got = dequantised(read)
    assert got.keys() == values.keys()
    for name, value in values.items():
        torch.testing.assert_close(got[name].double(), value, rtol=1e-7, atol=0)
    assert logits(read, tokens(1, 5)).isfinite().all()


def write_fused(path: Path, name: str, algorithm: str, along: str) -> dict[str, Tensor]:
    """Experts in one parameter, [E, K/2, N] with blocks along K or [E, K, N/2] with blocks along N."""
    original = family(name)
    original.save_pretrained(path)
    tensors, values = load_file(path / "model.safetensors"), {}
    block = 16 if algorithm == "NVFP4" else 32
    for owner, module in original.named_modules():
        if not form_of(module):
            continue
        for attribute in ("gate_up_proj", "down_proj"):
            e, k, n = module._parameters[attribute].shape
            rows, columns = (n, k) if along == "K" else (k, n)
            packed = torch.randint(0, 256, (e, rows, columns // 2), dtype=torch.uint8)
            scale = torch.randint(117, 126, (e, rows, columns // block), dtype=torch.uint8)
            value = times_blocks(code_values(packed), e8m0_values(scale), block)
            if "NVFP4" in algorithm:
                scale = (torch.rand(e, rows, columns // block) * 64 + 8).to(torch.float8_e4m3fn)
                value = times_blocks(code_values(packed), scale.double(), block) * 0.0078125
                tensors[f"{owner}.{attribute}_weight_scale_2"] = torch.tensor(0.0078125)
            if along == "K":
                packed, scale = packed.mT.contiguous(), scale.mT.contiguous()
            tensors |= {f"{owner}.{attribute}": packed, f"{owner}.{attribute}_weight_scale": scale}
            values[f"{owner}.{attribute}"] = value
    save_tensors(path, tensors)
    config = {**MODELOPT, "quant_algo": algorithm}
    edit_json(path / "config.json", lambda c: c.update(quantization_config=config))
    return values


ALGORITHMS = ["MXFP4", "W4A8_MXFP4_FP8", "W4A8_NVFP4_FP8", "NVFP4"]


@pytest.mark.parametrize("name", ["llama4_text", "gpt_oss"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_fused_experts_in_other_formats(name, algorithm, tmp_path):
    values = write_fused(tmp_path, name, algorithm, "K")
    got = dequantised(fp4_ops.load_checkpoint(None, tmp_path))
    for key, value in values.items():
        held = got[key].mT if name == "llama4_text" else got[key]
        torch.testing.assert_close(held.double(), value, rtol=1e-7, atol=0)


@HOW
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_blocks_along_the_outputs_are_refused(algorithm, how, registered, tmp_path):
    write_fused(tmp_path, "gpt_oss", algorithm, "N")
    with pytest.raises(CheckpointError, match=r"blocks along N.*outputs.*export it as NVFP4, or"):
        loaded(tmp_path, how)


STRAY = {
    "e4m3": torch.ones(64, 64).to(torch.float8_e4m3fn),
    "uint8": torch.ones(64, 64, dtype=torch.uint8),
    "int8": torch.ones(64, 64, dtype=torch.int8),
    "int32": torch.ones(64, 64, dtype=torch.int32),
}


@HOW
@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", STRAY)
@pytest.mark.parametrize("maker", ["modelopt", "compressed-tensors"])
def test_codes_that_the_config_does_not_explain(maker, dtype, how, registered, tmp_path):
    """transformers would take codes of the weight's own shape for its values."""
    _, _, eight = write_mixed(tmp_path, maker, "tensor1")
    tensors = load_file(tmp_path / "model.safetensors")
    for name, value in eight.items():
        tensors[name] = value.to(BF16)
        del tensors[name + "_scale"]
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    if maker != "modelopt":
        config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    edit_json(tmp_path / "config.json", lambda c: c.update(quantization_config=config))
    name = "model.layers.1.self_attn.o_proj.weight"
    assert tensors[name].shape == (64, 64)
    save_tensors(tmp_path, tensors)
    loaded(tmp_path, how)
    save_tensors(tmp_path, tensors | {name: STRAY[dtype]})
    message = "config does not say.*or leave the layer in bf16|weight_scale is missing"
    with pytest.raises(CheckpointError, match=rf"{name} .*({message})"):
        loaded(tmp_path, how)
