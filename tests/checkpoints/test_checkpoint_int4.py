"""int4 folders of compressed-tensors: read and written exactly, and quantised again only on request."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from checkpoint_samples import edit_json, experts_of, save_tensors, tiny
from safetensors.torch import load_file
from torch import Tensor

import fp4_ops
from fp4_ops.checkpoints import CheckpointError
from fp4_ops.checkpoints.dialects import Codes, dialects_of, encode, stored_weights, writing_dialect
from fp4_ops.checkpoints.files import Reader, read_header
from fp4_ops.quantization import calibrate, quantize_weight


def config(name: str, group: int | None, activations: dict[str, Any] | None = None, **weights: Any) -> dict:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": group, **weights}
    weights["strategy"] = "group" if group else "channel"
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": scheme}}


SCALE_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
F64 = torch.float64
FP8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
STORED = {
    "w4a16": config("pack-quantized", 32),
    "w4a16 by row": config("pack-quantized", None),
    "w4afp8": config("pack-quantized", 32, FP8),
    "w4afp8 in bytes": config("naive-quantized", 32, FP8),
    "groups of 64": config("pack-quantized", 64),
    "groups of 128": config("pack-quantized", 128),
}
FORMAT = {"w4a16 by row": "int4", "groups of 64": "int4_g64", "groups of 128": "int4"}
"""Formats of the cases above that are not int4_g32."""


def stored_weight(
    name: str, n: int, k: int, stored: dict, dtype: torch.dtype = torch.bfloat16
) -> tuple[dict[str, Tensor], Tensor]:
    """Random tensors, and the float32 values that they mean."""
    group = stored["config_groups"]["group_0"]["weights"]["group_size"] or k
    codes = torch.randint(-8, 8, (n, k), dtype=torch.int8)
    scale = (torch.rand(n, -(-k // group)) * 0.01 + 0.001).to(dtype)
    values = codes.float() * scale.float().repeat_interleave(min(group, k), 1)[:, :k]
    if stored["format"] == "naive-quantized":
        return {f"{name}.weight": codes, f"{name}.weight_scale": scale}, values
    nibbles = (codes + 8).to(torch.int32).view(n, k // 8, 8)
    words = sum(nibbles[..., i] << (4 * i) for i in range(8))  # the lower k in the lower bits
    tensors = {"packed": words, "scale": scale, "shape": torch.tensor([n, k])}
    return {f"{name}.weight_{part}": t for part, t in tensors.items()}, values


def write_folder(path, model, stored: dict, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    path.mkdir(exist_ok=True)
    model.config.save_pretrained(path)
    edit_json(path / "config.json", lambda c: c.update(quantization_config=stored))
    tensors, values = {}, {}
    for name, module in experts_of(model).items():
        e, h, i = module.down_proj.shape
        rows: dict[str, list[Tensor]] = {"gate_up_proj": [], "down_proj": []}
        for expert in range(e):
            new, gate = stored_weight(f"{name}.{expert}.gate_proj", i, h, stored, dtype)
            more, up = stored_weight(f"{name}.{expert}.up_proj", i, h, stored, dtype)
            rest, down = stored_weight(f"{name}.{expert}.down_proj", h, i, stored, dtype)
            tensors |= new | more | rest
            rows["gate_up_proj"].append(torch.cat([gate, up]))
            rows["down_proj"].append(down)
        values |= {f"{name}.{attribute}": torch.stack(r) for attribute, r in rows.items()}
    tensors |= {n: p.detach().clone() for n, p in model.named_parameters() if p.dim() != 3}
    save_tensors(path, tensors)
    return values


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", SCALE_DTYPES)
@pytest.mark.parametrize("kind", STORED)
def test_int4_stays_what_it_is(kind, dtype, tmp_path):
    values = write_folder(tmp_path, tiny(), STORED[kind], SCALE_DTYPES[dtype])
    loaded = fp4_ops.load_checkpoint(None, tmp_path)
    for name, value in values.items():
        weight = loaded.get_submodule(name)
        assert weight.format == FORMAT.get(kind, "int4_g32")
        assert weight.block_scale.dtype == (torch.bfloat16 if dtype == "bf16" else torch.float32)
        assert torch.equal(weight.dequantize(), value), name
    assert loaded.hf_quantizer.report.requantized == 0
    assert torch.isfinite(loaded(torch.arange(9)[None]).logits).all()


@pytest.mark.parametrize("scales", [("f32", "bf16"), ("bf16", "f16")], ids=str)
def test_gate_and_up_with_scales_of_two_dtypes(scales, tmp_path):
    stored = STORED["w4a16"]
    values = write_folder(tmp_path, tiny(), stored)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts"
    parts = []
    for part, dtype in zip(("gate_proj", "up_proj"), scales):
        new, value = stored_weight(f"{name}.3.{part}", 96, 64, stored, SCALE_DTYPES[dtype])
        tensors |= new
        parts.append(value)
    values[f"{name}.gate_up_proj"][3] = torch.cat(parts)
    save_tensors(tmp_path, tensors)
    loaded = fp4_ops.load_checkpoint(None, tmp_path)
    for name, value in values.items():
        assert torch.equal(loaded.get_submodule(name).dequantize(), value), name


@pytest.mark.parametrize("size", [16, 48])
def test_other_groups_need_requantize(size, tmp_path):
    write_folder(tmp_path, tiny(), config("pack-quantized", size))
    with pytest.raises(
        ValueError,
        match=rf"holds int4 in groups of {size}, which no operator computes with: requantize is None",
    ):
        fp4_ops.load_checkpoint(None, tmp_path)
    assert fp4_ops.load_checkpoint(None, tmp_path, requantize="nvfp4").hf_quantizer.report.requantized > 0


def test_groups_of_several_blocks(tmp_path):
    stored = config("pack-quantized", 256)
    tensors, values = stored_weight("w", 16, 640, stored)
    save_tensors(tmp_path, tensors)
    (weight,) = stored_weights(read_header(tmp_path / "model.safetensors"), dialects_of(stored)).values()
    with Reader() as reader:
        codes = weight.dialect.decode(weight, reader.read)
    assert weight.dialect.format == "int4" and codes.block_scale.shape == (16, 5)
    assert torch.equal(
        torch.ops.fp4.dequantize(codes.packed, codes.block_scale, None, "int4", F64), values.double()
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("kind", STORED)
def test_int4_is_quantised_anew_when_asked(kind, format, tmp_path):
    model = tiny()
    values = write_folder(tmp_path, model, STORED[kind])
    with pytest.raises(ValueError, match=r"requantize is 'int4'; it must be 'nvfp4' or 'mxfp4', or None"):
        fp4_ops.load_checkpoint(None, tmp_path, requantize="int4")
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
    with pytest.raises(
        ValueError, match=r"requantize is 'mxfp4'; nvfp4-pack-quantized holds nvfp4, which is not"
    ):
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


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", ["rtn", "search", "weighted", "gptq"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("format", ["int4_g32", "int4_g64", "int4"])
def test_saved_and_loaded_again(format, dtype, method, tmp_path):
    model = tiny(inner=128 if format == "int4_g64" else 96)
    calibration = calibrate(model, torch.arange(64).view(4, 16)) if method in ("weighted", "gptq") else None
    fp4_ops.prepare(model, format, method=method, calibration=calibration)
    held = {n: m for n, m in model.named_modules() if hasattr(m, "in_layout")}
    for m in held.values():
        m.block_scale = m.block_scale.to(dtype)
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    weights = stored["config_groups"]["group_0"]["weights"]
    assert stored["format"] == "pack-quantized" and weights["type"] == "int" and weights["symmetric"]
    assert weights["group_size"] == {"int4": 128, "int4_g64": 64, "int4_g32": 32}[format]
    loaded = fp4_ops.load_checkpoint(None, tmp_path)
    for name, m in held.items():
        for got, want in zip(loaded.get_submodule(name).in_layout("plain"), m.in_layout("plain")):
            assert (got is None) == (want is None)
            assert got is None or (got.dtype == want.dtype and torch.equal(got, want)), name


def test_what_pack_quantized_cannot_hold_is_refused(tmp_path):
    fp4_ops.prepare(model := tiny(), "int4_g64")  # K = 96
    with pytest.raises(
        ValueError, match=r"pack-quantized cannot hold int4_g64 with K = 96; .* multiple of 64"
    ):
        model.save_pretrained(tmp_path)


@pytest.mark.parametrize("format", ["int4_g32", "int4_g64", "int4"])
def test_quantize_is_what_compressed_tensors_does(format, tmp_path):
    """Scales and codes, and the files: their compressor's bytes are ours, their reader gives our values."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.utils import calculate_qparams

    n, k, group = 32, 384, {"int4": 128, "int4_g64": 64, "int4_g32": 32}[format]
    stored = config("pack-quantized", group)
    (scheme,) = QuantizationConfig.model_validate(stored).config_groups.values()
    w = torch.randn(n, k) * torch.exp(torch.randn(n, 1))
    w[3, :group] = 0
    packed, scale, _ = torch.ops.fp4.quantize(w, format)
    blocks = w.unflatten(1, (k // group, group))
    theirs, zero_point = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
    assert not zero_point.any()
    used = scale != 0  # they give a block of zeros the smallest step of the dtype
    assert torch.equal(theirs.bfloat16()[used], scale[used]) and used.sum() == used.numel() - 1
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    some = torch.where(used, scale.float(), 1.0)
    compressed = compressor.compress({"weight": w, "weight_scale": some}, scheme)
    dialect = writing_dialect(format, None, [k])
    tensors = encode("w", Codes(packed, scale, None), dialect)
    assert torch.equal(tensors["w.weight_packed"], compressed["weight_packed"])
    assert torch.equal(tensors["w.weight_shape"], compressed["weight_shape"])
    for q in ((packed, scale, None), quantize_weight(w, format, "search")):
        tensors = encode("w", Codes(*q), dialect)
        own = {name.removeprefix("w."): t for name, t in tensors.items()} | {"weight_scale": q[1].float()}
        values = compressor.decompress(own, scheme)["weight"]
        assert torch.equal(values.float(), torch.ops.fp4.dequantize(*q, format, torch.float32))


@pytest.mark.parametrize("kind", STORED)
def test_compressed_tensors_reads_the_same_values(kind, tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    stored = STORED[kind]
    tensors, values = stored_weight("w", 48, 384, stored)
    save_tensors(tmp_path, tensors)
    weights = stored_weights(read_header(tmp_path / "model.safetensors"), dialects_of(stored))
    with Reader() as reader:
        ours = weights["w"].dialect.values(weights["w"], reader.read)
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
