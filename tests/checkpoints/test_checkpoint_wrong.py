"""Folders that every reader must refuse with the true cause, and not measure or load at random."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from checkpoint_samples import edit_json, save_tensors, tiny, write_folder
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import fp4_ops
from fp4_ops.__main__ import main
from fp4_ops.checkpoints import CheckpointError, quantize_checkpoint
from fp4_ops.checkpoints.hf import FP4Config

CT = "nvfp4-pack-quantized"


def rename(path, new):
    tensors = load_file(path / "model.safetensors")
    save_file({new(n): t for n, t in tensors.items()}, path / "model.safetensors", {"format": "pt"})


def refusal(call):
    with pytest.raises((CheckpointError, ValueError, SystemExit)) as stopped:
        call()
    return str(stopped.value)


WRAPPED = {
    "around": lambda n: f"_orig_mod.{n}",
    "parallel": lambda n: f"module.{n}",
    "within": lambda n: n.replace(".mlp.", ".mlp._orig_mod."),
}


@pytest.mark.parametrize("where", WRAPPED)
def test_names_with_wrappers_are_never_measured_at_random(where, tmp_path):
    tiny().save_pretrained(tmp_path)
    rename(tmp_path, WRAPPED[where])
    name = "module" if where == "parallel" else "_orig_mod"
    told = [
        refusal(lambda: main(["report", str(tmp_path)])),
        refusal(lambda: quantize_checkpoint(tmp_path, tmp_path / "out", progress=False)),
        refusal(lambda: AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=FP4Config())),
    ]
    for text in told:
        assert name in text and ("not a wrapper around it" in text or "key_mapping" in text), text
        assert len(text) < 800 and "\n" not in text
    assert not (tmp_path / "out").exists()


def test_a_folder_that_lacks_experts_is_not_measured(tmp_path):
    tiny().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rest = {n: t for n, t in tensors.items() if ".layers.1.mlp.experts." not in n}
    save_file(rest, tmp_path / "model.safetensors", {"format": "pt"})
    text = refusal(lambda: main(["report", str(tmp_path)]))
    assert "missing keys: model.layers.1.mlp.experts.down_proj" in text


def test_a_missing_shard_is_named_by_report(tmp_path):
    tiny().save_pretrained(tmp_path)
    save_tensors(tmp_path, load_file(tmp_path / "model.safetensors"), shards=3)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    text = refusal(lambda: main(["report", str(tmp_path)]))
    assert "model-00002-of-00003.safetensors cannot be read: No such file" in text and "hub" not in text


def test_a_config_that_transformers_cannot_read_is_one_line(tmp_path):
    tiny().save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda c: c.update(dtype="bfloat17"))
    text = refusal(lambda: main(["report", str(tmp_path)]))
    assert "cannot be loaded" in text and "bfloat17" in text and "\n" not in text


def test_mistrals_own_names_are_not_to_be_renamed(tmp_path):
    write_folder(tmp_path, tiny(), CT)
    (tmp_path / "model.safetensors").rename(tmp_path / "consolidated.00.safetensors")
    for call in (lambda: fp4_ops.load_checkpoint(None, tmp_path), lambda: main(["report", str(tmp_path)])):
        text = refusal(call)
        assert "Mistral's own names" in text and "Rename" not in text


def test_a_path_that_is_not_utf_8(tmp_path):
    """safetensors cannot open it. quantize, which has its own reader, can."""
    source = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff"))
    tiny().save_pretrained(source)
    assert "is not UTF-8" in refusal(lambda: main(["report", str(source)]))
    quantize_checkpoint(source, tmp_path / "out", progress=False)
    fp4_ops.load_checkpoint(None, tmp_path / "out")
    out = Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xff"))
    (tmp_path / "out").rename(out)
    text = refusal(lambda: fp4_ops.load_checkpoint(None, out))
    assert "is not UTF-8" in text and "Rename" in text


def test_nan_names_the_weight(tmp_path):
    tiny().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"].fill_(torch.nan)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert "gate_up of model.layers.1.mlp.experts" in refusal(lambda: main(["report", str(tmp_path)]))


def test_a_prefix_of_another_model_is_not_called_a_wrapper(tmp_path):
    """The config.json of a text model beside the files of the model with a vision tower."""
    write_folder(tmp_path, tiny(), CT)
    rename(tmp_path, lambda n: n.replace("model.layers.", "model.language_model.layers."))
    text = refusal(lambda: fp4_ops.load_checkpoint(None, tmp_path))
    assert "begins with 'model.language_model'" in text and "describes another model" in text


def test_requantize_of_fp4_says_what_to_do(tmp_path):
    write_folder(tmp_path, tiny(), CT)
    text = refusal(lambda: fp4_ops.load_checkpoint(None, tmp_path, requantize="mxfp4"))
    assert text.endswith("Leave requantize out: it is for int4 folders")


def test_an_adapter_beside_the_model(tmp_path):
    """transformers loads it with the model, so all of its weights must be there."""
    write_folder(tmp_path, tiny(), CT)
    adapter = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    save_file({"base_model.model.x": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    pytest.importorskip("peft")
    text = refusal(lambda: fp4_ops.load_checkpoint(None, tmp_path))
    assert "adapter_config.json" in text and " more. " in text
