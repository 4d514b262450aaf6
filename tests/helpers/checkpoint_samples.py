"""Writes 4-bit folders in each dialect with random contents, and says what their tensors mean.

The values are computed here independently, in float64 and from the dialects' own documentation. So a mistake
in the tables of fp4_ops.checkpoints is found.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from moe_models import config
from safetensors.torch import save_file
from torch import Tensor, nn

import fp4_ops  # noqa: F401
from fp4_ops.experts.find import is_experts

transformers = __import__("pytest").importorskip("transformers")

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)

MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
STORED = {
    "modelopt-nvfp4": MODELOPT,
    "nvfp4-pack-quantized": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    "mxfp4-pack-quantized": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    "gpt-oss-mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}
PER_EXPERT = [d for d in STORED if d != "gpt-oss-mxfp4"]


def code_values(packed: Tensor) -> Tensor:
    """Convert uint8 [..., K/2] to float64 [..., K]. The lower k is in the low nibble, and bit 3 is the
    sign."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    return torch.where(codes >= 8, -E2M1[codes & 7], E2M1[codes & 7])


def e8m0_values(raw: Tensor) -> Tensor:
    return torch.exp2(raw.double() - 127)


def times_blocks(values: Tensor, scales: Tensor, block: int) -> Tensor:
    return values * scales.repeat_interleave(block, -1)[..., : values.shape[-1]]


def random_codes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def random_e4m3(*shape: int) -> Tensor:
    return (torch.rand(shape) * 64 + 8).to(torch.float8_e4m3fn)


def modelopt(name: str, n: int, k: int, factor: float) -> tuple[dict[str, Tensor], Tensor]:
    packed, scale, second = random_codes(n, k // 2), random_e4m3(n, k // 16), torch.tensor(factor)
    tensors = {
        f"{name}.weight": packed,
        f"{name}.weight_scale": scale,
        f"{name}.weight_scale_2": second,
        f"{name}.input_scale": torch.tensor(0.5),
    }
    return tensors, times_blocks(code_values(packed), scale.double(), 16) * second.double()


def nvfp4_pack(name: str, n: int, k: int, factor: float) -> tuple[dict[str, Tensor], Tensor]:
    packed, scale = random_codes(n, k // 2), random_e4m3(n, k // 16)
    divisor = 1.0 / torch.tensor([factor])
    tensors = {
        f"{name}.weight_packed": packed,
        f"{name}.weight_scale": scale,
        f"{name}.weight_global_scale": divisor,
    }
    # The dialect divides by this number; the operators multiply by its reciprocal, a float32.
    return tensors, times_blocks(code_values(packed), scale.double(), 16) * (1.0 / divisor).double()


def mxfp4_pack(name: str, n: int, k: int, factor: float) -> tuple[dict[str, Tensor], Tensor]:
    packed = random_codes(n, k // 2)
    scale = torch.randint(117, 126, (n, k // 32), dtype=torch.uint8)
    tensors = {f"{name}.weight_packed": packed, f"{name}.weight_scale": scale}
    return tensors, times_blocks(code_values(packed), e8m0_values(scale), 32)


WRITERS: dict[str, Callable[..., tuple[dict[str, Tensor], Tensor]]] = {
    "modelopt-nvfp4": modelopt,
    "nvfp4-pack-quantized": nvfp4_pack,
    "mxfp4-pack-quantized": mxfp4_pack,
}


def tiny(family: str = "qwen3_moe", inner: int = 96) -> Any:
    """Make a model whose sizes are multiples of the blocks of both formats."""
    c = config(family)
    c.dtype = torch.bfloat16
    for size in ("moe_intermediate_size", "intermediate_size"):
        if hasattr(c, size):
            setattr(c, size, inner)
    return transformers.AutoModelForCausalLM.from_config(c, dtype=torch.bfloat16).eval()


def experts_of(model: nn.Module) -> dict[str, Any]:
    return {name: m for name, m in model.named_modules() if is_experts(m)}


def write_folder(
    path: Path,
    model: Any,
    dialect: str,
    *,
    factors: Callable[[str, int], float] = lambda half, expert: 2.0**-8 * (1 + expert / 7),
    linears: tuple[str, ...] = (),
    shards: int = 1,
) -> dict[str, Tensor]:
    """Write a folder of `model` with random 4-bit experts. Return the value of each 4-bit parameter.

    factors: the global scale of an expert's "gate", "up" or "down". linears: layers that are in 4 bits too.
    """
    path.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(path)
    values: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    if dialect == "gpt-oss-mxfp4":
        for name, module in experts_of(model).items():
            for attribute in ("gate_up_proj", "down_proj"):
                e, k, n = getattr(module, attribute).shape
                blocks = random_codes(e, n, k // 32, 16)
                scales = torch.randint(117, 126, (e, n, k // 32), dtype=torch.uint8)
                tensors |= {f"{name}.{attribute}_blocks": blocks, f"{name}.{attribute}_scales": scales}
                values[f"{name}.{attribute}"] = times_blocks(
                    code_values(blocks.flatten(-2)), e8m0_values(scales), 32
                )
    else:
        write = WRITERS[dialect]
        for name, module in experts_of(model).items():
            rows: dict[str, list[Tensor]] = {"gate_up_proj": [], "down_proj": []}
            e, h, i = module.down_proj.shape
            for expert in range(e):
                for half, (n, k) in {"gate": (i, h), "up": (i, h), "down": (h, i)}.items():
                    new, value = write(f"{name}.{expert}.{half}_proj", n, k, factors(half, expert))
                    tensors |= new
                    rows["down_proj" if half == "down" else "gate_up_proj"].append(value)
            values[f"{name}.gate_up_proj"] = torch.stack(
                [torch.cat(pair) for pair in zip(rows["gate_up_proj"][::2], rows["gate_up_proj"][1::2])]
            )
            values[f"{name}.down_proj"] = torch.stack(rows["down_proj"])
        for name in linears:
            new, values[f"{name}.weight"] = write(name, *model.get_submodule(name).weight.shape, 2.0**-9)
            tensors |= new
    rest = {n: p.detach().clone() for n, p in model.named_parameters() if n not in values}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    rest |= {n: t.clone() for n, t in model.state_dict().items() if n not in parameters}  # buffers
    save_tensors(path, tensors | rest, shards)
    edit_json(path / "config.json", lambda c: c.update(quantization_config=STORED[dialect]))
    return values


def save_tensors(path: Path, tensors: dict[str, Tensor], shards: int = 1) -> None:
    """Write one model.safetensors, or several files and an index."""
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {n: tensors[n] for n in names[i * len(names) // shards : (i + 1) * len(names) // shards]}
        save_file(part, path / file)
        weight_map.update(dict.fromkeys(part, file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def edit_json(file: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(file.read_text())
    edit(value)
    file.write_text(json.dumps(value))
