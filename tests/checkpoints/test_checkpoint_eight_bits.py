"""Stacked experts in 8 bits: `quantize` reads them, and they may be in a folder beside 4-bit experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_folders import (
    BF16,
    HOW,
    MODELOPT,
    dequantised,
    e4m3,
    family,
    in_model_order,
    loaded,
    outputs,
    write_fp8,
)
from checkpoint_samples import edit_json, save_tensors
from moe_models import tokens
from safetensors.torch import load_file
from test_checkpoint_modelopt import write_fused
from torch import Tensor

import fp4_ops
from fp4_ops.checkpoints import CheckpointError, quantize_checkpoint
from fp4_ops.checkpoints.placement import form_of

BLOCK = (16, 32)


def scales(kind: str, e: int, a: int, b: int) -> tuple[Tensor, Tensor]:
    """Return scales of codes [E, A, B]: as they are stored, and for each code."""
    shape = {
        "one": (), "one an expert": (e,), "an expert, kept": (e, 1, 1), "one a row": (e, a, 1),
        "one a column": (e, 1, b), "blocks": (e, -(-a // BLOCK[0]), -(-b // BLOCK[1])),
    }[kind]  # fmt: skip
    scale = torch.rand(shape) * 1e-3 + 1e-4
    each = scale.double()
    if kind == "one an expert":
        each = each.view(e, 1, 1)
    if kind == "blocks":
        each = each.repeat_interleave(BLOCK[0], 1)[:, :a].repeat_interleave(BLOCK[1], 2)[..., :b]
    return scale, each.expand(e, a, b)


def put_stacks(path: Path, model: Any, kind: str, suffix: str, only: str = "") -> dict[str, Tensor]:
    """Experts' weights of a saved model in FP8, as they are stacked: float64 values by parameter."""
    tensors, values = load_file(path / "model.safetensors"), {}
    for owner, module in model.named_modules():
        if form_of(module) is None or not owner.startswith(only):
            continue
        for attribute in ("gate_up_proj", "down_proj"):
            name = f"{owner}.{attribute}"
            codes = e4m3(*module._parameters[attribute].shape)
            scale, each = scales(kind, *codes.shape)
            tensors |= {name: codes, name + suffix: scale}
            values[name] = codes.double() * each
    save_tensors(path, tensors)
    return values


SOURCES = {
    "modelopt": (MODELOPT | {"quant_algo": "FP8"}, "_weight_scale"),
    "transformers": ({"quant_method": "fp8", "weight_block_size": list(BLOCK)}, "_scale_inv"),
}
KINDS = ["one", "one an expert", "an expert, kept", "one a row", "one a column"]
SAVED_STACKED = ("llama4_text", "gpt_oss")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("format", ["nvfp4", pytest.param("int4_g32", marks=pytest.mark.more)])
@pytest.mark.parametrize("name", SAVED_STACKED)
@pytest.mark.parametrize(
    ("maker", "kind"), [*(("modelopt", k) for k in KINDS), *(("transformers", k) for k in ("one", "blocks"))]
)
def test_stacks_in_8_bits_are_what_quantize_starts_from(maker, kind, name, format, tmp_path):
    model = family(name)
    config, suffix = SOURCES[maker]
    model.save_pretrained(tmp_path / "fp8")
    values = put_stacks(tmp_path / "fp8", model, kind, suffix)
    edit_json(tmp_path / "fp8" / "config.json", lambda c: c.update(quantization_config=config))
    quantize_checkpoint(tmp_path / "fp8", tmp_path / "out", format, progress=False)
    read = fp4_ops.load_checkpoint(None, tmp_path / "out")
    got = dequantised(read)
    assert got.keys() == values.keys()
    for key, value in values.items():
        held = in_model_order(model, key, got[key]) if name == "llama4_text" else got[key]
        for matrix, w in zip(held, in_model_order(model, key, value)):
            q = torch.ops.fp4.quantize(w.float().contiguous(), format)
            torch.testing.assert_close(
                matrix, torch.ops.fp4.dequantize(*q, format, torch.float32), rtol=2.5e-7, atol=0
            )
    assert outputs(read, tokens(1, 5)).isfinite().all()


