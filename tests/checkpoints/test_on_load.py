"""`from_pretrained(16-bit folder, FP4Config(...))`: experts become 4-bit as they are read."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from moe_models import build, relative_error
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.quantizers import auto

import fp4_ops
from fp4_ops.checkpoints.files import CheckpointError
from fp4_ops.experts import find
from fp4_ops.experts.find import is_experts
from fp4_ops.integrations.transformers.quantizer import METHOD, FP4Config
from fp4_ops.models.arriving import ArrivingExperts
from fp4_ops.tensor import FP4Tensor


def folder_of(family, path, change=lambda tensors: tensors, **config) -> nn.Module:
    """Saves a model in bf16 (qwen3_moe: one tensor an expert; gpt_oss: stacked), its tensors changed."""
    model = build(family, torch.bfloat16, "grouped_mm", **config)
    model.save_pretrained(path)
    file = path / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    return model


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_never_more_than_one_expert_weight_is_in_16_bits(family, tmp_path, monkeypatch):
    want = folder_of(family, tmp_path)
    fp4_ops.prepare(want, "nvfp4")
    held, pack, models = [], ArrivingExperts.pack, []

    def packed(self, parameter, weight):
        modules = self.found.values()
        held.append(sum(p.dim() > 2 and not p.is_meta for m in modules for p in m.parameters(recurse=False)))
        pack(self, parameter, weight)

    monkeypatch.setattr(ArrivingExperts, "pack", packed)
    # Without register_with_transformers: a config that is given says enough.
    for mapping in (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING):
        monkeypatch.delitem(mapping, METHOD, raising=False)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=FP4Config("nvfp4"), dtype=torch.bfloat16
    )
    assert held == [0] * 2 * sum(map(is_experts, model.modules()))
    models = model.state_dict(), want.state_dict()
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(t, models[1][name]) for name, t in models[0].items())
    ids = torch.randint(0, 64, (2, 5))
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, want(input_ids=ids).logits)
    model.save_pretrained(tmp_path / "packed")


@pytest.mark.parametrize("tied", [False, True])
def test_layers_outside_the_experts(tied, tmp_path):
    """Loading gives the same weights as `prepare`, and the saved folder loads with the same values."""
    outside = {"attention": "nvfp4", "head": "nvfp4"}
    want = folder_of("qwen3_moe", tmp_path, tie_word_embeddings=tied)
    report = fp4_ops.prepare(want, "nvfp4", **outside)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=FP4Config("nvfp4", **outside), dtype=torch.bfloat16
    )
    assert model.hf_quantizer.report == report and len(report.outside) == 2
    assert isinstance(model.lm_head.weight, FP4Tensor)
    assert type(model.get_input_embeddings().weight) is torch.nn.Parameter
    ids = torch.randint(0, 64, (2, 5))
    with torch.no_grad():
        got = model(input_ids=ids).logits
        assert torch.equal(got, want(input_ids=ids).logits)
        model.save_pretrained(tmp_path / "packed")
        again = fp4_ops.load_checkpoint(None, tmp_path / "packed")
        assert isinstance(again.lm_head.weight, FP4Tensor)
        assert relative_error(again(input_ids=ids).logits, got) < 1e-2
    with pytest.raises(ValueError, match="trainable_inputs=True, and head is 'nvfp4'"):
        FP4Config(head="nvfp4", trainable_inputs=True)
    with pytest.raises(ValueError, match="dense is 'mxfp4', and the model has no such linear layer"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=FP4Config(dense="mxfp4"))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("refused", [False, True])
def test_the_report_is_that_of_prepare(family, refused, tmp_path, monkeypatch):
    """refused: the experts of the second layer are left alone."""
    want, calls, plan = folder_of(family, tmp_path), itertools.cycle([False, refused]), find.plan

    def planned(module):
        if next(calls):
            raise find.Refusal("the test refuses it")
        return plan(module)

    monkeypatch.setattr(find, "plan", planned)
    report = fp4_ops.prepare(want, "mxfp4", activation="bf16")
    assert [bool(m.reason) for m in report.modules] == [False, refused]
    assert want.hf_quantizer.report is report
    config = FP4Config("mxfp4", activation="bf16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.bfloat16)
    assert model.hf_quantizer.report == report


def test_experts_that_no_key_fits_are_an_error(tmp_path):
    def renamed(tensors):
        return {name.replace("model.", "model.language_model."): t for name, t in tensors.items()}

    folder_of("qwen3_moe", tmp_path, renamed)
    with pytest.raises(CheckpointError, match=r"prefix is 'model\.language_model\.', where") as error:
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=FP4Config("nvfp4"))
    assert "layers.0.mlp.experts.gate_up_proj and 3 more" in str(error.value)
    assert "language_model.layers.0.mlp.experts.0." in str(error.value)
    advice = {r"^model\.language_model\.": "model."}
    assert str(advice) in str(error.value).replace("\\", "\\\\")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=FP4Config("nvfp4"), key_mapping=advice
    )
    assert any(hasattr(m, "_fp4_recipe") for m in model.modules())


@pytest.mark.parametrize(
    ("what", "words"),
    [("missing", "1.down_proj|down_proj"), ("nan", "down_proj holds NaN or infinity in expert 1")],
)
def test_damaged_experts_are_named(what, words, tmp_path):
    name = "model.layers.0.mlp.experts.1.down_proj.weight"

    def changed(tensors):
        tensor = tensors.pop(name)
        if what == "nan":
            tensors[name] = torch.full_like(tensor, torch.nan)
        return tensors

    folder_of("qwen3_moe", tmp_path, changed)
    with pytest.raises(ValueError, match=f"layers.0.mlp.experts.({words})"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=FP4Config("nvfp4"))


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(64, 64, bias=False) for _ in range(3))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(64, 4), nn.ModuleList(Expert() for _ in range(4))


@pytest.mark.parametrize("kind", ["stacked", "modules"])
def test_parameters_that_zero3_holds_are_named(kind):
    model = build("qwen3_moe", torch.float32, "grouped_mm") if kind == "stacked" else nn.Sequential(Block())
    whole = copy.deepcopy(model)
    for p in model.parameters():  # as deepspeed.zero.Init leaves them
        p.ds_shape, p.ds_id = p.shape, id(p)
        p.data = torch.empty(0, dtype=p.dtype)
    with pytest.raises(ValueError, match=r"experts: \S+ is empty here: DeepSpeed ZeRO-3 .*Gathered"):
        fp4_ops.prepare(model)
    with pytest.raises(ValueError, match=r"explain: \S+ is empty here: DeepSpeed ZeRO-3"):
        fp4_ops.explain(model, torch.ones(1, 4, dtype=torch.int64))
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):  # gathered
        p.data = q.data
    assert fp4_ops.prepare(model).prepared


def test_a_dense_weight_that_is_missing_is_reported_as_without_4_bits(tmp_path):
    name = "model.layers.0.self_attn.q_proj.weight"

    def without(tensors):
        return {n: t for n, t in tensors.items() if n != name}

    model = folder_of("qwen3_moe", tmp_path, without)
    for config in (None, FP4Config("mxfp4")):
        _, info = type(model).from_pretrained(tmp_path, quantization_config=config, output_loading_info=True)
        assert {*info["missing_keys"]} == {name}
