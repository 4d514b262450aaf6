"""Models with stacked experts, loaded from folders that store each expert separately."""

from __future__ import annotations

import math

import families
import pytest
import torch
from checkpoint_folders import (
    BF16,
    CONFIGS,
    HOW,
    MODELOPT,
    OTHERS,
    OWN_CODE,
    STACKED,
    assert_computes,
    assert_family_holds,
    dequantised,
    family,
    family_folder,
    in_model_order,
    loaded,
)
from checkpoint_samples import code_values, edit_json, save_tensors, times_blocks
from safetensors.torch import load_file

import fp4_ops
from fp4_ops.__main__ import main
from fp4_ops.checkpoints import CheckpointError
from fp4_ops.checkpoints.placement import form_of
from fp4_ops.integrations.transformers.quantizer import FP4HfQuantizer


@HOW
@pytest.mark.one_in(2)
@pytest.mark.parametrize("dialect", [*CONFIGS])
@pytest.mark.parametrize("name", [
    *STACKED, *OWN_CODE[:2], *(pytest.param(f, marks=pytest.mark.more) for f in (*OWN_CODE[2:], *OTHERS)),
])  # fmt: skip
def test_experts_one_by_one(name, dialect, how, registered, tmp_path):
    original = family(name)
    values, biases = family_folder(tmp_path, original, dialect)
    assert bool(biases) == (name in ("gpt_oss", "openai_privacy_filter"))
    model = loaded(tmp_path, how)
    assert_family_holds(model, original, values)
    if name != "openai_privacy_filter":
        assert bool(model.hf_quantizer.report.own_code) == (name in OWN_CODE)
    if how == "load_checkpoint":
        exact = fp4_ops.load_checkpoint(None, tmp_path, activation="bf16", dtype=torch.float32)
        assert_computes(exact, original, values)


def test_all_weights_have_the_dtype_that_is_asked_for(monkeypatch, tmp_path):
    """Those, too, that have another name in the files: transformers 5.17 reads them in the files' dtype, as a
    newer one does where it is told to."""
    monkeypatch.setattr(FP4HfQuantizer, "get_new_dtype", lambda *_: None, raising=False)
    original = family("granitemoe")
    values, _ = family_folder(tmp_path, original, "modelopt-nvfp4")
    exact = fp4_ops.load_checkpoint(None, tmp_path, activation="bf16", dtype=torch.float32)
    assert {p.dtype for p in exact.parameters()} == {torch.float32}
    assert_computes(exact, original, values)


@pytest.mark.parametrize("name", ["llama4_text", "gpt_oss", "muse_spark_text"])
def test_saved_and_loaded_again(name, tmp_path):
    original = family(name)
    values, _ = family_folder(tmp_path, original, "modelopt-nvfp4")
    model = fp4_ops.load_checkpoint(None, tmp_path)
    model.save_pretrained(tmp_path / "again")
    again = fp4_ops.load_checkpoint(None, tmp_path / "again")
    held = dequantised(model)
    for key, got in dequantised(again).items():
        torch.testing.assert_close(got, held[key], rtol=2.5e-7, atol=0)
    assert held.keys() == values.keys()


def test_eval_of_experts_that_prepare_does_not_take(tmp_path, capsys):
    """`eval` reports the folder's own perplexity, and says why there are no other rows."""
    original = families.tiny("llama4_text", vocab_size=256).to(BF16)
    original.config.dtype = BF16
    values, _ = family_folder(tmp_path / "model", original, "modelopt-nvfp4")
    (tmp_path / "text").write_bytes(bytes(torch.randint(0, 256, (200,)).tolist()))
    command = [str(tmp_path / "model"), "--device", "cpu"]
    with pytest.raises(SystemExit, match="the model has no experts modules"):
        main(["eval", *command, "--text", str(tmp_path / "text"), "--length", "32", "--methods", "rtn"])
    with torch.no_grad():
        for name, value in values.items():
            original.get_parameter(name).copy_(in_model_order(original, name, value))
        windows = torch.tensor(list((tmp_path / "text").read_bytes())[: 6 * 32]).view(6, 32)
        ids, scores = windows[:, 1:].flatten(), original(windows).logits[:, :-1].float().flatten(0, 1)
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("bfloat16"))
    want = torch.nn.functional.cross_entropy(scores, ids).item()
    assert math.log(float(row.split()[3])) == pytest.approx(want, rel=2e-2)


