"""Folders as ModelOpt and llm-compressor write them: mixed precision, experts taken out of their stacks."""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from checkpoint_samples import WRITERS, code_values, edit_json, save_tensors, times_blocks, tiny
from moe_models import tokens, transformers
from safetensors.torch import load_file
from test_checkpoints import assert_holds, dequantised, logits, registered  # noqa: F401
from torch import Tensor

import fp4_ops
from fp4_ops.__main__ import main
from fp4_ops.checkpoints import CheckpointError, quantize_checkpoint
from fp4_ops.checkpoints.placement import form_of
from fp4_ops.experts import PackedWeight

BF16 = torch.bfloat16
CT = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
CONFIGS = {"nvfp4-pack-quantized": CT, "modelopt-nvfp4": MODELOPT}


def loaded(path: Path, how: str, **options: Any) -> Any:
    if how == "load_checkpoint":
        return fp4_ops.load_checkpoint(None, path, **options)
    cls = fp4_ops.checkpoints.hf.model_class(transformers.AutoConfig.from_pretrained(path))
    model, info = cls.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    return model


HOW = pytest.mark.parametrize("how", ["load_checkpoint", "from_pretrained"])


# --- mixed precision ---


def e4m3(*shape: int) -> Tensor:
    return torch.randn(shape).mul(40).clamp(-448, 448).to(torch.float8_e4m3fn)


