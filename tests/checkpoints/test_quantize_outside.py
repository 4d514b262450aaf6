"""`quantize` with attention, dense layers and the output head: the weights that `prepare` gives."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections import Counter
from typing import Any

import pytest
import torch
from checkpoint_folders import dequantised
from checkpoint_folders import loaded as load
from checkpoint_samples import edit_json, tiny
from moe_models import relative_error, tokens
from torch import nn

import fp4_ops
from fp4_ops.__main__ import main
from fp4_ops.checkpoints import CheckpointError, cli
from fp4_ops.checkpoints.convert import quantize_checkpoint
from fp4_ops.checkpoints.dialects import EXPERTS_TARGET
from fp4_ops.checkpoints.folder import Folder
from fp4_ops.checkpoints.resume import Progress
from fp4_ops.meta.formats import FORMATS as FP4_FORMATS
from fp4_ops.tensor import FP4Tensor


def in_4_bits(model: nn.Module) -> dict[str, FP4Tensor]:
    found = {n: m.weight for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    return {name: weight for name, weight in found.items() if isinstance(weight, FP4Tensor)}


FORMATS = [
    ("deepseek_v3", "nvfp4", {"attention": "nvfp4", "head": "nvfp4"}),
    ("deepseek_v3", "nvfp4", {"dense": "nvfp4"}),
    ("deepseek_v3", "nvfp4", {"dense": "mxfp4", "head": "int4_g32"}),
    ("qwen3_moe", "int4_g32", {"attention": "int4_g64", "head": "nvfp4"}),
    ("qwen3_moe", "mxfp4", {"head": "nvfp4"}),
    ("gpt_oss", "mxfp4", {"attention": "mxfp4", "head": "nvfp4"}),
]


def assert_described(config: dict[str, Any], want: dict[str, FP4Tensor], format: str) -> None:
    """Each layer is a target of the group that has its format's block and element, and of no other."""
    groups = config["config_groups"].values()
    for name, weight in want.items():
        (group,) = (g for g in groups if name in g["targets"])
        weights, own = group["weights"], FP4_FORMATS[weight.format]
        assert (weights["group_size"], weights["type"] == "int") == (own.block, own.element == "int4")
        assert name not in config["ignore"]
    dialects = {group["format"] for group in groups}
    assert config["format"] == (dialects.pop() if len(dialects) == 1 else "mixed-precision")
    (experts,) = (g for g in groups if EXPERTS_TARGET in g["targets"])
    assert experts["weights"]["group_size"] == FP4_FORMATS[format].block


@pytest.mark.parametrize(("family", "format", "outside"), FORMATS)
def test_values_are_those_of_prepare(family, format, outside, registered, tmp_path):
    model, ids = tiny(family), tokens(2, 7)
    model.save_pretrained(tmp_path / "bf16")
    report = quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", format, progress=False, **outside)
    fp4_ops.prepare(model, format, **outside)
    model.save_pretrained(tmp_path / "saved")
    want, experts = in_4_bits(model), dequantised(model)
    counts = Counter(weight.format for weight in want.values())
    assert report.linears == counts and sum(counts.values()) > 0
    for own, count in counts.items():
        joint = " and " if own == format else ", "
        assert f"{joint}{count} linear layers in {own}" in str(report)
    for folder, how in itertools.product(("out", "saved"), ("load_checkpoint", "from_pretrained")):
        loaded = load(tmp_path / folder, how)
        assert {n: w.format for n, w in in_4_bits(loaded).items()} == {n: w.format for n, w in want.items()}
        got = dequantised(loaded)
        assert got.keys() == experts.keys()
        for name, value in experts.items():
            # A file holds reciprocals of global scales, which round.
            torch.testing.assert_close(got[name], value, rtol=3e-7, atol=0)
        config = json.loads((tmp_path / folder / "config.json").read_text())["quantization_config"]
        assert_described(config, want, format)
    got = in_4_bits(loaded)
    for name, weight in want.items():
        # A file holds reciprocals of global scales, so values may round to the next bf16.
        torch.testing.assert_close(got[name].dequantize(), weight.dequantize(), rtol=8e-3, atol=0)
    with torch.no_grad():
        logits = [m(input_ids=ids, use_cache=False).logits.double() for m in (loaded, model)]
    assert relative_error(*logits) < 2e-2


def test_what_cannot_be_done_is_named(tmp_path):
    model = tiny("qwen3_moe")
    model.save_pretrained(tmp_path / "bf16")
    with pytest.raises(ValueError, match="head is 'fp4'; it must be one of: keep, nvfp4"):
        quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", "nvfp4", head="fp4")
    with pytest.raises(CheckpointError, match=r"attn\.._proj.weight .*K = 64; int4 files need"):
        quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", "nvfp4", attention="int4")
    with pytest.raises(CheckpointError, match="has no linear layer of kind 'dense'"):
        quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", "nvfp4", dense="nvfp4")
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path, capsys):
    tiny("qwen3_moe").save_pretrained(tmp_path / "bf16")
    main(["quantize", str(tmp_path / "bf16"), "-o", str(tmp_path / "out"), "--attention", "mxfp4"])
    assert "48 expert matrices in nvfp4, 8 linear layers in mxfp4" in capsys.readouterr().out


def test_commands_hide_what_torchao_logs_of_itself(monkeypatch, caplog):
    def quantize(*args: Any, **kwargs: Any) -> str:
        for name in ("torchao", "torch.utils._pytree"):
            logging.getLogger(name).warning("Failed to load")
        return "done"

    monkeypatch.setattr(cli, "quantize_checkpoint", quantize)
    levels = [logging.getLogger(name).level for name in ("torchao", "torch.utils._pytree")]
    main(["quantize", "bf16", "-o", "out"])
    assert "Failed to load" not in caplog.text
    assert [logging.getLogger(name).level for name in ("torchao", "torch.utils._pytree")] == levels


def test_a_run_with_another_format_outside_is_not_continued(tmp_path):
    tiny("qwen3_moe").save_pretrained(tmp_path / "bf16")
    (tmp_path / "out").mkdir()
    begun = Progress(Folder(tmp_path / "bf16"), tmp_path / "out", "nvfp4", "rtn", None, 8, {"head": "mxfp4"})
    begun.begin()
    with pytest.raises(CheckpointError, match="the beginning of a run on another source, format or method"):
        quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", "nvfp4", head="nvfp4", progress=False)


def test_int4_of_two_group_sizes_that_no_targets_tell_apart(tmp_path):
    tiny("qwen3_moe").save_pretrained(tmp_path / "bf16")
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", "int4_g32", attention="int4_g64", progress=False)
    shutil.copytree(tmp_path / "out", tmp_path / "twice")
    edit_json(
        tmp_path / "out" / "config.json",
        lambda c: c["quantization_config"]["config_groups"]["group_1"].pop("targets"),
    )
    edit_json(
        tmp_path / "twice" / "config.json",
        lambda c: c["quantization_config"]["config_groups"]["group_1"].update(targets=["re:("]),
    )
    with pytest.raises(CheckpointError, match=r"target 're:\(', which is no regular expression"):
        fp4_ops.load_checkpoint(None, tmp_path / "twice")
    with pytest.raises(CheckpointError, match="pack-quantized weights of several kinds that no targets tell"):
        fp4_ops.load_checkpoint(None, tmp_path / "out")
