"""GGUF: experts are read packed, bit for bit; other tensors are dequantised; unsupported ones are named in an
error.

Expected values are float64, from the formats' definitions over the bytes that were written.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from gguf_files import metadata_of, tensors_of, write

import fp4_ops
from fp4_ops.checkpoints import CheckpointError

transformers = pytest.importorskip("transformers")

ARCHS = {
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True, "head_dim": 32}),
    "qwen2moe": ("qwen2_moe", {}),
    "gpt-oss": ("gpt_oss", {}),
    "llama": ("mixtral", {}),
    "deepseek2": ("deepseek_v3", {}),
    "deepseek2, softmax": ("deepseek_v2", {}),
    "glm4moe": ("glm4_moe", {"attention_bias": True, "use_qk_norm": True, "n_group": 1}),
}
"""Architecture to transformers' family, and what its tiny config has."""
SIZES = {"intermediate_size": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
SAME = dict.fromkeys(("gate", "up", "down"))


def kinds(all_three: str, **changes: str) -> dict[str, str]:
    return {**dict.fromkeys(("gate", "up", "down"), all_three), **changes}


def model_of(arch: str, **changes: Any) -> Any:
    family, own = ARCHS[arch]
    sizes = {
        k: v
        for k, v in SIZES.items()
        if k in ("intermediate_size", "moe_intermediate_size") or "qwen2" in arch
    }
    return tiny(family, **{**sizes, **own, **changes})


def written(path: Path, arch: str, model: Any, how: dict[str, str], **more: Any) -> Path:
    arch_name = arch.partition(",")[0]
    return write(path, metadata_of(arch_name, model.config), tensors_of(arch_name, model, how, **more))


def values_of(model: Any) -> dict[str, torch.Tensor]:
    """Every parameter as float64, 4-bit experts by what their codes mean."""
    found = {n: p.detach().double() for n, p in model.named_parameters()}
    found |= {n: b.double() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    for name, module in model.named_modules():
        if isinstance(module, fp4_ops.experts.PackedWeight):
            found[name] = module.dequantize().double()
    return found


def assert_same(loaded: Any, model: Any) -> None:
    """Every weight equal, and so the logits up to the order of sums."""
    got = values_of(loaded)
    for name, want in values_of(model).items():
        if model.config.model_type == "gpt_oss" and name.endswith(
            ("experts.gate_up_proj", "experts.down_proj")
        ):
            want = want.transpose(1, 2)
        torch.testing.assert_close(got[name], want, rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")
    ids = torch.randint(3, 100, (2, 9))
    with torch.no_grad():
        want, logits = model(ids).logits.double(), loaded(ids).logits.double()
    assert ((logits - want).norm() / want.norm()).item() < 1e-4


@pytest.mark.parametrize("kind", ["MXFP4", "Q4_0", "NVFP4"])
@pytest.mark.parametrize("arch", ARCHS)
def test_experts_are_read_packed(arch: str, kind: str, tmp_path: Path) -> None:
    if kind != "MXFP4" and arch not in ("qwen3moe", "gpt-oss"):
        pytest.skip("one type shows the names")
    model = model_of(arch)
    file = written(tmp_path / "m.gguf", arch, model, kinds(kind), split_mla="softmax" in arch)
    loaded = fp4_ops.load_checkpoint(None, file, activation="bf16", dtype=torch.float32)
    report = loaded.hf_quantizer.report
    assert report.format == {"MXFP4": "mxfp4", "Q4_0": "int4_g32", "NVFP4": "nvfp4"}[kind]
    assert type(loaded) is type(model) and not report.requantized
    assert_same(loaded, model)


@pytest.mark.parametrize("dense", ["Q8_0", "BF16", "F16"])
def test_dense_tensors_are_dequantised(dense: str, tmp_path: Path) -> None:
    """Also those whose rows llama.cpp permutes."""
    model = model_of("llama", tie_word_embeddings=True)
    file = written(tmp_path / "m.gguf", "llama", model, kinds("MXFP4"), dense=dense)
    loaded = fp4_ops.load_checkpoint(None, tmp_path, activation="bf16", dtype=torch.float32)
    assert loaded.config.tie_word_embeddings and file.parent == tmp_path
    assert_same(loaded, model)


def test_the_default_dtype_is_bfloat16(tmp_path: Path) -> None:
    written(tmp_path / "m.gguf", "qwen3moe", model_of("qwen3moe"), kinds("MXFP4"))
    assert fp4_ops.load_checkpoint(None, tmp_path).dtype == torch.bfloat16


def test_a_config_beside_the_file_counts(tmp_path: Path) -> None:
    model = model_of("qwen3moe")
    written(tmp_path / "m.gguf", "qwen3moe", model, kinds("MXFP4"))
    model.config.num_experts_per_tok = 3
    model.config.save_pretrained(tmp_path)
    loaded = fp4_ops.load_checkpoint(None, tmp_path, activation="bf16", dtype=torch.float32)
    assert loaded.config.num_experts_per_tok == 3


def test_what_was_loaded_is_saved_as_a_folder(tmp_path: Path) -> None:
    model = model_of("qwen3moe")
    file = written(tmp_path / "m.gguf", "qwen3moe", model, kinds("Q4_0"))
    loaded = fp4_ops.load_checkpoint(None, file, activation="bf16", dtype=torch.float32)
    loaded.save_pretrained(tmp_path / "saved")
    again = fp4_ops.load_checkpoint(None, tmp_path / "saved", activation="bf16", dtype=torch.float32)
    assert_same(again, model)


def split(path: Path, metadata: dict[str, Any], tensors: dict[str, Any], files: int) -> list[Path]:
    """As llama.cpp's gguf-split writes it: only the first file has the metadata."""
    names, found = [*tensors], []
    for i in range(files):
        part = {n: tensors[n] for n in names[i::files]}
        own = {"split.no": i, "split.count": files, "split.tensors.count": len(tensors)}
        file = path / f"m-{i + 1:05}-of-{files:05}.gguf"
        found.append(write(file, {**(metadata if i == 0 else {}), **own}, part))
    return found


def test_split_files_are_read_from_any_of_them(tmp_path: Path) -> None:
    model = model_of("qwen3moe")
    files = split(
        tmp_path, metadata_of("qwen3moe", model.config), tensors_of("qwen3moe", model, kinds("MXFP4")), 3
    )
    for given in (files[1], tmp_path):
        loaded = fp4_ops.load_checkpoint(None, given, activation="bf16", dtype=torch.float32)
        assert_same(loaded, model)
    files[2].rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"m-00003-of-00003\.gguf is not beside it"):
        fp4_ops.load_checkpoint(None, files[0])
    files[1].rename(files[2])
    (tmp_path / "elsewhere").rename(files[1])
    with pytest.raises(CheckpointError, match="says that it is file 3 of 3; by its name it is file 2"):
        fp4_ops.load_checkpoint(None, files[0])


def test_other_types_are_quantised_anew_where_that_is_asked_for(tmp_path: Path) -> None:
    model = model_of("qwen3moe")
    file = written(tmp_path / "m.gguf", "qwen3moe", model, kinds("MXFP4", down="Q8_0"))
    with pytest.raises(
        CheckpointError, match=r"ffn_down_exps.weight of .* holds experts in Q8_0.*requantize="
    ):
        fp4_ops.load_checkpoint(None, file)
    loaded = fp4_ops.load_checkpoint(None, file, requantize="mxfp4", activation="bf16", dtype=torch.float32)
    report, got = loaded.hf_quantizer.report, values_of(loaded)
    assert 0 < report.requantized < 0.2 and "quantised anew" in str(report)
    for name, want in values_of(model).items():
        error = ((got[name] - want).norm() / want.norm()).item()
        assert error <= (report.requantized + 1e-6 if "down_proj" in name else 0), name


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q4_1"])
def test_each_half_may_have_its_own_type_if_quantised_anew(kind: str, tmp_path: Path) -> None:
    model = model_of("qwen3moe")
    file = written(tmp_path / "m.gguf", "qwen3moe", model, kinds("NVFP4", up=kind, down="Q4_0"))
    loaded = fp4_ops.load_checkpoint(None, file, requantize="nvfp4", activation="bf16", dtype=torch.float32)
    assert 0.01 < loaded.hf_quantizer.report.requantized < 0.2
    with pytest.raises(ValueError, match="requantize is 'int4'"):
        fp4_ops.load_checkpoint(None, file, requantize="int4")


def test_one_layer_has_one_format(tmp_path: Path) -> None:
    file = written(tmp_path / "m.gguf", "qwen3moe", model_of("qwen3moe"), kinds("Q4_0", down="MXFP4"))
    with pytest.raises(
        CheckpointError, match=r"is in (Q4_0|MXFP4), and blk.\d.*one format. Give requantize="
    ):
        fp4_ops.load_checkpoint(None, file)


def test_from_pretrained_reads_experts_packed(tmp_path: Path) -> None:
    """transformers 5.23 asks the quantizer for the tensors of a GGUF file; older ones read it themselves."""
    from transformers.quantizers import auto

    from fp4_ops.checkpoints.gguf import GGUF, gguf_config
    from fp4_ops.integrations.transformers.quantizer import FP4Config

    if not hasattr(auto.AUTO_QUANTIZER_MAPPING.get("gguf"), "read_header"):
        pytest.skip(f"transformers {transformers.__version__} reads GGUF files itself")
    model = model_of("deepseek2")
    file = written(tmp_path / "m.gguf", "deepseek2", model, kinds("MXFP4"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, config=gguf_config(GGUF.open(file)), dtype=torch.float32,
        quantization_config=FP4Config(activation="bf16"),
    )  # fmt: skip
    assert loaded.hf_quantizer.report.format == "mxfp4"
    assert_same(loaded, model)
    config = gguf_config(GGUF.open(file))
    config.moe_intermediate_size *= 2  # as transformers' own reading of some metadata has it
    with pytest.raises(CheckpointError, match=r"model's is .*Give from_pretrained config=gguf_config"):
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file=file.name, config=config, quantization_config=FP4Config(activation="bf16")
        )


def damaged(raw: bytes, what: str) -> bytes:
    at = {"version": 4, "tensors": 8, "keys": 16}
    changes = {
        "of version 1": (at["version"], struct.pack("<I", 1)),
        "big-endian": (at["version"], struct.pack(">I", 3)),
        "with a wild count": (at["tensors"], struct.pack("<Q", 1 << 60)),
        "with wild keys": (at["keys"], struct.pack("<Q", 1 << 40)),
        "not one": (0, b"GGML"),
    }
    if what in changes:
        place, new = changes[what]
        return raw[:place] + new + raw[place + len(new) :]
    pointer = b"version https://git-lfs.github.com/spec/v1\n"
    return {
        "cut short": raw[: len(raw) - 4000],
        "cut in its header": raw[:300],
        "empty": b"",
        "a pointer": pointer,
    }[what]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("of version 1", "GGUF version 1; 2 and 3 are read"),
        ("big-endian", "is big-endian"),
        ("with a wild count", "announces 1152921504606846976 entries"),
        ("with wild keys", "announces 1099511627776 entries"),
        ("not one", "is not a GGUF file"),
        ("cut short", "is truncated: .* ends at byte"),
        ("cut in its header", "is truncated: its header"),
        ("empty", "is empty"),
        ("a pointer", "is a git-lfs pointer"),
    ],
)
def test_damaged_files_say_so(what: str, words: str, tmp_path: Path) -> None:
    file = written(tmp_path / "m.gguf", "qwen3moe", model_of("qwen3moe"), kinds("MXFP4"))
    file.write_bytes(damaged(file.read_bytes(), what))
    with pytest.raises(CheckpointError, match=words):
        fp4_ops.load_checkpoint(None, file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"m\.gguf is not there. Give the path"):
        fp4_ops.load_checkpoint(None, tmp_path / "m.gguf")


