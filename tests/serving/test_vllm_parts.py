"""The vLLM integration without vLLM: parts of weights, and the layers that a folder stores in 4 bits."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
import vllm_folders
from checkpoint_samples import write_folder

import fp4_ops
from fp4_ops.checkpoints.dialects import Codes, dialects_of, stored_weights
from fp4_ops.checkpoints.files import CheckpointError, TensorInfo
from fp4_ops.checkpoints.fold import Folds, share_scale
from fp4_ops.integrations.vllm import shards
from fp4_ops.integrations.vllm.stored import Entry, Gathered, Stored, described, is_stack, why_not
from fp4_ops.meta.formats import FORMATS

H = 64


def made(n: int, k: int, format: str) -> Codes:
    packed, scale, factor = torch.ops.fp4.quantize(torch.randn(n, k), format)
    return Codes(packed, scale, factor if factor.numel() else None)


def values(codes: Codes, format: str) -> torch.Tensor:
    return torch.ops.fp4.dequantize(
        codes.packed, codes.block_scale, codes.global_scale, format, torch.float64
    )


def stacked(matrices: list[Codes], format: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    made = shards.Stack(len(matrices), torch.device("cpu"))
    for expert, codes in enumerate(matrices):
        made.write(expert, [codes], FORMATS[format].scale_dtype)
    return made.operand()


@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shares_are_whole_blocks_and_leave_nothing_out(format, size):
    for inner in (16, 48, 96, 200, 768):
        parts = [shards.share(inner, format, size, rank) for rank in range(size)]
        assert [i for part in parts for i in part] == list(range(inner))
        assert all(part.start % FORMATS[format].block == 0 for part in parts if len(part))


@pytest.mark.parametrize("format", list(FORMATS))
def test_columns_from_anywhere(format):
    codes = made(32, 320, format)
    whole = values(codes, format)
    for part in (range(0, 320), range(128, 320), range(7, 40), range(33, 33 + 90), range(96, 160)):
        cut, front = shards.columns(codes, part, format)
        got = values(cut, format)
        want = torch.zeros_like(got)
        want[:, front : front + len(part)] = whole[:, part.start : part.stop]
        assert torch.equal(got, want), part
    nothing, _ = shards.columns(codes, range(320, 320), format)
    assert nothing.packed.shape[1] > 0 and not values(nothing, format).any()


@pytest.mark.parametrize("format", list(FORMATS))
def test_rows_and_rows_of_zeros(format):
    codes = made(40, 64, format)
    whole = values(codes, format)
    cut = shards.rows(codes, [range(3, 9), range(20, 40)])
    assert torch.equal(values(cut, format), torch.cat([whole[3:9], whole[20:]]))
    more = shards.add_rows(cut, 64)
    assert torch.equal(values(more, format)[:26], values(cut, format))
    assert more.packed.shape[0] == 64 and not values(more, format)[26:].any()


@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize(("inner", "size"), [(96, 2), (144, 4), (32, 2)])
def test_processes_add_up_to_the_whole_block(format, inner, size):
    """Also where no block divides the middle, and where a process has no column of it."""
    experts, x = 4, torch.randn(5, H)
    ids, weights = torch.randint(0, experts, (5, 2)), torch.rand(5, 2)
    up = [made(2 * inner, H, format) for _ in range(experts)]
    down = [made(H, inner, format) for _ in range(experts)]

    def moe(up: list[Codes], down: list[Codes]) -> torch.Tensor:
        operands = *stacked(up, format), *stacked(down, format)
        return torch.ops.fp4.moe(x, ids, weights, *operands, format=format).double()

    total = torch.zeros(5, H, dtype=torch.float64)
    for rank in range(size):
        part = shards.share(inner, format, size, rank)
        cut = [shards.columns(codes, part, format)[0] for codes in down]
        own = part if len(part) else range(2 * cut[0].packed.shape[1])
        gate_up = [shards.rows(c, [own, range(inner + own.start, inner + own.stop)]) for c in up]
        total += moe(gate_up, cut)
    assert torch.allclose(total, moe(up, down), rtol=1e-4, atol=1e-5 * total.abs().max())


def test_what_a_folder_stores_by_the_names_of_layers(tmp_path):
    path = tmp_path / "linears"
    vllm_folders.FOLDERS["linears"](path)
    stored = Stored.read(str(path), {}, {})
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    found = stored.experts("model.layers.1.mlp.experts")
    assert len(found) == 8 * 3 and {m for _, m, _ in found} == {"gate_up", "down"}
    parts = stored.linear("model.layers.0.self_attn.qkv_proj", fused)
    assert list(parts) == fused["qkv_proj"] and all(parts.values())
    assert list(stored.linear("model.layers.0.self_attn.o_proj", fused)) == ["o_proj"]
    assert not any(stored.linear("model.layers.0.mlp.gate", fused).values())
    assert not stored.experts("model.layers.7.mlp.experts")


def test_tensors_come_in_any_order(tmp_path):
    model = vllm_folders.model_of("qwen3_moe")
    means = write_folder(tmp_path, model, "nvfp4-pack-quantized")
    stored = Stored.read(str(tmp_path), {}, {})
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "model.safetensors")
    gathered = Gathered(stored.experts("model.layers.0.mlp.experts"))
    key = (3, "down", "")
    suffixes = [".weight_global_scale", ".weight_packed", ".weight_scale"]
    order = torch.randperm(3).tolist()
    name = "model.layers.0.mlp.experts.3.down_proj"
    whole = [gathered.add(key, suffixes[i], tensors[name + suffixes[i]]) for i in order]
    assert [w is not None for w in whole] == [False, False, True]
    got = values(gathered.take(key), "nvfp4")
    assert torch.allclose(got, means["model.layers.0.mlp.experts.down_proj"][3].double(), rtol=1e-6, atol=0)


def test_tensors_arrive_in_the_operand_and_stay_there(monkeypatch):
    """Gate and up are written once, by the loader, also in the order in which files have them."""
    e, n, k, made = 3, 32, 64, shards.Stack(3, torch.device("cpu"))
    info = {
        f"{half}{end}": TensorInfo(f"{half}{end}", dtype, shape, Path("a"), 0)
        for half in ("gate", "up")
        for end, dtype, shape in (
            (".weight_packed", torch.uint8, (n, k // 2)), (".weight_scale", torch.uint8, (n, k // 32))
        )
    }  # fmt: skip
    config = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    weights = stored_weights(info, described(config))
    gathered = Gathered(
        {(i, h): Entry(weights[h], (".weight_packed", ".weight_scale")) for i in range(e) for h in weights}
    )
    assert made.missing == [0, 1, 2]
    want = {}
    for i in reversed(range(e)):
        parts = []
        for half in ("up", "gate"):
            places = made.place(i, 2 * n, k, k // 32, torch.float8_e8m0fnu)
            rows = slice(n, None) if half == "up" else slice(n)
            tensors = torch.randint(256, (n, k // 2)).byte(), torch.randint(117, 126, (n, k // 32)).byte()
            for end, tensor, place in zip((".weight_packed", ".weight_scale"), tensors, places):
                gathered.add((i, half), end, tensor, into=place[rows].view(torch.uint8))
            parts.insert(0, gathered.take((i, half)))
            want[i, half] = tensors
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", None)  # nothing is copied again
            made.write(i, share_scale(*parts, Folds()), torch.float8_e8m0fnu)
    assert made.missing == []
    packed, scale, factor = made.operand()
    assert factor is None
    for got, which in ((packed, 0), (scale.view(torch.uint8), 1)):
        rows = [torch.cat([want[i, half][which] for half in ("gate", "up")]) for i in range(e)]
        assert torch.equal(got, torch.stack(rows))


def test_global_scales_are_float32_whatever_the_default_dtype():
    """vLLM sets the default dtype to the model's while it loads."""
    matrices = [made(32, 64, "nvfp4") for _ in range(2)]
    torch.set_default_dtype(torch.bfloat16)
    try:
        factor = stacked(matrices, "nvfp4")[2]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(factor, torch.stack([codes.global_scale for codes in matrices]))


