"""16-bit folders with further tensors, and folders whose codes no config explains.

A tensor of quantisation is an error only if the model's own weight is not there as an ordinary one.
"""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_folders import logits
from checkpoint_samples import edit_json, random_codes, save_tensors, tiny
from moe_models import tokens
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from fp4_ops.checkpoints import CheckpointError
from fp4_ops.checkpoints.dialects import dialects_of
from fp4_ops.checkpoints.folder import Folder
from fp4_ops.checkpoints.hf import FP4Config
from fp4_ops.checkpoints.placement import place
from fp4_ops.checkpoints.source import four_bit_weights
from fp4_ops.integrations.transformers import quantizer as hf
from fp4_ops.integrations.transformers.reference import load_reference

Q = "model.layers.1.self_attn.q_proj"
EXPERT = "model.layers.1.mlp.experts.2.up_proj"
BF16 = torch.bfloat16


def with_registration(path, **options):
    with hf.registered():
        return AutoModelForCausalLM.from_pretrained(path, dtype=BF16, **options)


def with_config(path, **options):
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=BF16, quantization_config=FP4Config("nvfp4"), **options
    )


def reference(path):
    return load_reference(path, "cpu", BF16)[0]


WAYS = {"registered": with_registration, "FP4Config": with_config, "reference": reference}


