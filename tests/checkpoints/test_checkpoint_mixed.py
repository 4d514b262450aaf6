"""Folders as ModelOpt and llm-compressor write them: mixed precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_folders import BF16, HOW, assert_holds, dequantised, eight_bits, loaded, logits, write_mixed
from checkpoint_samples import WRITERS, edit_json, save_tensors
from moe_models import tokens
from safetensors.torch import load_file
from torch import Tensor

import fp4_ops
from fp4_ops.checkpoints import CheckpointError

MIXED = [
    *(("modelopt", k) for k in ("tensor", "tensor1", "rows", "mxfp8")),
    *(("compressed-tensors", k) for k in ("tensor1", "channel", "blocks", "mxfp8", "int8")),
]


@HOW
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("maker", "kind"), MIXED)
def test_mixed_precision(maker, kind, how, registered, tmp_path):
    original, four, eight = write_mixed(tmp_path, maker, kind)
    model = loaded(tmp_path, how)
    assert_holds(model, four)
    for name, p in model.named_parameters():
        want = eight[name].to(BF16) if name in eight else original.get_parameter(name)
        assert torch.equal(p, want), name
    report = model.hf_quantizer.report
    assert set(report.dense) == set(eight) and "8 bits, dequantised" in str(report)
    assert report.format == "nvfp4"
    assert logits(model, tokens(1, 5)).isfinite().all()
    model.save_pretrained(tmp_path / "again")
    again = loaded(tmp_path / "again", how)
    assert dequantised(again).keys() == four.keys()
    assert torch.equal(again.get_parameter(name), model.get_parameter(name))


@HOW
def test_only_the_older_file_says_what_is_mixed(how, registered, tmp_path):
    _, four, eight = write_mixed(tmp_path, "modelopt", "tensor")
    config: dict[str, Any] = {}
    edit_json(tmp_path / "config.json", lambda c: config.update(c.pop("quantization_config")))
    config.pop("quant_method")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": config}))
    model = loaded(tmp_path, how)
    assert_holds(model, four)
    assert all(torch.equal(model.get_parameter(n), v.to(BF16)) for n, v in eight.items())


@pytest.mark.parametrize("kind", ["channel", "int8"])
def test_groups_that_name_no_format(kind, tmp_path):
    """Older configs of mixed precision: the groups' numbers say what compressed-tensors made of them."""
    _, four, eight = write_mixed(tmp_path, "compressed-tensors", kind)

    def forget(config: dict[str, Any]) -> None:
        for group in config["quantization_config"]["config_groups"].values():
            del group["format"]

    edit_json(tmp_path / "config.json", forget)
    model = fp4_ops.load_checkpoint(None, tmp_path)
    assert_holds(model, four)
    assert all(torch.equal(model.get_parameter(n), v.to(BF16)) for n, v in eight.items())


def test_two_formats_of_4_bits(tmp_path):
    """nvfp4 experts and mxfp4 attention, whose codes have one name: the scales beside them tell."""
    _, four, eight = write_mixed(tmp_path, "compressed-tensors", "tensor1")
    tensors = load_file(tmp_path / "model.safetensors")
    for name in eight:
        base = name.removesuffix(".weight")
        for suffix in ("", "_scale"):
            del tensors[name + suffix]
        n, k = eight[name].shape
        new, four[name] = WRITERS["mxfp4-pack-quantized"](base, n, k, 1.0)
        tensors |= new
    save_tensors(tmp_path, tensors)
    group = {"format": "mxfp4-pack-quantized", "weights": {"num_bits": 4, "type": "float", "group_size": 32}}
    edit_json(
        tmp_path / "config.json", lambda c: c["quantization_config"]["config_groups"].update(group_0=group)
    )
    model = fp4_ops.load_checkpoint(None, tmp_path)
    assert_holds(model, four)
    assert model.hf_quantizer.report.format == "nvfp4 and mxfp4"
    assert logits(model, tokens(1, 5)).isfinite().all()


BAD_SCALES = {
    "another shape": (torch.ones(3), r"is torch.float32 \[3\]; beside a weight \[64, 64\] it must be"),
    "another dtype": (torch.ones((), dtype=torch.int32), r"is torch.int32 \[\]; beside a weight"),
    "NaN": (torch.tensor(torch.nan), "holds NaN or infinity"),
}


