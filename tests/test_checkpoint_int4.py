"""int4 folders of compressed-tensors: read exactly, and quantised anew only where that is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoint_samples import edit_json, experts_of, save_tensors, tiny
from safetensors.torch import load_file
from torch import Tensor

import fp4_ops
from fp4_ops.checkpoints import CheckpointError
from fp4_ops.checkpoints.codec import int4_values
from fp4_ops.checkpoints.dialects import dialect_of, stored_weights
from fp4_ops.checkpoints.files import Reader, read_header


def config(name: str, group: int | None, activations: dict[str, Any] | None = None, **weights: Any) -> dict:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": group, **weights}
    weights["strategy"] = "group" if group else "channel"
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": scheme}}


FP8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
STORED = {
    "w4a16": config("pack-quantized", 32),
    "w4a16 by row": config("pack-quantized", None),
    "w4afp8": config("pack-quantized", 32, FP8),
    "w4afp8 in bytes": config("naive-quantized", 32, FP8),
}


def stored_weight(name: str, n: int, k: int, stored: dict) -> tuple[dict[str, Tensor], Tensor]:
    """Random tensors, and the float32 values that they mean."""
    group = stored["config_groups"]["group_0"]["weights"]["group_size"] or k
    codes = torch.randint(-8, 8, (n, k), dtype=torch.int8)
    scale = (torch.rand(n, -(-k // group)) * 0.01 + 0.001).bfloat16()
    values = codes.float() * scale.float().repeat_interleave(group, 1)[:, :k]
    if stored["format"] == "naive-quantized":
        return {f"{name}.weight": codes, f"{name}.weight_scale": scale}, values
    nibbles = (codes + 8).to(torch.int32).view(n, k // 8, 8)
    words = sum(nibbles[..., i] << (4 * i) for i in range(8))  # the lower k in the lower bits
    tensors = {"packed": words, "scale": scale, "shape": torch.tensor([n, k])}
    return {f"{name}.weight_{part}": t for part, t in tensors.items()}, values


def write_folder(path, model, stored: dict) -> dict[str, Tensor]:
    path.mkdir(exist_ok=True)
    model.config.save_pretrained(path)
    edit_json(path / "config.json", lambda c: c.update(quantization_config=stored))
    tensors, values = {}, {}
    for name, module in experts_of(model).items():
        e, h, i = module.down_proj.shape
        rows: dict[str, list[Tensor]] = {"gate_up_proj": [], "down_proj": []}
        for expert in range(e):
            new, gate = stored_weight(f"{name}.{expert}.gate_proj", i, h, stored)
            more, up = stored_weight(f"{name}.{expert}.up_proj", i, h, stored)
            rest, down = stored_weight(f"{name}.{expert}.down_proj", h, i, stored)
            tensors |= new | more | rest
            rows["gate_up_proj"].append(torch.cat([gate, up]))
            rows["down_proj"].append(down)
        values |= {f"{name}.{attribute}": torch.stack(r) for attribute, r in rows.items()}
    tensors |= {n: p.detach().clone() for n, p in model.named_parameters() if p.dim() != 3}
    save_tensors(path, tensors)
    return values


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("kind", STORED)
def test_int4_is_quantised_anew_when_asked(kind, format, tmp_path):
    model = tiny()
    values = write_folder(tmp_path, model, STORED[kind])
    with pytest.raises(ValueError, match=r"holds int4, which no operator computes with: requantize is None"):
        fp4_ops.load_checkpoint(None, tmp_path)
    loaded = fp4_ops.load_checkpoint(None, tmp_path, requantize=format)
    worst = 0.0
    for name, value in values.items():
        want = torch.ops.fp4.dequantize(*torch.ops.fp4.quantize(value, format), format, torch.float32)
        assert torch.equal(loaded.get_submodule(name).dequantize(), want), name
        errors = (want - value).flatten(1).norm(dim=1) / value.flatten(1).norm(dim=1)
        worst = max(worst, errors.max().item())
    report = loaded.hf_quantizer.report
    assert report.requantized == pytest.approx(worst, rel=1e-4) and 0.02 < worst < 0.2
    assert f"quantised anew: relative error of a matrix at most {report.requantized:.4f}" in str(report)
    assert report.folds.exact == report.folds.rounded == 0


def test_fp4_is_never_converted(tmp_path):
    fp4_ops.prepare(model := tiny(), "nvfp4")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"requantize is 'mxfp4'; nvfp4-pack-quantized holds nvfp4: not"):
        fp4_ops.load_checkpoint(None, tmp_path, requantize="mxfp4")


@pytest.mark.parametrize(
    "changed", [{"num_bits": 8}, {"symmetric": False}, {"actorder": "group"}, {"type": "float"}], ids=str
)
def test_other_integers_are_refused(changed, tmp_path):
    write_folder(tmp_path, tiny(), config("pack-quantized", 32, **changed))
    with pytest.raises(CheckpointError, match="weights other than symmetric int4 of one group size"):
        fp4_ops.load_checkpoint(None, tmp_path, requantize="nvfp4")


def test_bad_scales_are_named(tmp_path):
    write_folder(tmp_path, tiny(), STORED["w4a16"])
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.5.down_proj.weight_scale"
    tensors[name][3, 1] = torch.nan
    save_tensors(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=rf"{name} of .* holds NaN or infinity"):
        fp4_ops.load_checkpoint(None, tmp_path, requantize="nvfp4")
    tensors[name] = torch.ones(64, 2).bfloat16()
    save_tensors(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=rf"{name} .*has shape \[64, 2\]; .* it must be \[64, 3\]"):
        fp4_ops.load_checkpoint(None, tmp_path, requantize="nvfp4")


@pytest.mark.parametrize("kind", STORED)
def test_compressed_tensors_reads_the_same_values(kind, tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    stored = STORED[kind]
    tensors, values = stored_weight("w", 48, 96, stored)
    save_tensors(tmp_path, tensors)
    weights = stored_weights(read_header(tmp_path / "model.safetensors"), dialect_of(stored))
    with Reader() as reader:
        ours = int4_values(weights["w"], reader.read)
    assert torch.equal(ours, values)
    (scheme,) = QuantizationConfig.model_validate(stored).config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(stored["format"])
    own = {n.removeprefix("w."): t for n, t in tensors.items()}
    theirs = compressor.decompress(own | {"weight_scale": own["weight_scale"].float()}, scheme)["weight"]
    assert torch.equal(ours, theirs.float())
    if stored["format"] == "pack-quantized":
        scale = own["weight_scale"].float()
        again = compressor.compress({"weight": ours, "weight_scale": scale}, scheme)
        assert torch.equal(again["weight_packed"], own["weight_packed"])
