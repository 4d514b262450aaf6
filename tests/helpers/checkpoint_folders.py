"""Makes folders like those of other tools, together with the values that a model loaded from them must
have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from checkpoint_samples import WRITERS, edit_json, save_tensors, tiny
from moe_models import tokens, transformers
from safetensors.torch import load_file
from torch import Tensor

import fp4_ops
from fp4_ops.checkpoints.placement import form_of
from fp4_ops.experts.packed import PackedWeight
from fp4_ops.tensor import FP4Tensor

BF16 = torch.bfloat16
CT = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
CONFIGS = {"nvfp4-pack-quantized": CT, "modelopt-nvfp4": MODELOPT}


def loaded(path: Path, how: str, **options: Any) -> Any:
    if how == "load_checkpoint":
        return fp4_ops.load_checkpoint(None, path, **options)
    cls = fp4_ops.checkpoints.families.model_class(transformers.AutoConfig.from_pretrained(path))
    model, info = cls.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    return model


def dequantised(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return every 4-bit weight of a model as float32."""
    found = {n: m.dequantize() for n, m in model.named_modules() if isinstance(m, PackedWeight)}
    for name, p in model.named_parameters():
        if isinstance(p, FP4Tensor):
            found[name] = p.dequantize(torch.float32)
    return found


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits


def assert_holds(model: torch.nn.Module, values: dict[str, Tensor]) -> None:
    got = dequantised(model)
    assert got.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(got[name].cpu(), value.float()), name


HOW = pytest.mark.parametrize("how", ["load_checkpoint", "from_pretrained"])


def e4m3(*shape: int) -> Tensor:
    return torch.randn(shape).mul(40).clamp(-448, 448).to(torch.float8_e4m3fn)


def eight_bits(kind: str, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales, and the float64 values that they represent."""
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


def write_mixed(path: Path, maker: str, kind: str) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """Write a folder with nvfp4 experts and attention in 8 bits. Return the model, the values in 4 bits, and
    the values in 8 bits."""
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
    """Write experts one by one. Return the tensors by name, and the values [E, N, K] that the model's
    parameters then have.

    owners: maps a module's name to the name of its experts in the files, if it differs.
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


def family(name: str) -> Any:
    changes = {"num_key_value_heads": 4} if name in ("axk2", "deepseek_v32", "glm_moe_dsa") else {}
    model = families.tiny(name, **changes).to(BF16)
    model.config.dtype = BF16
    return model


def family_folder(path: Path, model: Any, dialect: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Write the family's own checkpoint, with experts one by one, like llm-compressor and ModelOpt.

    Returns the values of its 4-bit parameters, and the biases of experts.
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
    """Return values [E, N, K] in the order of the parameter of that name."""
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
    """Return logits, or hidden states if the model has no head. For longcat_flash, whose tiny config has no
    working attention, return the output of its last block of experts."""
    if type(model).__name__.startswith("Longcat"):
        x = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(len(ids))) * 3
        return families.expert_block(model)(x.to(model.dtype))
    out = model(input_ids=ids, use_cache=False)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def assert_computes(model: Any, original: Any, values: dict[str, Tensor]) -> None:
    """Check that the model computes the same as the original with these values as weights."""
    twin = original.float()
    with torch.no_grad():
        for name, value in values.items():
            twin.get_parameter(name)[: len(value)] = in_model_order(twin, name, value).float()
    ids = tokens(4, 7)
    pairs = zip(outputs(model, ids).float(), outputs(twin, ids).float(), strict=True)
    errors = sorted(((got - want).norm() / want.norm()).item() for got, want in pairs)
    # Experts with their own code take inputs in bfloat16. In one of the four sequences, this may change the
    # choice of the next router between two nearly equal scores.
    near = 4e-3 if model.hf_quantizer.report.own_code else 1e-3
    assert all(error < near for error in errors[:3]) and errors[-1] < 1, errors


STACKED = ("mixtral", "qwen3_vl_moe_text", "granitemoe", "minimax_m2", "gpt_oss")
OWN_CODE = ("llama4_text", "muse_spark_text", "longcat_flash")
OTHERS = (
    "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "ernie4_5_moe", "axk2",
    "hunyuan_v1_moe", "dots1", "flex_olmo", "exaone_moe", "solar_open", "afmoe", "mimo_v2_flash", "hy_v3",
    "axk1", "kimi_linear", "laguna", "qwen3_5_moe_text", "qwen3_next", "lfm2_moe", "jamba", "phimoe",
    "granitemoeshared", "minimax", "granitemoehybrid", "mistral4", "deepseek_v32",
    "glm4_moe_lite", "cohere2_moe", "mellum", "bailing_hybrid", "kolibri1", "openai_privacy_filter",
    "glm_moe_dsa", "qwen4_exp_text",
)  # fmt: skip


def write_fp8(path: Path, kind: str) -> tuple[Any, dict[str, Tensor]]:
    """Write a model with attention and experts in 8 bits. Return it, and float64 values by name."""
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
