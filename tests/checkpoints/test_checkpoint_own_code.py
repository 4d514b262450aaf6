"""Experts that fp4::moe cannot compute: read exactly, run by their own code, and reported with the true
reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import transformers
from checkpoint_folders import assert_computes, assert_family_holds, dequantised, per_expert
from checkpoint_samples import WRITERS, edit_json, save_tensors
from safetensors.torch import load_file
from torch import Tensor

import fp4_ops
from fp4_ops.__main__ import main
from fp4_ops.checkpoints import quantize_checkpoint
from fp4_ops.quantization.report import error_report

GATE = r"its gate is none of fp4::moe's activations .*swigluoai.*clamped or not"
ENTRY = "it is not an entry of transformers' experts interface"
# A family, changes to its config, why its experts stay as they are (empty: they do not), and in which layers.
CASES: dict[str, tuple[str, dict[str, Any], str, tuple[int, ...]]] = {
    "llama4": ("llama4_text", {}, ENTRY, (0, 1)),
    "inkling2, its own caps": ("inkling2_text", {}, "", ()),  # those of situ
    "inkling2, another cap": ("inkling2_text", {"mlp_up_softcap": 10.0}, GATE, (0, 1)),
    "minimax_m3, alpha 1.5": ("minimax_m3_vl_text", {"swiglu_alpha": 1.5}, GATE, (0, 1)),
    "minimax_m3, its own alpha": ("minimax_m3_vl_text", {}, "", ()),
    "minimax_m3, another limit": ("minimax_m3_vl_text", {"swiglu_limit": 2.5}, "", ()),
    "step3p7, no clamps": ("step3p7", {}, ENTRY, (0, 1)),
    "step3p7, a clamp after the activation": ("step3p7", {"swiglu_limits": [0.0, 1.0]}, ENTRY, (0, 1)),
}


def built(case: str) -> Any:
    name, changes, _, _ = CASES[case]
    made = step(**changes) if name == "step3p7" else families.tiny(name, **changes)
    made = made.to(torch.bfloat16)
    made.config.dtype = torch.bfloat16
    return made


def step(**changes: Any) -> Any:
    """Step-3.7 has no class for its text model alone."""
    text = {
        "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "moe_intermediate_size": 32,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "share_expert_dim": 32, "pad_token_id": 0,
        "mlp_layer_types": ["sparse"] * 2, "layer_types": ["full_attention"] * 2,
        "swiglu_limits": None, "swiglu_limits_shared": None, "sliding_window": 16, **changes,
    }  # fmt: skip
    vision = {"width": 32, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14, "mlp_ratio": 2.0}
    config = transformers.Step3p7Config(text_config=text, vision_config=vision)
    made = transformers.Step3p7ForConditionalGeneration._from_config(config).eval()
    with torch.no_grad():
        for _, p in made.named_parameters():
            if p.dim() == 3:
                p.normal_(0, 0.1)
    return made


def write_folder(path: Path, model: Any) -> dict[str, Tensor]:
    """As ModelOpt writes it: experts one by one under the names of their modules."""
    model.save_pretrained(path)
    new, values = per_expert(model, None, WRITERS["modelopt-nvfp4"])
    kept = {n: t for n, t in load_file(path / "model.safetensors").items() if not is_stack(n, t)}
    save_tensors(path, kept | new)
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    edit_json(path / "config.json", lambda c: c.update(quantization_config=config))
    return values


def is_stack(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 3 and tensor.shape[0] == 8 and ("experts" in name or ".moe." in name)


@pytest.mark.parametrize("case", CASES)
def test_loaded_exactly_and_computed_as_their_own_code_does(case, tmp_path):
    _, _, reason, layers = CASES[case]
    original = built(case)
    values = write_folder(tmp_path, original)
    model = fp4_ops.load_checkpoint(None, tmp_path, activation="bf16", dtype=torch.float32)
    assert_family_holds(model, original, values)
    own = model.hf_quantizer.report.own_code
    assert {int(n.split(".layers.")[1].split(".")[0]) for n in own} == set(layers)
    assert all(re.search(reason, why) for why in own.values()), own
    assert_computes(model, original, values)


@pytest.mark.parametrize("case", CASES)
def test_report_and_prepare_say_the_same(case, capsys, tmp_path):
    """`report` measures every stack of experts, and says which of them prepare leaves alone, and why."""
    _, _, reason, layers = CASES[case]
    model = built(case)
    report = error_report(model, "nvfp4")
    assert {int(n.split("layers.")[1].split(".")[0]) for n in report.left} == set(layers)
    assert all(re.search(reason, why) for why in report.left.values()), report.left
    modules = {e.module for e in report.errors}
    assert len(modules) == 2 and len(report.errors) == 2 * 2 * 8
    assert all(15 < e.sqnr < 30 for e in report.errors)
    model.save_pretrained(tmp_path)
    main(["report", str(tmp_path), "--device", "cpu", "--json", str(tmp_path / "report.json")])
    printed = capsys.readouterr().out
    assert bool(layers) == ("alone" in printed)
    assert len(json.loads((tmp_path / "report.json").read_text())["errors"]) == len(report.errors)
    if len(layers) == 2:
        with pytest.raises(ValueError, match=reason if reason != ENTRY else "has no experts modules"):
            fp4_ops.prepare(model, "nvfp4")
    else:
        left = {m.name: m.reason for m in fp4_ops.prepare(model, "nvfp4").modules if m.reason}
        assert {int(n.split("layers.")[1].split(".")[0]) for n in left} == set(layers)
        assert all(re.search(reason, why) for why in left.values())


@pytest.mark.parametrize("case", ["llama4", "minimax_m3, alpha 1.5"])
def test_what_the_report_says_is_what_quantize_writes(case, tmp_path):
    model = built(case)
    model.save_pretrained(tmp_path / "bf16")
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", "mxfp4", progress=False)
    held = dequantised(fp4_ops.load_checkpoint(None, tmp_path / "out"))
    report = error_report(model, "mxfp4")
    for e in report.errors:
        attribute = "gate_up_proj" if e.matrix == "gate_up" else "down_proj"
        name = f"{e.module}.{attribute}"
        w, q = model.get_parameter(name)[e.expert].detach().double(), held[name][e.expert].double()
        q = q if q.shape == w.shape and (q - w).norm() < w.norm() else q.T
        sqnr = 10 * torch.log10(w.square().sum() / (w - q).square().sum())
        assert sqnr.item() == pytest.approx(e.sqnr, abs=1e-3)