@HOW
@pytest.mark.parametrize("name", ["llama4_text", "gpt_oss"])
@pytest.mark.parametrize("per_expert_scale", [False, True])
def test_experts_fused_by_modelopt(name, per_expert_scale, how, registered, tmp_path):
    """gate_up_proj uint8 [E, K/2, N], its block scales [E, K/16, N], and one global scale."""
    original = family(name)
    original.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    values = {}
    for owner, module in original.named_modules():
        if not form_of(module):
            continue
        for attribute in ("gate_up_proj", "down_proj"):
            e, k, n = module._parameters[attribute].shape
            packed = torch.randint(0, 256, (e, k // 2, n), dtype=torch.uint8)
            scale = (torch.rand(e, k // 16, n) * 64 + 8).to(torch.float8_e4m3fn)
            second = torch.rand(e) * 0.01 + 0.001 if per_expert_scale else torch.tensor(0.003)
            tensors |= {
                f"{owner}.{attribute}": packed,
                f"{owner}.{attribute}_weight_scale": scale,
                f"{owner}.{attribute}_weight_scale_2": second,
                f"{owner}.{attribute}_input_scale": torch.tensor(1.0),
            }
            rows = times_blocks(code_values(packed.mT.contiguous()), scale.double().mT, 16)
            values[f"{owner}.{attribute}"] = rows * second.double().reshape(-1, 1, 1)
    save_tensors(tmp_path, tensors)
    edit_json(tmp_path / "config.json", lambda c: c.update(quantization_config=MODELOPT))
    model = loaded(tmp_path, how)
    got = dequantised(model)
    for key, value in values.items():
        held = got[key].mT if name == "llama4_text" else got[key]  # an FP4Tensor lies as the model's
        torch.testing.assert_close(held.double(), value, rtol=1e-7, atol=0)
    assert model.hf_quantizer.report.dialect == "modelopt-nvfp4-fused"
    if how == "load_checkpoint":
        exact = fp4_ops.load_checkpoint(None, tmp_path, activation="bf16", dtype=torch.float32)
        assert_computes(exact, original, values)


def test_experts_that_stay_in_bf16_find_their_place(tmp_path):
    """A layer that the tool did not quantise has separate experts, in a family that stacks them."""
    original = family("gpt_oss")
    values, _ = family_folder(tmp_path, original, "nvfp4-pack-quantized")
    tensors = load_file(tmp_path / "model.safetensors")
    owner = "model.layers.1.mlp.experts"
    tensors = {n: t for n, t in tensors.items() if not (n.startswith(owner) and "bias" not in n)}
    module = original.get_submodule(owner)
    for expert in range(8):
        rows = module.gate_up_proj.detach()[expert].T
        tensors |= {
            f"{owner}.{expert}.gate_proj.weight": rows[::2].contiguous(),
            f"{owner}.{expert}.up_proj.weight": rows[1::2].contiguous(),
            f"{owner}.{expert}.down_proj.weight": module.down_proj.detach()[expert].T.contiguous(),
        }
    save_tensors(tmp_path, tensors)
    model = fp4_ops.load_checkpoint(None, tmp_path)
    assert_family_holds(model, original, {n: v for n, v in values.items() if not n.startswith(owner)})
    assert model.hf_quantizer.report.left == {owner: "its weights are not stored in 4 bits"}
    del tensors[f"{owner}.5.up_proj.weight"]
    save_tensors(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=rf"no weight for {owner}.gate_up_proj, expert 5 \(up\)"):
        fp4_ops.load_checkpoint(None, tmp_path)
