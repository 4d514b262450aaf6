"""`prepare` with attention, dense layers and the output head in 4 bits."""

from __future__ import annotations

import copy

import pytest
import torch
from moe_models import build, relative_error, tokens
from torch import nn

import fp4_ops
from fp4_ops.models.outside_experts import KINDS, kind_of
from fp4_ops.tensor import FP4Tensor

NAMES = {
    "model.layers.0.self_attn.q_proj.weight": "attention",
    "model.layers.3.linear_attn.in_proj_qkvz.weight": "attention",
    "model.layers.0.mlp.shared_expert.gate_proj.weight": "dense",
    "model.layers.0.mlp.down_proj.weight": "dense",
    "backbone.layers.1.mixer.in_proj.weight": "dense",
    "lm_head.weight": "head",
    "model.layers.0.mlp.gate.weight": None,
    "model.layers.0.mlp.shared_expert_gate.weight": None,
    "model.layers.0.block_sparse_moe.router.weight": None,
    "model.embed_tokens.weight": None,
}


def test_kinds_by_name():
    assert {name: kind_of(name) for name in NAMES} == NAMES


def in_4_bits(model: nn.Module) -> dict[str, str]:
    found = {f"{n}.weight": m.weight for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    return {name: weight.format for name, weight in found.items() if isinstance(weight, FP4Tensor)}


def linears(model: nn.Module) -> list[str]:
    return [f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear)]


def test_a_kind_that_the_model_has_not():
    with pytest.raises(ValueError, match="dense is 'mxfp4', and the model has no such linear layer"):
        fp4_ops.prepare(build("qwen3_moe", torch.float32, "grouped_mm"), dense="mxfp4")


@pytest.mark.parametrize("kinds", [("attention",), ("dense",), ("head",), KINDS])
def test_each_kind_by_its_own_word(kinds):
    """The chosen layers compute with the values of their codes, and no other layer changes."""
    model, ids = build("deepseek_v3", torch.float32, "grouped_mm"), tokens(2, 7)
    names = [n for n in linears(model) if kind_of(n) in kinds]
    twin = copy.deepcopy(model)
    report = fp4_ops.prepare(model, "nvfp4", activation="bf16", **dict.fromkeys(kinds, "mxfp4"))
    fp4_ops.prepare(twin, "nvfp4", activation="bf16")
    for name in names:
        linear = twin.get_submodule(name.removesuffix(".weight"))
        linear.weight = nn.Parameter(fp4_ops.quantize(linear.weight.detach(), "mxfp4").dequantize())
    assert in_4_bits(model) == dict.fromkeys(names, "mxfp4")
    assert [w.kind for w in report.outside] == list(kinds)
    assert all(f"{w.kind}: {w.layers} linear layers, mxfp4" in str(report) for w in report.outside)
    with torch.no_grad():
        got = model(input_ids=ids, use_cache=False).logits
        assert relative_error(got, twin(input_ids=ids, use_cache=False).logits) < 1e-4


def test_a_tied_head_leaves_the_embeddings_alone(tmp_path):
    model, ids = build("qwen3_moe", torch.float32, "grouped_mm", tie_word_embeddings=True), tokens(2, 7)
    embeddings = model.get_input_embeddings().weight
    before = embeddings.detach().clone()
    fp4_ops.prepare(model, "nvfp4", head="nvfp4", attention="nvfp4")
    assert model.get_input_embeddings().weight is embeddings and torch.equal(embeddings, before)
    assert isinstance(model.lm_head.weight, FP4Tensor) and not model.config.tie_word_embeddings
    model.save_pretrained(tmp_path)
    loaded = fp4_ops.load_checkpoint(None, tmp_path)
    assert in_4_bits(loaded) == in_4_bits(model)
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits
        got = loaded(input_ids=ids, use_cache=False).logits
    assert relative_error(got, want) < 1e-5  # a file holds reciprocals of global scales


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(attention="fp8"), "attention is 'fp8'; it must be one of: keep, nvfp4"),
        (dict(head="nvfp4", trainable_inputs=True), "trainable_inputs=True, and head is 'nvfp4'"),
        (dict(attention="int4"), "q_proj.weight holds NaN or infinity"),
    ],
)
def test_what_cannot_be_done_leaves_the_model_unchanged(arguments, words):
    model = build("qwen3_moe", torch.float32, "grouped_mm", num_hidden_layers=1)
    if "int4" in arguments.values():
        model.model.layers[0].self_attn.q_proj.weight.data[0, 0] = torch.nan
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=words):
        fp4_ops.prepare(model, **arguments)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