@pytest.mark.parametrize("what", BAD_SCALES)
def test_bad_scales_of_8_bits_are_named(what, tmp_path):
    write_mixed(tmp_path, "modelopt", "tensor")
    tensors, (scale, message) = load_file(tmp_path / "model.safetensors"), BAD_SCALES[what]
    name = "model.layers.1.self_attn.q_proj.weight_scale"
    save_tensors(tmp_path, tensors | {name: scale})
    with pytest.raises(CheckpointError, match=message) as error:
        fp4_ops.load_checkpoint(None, tmp_path)
    assert name in str(error.value)
    del tensors[name]
    save_tensors(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight_scale is missing"):
        fp4_ops.load_checkpoint(None, tmp_path)


def test_experts_in_8_bits_beside_others_in_4(tmp_path):
    """The first layer in FP8, per expert: it becomes an ordinary parameter."""
    _, four, _ = write_mixed(tmp_path, "modelopt", "tensor")
    tensors = load_file(tmp_path / "model.safetensors")
    owner = "model.layers.0.mlp.experts"
    tensors = {n: t for n, t in tensors.items() if not n.startswith(owner)}
    rows: dict[str, list[Tensor]] = {"gate": [], "up": [], "down": []}
    for expert in range(8):
        for half, part in rows.items():
            n, k = (64, 96) if half == "down" else (96, 64)
            codes, scale, value = eight_bits("tensor", n, k)
            name = f"{owner}.{expert}.{half}_proj"
            tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": scale}
            part.append(value)
    save_tensors(tmp_path, tensors)
    model = fp4_ops.load_checkpoint(None, tmp_path)
    gate_up = torch.cat([torch.stack(rows["gate"]), torch.stack(rows["up"])], 1)
    assert torch.equal(model.get_parameter(f"{owner}.gate_up_proj"), gate_up.to(BF16))
    assert torch.equal(model.get_parameter(f"{owner}.down_proj"), torch.stack(rows["down"]).to(BF16))
    assert_holds(model, {n: v for n, v in four.items() if not n.startswith(owner)})
    assert logits(model, tokens(1, 5)).isfinite().all()


def test_scaled_inputs_are_refused(tmp_path):
    write_mixed(tmp_path, "modelopt", "tensor")
    name = "model.layers.1.mlp.experts.3.up_proj.pre_quant_scale"
    tensors = load_file(tmp_path / "model.safetensors")
    save_tensors(tmp_path, tensors | {name: torch.ones(64)})
    with pytest.raises(CheckpointError, match=rf"{name} .*scales the inputs .*Export the checkpoint with"):
        fp4_ops.load_checkpoint(None, tmp_path)


LAYERS = {"q_proj": "FP8", "k_proj": "FP8_BLOCK_SCALES", "v_proj": "NVFP4", "o_proj": None}


def write_layers(path: Path) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """A folder of ModelOpt's with a format for each layer: FP8 with one scale, FP8 in blocks of 16 whose
    scales have DeepSeek's name, NVFP4, and none."""
    model, four, eight = write_mixed(path, "modelopt", "tensor")
    tensors, layers = load_file(path / "model.safetensors"), {}
    for name in eight.copy():
        base, algorithm = name.removesuffix(".weight"), LAYERS[name.split(".")[-2]]
        layers[base] = {"quant_algo": algorithm}
        if algorithm == "FP8":
            continue
        del eight[name]
        for suffix in (".weight", ".weight_scale", ".input_scale"):
            del tensors[base + suffix]
        n, k = model.get_parameter(name).shape
        if algorithm == "NVFP4":
            layers[base]["group_size"] = 16
            new, four[name] = WRITERS["modelopt-nvfp4"](base, n, k, 2.0**-9)
            tensors |= new
        elif algorithm is None:
            tensors[name] = model.get_parameter(name).detach().clone()
        else:
            layers[base]["group_size"] = 16
            scale = torch.rand(-(-n // 16), -(-k // 16)) * 1e-3 + 1e-4
            tensors[name] = torch.randn(n, k).mul(40).to(torch.float8_e4m3fn)
            tensors[base + ".weight_scale_inv"] = scale
            blocks = scale.double().repeat_interleave(16, 0)[:n].repeat_interleave(16, 1)[:, :k]
            eight[name] = tensors[name].double() * blocks
    save_tensors(path, tensors)
    edit_json(path / "config.json", lambda c: c["quantization_config"]["quantized_layers"].update(layers))
    return model, four, eight


@HOW
@pytest.mark.parametrize("where", ["config", "both", "older"])
def test_a_format_for_each_layer(where, how, registered, tmp_path):
    """Exports before 0.40 list the layers in hf_quant_config.json alone, and name their library."""
    original, four, eight = write_layers(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    older = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8"}
    older["quantized_layers"] = stored["quantized_layers"]
    if where != "config":
        producer = {"name": "modelopt", "version": "0.39.0"}
        text = json.dumps({"producer": producer, "quantization": older})
        (tmp_path / "hf_quant_config.json").write_text(text)
    if where == "older":
        stored = {"ignore": [], "quant_algo": "MIXED_PRECISION", "kv_cache_scheme": "FP8",
                  "producer": producer, "quant_library": "modelopt"}  # fmt: skip
        edit_json(tmp_path / "config.json", lambda c: c.update(quantization_config=stored))
    model = loaded(tmp_path, how)
    assert_holds(model, four)
    for name, p in model.named_parameters():
        if name not in four:
            want = eight[name].to(BF16) if name in eight else original.get_parameter(name)
            assert torch.equal(p, want), name
    assert logits(model, tokens(1, 5)).isfinite().all()


def test_mixed_precision_without_its_layers_is_named(tmp_path):
    write_layers(tmp_path)
    edit_json(tmp_path / "config.json", lambda c: c["quantization_config"].pop("quantized_layers"))
    with pytest.raises(CheckpointError, match=r"no quantized_layers.*put the export's hf_quant_config.json"):
        fp4_ops.load_checkpoint(None, tmp_path)


def test_another_algorithm_of_one_layer_is_named(tmp_path):
    write_layers(tmp_path)
    name = "model.layers.0.self_attn.q_proj"
    edit_json(
        tmp_path / "config.json",
        lambda c: c["quantization_config"]["quantized_layers"][name].update(quant_algo="W4A8_AWQ"),
    )
    with pytest.raises(CheckpointError, match=rf"quant_algo 'W4A8_AWQ' for {name}; those that can be read"):
        fp4_ops.load_checkpoint(None, tmp_path)
