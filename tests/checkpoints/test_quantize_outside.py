"""`quantize` with attention, dense layers and the output head: the weights that `prepare` gives."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_samples import tiny
from moe_models import relative_error, tokens
from torch import nn

import fp4_ops
from fp4_ops.__main__ import main
from fp4_ops.checkpoints import CheckpointError
from fp4_ops.checkpoints.convert import quantize_checkpoint
from fp4_ops.tensor import FP4Tensor


def in_4_bits(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {n: m.weight for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    return {name: weight for name, weight in found.items() if isinstance(weight, FP4Tensor)}


@pytest.mark.parametrize("kinds", [("attention", "head"), ("dense",)])
def test_values_are_those_of_prepare(kinds, tmp_path):
    model, ids = tiny("deepseek_v3"), tokens(2, 7)
    model.save_pretrained(tmp_path / "bf16")
    outside = dict.fromkeys(kinds, "nvfp4")
    report = quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", "nvfp4", progress=False, **outside)
    fp4_ops.prepare(model, "nvfp4", **outside)
    loaded = fp4_ops.load_checkpoint(None, tmp_path / "out")
    want, got = in_4_bits(model), in_4_bits(loaded)
    assert got.keys() == want.keys() and len(want) == report.linears > 0
    assert f"and {report.linears} linear layers in nvfp4" in str(report)
    for name, weight in want.items():
        # A file holds reciprocals of global scales, so values may round to the next bf16.
        torch.testing.assert_close(got[name].dequantize(), weight.dequantize(), rtol=8e-3, atol=0)
    with torch.no_grad():
        logits = [m(input_ids=ids, use_cache=False).logits.double() for m in (loaded, model)]
    assert relative_error(*logits) < 2e-2
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert set(want) <= set(config["config_groups"]["group_0"]["targets"])
    assert not set(want) & set(config["ignore"])


def test_what_cannot_be_done_is_named(tmp_path):
    model = tiny("qwen3_moe")
    model.save_pretrained(tmp_path / "bf16")
    with pytest.raises(ValueError, match="head is 'mxfp4' and format is 'nvfp4'; a folder has one format"):
        quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", "nvfp4", head="mxfp4")
    with pytest.raises(CheckpointError, match="has no linear layer of kind 'dense'"):
        quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", "nvfp4", dense="nvfp4")
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path, capsys):
    tiny("qwen3_moe").save_pretrained(tmp_path / "bf16")
    main(["quantize", str(tmp_path / "bf16"), "-o", str(tmp_path / "out"), "--attention", "nvfp4"])
    assert "and 8 linear layers in nvfp4" in capsys.readouterr().out