@HOW
@pytest.mark.parametrize("name", SAVED_STACKED)
def test_a_layer_in_8_bits_beside_others_in_4(name, how, registered, tmp_path):
    """Both stacked: one becomes ordinary parameters, and the report names them."""
    four = write_fused(tmp_path, name, "NVFP4", "K")
    model = family(name)
    first = next(n for n, m in model.named_modules() if form_of(m))
    tensors = load_file(tmp_path / "model.safetensors")
    save_tensors(tmp_path, {n: t for n, t in tensors.items() if not n.startswith(f"{first}.") or "bias" in n})
    eight = put_stacks(tmp_path, model, "one", "_weight_scale", only=first)
    layers = {n: {"quant_algo": "NVFP4"} for n in four} | {n: {"quant_algo": "FP8"} for n in eight}
    config = {**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    edit_json(tmp_path / "config.json", lambda c: c.update(quantization_config=config))
    read = loaded(tmp_path, how)
    assert set(read.hf_quantizer.report.dense) == set(eight)
    for key, value in eight.items():
        assert torch.equal(read.get_parameter(key), value.to(BF16)), key
    for key, held in dequantised(read).items():
        held = held.mT if name == "llama4_text" else held
        torch.testing.assert_close(held.double(), four[key], rtol=1e-7, atol=0)
    assert outputs(read, tokens(1, 5)).isfinite().all()


BAD = {
    "another shape": (torch.ones(3), r"must be .* for each expert, or for all"),
    "NaN": (torch.tensor(torch.nan), "holds NaN or infinity"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_scales_of_stacks_are_named(what, tmp_path):
    model = family("gpt_oss")
    config, suffix = SOURCES["modelopt"]
    model.save_pretrained(tmp_path / "fp8")
    values = put_stacks(tmp_path / "fp8", model, "one", suffix)
    edit_json(tmp_path / "fp8" / "config.json", lambda c: c.update(quantization_config=config))
    name = next(iter(values)) + suffix
    scale, message = BAD[what]
    save_tensors(tmp_path / "fp8", load_file(tmp_path / "fp8" / "model.safetensors") | {name: scale})
    with pytest.raises(CheckpointError, match=message) as error:
        quantize_checkpoint(tmp_path / "fp8", tmp_path / "out", progress=False)
    assert name in str(error.value)
    assert not (tmp_path / "out" / "config.json").exists()


# --- calibration: the model that runs is the one that the 8 bits mean ---


def bf16_twin(folder: Path, out: Path, values: dict[str, Tensor]) -> None:
    """The same folder with ordinary weights."""
    out.mkdir()
    tensors = load_file(folder / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if t.dtype == BF16 and n not in values and "_scale" not in n}
    save_tensors(out, kept | {n: v.to(BF16) for n, v in values.items()})
    (out / "config.json").write_text((folder / "config.json").read_text())
    edit_json(out / "config.json", lambda c: c.pop("quantization_config"))


EIGHT = ["deepseek", "modelopt", "compressed-tensors", "stacked gpt_oss"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("method", ["gptq", pytest.param("weighted", marks=pytest.mark.more)])
@pytest.mark.parametrize("kind", EIGHT)
def test_calibrated_as_a_folder_in_bf16_is(kind, method, tmp_path):
    source = tmp_path / "fp8"
    if kind.startswith("stacked"):
        model = family(kind.partition(" ")[2])
        model.save_pretrained(source)
        values = put_stacks(source, model, "one", "_weight_scale")
        edit_json(source / "config.json", lambda c: c.update(quantization_config=SOURCES["modelopt"][0]))
    else:
        _, values = write_fp8(source, kind)
    bf16_twin(source, tmp_path / "bf16", values)
    text = tokens(3, 12)
    made = []
    for folder in (source, tmp_path / "bf16"):
        out = folder.with_suffix(".out")
        quantize_checkpoint(folder, out, method=method, calibration=text, progress=False)
        made.append(load_file(out / "model.safetensors"))
    got, want = made
    assert got.keys() == want.keys()
    seen = 0
    for name, tensor in got.items():
        # Experts that no token reached are quantised from float32 values where these are in 8 bits.
        seen += torch.equal(tensor.view(torch.uint8), want[name].view(torch.uint8))
    assert seen > 0.9 * len(got)
    assert outputs(fp4_ops.load_checkpoint(None, source.with_suffix(".out")), text).isfinite().all()
