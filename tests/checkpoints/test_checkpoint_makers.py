"""Folders of GPTQModel, AutoAWQ, AutoRound, Quark, Kimi and DeepSeek: read exactly, or refused with advice.

Expected values are float64, from each format's definition over the tensors in the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from checkpoint_samples import code_values, e8m0_values, experts_of, random_codes, save_tensors, times_blocks
from conftest import more
from families import tiny as tiny_family
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import fp4_ops
from fp4_ops.checkpoints import CheckpointError
from fp4_ops.integrations.transformers.quantizer import registered

Tensors = dict[str, Tensor]
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # AWQ's
GROUP = 32


def words(codes: Tensor, order: list[int] | None = None) -> Tensor:
    """int32 [..., N/8]: eight codes a word, the first of `order` in the lowest bits."""
    eights = codes.to(torch.int64).unflatten(-1, (-1, 8))
    eights = eights[..., order or list(range(8))]
    word = sum(eights[..., i] << (4 * i) for i in range(8))
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


def int4(n: int, k: int, symmetric: bool, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [N, K] and zero points [N, groups], 0 to 15, float16 scales, and the values that they mean."""
    codes = torch.randint(0, 16, (n, k))
    zeros = torch.full((n, k // GROUP), 8) if symmetric else torch.randint(1, 15, (n, k // GROUP))
    scales = (torch.rand(n, k // GROUP) * 0.02 + 0.001).half()
    return codes, zeros, scales, (codes - zeros[:, index]).double() * scales.double()[:, index]


@dataclass(frozen=True)
class Maker:
    """How one tool stores a weight [N, K], and what its config says."""

    config: dict[str, Any]
    write: Callable[[str, int, int], tuple[Tensors, Tensor]]
    advice: str = ""
    """A regular expression: why it is refused unless it is quantised anew. Empty: it is not."""


def gptq(offset: int = 1, symmetric: bool = True, shuffled: bool = False, index: bool = True) -> Any:
    def write(name: str, n: int, k: int) -> tuple[Tensors, Tensor]:
        group = torch.arange(k) // GROUP
        group = group[torch.randperm(k)] if shuffled else group
        codes, zeros, scales, values = int4(n, k, symmetric, group)
        tensors = {
            "qweight": words(codes).T, "qzeros": words((zeros - offset).T), "scales": scales.T,
            "g_idx": group.int(),
        }  # fmt: skip
        if not index:
            del tensors["g_idx"]
        return {f"{name}.{part}": t.contiguous() for part, t in tensors.items()}, values

    return write


def awq(symmetric: bool) -> Any:
    def write(name: str, n: int, k: int) -> tuple[Tensors, Tensor]:
        codes, zeros, scales, values = int4(n, k, symmetric, torch.arange(k) // GROUP)
        tensors = {"qweight": words(codes.T, ORDER), "qzeros": words(zeros.T, ORDER), "scales": scales.T}
        return {f"{name}.{part}": t.contiguous() for part, t in tensors.items()}, values

    return write


def compressed(symmetric: bool, shuffled: bool) -> Any:
    def write(name: str, n: int, k: int) -> tuple[Tensors, Tensor]:
        group = torch.arange(k) // GROUP
        group = group[torch.randperm(k)] if shuffled else group
        codes, zeros, scales, values = int4(n, k, symmetric, group)
        tensors = {"packed": words(codes), "scale": scales.contiguous(), "shape": torch.tensor([n, k])}
        if not symmetric:
            tensors["zero_point"] = words(zeros.T).T.contiguous()  # along N
        if shuffled:
            tensors["g_idx"] = group.int()
        return {f"{name}.weight_{part}": t for part, t in tensors.items()}, values

    return write


def mxfp4(codes_name: str, scale_name: str, dtype: torch.dtype = torch.uint8) -> Any:
    def write(name: str, n: int, k: int) -> tuple[Tensors, Tensor]:
        codes = random_codes(n, k // 2)
        scale = torch.randint(110, 124, (n, k // 32), dtype=torch.uint8)
        values = times_blocks(code_values(codes), e8m0_values(scale), 32).double()
        stored = codes if dtype == torch.uint8 else codes.view(dtype)
        scale = scale if dtype == torch.uint8 else scale.view(torch.float8_e8m0fnu)
        return {f"{name}.{codes_name}": stored, f"{name}.{scale_name}": scale}, values

    return write


def of_groups(actorder: str | None, symmetric: bool) -> dict[str, Any]:
    weights = {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": symmetric,
        "actorder": actorder,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": False, "version": "gemm"}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True, "data_type": "int"}
QUARK_WEIGHT = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
QUARK = {"quant_method": "quark", "global_quant_config": {"weight": QUARK_WEIGHT}, "layer_quant_config": {}}
MAKERS = {
    "gptq": Maker(GPTQ, gptq()),
    "gptq without g_idx": Maker(GPTQ, gptq(index=False)),
    "gptq_v2": Maker({**GPTQ, "checkpoint_format": "gptq_v2"}, gptq(0)),
    "auto-round gptq": Maker({**ROUND, "packing_format": "auto_round:auto_gptq"}, gptq()),
    "awq, symmetric": Maker(AWQ, awq(True)),
    "auto-round awq": Maker({**ROUND, "packing_format": "auto_round:auto_awq"}, awq(True)),
    "auto-round mxfp4": Maker(
        {**ROUND, "data_type": "mx_fp", "packing_format": "auto_round:llm_compressor"},
        mxfp4("weight_packed", "weight_scale"),
    ),
    "quark mxfp4": Maker(QUARK, mxfp4("weight", "weight_scale")),
    "actorder weight": Maker(of_groups("weight", True), compressed(True, False)),
    "actorder static": Maker(of_groups("static", True), compressed(True, False)),
    "actorder group": Maker(of_groups("group", True), compressed(True, True), "out of order.*requantize"),
    "asymmetric": Maker(of_groups(None, False), compressed(False, False), "asymmetric int4.*requantize"),
    "gptq, asymmetric": Maker({**GPTQ, "sym": False}, gptq(symmetric=False), "asymmetric int4.*requantize"),
    "gptq, desc_act": Maker({**GPTQ, "desc_act": True}, gptq(shuffled=True), "out of order.*requantize"),
    "awq": Maker({**AWQ, "zero_point": True}, awq(False), "asymmetric int4.*requantize"),
}


def model() -> Any:
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=96, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=3, num_experts_per_tok=2,
        decoder_sparse_step=1, mlp_only_layers=[], architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()


def write_folder(path: Any, made: Any, maker: Maker, linears: tuple[str, ...] = ()) -> Tensors:
    """A folder of random experts, one by one; returns the values of each stacked parameter and layer."""
    values: Tensors = {}
    tensors: Tensors = {}
    for name, module in experts_of(made).items():
        e, h, i = module.down_proj.shape
        rows: dict[str, list[Tensor]] = {"gate_up_proj": [], "down_proj": []}
        for expert in range(e):
            matrices = []
            for matrix, shape in {"gate": (i, h), "up": (i, h), "down": (h, i)}.items():
                new, value = maker.write(f"{name}.{expert}.{matrix}_proj", *shape)
                tensors |= new
                matrices.append(value)
            rows["gate_up_proj"].append(torch.cat(matrices[:2]))
            rows["down_proj"].append(matrices[2])
        values |= {f"{name}.{attribute}": torch.stack(r) for attribute, r in rows.items()}
    for name in linears:
        new, values[f"{name}.weight"] = maker.write(name, *made.get_submodule(name).weight.shape)
        tensors |= new
    rest = {n: p.clone() for n, p in made.state_dict().items() if n not in values}
    made.config.save_pretrained(path)
    save_tensors(path, tensors | rest)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": maker.config}))
    return values


def held(loaded: nn.Module, name: str) -> Tensor:
    """Returns the values of a 4-bit parameter of a loaded model in float64."""
    owner, _, attribute = name.rpartition(".")
    weight = getattr(loaded.get_submodule(owner), attribute)
    return weight.dequantize(torch.float64)


READ = [name for name, maker in MAKERS.items() if not maker.advice]
REFUSED = [name for name, maker in MAKERS.items() if maker.advice]


@pytest.mark.parametrize("name", READ)
def test_folders_are_read_exactly(name, tmp_path):
    linears = ("model.layers.0.self_attn.q_proj",)
    values = write_folder(tmp_path, model(), MAKERS[name], linears)
    with registered():
        from_registered = AutoModelForCausalLM.from_pretrained(tmp_path)
    for loaded in (fp4_ops.load_checkpoint(None, tmp_path), from_registered):
        for parameter, want in values.items():
            assert torch.equal(held(loaded, parameter), want), parameter
        with torch.no_grad():
            assert loaded(torch.randint(0, 64, (1, 5))).logits.isfinite().all()


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_with_advice_and_quantised_anew_when_asked(name, tmp_path):
    maker = MAKERS[name]
    values = write_folder(tmp_path, model(), maker)
    with pytest.raises(CheckpointError, match=maker.advice):
        fp4_ops.load_checkpoint(None, tmp_path)
    with registered(), pytest.raises(CheckpointError, match=maker.advice):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded = fp4_ops.load_checkpoint(None, tmp_path, requantize="nvfp4")
    for parameter, want in values.items():
        packed = torch.ops.fp4.quantize(want.float(), "nvfp4")
        assert torch.equal(held(loaded, parameter), torch.ops.fp4.dequantize(*packed, "nvfp4", torch.float64))
    assert 0 < loaded.hf_quantizer.report.requantized < 0.2


WRONG = [
    ("gptq", gptq(symmetric=False), "has zero points other than 7"),
    ("gptq_v2", gptq(1), "has zero points other than 8"),
    ("gptq", gptq(shuffled=True), "out of order"),
    ("awq, symmetric", awq(False), "has zero points other than 8"),
    ("actorder weight", compressed(True, True), "weight_g_idx"),
    ("actorder weight", compressed(False, False), "weight_zero_point"),
]


@pytest.mark.parametrize(("name", "write", "reason"), WRONG)
def test_files_that_are_not_what_their_config_says(name, write, reason, tmp_path):
    write_folder(tmp_path, model(), Maker(MAKERS[name].config, write))
    with pytest.raises(CheckpointError, match=reason):
        fp4_ops.load_checkpoint(None, tmp_path)


CONFIGS = [
    ({**GPTQ, "bits": 8}, "must have 4"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "must be one of: gptq, gptq_v2"),
    ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, "must all have the same"),
    ({**AWQ, "version": "gemv"}, "must be 'gemm'"),
    ({**ROUND, "packing_format": "auto_round:fp8"}, "Export with format="),
    ({**ROUND, "bits": 2, "packing_format": "auto_round:auto_gptq"}, "2 bits"),
    (
        {**ROUND, "packing_format": "auto_round:auto_gptq", "extra_config": {"x": {"bits": 8}}},
        "8 bits for 'x'",
    ),
    ({**QUARK, "global_quant_config": {"weight": {**QUARK_WEIGHT, "dtype": "int4"}}}, "must be fp4"),
    ({**QUARK, "layer_quant_config": {"*down*": {"weight": {"dtype": "fp8_e4m3"}}}}, r"for \*down\*"),
]


@pytest.mark.parametrize(("stored", "reason"), CONFIGS)
def test_configs_that_cannot_be_read_say_what_to_do(stored, reason, tmp_path):
    write_folder(tmp_path, model(), Maker(stored, gptq()))
    with pytest.raises(CheckpointError, match=reason):
        fp4_ops.load_checkpoint(None, tmp_path)


def test_modules_that_gptq_left_alone_are_no_change():
    from fp4_ops.checkpoints.dialects import dialects_of

    (dialect,) = dialects_of({**GPTQ, "dynamic": {"-:.*gate$": {}, "+:.*down.*": {"bits": 4}}})
    assert dialect.name == "gptq" and dialect.format == "int4_g32"


def deepseek_folder(path: Any, beside: bool) -> tuple[Any, Tensors, Tensors]:
    """DeepSeek-V4's own: names of its own, experts in mxfp4 as int8, one fp8 layer with e8m0 scales."""
    made = tiny_family("deepseek_v4", architectures=["DeepseekV4ForCausalLM"]).to(torch.bfloat16)
    made.save_pretrained(path)
    from safetensors.torch import load_file

    tensors = load_file(path / "model.safetensors")
    write = mxfp4("weight", "scale", torch.int8)
    experts: Tensors = {}
    dense: Tensors = {}
    for name, tensor in list(tensors.items()):
        base = name.removesuffix(".weight")
        if ".ffn.experts." in name:
            new, experts[base] = write(base, *tensor.shape)
        elif name.endswith("shared_experts.w1.weight"):
            codes = torch.randn(tensor.shape).to(torch.float8_e4m3fn)
            scale = torch.full((1, 1), 120, dtype=torch.uint8)
            new = {name: codes, f"{base}.scale": scale.view(torch.float8_e8m0fnu)}
            dense[base] = codes.double() * 2.0**-7
        else:
            continue
        del tensors[name]
        tensors |= new
    assert experts and dense
    save_tensors(path, tensors)
    config = json.loads((path / "config.json").read_text())
    stored = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    if beside:
        config["expert_dtype"] = "fp4"
    else:
        stored["expert_dtype"] = "fp4"
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    return made, experts, dense


@pytest.mark.parametrize("beside", [True, more(False)])
def test_deepseek_v4s_own_folder(beside, tmp_path):
    _, experts, dense = deepseek_folder(tmp_path, beside)
    with registered():
        from_registered = AutoModelForCausalLM.from_pretrained(tmp_path)
    for loaded in (fp4_ops.load_checkpoint(None, tmp_path), from_registered):
        for name, module in experts_of(loaded).items():
            layer = name.split(".layers.")[1].split(".")[0]
            up, down = (held(loaded, f"{name}.{a}") for a in ("gate_up_proj", "down_proj"))
            for e in range(len(up)):
                (prefix,) = {n.rpartition(".")[0] for n in experts if f"layers.{layer}.ffn.experts.{e}." in n}
                assert torch.equal(up[e], torch.cat([experts[f"{prefix}.w1"], experts[f"{prefix}.w3"]]))
                assert torch.equal(down[e], experts[f"{prefix}.w2"])
            assert module._fp4_recipe.gate == "silu(limit=10)"
        layers = [m for n, m in loaded.named_modules() if n.endswith("shared_experts.gate_proj")]
        for layer, want in zip(layers, dense.values(), strict=True):
            assert torch.equal(layer.weight.double(), want.bfloat16().double())


UNGATED_AND_CLAMPED = {
    "nemotron_h": ("relu2", {}),
    "deepseek_v4": ("silu(limit=0.05)", {"swiglu_limit": 0.05}),
    "minimax_m3_vl_text": ("swigluoai_halves(limit=0.05)", {"swiglu_limit": 0.05}),
    "hy_v4": ("silu(limit=0.05)", {"swiglu_limit": 0.05}),
}


@pytest.mark.parametrize("format", ["nvfp4", more("mxfp4"), more("int4_g32")])
@pytest.mark.parametrize("family", UNGATED_AND_CLAMPED)
def test_ungated_and_clamped_experts_are_prepared_saved_and_loaded(family, format, tmp_path):
    gate, changes = UNGATED_AND_CLAMPED[family]
    made = tiny_family(family, "grouped_mm", **changes)
    ids = torch.randint(0, 128, (2, 7))
    report = fp4_ops.prepare(made, format, activation="bf16")
    assert {m.gate for m in report.modules} == {gate} and not any(m.reason for m in report.modules)
    with torch.no_grad():
        want = made(ids)[0]
    made.save_pretrained(tmp_path)
    loaded = fp4_ops.load_checkpoint(made, tmp_path, activation="bf16", dtype=torch.float32)
    with torch.no_grad():
        got = loaded(ids)[0]
    assert ((got - want).norm() / want.norm()).item() < 1e-5


KIMI_AUTO = {"AutoConfig": "configuration_deepseek.Config", "AutoModelForCausalLM": "modeling_deepseek.Model"}


@pytest.mark.parametrize("trust", [False, True])
def test_kimi_k2_is_deepseek_v3_whose_own_code_is_not_needed(trust, tmp_path):
    """A model type that transformers does not have, and an auto_map to code that the folder lacks."""
    made = tiny_family("deepseek_v3", architectures=["DeepseekV3ForCausalLM"]).to(torch.bfloat16)
    maker = MAKERS["actorder static"]
    values = write_folder(tmp_path, made, maker)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "kimi_k2", "auto_map": KIMI_AUTO}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with registered():
        from_registered = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=trust)
    for loaded in (fp4_ops.load_checkpoint(None, tmp_path, trust_remote_code=trust), from_registered):
        for parameter, want in values.items():
            assert torch.equal(held(loaded, parameter), want), parameter


def test_a_family_that_transformers_lacks_is_named(tmp_path):
    write_folder(tmp_path, model(), MAKERS["gptq"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "no_such_moe"}))
    with pytest.raises(CheckpointError, match=r"'no_such_moe'.*trust_remote_code=True.*model_or_config"):
        fp4_ops.load_checkpoint(None, tmp_path)
