"""Folders that `quantize` writes: from 8 bits, for many families, with a correct report and index."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from checkpoint_folders import (
    BF16,
    OTHERS,
    OWN_CODE,
    STACKED,
    assert_holds,
    dequantised,
    family,
    family_folder,
    in_model_order,
    logits,
    outputs,
    write_fp8,
    write_mixed,
)
from checkpoint_samples import edit_json, save_tensors, tiny
from moe_models import tokens, transformers
from safetensors.torch import load_file

import fp4_ops
from fp4_ops.checkpoints import CheckpointError, quantize_checkpoint


@pytest.mark.parametrize("format", ["nvfp4", "int4_g32"])
@pytest.mark.parametrize("kind", ["deepseek", "modelopt", "compressed-tensors"])
def test_8_bits_are_what_quantize_starts_from(kind, format, tmp_path):
    _, values = write_fp8(tmp_path / "fp8", kind)
    quantize_checkpoint(tmp_path / "fp8", tmp_path / "out", format, progress=False)
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    model = fp4_ops.load_checkpoint(None, tmp_path / "out")
    got = dequantised(model)
    assert got
    for name, held in got.items():
        owner, _, attribute = name.rpartition(".")
        for expert, matrix in enumerate(held):
            halves = ("gate", "up") if attribute == "gate_up_proj" else ("down",)
            w = torch.cat([values[f"{owner}.{expert}.{half}_proj.weight"] for half in halves]).float()
            q = torch.ops.fp4.quantize(w, format)
            want = torch.ops.fp4.dequantize(*q, format, torch.float32)
            torch.testing.assert_close(matrix, want, rtol=2.5e-7, atol=0)
    for name, value in values.items():
        if "experts." not in name or "shared" in name:
            assert torch.equal(model.get_parameter(name), value.to(BF16)), name
    assert logits(model, tokens(1, 4)).isfinite().all()


def test_a_result_that_cannot_be_loaded_is_not_written(tmp_path):
    """Experts that the config does not have: found before anything is written, not after hours."""
    model = tiny()
    model.save_pretrained(tmp_path / "bf16")
    edit_json(tmp_path / "bf16" / "config.json", lambda c: c.update(num_experts=4, num_local_experts=4))
    with pytest.raises(
        CheckpointError, match=r"is of expert 4; the model has 4 experts.*another model.*Nothing was written"
    ):
        quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


LACKING = {
    "model.norm.weight": lambda t: None,
    "lm_head.weight": lambda t: None,
    "model.layers.1.self_attn.q_proj.weight": lambda t: None,
    "model.layers.1.mlp.gate.weight": lambda t: t[:, 1:].contiguous(),
    "experts": lambda t: None,  # those of a layer
    "bias": lambda t: None,  # those of a layer's experts
}


@pytest.mark.parametrize("name", LACKING)
def test_a_source_that_lacks_weights_outside_the_experts_is_refused(name, tmp_path):
    """As after a download without a shard and without the index: the result could not be loaded."""
    tiny("gpt_oss" if name == "bias" else "qwen3_moe").save_pretrained(tmp_path / "bf16")
    file = tmp_path / "bf16" / "model.safetensors"
    tensors, of_experts = load_file(file), "layers.0.mlp.experts."
    for key in [k for k in tensors if k == name or (of_experts in k and name in ("experts", k[-4:]))]:
        changed = LACKING[name](tensors.pop(key))
        tensors |= {} if changed is None else {key: changed}
    save_tensors(file.parent, tensors)
    words = "has shape .* the model's is" if name.endswith("gate.weight") else "has no values for"
    for formats in ({}, {"attention": "mxfp4"}):
        with pytest.raises(CheckpointError, match=rf"{words}.*Nothing was written") as error:
            quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", progress=False, **formats)
        assert name in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("classes", [None, ["MyEmbedder"]])
def test_a_class_that_transformers_does_not_have_may_lack_a_head(classes, tmp_path):
    base = transformers.Qwen3MoeModel(tiny().config).to(BF16)
    base.save_pretrained(tmp_path / "bf16")
    edit_json(tmp_path / "bf16" / "config.json", lambda c: c.update(architectures=classes))
    with pytest.warns(UserWarning, match=r"no values for lm_head.weight, .* if it is a Qwen3MoeForCausalLM"):
        quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", progress=False)
    model = fp4_ops.load_checkpoint(base, tmp_path / "out")
    assert len(dequantised(model)) == 4


def test_without_accelerate_the_check_says_that_it_is_off(tmp_path, monkeypatch):
    tiny().save_pretrained(tmp_path / "bf16")
    monkeypatch.setattr("transformers.integrations.accelerate.is_accelerate_available", lambda: False)
    with pytest.warns(UserWarning, match=r"outside the experts are missing is not known: .*accelerate"):
        quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", progress=False)


@pytest.mark.parametrize("name", [
    *STACKED, *OWN_CODE[:2], *(pytest.param(f, marks=pytest.mark.more) for f in (*OWN_CODE[2:], *OTHERS)),
])  # fmt: skip
def test_quantize_and_load(name, tmp_path):
    """What the command writes is loaded, with the values that quantising the parameters gives."""
    original = family(name)
    original.save_pretrained(tmp_path / "bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", "mxfp4", progress=False)
    model = fp4_ops.load_checkpoint(None, tmp_path / "out")
    got = dequantised(model)
    assert got
    for key, held in got.items():
        w = original.get_parameter(key).detach()
        owner, _, attribute = key.rpartition(".")
        w = in_model_order(original, key, w).contiguous()  # which is [E, N, K]: the other way is the same
        want = torch.ops.fp4.dequantize(*torch.ops.fp4.quantize(w, "mxfp4"), "mxfp4", torch.float32)
        if attribute not in model.get_submodule(owner)._modules:  # an FP4Tensor lies as the model's
            held = in_model_order(original, key, held)
        experts = len(original.get_submodule(owner).down_proj)
        assert torch.equal(held[:experts], want[:experts]), key
    assert outputs(model, tokens(1, 5)).isfinite().all()


@pytest.mark.parametrize("name", ["dbrx", "aria_text", "jetmoe"])
def test_families_whose_experts_are_not_found_are_named(name, tmp_path):
    family(name).save_pretrained(tmp_path / "bf16")
    message = (
        rf"a {name}, has no expert weights .*experts.* has no such name: nothing was written.*torch\.compile"
    )
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_files_with_weights_are_not_copied(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path / "bf16")
    for name in ("model.Q4_K_M.gguf", "pytorch_model.bin", "pytorch_model.bin.index.json", "model.onnx"):
        (tmp_path / "bf16" / name).write_bytes(b"weights")
    also = ("tokenizer.json", "adapter_config.json", "adapter_model.safetensors")  # an adapter is whole
    for name in also:
        (tmp_path / "bf16" / name).write_text("{}")
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", progress=False)
    assert {f.name for f in (tmp_path / "out").iterdir()} - {"generation_config.json"} == {
        "config.json", "model.safetensors", "README.md", *also
    }  # fmt: skip


def test_a_thousand_matrices_are_one_line(tmp_path):
    model = family("qwen3_next")
    family_folder(tmp_path, model, "modelopt-nvfp4")
    tensors = load_file(tmp_path / "model.safetensors")
    first = {n: t for n, t in tensors.items() if n.startswith("model.layers.0.mlp.experts.0.")}
    for expert in range(334):
        for name, t in first.items():
            tail = name.removeprefix("model.layers.0.mlp.experts.0.")
            tensors[f"mtp.layers.0.mlp.experts.{expert}.{tail}"] = t.clone()
    save_tensors(tmp_path, tensors)
    report = fp4_ops.load_checkpoint(None, tmp_path).hf_quantizer.report
    assert report.left and all(name.startswith("mtp.") for name in report.left)
    assert str(report).count("\n") == 1 and "left alone: the model has no such layer" in str(report)


def test_a_second_copy_that_the_index_does_not_name(tmp_path):
    _, four, _ = write_mixed(tmp_path, "modelopt", "tensor")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    save_tensors(tmp_path, tensors, shards=2)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    second = tmp_path / "model-00002-of-00002.safetensors"
    name = next(n for n, file in index.items() if file != second.name)
    other = load_file(second)
    from safetensors.torch import save_file

    save_file(other | {name: torch.zeros_like(tensors[name])}, second)
    assert_holds(fp4_ops.load_checkpoint(None, tmp_path), four)