def test_any_cut_is_an_error_in_words(tmp_path: Path) -> None:
    file = written(tmp_path / "m.gguf", "qwen3moe", model_of("qwen3moe"), kinds("MXFP4"))
    raw = file.read_bytes()
    for length in [100, *torch.randint(0, len(raw) - 32, (40,)).tolist()]:  # 100: more entries than bytes
        file.write_bytes(raw[:length])
        with pytest.raises(CheckpointError, match=r"m\.gguf is (truncated|empty|damaged|not a GGUF)"):
            fp4_ops.load_checkpoint(None, file)


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    model = model_of("qwen3moe")
    metadata = metadata_of("qwen3moe", model.config)
    tensors = tensors_of("qwen3moe", model, kinds("MXFP4"))

    def refused(words: str, metadata: dict[str, Any] = metadata, **changed: Any) -> None:
        file = write(
            tmp_path / "m.gguf",
            metadata,
            {**tensors, **{k.replace("__", "."): v for k, v in changed.items()}},
        )
        with pytest.raises(CheckpointError, match=words):
            fp4_ops.load_checkpoint(None, file)

    refused("general.architecture 'rwkv7'", {**metadata, "general.architecture": "rwkv7"})
    refused("has no experts", {**metadata, "qwen3moe.expert_count": 0})
    refused("has no qwen3moe.block_count", {k: v for k, v in metadata.items() if "block_count" not in k})
    refused("rope.scaling.type 'yarn'", {**metadata, "qwen3moe.rope.scaling.type": "yarn"})
    refused("tensor rope_freqs.weight .* is not known", rope_freqs__weight=("F32", (8,), bytes(32)))
    grid = ("IQ2_XXS", (2, 256), bytes(132))
    refused("is in IQ2_XXS, whose values are not read", blk__0__attn_q__weight=grid)
    experts = ("IQ2_XXS", (8, 64, 256), bytes(8 * 64 * 66))
    refused("is in IQ2_XXS, whose values are not read", blk__0__ffn_up_exps__weight=experts)
    kind, shape, raw = tensors["blk.0.ffn_up_exps.weight"]
    refused("holds scales that are NaN", blk__0__ffn_up_exps__weight=(kind, shape, b"\xff" + raw[1:]))
    del tensors["output_norm.weight"]
    refused("missing keys: model.norm.weight")


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    model = model_of("glm4moe")
    metadata = metadata_of("glm4moe", model.config)
    tensors = tensors_of("glm4moe", model, kinds("MXFP4"))
    metadata |= {"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1}
    extra = {n.replace("blk.1.", "blk.2."): t for n, t in tensors.items() if n.startswith("blk.1.")}
    extra["blk.2.nextn.eh_proj.weight"] = ("F32", (2, 2), bytes(16))
    file = write(tmp_path / "m.gguf", metadata, {**tensors, **extra})
    assert_same(fp4_ops.load_checkpoint(None, file, activation="bf16", dtype=torch.float32), model)


def test_a_folder_of_several_models_is_ambiguous(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        written(tmp_path / name, "qwen3moe", model_of("qwen3moe"), kinds("MXFP4"))
    (tmp_path / "mmproj-a.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"several models in GGUF: a.gguf, b.gguf"):
        fp4_ops.load_checkpoint(None, tmp_path)
    (tmp_path / "b.gguf").unlink()
    fp4_ops.load_checkpoint(None, tmp_path)


def test_each_type_has_the_values_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    import numpy as np

    from fp4_ops.checkpoints.gguf.types import TYPES, values

    for number, kind in TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert gguf.GGML_QUANT_SIZES[theirs] == (kind.block, kind.nbytes)
        if kind.dequantize is None:
            continue
        raw = torch.randint(0, 256, (50, kind.nbytes * 3), dtype=torch.uint8)
        if kind.name == "NVFP4":
            raw[raw == 255] = 0  # a scale that no file has
        with np.errstate(all="ignore"):
            want = gguf.quants.dequantize(raw.numpy(), theirs)
        got = values(kind, raw).numpy()
        np.testing.assert_array_equal(got, want, err_msg=kind.name)


def test_the_gguf_package_reads_these_files_alike(tmp_path: Path) -> None:
    """The fixture's writer, too, is right."""
    gguf = pytest.importorskip("gguf")
    model = model_of("qwen3moe")
    file = written(tmp_path / "m.gguf", "qwen3moe", model, kinds("Q4_0", down="MXFP4"), dense="Q8_0")
    found = {
        t.name: torch.tensor(gguf.dequantize(t.data, t.tensor_type)) for t in gguf.GGUFReader(file).tensors
    }
    experts = model.model.layers[1].mlp.experts
    assert torch.equal(found["blk.1.ffn_up_exps.weight"], experts.gate_up_proj[:, 64:].float())
    assert torch.equal(found["blk.1.ffn_down_exps.weight"], experts.down_proj.float())
    assert torch.equal(found["token_embd.weight"], model.model.embed_tokens.weight.float())
