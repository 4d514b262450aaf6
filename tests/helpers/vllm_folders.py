"""Tiny folders in several 4-bit formats that vLLM's engine can serve, and transformers' answers from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoint_folders import ct_group, eight_bits, per_expert
from checkpoint_samples import WRITERS, edit_json, save_tensors, write_folder
from moe_models import config, transformers
from torch import nn

import fp4_ops
from fp4_ops.checkpoints.convert import quantize_checkpoint

HEAD = 32
"""The smallest head size that vLLM's attention supports on a CPU."""
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 64,
}  # fmt: skip
"""Rotary positions of GPT-OSS. vLLM supports no others for it."""
LAYERS = {"mixed": ("o_proj",), "linears": ("q_proj", "k_proj", "v_proj", "o_proj")}


def model_of(family: str, inner: int = 96, **changes: Any) -> Any:
    """Make a float32 model whose embeddings have size one, so that different prompts have different
    continuations."""
    if family == "glm4_moe":
        c = transformers.Glm4MoeConfig(
            vocab_size=128, hidden_size=128, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, moe_intermediate_size=inner, intermediate_size=96, n_routed_experts=8,
            num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1, first_k_dense_replace=1,
            max_position_embeddings=256, routed_scaling_factor=1.5,
        )  # fmt: skip
    else:
        c = config(family)
        c.hidden_size = 128
    c.head_dim = HEAD
    for size in ("moe_intermediate_size", "intermediate_size"):
        if hasattr(c, size) and family != "glm4_moe":
            setattr(c, size, inner)
    if family == "gpt_oss":
        c.rope_parameters = YARN
    for name, value in changes.items():
        setattr(c, name, value)
    c.dtype = torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_config(c, dtype=torch.bfloat16).eval()
    model.config.architectures = [type(model).__name__]  # without it vLLM makes an embedding model of it
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 3 or "bias" in name:
                p.normal_(0, 0.1)
        nn.init.normal_(model.get_input_embeddings().weight)
    return model


def in_16_bits(path: Path, family: str = "qwen3_moe", **changes: Any) -> None:
    model_of(family, **changes).save_pretrained(path)


def quantised(path: Path, format: str, family: str = "qwen3_moe", **changes: Any) -> None:
    """Write a folder like `python -m fp4_ops quantize`: in compressed-tensors' dialect, or in GPT-OSS's
    own."""
    in_16_bits(path.with_name(path.name + "_16"), family, **changes)
    quantize_checkpoint(path.with_name(path.name + "_16"), path, format, progress=False)


def modelopt(path: Path) -> None:
    """Write experts in ModelOpt's NVFP4. Gates and ups have separate global scales."""
    ratio = {"gate": 1.0, "up": 0.5, "down": 1.0}
    write_folder(
        path,
        model_of("qwen3_moe"),
        "modelopt-nvfp4",
        factors=lambda half, e: 2.0**-11 * ratio[half] * (1 + e),
    )


def linears(path: Path) -> None:
    """Write attention in 4 bits, too. q, k and v have one global scale each, and are one layer in vLLM."""
    model = model_of("qwen3_moe")
    names = tuple(n for n, m in model.named_modules() if n.endswith(LAYERS["linears"]))
    write_folder(path, model, "nvfp4-pack-quantized", factors=lambda half, e: 2.0**-11, linears=names)
    distinct_scales(path, names)


def distinct_scales(path: Path, names: tuple[str, ...]) -> None:
    """Gives each of these layers a global scale of its own."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    for i, name in enumerate(names):
        tensors[f"{name}.weight_global_scale"] = torch.tensor([2.0**10 * (1 + i / 8)])
    save_file(tensors, path / "model.safetensors")


def mixed(path: Path) -> None:
    """Write the experts of layer 0 in nvfp4, o_proj in fp8, and the rest in bf16."""
    model = model_of("qwen3_moe")
    path.mkdir(exist_ok=True)
    model.config.save_pretrained(path)
    tensors = {n: p.detach() for n, p in model.named_parameters()}
    four, _ = per_expert(model, owners=None, write=WRITERS["nvfp4-pack-quantized"])
    for name in [n for n in tensors if "layers.0.mlp.experts" in n]:
        del tensors[name]
    tensors |= {n: t for n, t in four.items() if "layers.0." in n}
    for name, module in model.named_modules():
        if name.endswith(LAYERS["mixed"]):
            codes, scale, _ = eight_bits("rows", *module.weight.shape)
            tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": scale}
    save_tensors(path, tensors)
    groups = {"group_0": ct_group("rows"), "group_1": ct_group("nvfp4")}
    stored = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    edit_json(path / "config.json", lambda c: c.update(quantization_config=stored))


def gptq(path: Path) -> None:
    """Write GPTQ's int4 in groups of 32, symmetric and in order."""
    model = model_of("qwen3_moe")
    path.mkdir(exist_ok=True)
    model.config.save_pretrained(path)

    def write(name: str, n: int, k: int, factor: float) -> Any:
        words = torch.randint(-(2**31), 2**31 - 1, (k // 8, n), dtype=torch.int64).int()
        return {
            f"{name}.qweight": words,
            f"{name}.scales": (torch.rand(k // 32, n) * 0.02 + 0.005).half(),
            f"{name}.qzeros": torch.full((k // 32, n // 8), 0x77777777, dtype=torch.int32),
            f"{name}.g_idx": (torch.arange(k) // 32).int(),
        }, torch.zeros(n, k)

    tensors, _ = per_expert(model, owners=None, write=write)
    tensors |= {n: p.detach() for n, p in model.named_parameters() if p.dim() != 3}
    save_tensors(path, tensors)
    stored = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    edit_json(path / "config.json", lambda c: c.update(quantization_config=stored))


FOLDERS: dict[str, Callable[[Path], None]] = {
    "nvfp4": lambda path: quantised(path, "nvfp4"),
    "mxfp4": lambda path: quantised(path, "mxfp4", "gpt_oss"),
    "int4": lambda path: quantised(path, "int4_g32"),
    "mixed": mixed,
    "bf16": in_16_bits,
    "modelopt": modelopt,
    "linears": linears,
    "gptq": gptq,
    "mxfp4_pack": lambda path: quantised(path, "mxfp4", "mixtral"),
    "shared": lambda path: quantised(path, "nvfp4", "glm4_moe"),
    "gpt_oss_bf16": lambda path: in_16_bits(path, "gpt_oss"),
}
"""Functions that write folders, by name. The first five folders are served."""
ONLINE = ("bf16", "gpt_oss_bf16")
"""Folders that need `--quantization fp4_ops`."""


def reference(name: str, path: Path) -> Any:
    """Load the model in transformers, with the same packed weights."""
    if name not in ONLINE:
        return fp4_ops.load_checkpoint(None, path, dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    fp4_ops.prepare(model, format="nvfp4")
    return model


def answer(model: Any, prompt: list[int], new: int) -> list[int]:
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False}
    ids = torch.tensor([prompt])
    # Pass a mask, because without one `generate` hides a padding token in a prompt.
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), eos_token_id=None, pad_token_id=0, **options
    )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found