def add(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def assert_same_logits(model, expected):
    ids = tokens(2, 7)
    assert torch.equal(logits(model, ids), logits(expected, ids))


LEFT = {
    "block scales": {f"{n}.weight_scale_inv": torch.rand(1, 1) for n in (Q, EXPERT)},
    "scales": {f"{n}.weight_scale": torch.rand(1) for n in (Q, EXPERT)},
    "e4m3 scales": {f"{n}.weight_scale": torch.rand(8, 4).to(torch.float8_e4m3fn) for n in (Q, EXPERT)},
    "codes beside the weight": {f"{n}.weight_packed": random_codes(8, 4) for n in (Q, EXPERT)},
    "a tied head": {"lm_head.weight_packed": random_codes(8, 4), "lm_head.weight_scale": torch.rand(8, 1)},
    "a counter": {"model.rotary.counter_blocks": torch.arange(4)},
    "a mask": {"extra.mask.weight": torch.arange(4, dtype=torch.uint8)},
    "a layer in 4 bits": {"extra.weight_packed": random_codes(8, 4), "extra.weight_scale": torch.rand(8, 1)},
    "a layer in fp8": {"extra.weight": torch.rand(8, 8).to(torch.float8_e4m3fn),
                       "extra.weight_scale": torch.rand(1)},
    "W_q": {"extra.W_q": torch.rand(4)},
    "biases": {"extra.biases": torch.rand(4)},
    "suh": {"extra.suh": torch.rand(4)},
    "SCB": {"extra.SCB": torch.rand(4), f"{Q}.SCB": torch.rand(4)},
}  # fmt: skip


@pytest.mark.parametrize("what", LEFT)
def test_further_tensors_change_nothing(what, tmp_path):
    tiny().save_pretrained(tmp_path)
    if "tied" in what:
        edit_json(tmp_path / "config.json", lambda c: c.update(tie_word_embeddings=True))
        add(tmp_path, lambda t: t.pop("lm_head.weight"))
    expected = {how: load(tmp_path) for how, load in WAYS.items()}
    add(tmp_path, lambda t: t.update(LEFT[what]))
    for how, load in WAYS.items():
        assert_same_logits(load(tmp_path), expected[how])


def test_a_given_config_needs_no_config_json(tmp_path):
    tiny().save_pretrained(tmp_path)
    expected = with_config(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    assert_same_logits(with_config(tmp_path, config=config), expected)


def test_an_index_may_name_a_tensor_that_no_file_has(tmp_path):
    tiny().save_pretrained(tmp_path)
    expected = with_config(tmp_path)
    save_tensors(tmp_path, load_file(tmp_path / "model.safetensors"), shards=3)
    (tmp_path / "model.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    edit_json(
        index, lambda c: c["weight_map"].update({"model.ghost.weight": "model-00002-of-00003.safetensors"})
    )
    assert_same_logits(with_config(tmp_path), expected)


def test_missing_experts_are_named_without_a_config_json(tmp_path):
    tiny().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    add(tmp_path, lambda t: [t.pop(n) for n in list(t) if ".layers.1.mlp.experts." in n])
    with pytest.raises(CheckpointError, match=r"no values for model.layers.1.mlp.experts"):
        with_config(tmp_path, config=config)


def to_fp8(tensors, name):
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.float8_e4m3fn)


CODES = {
    "fp8": (lambda t, n: to_fp8(t, n) or {f"{n}.weight_scale": torch.rand(1)}, "float8_e4m3fn: codes.*no q"),
    "fp8 in blocks": (
        lambda t, n: to_fp8(t, n) or {f"{n}.weight_scale_inv": torch.rand(1, 1)}, "float8_e4m3fn: codes.*no q"
    ),
    "packed": (lambda t, n: t.pop(f"{n}.weight") is None or {f"{n}.weight_packed": random_codes(8, 4)},
               "weight_packed of .* is uint8: codes.*no q"),
    "gptq": (lambda t, n: t.pop(f"{n}.weight") is None or {f"{n}.qweight": torch.randint(9, (8, 4))},
             "qweight of .* is int64: codes.*no q"),
    "HQQ": (lambda t, n: t.pop(f"{n}.weight") is None or {f"{n}.W_q": random_codes(8, 4)},
            "quantised by HQQ: it has .*W_q"),
}  # fmt: skip


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("what", CODES)
def test_codes_of_the_models_own_weights_are_refused(what, how, tmp_path):
    change, message = CODES[what]
    for name in (Q, EXPERT):
        tiny().save_pretrained(tmp_path / name)
        add(tmp_path / name, lambda t, name=name: t.update(change(t, name)))
        with pytest.raises(CheckpointError, match=message) as error:
            WAYS[how](tmp_path / name)
        assert name in str(error.value)


class Lists(PreTrainedModel):
    """Its experts are modules in a list, as its layers are."""

    config_class = PretrainedConfig

    def __init__(self, layers, experts):
        super().__init__(PretrainedConfig(num_hidden_layers=layers))

        def block():
            made = torch.nn.Module()
            made.experts = torch.nn.ModuleList(torch.nn.Linear(32, 16, bias=False) for _ in range(experts))
            return made

        self.layers = torch.nn.ModuleList(block() for _ in range(layers))


@pytest.mark.parametrize("experts", [2, 3, 4])
def test_fewer_layers_do_not_excuse_fewer_experts(experts, tmp_path):
    """2 experts: the list of experts is as long as the one of layers."""
    tensors = {}
    for name in (f"layers.{i}.experts.{j}" for i in range(3) for j in range(4)):
        tensors[f"{name}.weight_packed"] = random_codes(16, 16)
        tensors[f"{name}.weight_scale"] = (torch.rand(16, 2) + 1).to(torch.float8_e4m3fn)
        tensors[f"{name}.weight_global_scale"] = torch.rand(1) + 1
    save_file(tensors, tmp_path / "model.safetensors")
    stored = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 3, "quantization_config": stored}))
    folder = Folder(tmp_path)
    weights = four_bit_weights(folder, dialects_of(stored))
    model = Lists(2, experts)
    if experts == 4:
        placed = place(model, weights, folder.tensors.values(), fewer_layers=True)
        assert len(placed.linears) == 8 and len(placed.left) == 4
    else:
        with pytest.raises(CheckpointError, match=rf"layers.0.experts has only {experts} modules"):
            place(model, weights, folder.tensors.values(), fewer_layers=True)
