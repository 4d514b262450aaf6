"""Two modules that share their experts: one copy in memory, saved once if a new model shares them, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from safetensors import safe_open
from safetensors.torch import save_file

import fp4_ops
from fp4_ops.checkpoints.convert import quantize_checkpoint
from fp4_ops.experts.packed import PackedWeight
from fp4_ops.integrations.transformers.quantizer import FP4Config

transformers = pytest.importorskip("transformers")
WEIGHTS = ("gate_up_proj", "down_proj")


def share(model: Any, how: str) -> None:
    layers = model.model.layers
    if how == "one module":
        layers[2].mlp.experts = layers[0].mlp.experts
    else:
        for name in WEIGHTS:
            setattr(layers[2].mlp.experts, name, getattr(layers[0].mlp.experts, name))


class OneModule(transformers.Qwen3MoeForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        share(self, "one module")


class SameParameters(transformers.Qwen3MoeForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        share(self, "same parameters")


class Tied(transformers.Qwen3MoeForCausalLM):
    _tied_weights_keys = {  # noqa: RUF012
        "lm_head.weight": "model.embed_tokens.weight",
        **{f"model.layers.2.mlp.experts.{name}": f"model.layers.0.mlp.experts.{name}" for name in WEIGHTS},
    }


def made(cls: Any) -> Any:
    # transformers ties whatever a class names where the config ties the embeddings
    random = tiny("qwen3_moe", num_hidden_layers=3, tie_word_embeddings=cls is Tied)
    model = cls(random.config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(random.get_parameter(name))
    return model


def stored_experts(path: Path) -> set[str]:
    with safe_open(path / "model.safetensors", "pt") as file:
        return {name.partition(".mlp.experts.")[0] for name in [*file.keys()] if ".mlp.experts." in name}


def copies(model: Any) -> int:
    return len({m.packed.data_ptr() for m in model.modules() if isinstance(m, PackedWeight)})


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 21).reshape(2, 9)
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("cls", [OneModule, SameParameters, Tied])
def test_one_copy_is_saved_and_loaded(cls: Any, tmp_path: Path) -> None:
    model = made(cls)
    fp4_ops.prepare(model, "mxfp4", activation="bf16")
    assert copies(model) == 4
    model.save_pretrained(tmp_path)
    assert stored_experts(tmp_path) == {"model.layers.0", "model.layers.1"}
    with torch.device("meta"):
        like = cls(model.config)
    loaded = fp4_ops.load_checkpoint(like, tmp_path, activation="bf16", dtype=torch.float32)
    assert copies(loaded) == 4
    layers = loaded.model.layers
    assert layers[2].mlp.experts.down_proj is layers[0].mlp.experts.down_proj
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0)
    loaded.save_pretrained(tmp_path / "again")
    assert stored_experts(tmp_path / "again") == {"model.layers.0", "model.layers.1"}


def write_bf16(model: Any, path: Path, each: bool) -> None:
    """A folder in 16 bits with its experts one by one: those of layer 2, too, or not."""
    model.config.save_pretrained(path)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        owner, _, attribute = name.rpartition(".")
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if not owner.endswith(".mlp.experts"):
            tensors[name] = value.clone()
        elif each or "layers.2" not in owner:
            halves = ("gate_proj", "up_proj") if attribute == "gate_up_proj" else (attribute,)
            for expert, matrix in enumerate(value):
                parts = zip(halves, matrix.chunk(len(halves)))
                tensors |= {f"{owner}.{expert}.{half}.weight": part.clone() for half, part in parts}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("how", ["FP4Config", "quantize"])
@pytest.mark.parametrize("cls", [OneModule, SameParameters, Tied])
def test_a_folder_in_16_bits_becomes_one_copy(cls: Any, how: str, each: bool, tmp_path: Path) -> None:
    model = made(cls)
    (tmp_path / "bf16").mkdir()
    write_bf16(model, tmp_path / "bf16", each)
    if how == "quantize":
        quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", "mxfp4", progress=False)
    folder = tmp_path / ("out" if how == "quantize" else "bf16")
    like = FP4Config("mxfp4", activation="bf16")
    loaded, info = cls.from_pretrained(folder, quantization_config=like, output_loading_info=True)
    assert not any(info.values()), info
    report = fp4_ops.prepare(model, "mxfp4", activation="bf16")
    if how == "FP4Config":  # bytes are counted once there, too
        assert loaded.hf_quantizer.report == report
    for one in (loaded, cls.from_pretrained(save(loaded, tmp_path / "again"), quantization_config=like)):
        assert copies(one) == 4
        torch.testing.assert_close(logits(one), logits(model), rtol=0, atol=0)
    assert stored_experts(tmp_path / "again") == {"model.layers.0", "model.layers.1"}


def save(model: Any, path: Path) -> Path:
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("how", ["one module", "same parameters"])
def test_what_a_new_model_would_not_share_is_saved_for_each(how: str, tmp_path: Path) -> None:
    """A reader of the folder cannot know of it; and a class that does share reads the same folder."""
    model = tiny("qwen3_moe", num_hidden_layers=3)
    share(model, how)
    fp4_ops.prepare(model, "mxfp4", activation="bf16")
    assert copies(model) == 4
    model.save_pretrained(tmp_path)
    assert len(stored_experts(tmp_path)) == 3
    loaded = fp4_ops.load_checkpoint(None, tmp_path, activation="bf16", dtype=torch.float32)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0)
    with torch.device("meta"):
        like = (OneModule if how == "one module" else SameParameters)(model.config)
    loaded = fp4_ops.load_checkpoint(like, tmp_path, activation="bf16", dtype=torch.float32)
    assert copies(loaded) == 4
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0)
