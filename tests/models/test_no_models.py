"""Functions that take a model say so when they get a folder's name, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_samples import tiny

import fp4_ops
from fp4_ops.checkpoints.hf import FP4Config
from fp4_ops.quantization import calibrate
from fp4_ops.quantization.report import error_report

CALLS = {
    "prepare": fp4_ops.prepare,
    "calibrate": lambda model: calibrate(model, torch.zeros(1, 4, dtype=torch.int64)),
    "error_report": error_report,
    "update": lambda model: fp4_ops.update(model, "lm_head.weight", torch.zeros(1)),
}


@pytest.mark.parametrize(
    "given, named", [("a folder", "'a folder'"), (Path("x"), "PosixPath.*"), ([], "a list")]
)
@pytest.mark.parametrize("what", CALLS)
def test_a_folder_is_no_model(what, given, named):
    with pytest.raises(ValueError, match=rf"^fp4: model is {named}; it must be a torch.nn.Module. Load a"):
        CALLS[what](given)


def test_load_checkpoint_takes_no_name_of_a_model(tmp_path):
    tiny().save_pretrained(tmp_path / "bf16")
    fp4_ops.checkpoints.quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", progress=False)
    for given, named in (("qwen3_moe", "'qwen3_moe'"), (torch.nn.Linear(1, 1), "a Linear"), ({}, "a dict")):
        with pytest.raises(
            ValueError, match=rf"^fp4: model_or_config is {named}; .*load_checkpoint\(None, F"
        ):
            fp4_ops.load_checkpoint(given, tmp_path / "out")  # type: ignore[arg-type]


def test_devices_that_are_not_there_are_refused_before_weights_are_read(tmp_path):
    """torch said: Torch not compiled with CUDA enabled, after the weights had been read."""
    device = f"cuda:{torch.cuda.device_count()}"
    tiny().save_pretrained(tmp_path / "bf16")
    fp4_ops.checkpoints.quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", progress=False)
    with pytest.raises(ValueError, match=rf"^fp4: device is '{device}', which is not there"):
        fp4_ops.load_checkpoint(None, tmp_path / "out", device=device)
    model = type(tiny())
    with pytest.raises(ValueError, match=rf"^fp4: device is '{device}', which is not there"):
        model.from_pretrained(tmp_path / "out", quantization_config=FP4Config(device=device))