def eight_bits(kind: str, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and the float64 values that they mean."""
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8) if kind == "int8" else e4m3(n, k)
    if kind == "mxfp8":
        scale = torch.randint(112, 122, (n, k // 32), dtype=torch.uint8)
        factor = torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    else:
        shape = {"tensor": (), "tensor1": (1,), "rows": (n,), "blocks": (-(-n // 16), -(-k // 32))}
        dtype = torch.float32 if kind in ("tensor", "blocks") else BF16
        scale = (torch.rand(shape.get(kind, (n, 1))) * 1e-3 + 1e-4).to(dtype)
        factor = scale.double().reshape(n, 1) if kind in ("rows", "channel", "int8") else scale.double()
        if kind == "blocks":
            factor = factor.repeat_interleave(16, 0)[:n].repeat_interleave(32, 1)[:, :k]
    return codes, scale, codes.double() * factor


def ct_group(kind: str) -> dict[str, Any]:
    if kind == "nvfp4":
        return {
            "format": "nvfp4-pack-quantized",
            "weights": {"num_bits": 4, "type": "float", "group_size": 16},
        }
    formats = {"int8": "int-quantized", "mxfp8": "mxfp8-quantized"}
    weights = {"num_bits": 8, "type": "int" if kind == "int8" else "float", "symmetric": True}
    if kind == "blocks":
        weights |= {"strategy": "block", "block_structure": [16, 32]}
    return {"format": formats.get(kind, "float-quantized"), "weights": weights}


MIXED = [
    *(("modelopt", k) for k in ("tensor", "tensor1", "rows", "mxfp8")),
    *(("compressed-tensors", k) for k in ("tensor1", "channel", "blocks", "mxfp8", "int8")),
]


def write_mixed(path: Path, maker: str, kind: str) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """A folder with nvfp4 experts and attention in 8 bits: the model, what is in 4 and what was in 8 bits."""
    model = tiny()
    path.mkdir(exist_ok=True)
    model.config.save_pretrained(path)
    write = WRITERS["modelopt-nvfp4" if maker == "modelopt" else "nvfp4-pack-quantized"]
    (tensors, four), eight = per_expert(model, owners=None, write=write), {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj", "o_proj")):
            codes, scale, value = eight_bits(kind, *module.weight.shape)
            tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": scale}
            tensors[f"{name}.input_scale"] = torch.tensor(0.25)
            eight[f"{name}.weight"] = value
            if name.endswith(("k_proj", "v_proj")):
                tensors[f"{name}.{name[-6]}_scale"] = torch.tensor(0.5)
    tensors |= {n: p.detach() for n, p in model.named_parameters() if p.dim() != 3 and n not in eight}
    tensors |= {f"model.layers.{i}.self_attn.{x}_scale": torch.tensor(0.5) for i in (0, 1) for x in "kv"}
    save_tensors(path, tensors)
    if maker == "modelopt":
        algorithm = {"mxfp8": "MXFP8", "rows": "FP8_PER_CHANNEL_PER_TOKEN"}.get(kind, "FP8")
        layers = {n.removesuffix(".weight"): {"quant_algo": algorithm} for n in eight}
        layers |= {n.rpartition(".")[0]: {"quant_algo": "NVFP4", "group_size": 16} for n in four}
        config: dict[str, Any] = {
            "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers
        }  # fmt: skip
    else:
        groups = {"group_0": ct_group(kind), "group_1": ct_group("nvfp4")}
        config = {
            "quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups
        }  # fmt: skip
    edit_json(path / "config.json", lambda c: c.update(quantization_config=config))
    return model, four, eight


def per_expert(
    model: Any,
    owners: dict[str, str] | None,
    write: Any,
    halves: tuple[str, str, str] = ("gate", "up", "down"),
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Experts one by one: tensors by name, and what the model's parameters then mean, [E, N, K].

    owners: a module's name to that of its experts in the files, if it differs.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        form = form_of(module)
        if form is None:
            continue
        start = (owners or {}).get(name, name)
        up, down = module._parameters[form.gate_up], module._parameters[form.down]
        experts = min(up.shape[0], down.shape[0])
        h, i = down.shape[1:] if not form.transposed else down.shape[:0:-1]
        rows: dict[str, list[Tensor]] = {"gate_up": [], "down": []}
        for expert in range(experts):
            made = []
            for half, (n, k) in {"gate": (i, h), "up": (i, h), "down": (h, i)}.items():
                new, value = write(f"{start}.{expert}.{half}_proj", n, k, 2.0**-9 * (1 + expert))
                tensors |= new
                made.append(value)
            gate_up = torch.stack(made[:2], 1).flatten(0, 1) if form.interleaved else torch.cat(made[:2])
            rows["gate_up"].append(gate_up)
            rows["down"].append(made[2])
        values[f"{name}.{form.gate_up}"] = torch.stack(rows["gate_up"])
        values[f"{name}.{form.down}"] = torch.stack(rows["down"])
    return tensors, values


@HOW
@pytest.mark.parametrize(("maker", "kind"), MIXED)
def test_mixed_precision(maker, kind, how, registered, tmp_path):  # noqa: F811
    original, four, eight = write_mixed(tmp_path, maker, kind)
    model = loaded(tmp_path, how)
    assert_holds(model, four)
    for name, p in model.named_parameters():
        want = eight[name].to(BF16) if name in eight else original.get_parameter(name)
        assert torch.equal(p, want), name
    report = model.hf_quantizer.report
    assert set(report.dense) == set(eight) and "8 bits, dequantised" in str(report)
    assert report.format == "nvfp4"
    assert logits(model, tokens(1, 5)).isfinite().all()
    model.save_pretrained(tmp_path / "again")
    again = loaded(tmp_path / "again", how)
    assert dequantised(again).keys() == four.keys()
    assert torch.equal(again.get_parameter(name), model.get_parameter(name))


@HOW
def test_only_the_older_file_says_what_is_mixed(how, registered, tmp_path):  # noqa: F811
    _, four, eight = write_mixed(tmp_path, "modelopt", "tensor")
    config: dict[str, Any] = {}
    edit_json(tmp_path / "config.json", lambda c: config.update(c.pop("quantization_config")))
    config.pop("quant_method")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": config}))
    model = loaded(tmp_path, how)
    assert_holds(model, four)
    assert all(torch.equal(model.get_parameter(n), v.to(BF16)) for n, v in eight.items())


@pytest.mark.parametrize("kind", ["channel", "int8"])
def test_groups_that_name_no_format(kind, tmp_path):
    """Older configs of mixed precision: the groups' numbers say what compressed-tensors made of them."""
    _, four, eight = write_mixed(tmp_path, "compressed-tensors", kind)

    def forget(config: dict[str, Any]) -> None:
        for group in config["quantization_config"]["config_groups"].values():
            del group["format"]

    edit_json(tmp_path / "config.json", forget)
    model = fp4_ops.load_checkpoint(None, tmp_path)
    assert_holds(model, four)
    assert all(torch.equal(model.get_parameter(n), v.to(BF16)) for n, v in eight.items())


def test_two_formats_of_4_bits(tmp_path):
    """nvfp4 experts and mxfp4 attention, whose codes have one name: the scales beside them tell."""
    _, four, eight = write_mixed(tmp_path, "compressed-tensors", "tensor1")
    tensors = load_file(tmp_path / "model.safetensors")
    for name in eight:
        base = name.removesuffix(".weight")
        for suffix in ("", "_scale"):
            del tensors[name + suffix]
        n, k = eight[name].shape
        new, four[name] = WRITERS["mxfp4-pack-quantized"](base, n, k, 1.0)
        tensors |= new
    save_tensors(tmp_path, tensors)
    group = {"format": "mxfp4-pack-quantized", "weights": {"num_bits": 4, "type": "float", "group_size": 32}}
    edit_json(
        tmp_path / "config.json", lambda c: c["quantization_config"]["config_groups"].update(group_0=group)
    )
    model = fp4_ops.load_checkpoint(None, tmp_path)
    assert_holds(model, four)
    assert model.hf_quantizer.report.format == "nvfp4 and mxfp4"
    assert logits(model, tokens(1, 5)).isfinite().all()


BAD_SCALES = {
    "another shape": (torch.ones(3), r"is torch.float32 \[3\]; beside a weight \[64, 64\] it must be"),
    "another dtype": (torch.ones((), dtype=torch.int32), r"is torch.int32 \[\]; beside a weight"),
    "NaN": (torch.tensor(torch.nan), "holds NaN or infinity"),
}


@pytest.mark.parametrize("what", BAD_SCALES)
def test_bad_scales_of_8_bits_are_named(what, tmp_path):
    write_mixed(tmp_path, "modelopt", "tensor")
    tensors, (scale, message) = load_file(tmp_path / "model.safetensors"), BAD_SCALES[what]
    name = "model.layers.1.self_attn.q_proj.weight_scale"
    save_tensors(tmp_path, tensors | {name: scale})
    with pytest.raises(CheckpointError, match=message) as error:
        fp4_ops.load_checkpoint(None, tmp_path)
    assert name in str(error.value)
    del tensors[name]
    save_tensors(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight_scale is missing"):
        fp4_ops.load_checkpoint(None, tmp_path)


def test_experts_in_8_bits_beside_others_in_4(tmp_path):
    """The first layer in FP8, per expert: it becomes an ordinary parameter."""
    _, four, _ = write_mixed(tmp_path, "modelopt", "tensor")
    tensors = load_file(tmp_path / "model.safetensors")
    owner = "model.layers.0.mlp.experts"
    tensors = {n: t for n, t in tensors.items() if not n.startswith(owner)}
    rows: dict[str, list[Tensor]] = {"gate": [], "up": [], "down": []}
    for expert in range(8):
        for half, part in rows.items():
            n, k = (64, 96) if half == "down" else (96, 64)
            codes, scale, value = eight_bits("tensor", n, k)
            name = f"{owner}.{expert}.{half}_proj"
            tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": scale}
            part.append(value)
    save_tensors(tmp_path, tensors)
    model = fp4_ops.load_checkpoint(None, tmp_path)
    gate_up = torch.cat([torch.stack(rows["gate"]), torch.stack(rows["up"])], 1)
    assert torch.equal(model.get_parameter(f"{owner}.gate_up_proj"), gate_up.to(BF16))
    assert torch.equal(model.get_parameter(f"{owner}.down_proj"), torch.stack(rows["down"]).to(BF16))
    assert_holds(model, {n: v for n, v in four.items() if not n.startswith(owner)})
    assert logits(model, tokens(1, 5)).isfinite().all()


def test_scaled_inputs_are_refused(tmp_path):
    write_mixed(tmp_path, "modelopt", "tensor")
    name = "model.layers.1.mlp.experts.3.up_proj.pre_quant_scale"
    tensors = load_file(tmp_path / "model.safetensors")
    save_tensors(tmp_path, tensors | {name: torch.ones(64)})
    with pytest.raises(CheckpointError, match=rf"{name} .*scales the inputs .*Export the checkpoint with"):
        fp4_ops.load_checkpoint(None, tmp_path)


# --- families whose experts are stacked, in folders where they are not ---


def family(name: str) -> Any:
    changes = {"num_key_value_heads": 4} if name in ("axk2", "deepseek_v32", "glm_moe_dsa") else {}
    model = families.tiny(name, **changes).to(BF16)
    model.config.dtype = BF16
    return model


def family_folder(path: Path, model: Any, dialect: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The family's own checkpoint with its experts as llm-compressor and ModelOpt write them: one by one.

    Returns what its 4-bit parameters then mean, and the biases that experts have.
    """
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    stack = re.compile(
        r"^(.*experts)\.(gate_up_proj|down_proj|\d+\..*)$|^(.*block_sparse_moe)\.(input|output)_linear\.weight$"
    )
    raw = {}
    for name in [n for n in tensors if "shared_experts" not in n]:
        if match := stack.match(name):
            raw[match[1] or f"{match[3]}.experts"] = None
            if "bias" not in name:
                del tensors[name]
    modules = [n for n, m in model.named_modules() if form_of(m)]
    number = re.compile(r"\d+")
    order = sorted(raw, key=lambda n: [int(i) for i in number.findall(n)])
    owners = dict(zip(modules, order, strict=True))
    new, values = per_expert(model, owners, WRITERS[dialect])
    biases = {}
    for name, owner in owners.items():
        module = model.get_submodule(name)
        form = form_of(module)
        for attribute in ("gate_up_proj_bias", "down_proj_bias"):
            bias = module._parameters.get(attribute)
            if bias is None:
                continue
            biases[f"{name}.{attribute}"] = bias.detach()
            tensors = {n: t for n, t in tensors.items() if n != f"{owner}.{attribute}"}
            for expert, row in enumerate(bias.detach()):
                if attribute == "down_proj_bias":
                    tensors[f"{owner}.{expert}.down_proj.bias"] = row.clone()
                    continue
                gate, up = (row[::2], row[1::2]) if form.interleaved else row.chunk(2)
                tensors[f"{owner}.{expert}.gate_proj.bias"] = gate.clone()
                tensors[f"{owner}.{expert}.up_proj.bias"] = up.clone()
    save_tensors(path, {n: t.contiguous() for n, t in (tensors | new).items()})
    edit_json(path / "config.json", lambda c: c.update(quantization_config=CONFIGS[dialect]))
    return values, biases


def in_model_order(model: Any, name: str, values: Tensor) -> Tensor:
    """[E, N, K] as the parameter of that name has it."""
    form = form_of(model.get_submodule(name.rpartition(".")[0]))
    return values.mT if form.transposed else values


def assert_family_holds(model: Any, original: Any, values: dict[str, Tensor]) -> None:
    got = dequantised(model)
    for name, value in values.items():
        packed = isinstance(
            model.get_submodule(name.rpartition(".")[0])._modules.get(name.split(".")[-1]), PackedWeight
        )
        want = value if packed else in_model_order(original, name, value)
        assert torch.equal(got[name][: len(value)].cpu(), want.float()), name
    for name, p in model.named_parameters():
        if name not in values:
            assert torch.equal(p.float(), original.get_parameter(name).float()), name


@torch.no_grad()
def outputs(model: Any, ids: Tensor) -> Tensor:
    """Logits; of a model without a head its hidden states; of longcat_flash, whose tiny config has no
    attention that works, those of its last block of experts."""
    if type(model).__name__.startswith("Longcat"):
        x = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(len(ids))) * 3
        return families.expert_block(model)(x.to(model.dtype))
    out = model(input_ids=ids, use_cache=False)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def assert_computes(model: Any, original: Any, values: dict[str, Tensor]) -> None:
    """The same as the original with the values in place of its weights."""
    twin = original.float()
    with torch.no_grad():
        for name, value in values.items():
            twin.get_parameter(name)[: len(value)] = in_model_order(twin, name, value).float()
    ids = tokens(2, 7)
    got, want = outputs(model, ids).float(), outputs(twin, ids).float()
    # Products of experts that run by their own code take their inputs in bfloat16.
    near = 4e-3 if model.hf_quantizer.report.own_code else 1e-3
    assert ((got - want).norm() / want.norm()).item() < near


STACKED = ("mixtral", "qwen3_vl_moe_text", "granitemoe", "minimax_m2", "gpt_oss")
OWN_CODE = ("llama4_text", "longcat_flash", "muse_spark_text")
OTHERS = (
    "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "ernie4_5_moe", "axk2",
    "hunyuan_v1_moe", "dots1", "flex_olmo", "exaone_moe", "solar_open", "afmoe", "mimo_v2_flash", "hy_v3",
    "axk1", "kimi_linear", "laguna", "qwen3_5_moe_text", "qwen3_next", "lfm2_moe", "jamba", "phimoe",
    "granitemoeshared", "minimax", "granitemoehybrid", "mistral4", "deepseek_v32",
    "glm4_moe_lite", "cohere2_moe", "mellum", "bailing_hybrid", "kolibri1", "openai_privacy_filter",
    "glm_moe_dsa", "qwen4_exp_text",
)  # fmt: skip


@HOW
@pytest.mark.parametrize("dialect", [*CONFIGS])
@pytest.mark.parametrize("name", [
    *STACKED, *OWN_CODE, *(pytest.param(f, marks=pytest.mark.more) for f in OTHERS),
])  # fmt: skip
def test_experts_one_by_one(name, dialect, how, registered, tmp_path):  # noqa: F811
    original = family(name)
    values, biases = family_folder(tmp_path, original, dialect)
    assert bool(biases) == (name in ("gpt_oss", "openai_privacy_filter"))
    model = loaded(tmp_path, how)
    assert_family_holds(model, original, values)
    if name != "openai_privacy_filter":
        assert bool(model.hf_quantizer.report.own_code) == (name in OWN_CODE)
    if how == "load_checkpoint":
        exact = fp4_ops.load_checkpoint(None, tmp_path, activation="bf16", dtype=torch.float32)
        assert_computes(exact, original, values)


@pytest.mark.parametrize("name", ["llama4_text", "gpt_oss", "muse_spark_text"])
def test_saved_and_loaded_again(name, tmp_path):
    original = family(name)
    values, _ = family_folder(tmp_path, original, "modelopt-nvfp4")
    model = fp4_ops.load_checkpoint(None, tmp_path)
    model.save_pretrained(tmp_path / "again")
    again = fp4_ops.load_checkpoint(None, tmp_path / "again")
    held = dequantised(model)
    for key, got in dequantised(again).items():
        torch.testing.assert_close(got, held[key], rtol=2.5e-7, atol=0)
    assert held.keys() == values.keys()


def test_eval_of_experts_that_prepare_does_not_take(tmp_path, capsys):
    """Its own perplexity, and then in words why there are no other rows."""
    original = families.tiny("llama4_text", vocab_size=256).to(BF16)
    original.config.dtype = BF16
    values, _ = family_folder(tmp_path / "model", original, "modelopt-nvfp4")
    (tmp_path / "text").write_bytes(bytes(torch.randint(0, 256, (200,)).tolist()))
    command = [str(tmp_path / "model"), "--device", "cpu"]
    with pytest.raises(SystemExit, match="the model has no experts modules"):
        main(["eval", *command, "--text", str(tmp_path / "text"), "--length", "32", "--methods", "rtn"])
    with torch.no_grad():
        for name, value in values.items():
            original.get_parameter(name).copy_(in_model_order(original, name, value))
        windows = torch.tensor(list((tmp_path / "text").read_bytes())[: 6 * 32]).view(6, 32)
        ids, scores = windows[:, 1:].flatten(), original(windows).logits[:, :-1].float().flatten(0, 1)
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("bfloat16"))
    want = torch.nn.functional.cross_entropy(scores, ids).item()
    assert math.log(float(row.split()[3])) == pytest.approx(want, rel=2e-2)


@HOW
@pytest.mark.parametrize("name", ["llama4_text", "gpt_oss"])
@pytest.mark.parametrize("per_expert_scale", [False, True])
def test_experts_fused_by_modelopt(name, per_expert_scale, how, registered, tmp_path):  # noqa: F811
    """gate_up_proj uint8 [E, K/2, N], its block scales [E, K/16, N], and one global scale."""
    original = family(name)
    original.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    values = {}
    for owner, module in original.named_modules():
        if not form_of(module):
            continue
        for attribute in ("gate_up_proj", "down_proj"):
            e, k, n = module._parameters[attribute].shape
            packed = torch.randint(0, 256, (e, k // 2, n), dtype=torch.uint8)
            scale = (torch.rand(e, k // 16, n) * 64 + 8).to(torch.float8_e4m3fn)
            second = torch.rand(e) * 0.01 + 0.001 if per_expert_scale else torch.tensor(0.003)
            tensors |= {
                f"{owner}.{attribute}": packed,
                f"{owner}.{attribute}_weight_scale": scale,
                f"{owner}.{attribute}_weight_scale_2": second,
                f"{owner}.{attribute}_input_scale": torch.tensor(1.0),
            }
            rows = times_blocks(code_values(packed.mT.contiguous()), scale.double().mT, 16)
            values[f"{owner}.{attribute}"] = rows * second.double().reshape(-1, 1, 1)
    save_tensors(tmp_path, tensors)
    edit_json(tmp_path / "config.json", lambda c: c.update(quantization_config=MODELOPT))
    model = loaded(tmp_path, how)
    got = dequantised(model)
    for key, value in values.items():
        held = got[key].mT if name == "llama4_text" else got[key]  # an FP4Tensor lies as the model's
        torch.testing.assert_close(held.double(), value, rtol=1e-7, atol=0)
    assert model.hf_quantizer.report.dialect == "modelopt-nvfp4-fused"
    if how == "load_checkpoint":
        exact = fp4_ops.load_checkpoint(None, tmp_path, activation="bf16", dtype=torch.float32)
        assert_computes(exact, original, values)


def test_experts_that_stay_in_bf16_find_their_place(tmp_path):
    """A layer that the tool left alone, its experts one by one, in a family that stacks them."""
    original = family("gpt_oss")
    values, _ = family_folder(tmp_path, original, "nvfp4-pack-quantized")
    tensors = load_file(tmp_path / "model.safetensors")
    owner = "model.layers.1.mlp.experts"
    tensors = {n: t for n, t in tensors.items() if not (n.startswith(owner) and "bias" not in n)}
    module = original.get_submodule(owner)
    for expert in range(8):
        rows = module.gate_up_proj.detach()[expert].T
        tensors |= {
            f"{owner}.{expert}.gate_proj.weight": rows[::2].contiguous(),
            f"{owner}.{expert}.up_proj.weight": rows[1::2].contiguous(),
            f"{owner}.{expert}.down_proj.weight": module.down_proj.detach()[expert].T.contiguous(),
        }
    save_tensors(tmp_path, tensors)
    model = fp4_ops.load_checkpoint(None, tmp_path)
    assert_family_holds(model, original, {n: v for n, v in values.items() if not n.startswith(owner)})
    assert model.hf_quantizer.report.left == {owner: "its weights are not stored in 4 bits"}
    del tensors[f"{owner}.5.up_proj.weight"]
    save_tensors(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=rf"no weight for {owner}.gate_up_proj, expert 5 \(up\)"):
        fp4_ops.load_checkpoint(None, tmp_path)


# --- quantize ---


def write_fp8(path: Path, kind: str) -> tuple[Any, dict[str, Tensor]]:
    """A model in 8 bits, attention and experts: float64 values by name."""
    model = tiny("deepseek_v3" if kind == "deepseek" else "qwen3_moe")
    model.save_pretrained(path)
    tensors, values = load_file(path / "model.safetensors"), {}
    suffix = ".weight_scale_inv" if kind == "deepseek" else ".weight_scale"
    stored = {"deepseek": "blocks", "modelopt": "tensor", "compressed-tensors": "channel"}[kind]
    for name in list(tensors):
        if name.endswith("_proj.weight"):
            codes, scale, value = eight_bits(stored, *tensors[name].shape)
            tensors |= {name: codes, name.removesuffix(".weight") + suffix: scale}
            values[name] = value
    save_tensors(path, tensors)
    config = {
        "deepseek": {"quant_method": "fp8", "weight_block_size": [16, 32], "fmt": "e4m3"},
        "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
        "compressed-tensors": {
            "quant_method": "compressed-tensors", "format": "float-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
        },
    }[kind]  # fmt: skip
    edit_json(path / "config.json", lambda c: c.update(quantization_config=config))
    (path / "hf_quant_config.json").write_text("{}")
    return model, values


@pytest.mark.parametrize("format", ["nvfp4", "int4_g32"])
@pytest.mark.parametrize("kind", ["deepseek", "modelopt", "compressed-tensors"])
def test_8_bits_are_what_quantize_starts_from(kind, format, tmp_path):
    _, values = write_fp8(tmp_path / "fp8", kind)
    quantize_checkpoint(tmp_path / "fp8", tmp_path / "out", format, progress=False)
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    model = fp4_ops.load_checkpoint(None, tmp_path / "out")
    got = dequantised(model)
    assert got
    for name, held in got.items():
        owner, _, attribute = name.rpartition(".")
        for expert, matrix in enumerate(held):
            halves = ("gate", "up") if attribute == "gate_up_proj" else ("down",)
            w = torch.cat([values[f"{owner}.{expert}.{half}_proj.weight"] for half in halves]).float()
            q = torch.ops.fp4.quantize(w, format)
            want = torch.ops.fp4.dequantize(*q, format, torch.float32)
            torch.testing.assert_close(matrix, want, rtol=2.5e-7, atol=0)
    for name, value in values.items():
        if "experts." not in name or "shared" in name:
            assert torch.equal(model.get_parameter(name), value.to(BF16)), name
    assert logits(model, tokens(1, 4)).isfinite().all()


def test_a_result_that_cannot_be_loaded_is_not_written(tmp_path):
    """Experts that the config does not have: found before anything is written, not after hours."""
    model = tiny()
    model.save_pretrained(tmp_path / "bf16")
    edit_json(tmp_path / "bf16" / "config.json", lambda c: c.update(num_experts=4, num_local_experts=4))
    with pytest.raises(
        CheckpointError, match=r"is of expert 4; the model has 4\n.*is a qwen3_moe.*nothing was"
    ):
        quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [
    *STACKED, *OWN_CODE, *(pytest.param(f, marks=pytest.mark.more) for f in OTHERS),
])  # fmt: skip
def test_quantize_and_load(name, tmp_path):
    """What the command writes is loaded, with the values that quantising the parameters gives."""
    original = family(name)
    original.save_pretrained(tmp_path / "bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", "mxfp4", progress=False)
    model = fp4_ops.load_checkpoint(None, tmp_path / "out")
    got = dequantised(model)
    assert got
    for key, held in got.items():
        w = original.get_parameter(key).detach()
        owner, _, attribute = key.rpartition(".")
        w = in_model_order(original, key, w).contiguous()  # which is [E, N, K]: the other way is the same
        want = torch.ops.fp4.dequantize(*torch.ops.fp4.quantize(w, "mxfp4"), "mxfp4", torch.float32)
        if attribute not in model.get_submodule(owner)._modules:  # an FP4Tensor lies as the model's
            held = in_model_order(original, key, held)
        experts = len(original.get_submodule(owner).down_proj)
        assert torch.equal(held[:experts], want[:experts]), key
    assert outputs(model, tokens(1, 5)).isfinite().all()


@pytest.mark.parametrize("name", ["dbrx", "aria_text", "jetmoe"])
def test_families_whose_experts_are_not_found_are_named(name, tmp_path):
    family(name).save_pretrained(tmp_path / "bf16")
    message = rf"a {name}, has no expert weights .*experts.* is none of: nothing was written.*torch\.compile"
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_files_with_weights_are_not_copied(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path / "bf16")
    for name in ("model.Q4_K_M.gguf", "pytorch_model.bin", "pytorch_model.bin.index.json", "model.onnx"):
        (tmp_path / "bf16" / name).write_bytes(b"weights")
    (tmp_path / "bf16" / "tokenizer.json").write_text("{}")
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", progress=False)
    assert {f.name for f in (tmp_path / "out").iterdir()} - {"generation_config.json"} == {
        "config.json", "model.safetensors", "tokenizer.json"
    }  # fmt: skip


# --- what a report and an index say ---


def test_a_thousand_matrices_are_one_line(tmp_path):
    model = family("qwen3_next")
    family_folder(tmp_path, model, "modelopt-nvfp4")
    tensors = load_file(tmp_path / "model.safetensors")
    first = {n: t for n, t in tensors.items() if n.startswith("model.layers.0.mlp.experts.0.")}
    for expert in range(334):
        for name, t in first.items():
            tail = name.removeprefix("model.layers.0.mlp.experts.0.")
            tensors[f"mtp.layers.0.mlp.experts.{expert}.{tail}"] = t.clone()
    save_tensors(tmp_path, tensors)
    report = fp4_ops.load_checkpoint(None, tmp_path).hf_quantizer.report
    assert report.left and all(name.startswith("mtp.") for name in report.left)
    assert str(report).count("\n") == 1 and "left alone: the model has no such layer" in str(report)


def test_a_second_copy_that_the_index_does_not_name(tmp_path):
    _, four, _ = write_mixed(tmp_path, "modelopt", "tensor")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    save_tensors(tmp_path, tensors, shards=2)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    second = tmp_path / "model-00002-of-00002.safetensors"
    name = next(n for n, file in index.items() if file != second.name)
    other = load_file(second)
    from safetensors.torch import save_file

    save_file(other | {name: torch.zeros_like(tensors[name])}, second)
    assert_holds(fp4_ops.load_checkpoint(None, tmp_path), four)