def test_stacks_of_gpt_oss_are_found_by_vllms_names(tmp_path):
    vllm_folders.FOLDERS["mxfp4"](tmp_path / "mxfp4")
    stored = Stored.read(str(tmp_path / "mxfp4"), {}, {})

    class Mapper:
        """Of vLLM's GPT-OSS."""

        def apply_dict(self, entries):
            ends = {".gate_up_proj_blocks": ".w13_weight", ".down_proj_blocks": ".w2_weight"}
            return {
                name.replace(a, b): e for name, e in entries.items() for a, b in ends.items() if a in name
            }

    stored.rename(Mapper())
    found = stored.experts("model.layers.0.mlp.experts")
    assert set(found) == {(None, "gate_up", ""), (None, "down", "")} and all(map(is_stack, found.values()))


def test_configs_as_vllm_hands_them_over():
    own = {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4", "total_num_heads": 4}
    assert {d.format for d in described(own)} == {"nvfp4"}
    assert {d.name for d in described({"quant_method": "gpt_oss_mxfp4"})} == {"gpt-oss-mxfp4"}
    asymmetric = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}
    assert "asymmetric int4" in why_not(dialects_of(asymmetric))
    assert not why_not(described(own))
    with pytest.raises(CheckpointError, match="quant_method 'bitsandbytes'"):
        described({"quant_method": "bitsandbytes"})


@pytest.mark.parametrize("release", ["0.26", "0.32"])
def test_gpt_oss_is_taken_where_vllm_hands_over_its_stacks(monkeypatch, release):
    model = types.ModuleType("gpt_oss")
    if release == "0.32":
        model.GptOssRoutedExperts = type("GptOssRoutedExperts", (), {})
    models = types.ModuleType("vllm.model_executor.models")
    models.gpt_oss = model
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.model_executor", types.ModuleType("vllm.model_executor"))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models", models)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.gpt_oss", model)
    reason = why_not(described({"quant_method": "mxfp4"}))
    assert reason == (
        "" if release == "0.32" else "this release of vLLM loads gpt-oss-mxfp4 without quantisation methods"
    )


def test_a_hub_models_headers(tmp_path):
    """Headers that vLLM fetched, of a model that is not here yet."""
    entry = {"dtype": "U8", "shape": [32, 16], "data_offsets": [0, 512]}
    scale = {"dtype": "F8_E4M3", "shape": [32, 2], "data_offsets": [512, 576]}
    second = {"dtype": "F32", "shape": [1], "data_offsets": [576, 580]}
    name = "model.layers.0.self_attn.o_proj"
    headers = {
        f"{name}.weight_packed": entry, f"{name}.weight_scale": scale, f"{name}.weight_global_scale": second
    }  # fmt: skip
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    stored = Stored.read("someone/model", config, headers)
    assert stored.linear(name, {})["o_proj"] is not None
    with pytest.raises(CheckpointError, match="headers of someone/model"):
        Stored.read("someone/model", config, {})


def test_the_entry_point_is_in_the_project(repository=Path(fp4_ops.__file__).parent.parent):
    import importlib
    import tomllib

    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    where, _, function = project["entry-points"]["vllm.general_plugins"]["fp4_ops"].partition(":")
    assert callable(getattr(importlib.import_module(where), function))
