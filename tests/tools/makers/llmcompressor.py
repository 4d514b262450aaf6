"""llm-compressor, which stores with compressed-tensors. It takes experts out of their stacks first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from cases import Scheme, Tool

FAMILIES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe", "granitemoeshared", "ernie4_5_moe",
    "glm4_moe", "glm4_moe_lite", "hunyuan_v1_moe", "minimax_m2", "dots1", "flex_olmo", "exaone_moe",
    "solar_open", "afmoe", "cohere2_moe", "mimo_v2_flash", "hy_v3", "axk1",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "granitemoehybrid",
    "gpt_oss", "jamba", "kimi_linear", "laguna", "lfm2_moe",
    "minimax", "minimax_m3_vl_text", "mistral4", "nemotron_h", "qwen3_next",
    "qwen3_5_moe_text", "qwen3_vl_moe_text",
)  # fmt: skip
SOME = ("mixtral", "qwen3_moe", "olmoe", "minimax_m2", "qwen3_vl_moe_text", "granitemoe")

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
FP8_BLOCK = {
    "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "symmetric": True
}  # fmt: skip
FP8_TOKENS = {
    "num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True, "observer": None
}  # fmt: skip

CALIBRATED = ("NVFP4", "NVFP4 experts, FP8 attention")
SCHEMES = {
    "NVFP4A16": Scheme(FAMILIES),
    "NVFP4": Scheme(SOME, draw=2),
    "MXFP4": Scheme(SOME, draw=2),
    "MXFP4A16": Scheme(SOME, draw=2),
    "W4A16, groups of 32": Scheme(SOME, draw=2),
    "W4A16_ASYM, groups of 32": Scheme(SOME, draw=2, refused="asymmetric int4", requantize="nvfp4"),
    "W4AFP8, groups of 32": Scheme(SOME, draw=2),
    "NVFP4 experts, FP8 attention": Scheme(SOME, draw=2),
    "NVFP4 experts, FP8_BLOCK attention": Scheme(SOME, draw=2),
    "MXFP4 experts, NVFP4 attention": Scheme(SOME, draw=2),
    "FP8_DYNAMIC": Scheme(SOME, draw=1, refused="weights in fp8 and none in 4 bits"),
    **{f"GPTQ, actorder {order}": Scheme(SOME, draw=1, far=0.5) for order in ("weight", "static")},
}


def recipe(scheme: str) -> Any:
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    ignore = ["lm_head", r"re:.*gate$", r"re:.*router.*"]
    experts, attention = [r"re:.*experts\.\d+\..*"], [r"re:.*self_attn\.[qkvo]_proj$"]

    def group(weights: Any, targets: list[str] | None = None, **more: Any) -> dict[str, Any]:
        return {"targets": targets or ["Linear"], "weights": weights, **more}

    def preset(name: str, targets: list[str]) -> Any:
        return preset_name_to_scheme(name, targets)

    groups: dict[str, Any]
    if scheme.startswith("GPTQ"):
        weights = {**INT4, "actorder": scheme.rpartition(" ")[2]}
        return GPTQModifier(config_groups={"group_0": group(weights)}, ignore=ignore)
    if scheme == "W4A16, groups of 32":
        groups = {"group_0": group(INT4)}
    elif scheme == "W4A16_ASYM, groups of 32":
        groups = {"group_0": group({**INT4, "symmetric": False})}
    elif scheme == "W4AFP8, groups of 32":
        groups = {"group_0": group(INT4, input_activations=FP8_TOKENS)}
    elif scheme == "NVFP4 experts, FP8 attention":
        groups = {"group_0": preset("NVFP4", experts), "group_1": preset("FP8_DYNAMIC", attention)}
    elif scheme == "NVFP4 experts, FP8_BLOCK attention":
        groups = {"group_0": preset("NVFP4A16", experts), "group_1": preset("FP8_BLOCK", attention)}
    elif scheme == "MXFP4 experts, NVFP4 attention":
        groups = {"group_0": preset("MXFP4A16", experts), "group_1": preset("NVFP4A16", attention)}
    else:
        return QuantizationModifier(targets="Linear", scheme=scheme, ignore=ignore)
    return QuantizationModifier(config_groups=groups, ignore=ignore)


def write(model: Any, scheme: str, source: Path, out: Path) -> None:
    from llmcompressor import oneshot
    from torch.utils.data import DataLoader

    options: dict[str, Any] = {"pipeline": "datafree"}
    if scheme in CALIBRATED or scheme.startswith("GPTQ"):
        samples = [
            {"input_ids": torch.randint(0, 128, (32,)), "attention_mask": torch.ones(32, dtype=torch.long)}
            for _ in range(16)
        ]
        options = {
            "dataset": DataLoader(samples, batch_size=4), "num_calibration_samples": 16, "max_seq_length": 32,
            "pipeline": "basic",
        }  # fmt: skip
    oneshot(model=model, recipe=recipe(scheme), processor=object(), **options)
    model.save_pretrained(out, save_compressed=True)


def second_opinion(tensors: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """Decodes weights with compressed-tensors, if all weights are stored in one way."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    schemes = list(QuantizationConfig.model_validate(stored).config_groups.values())
    if len(schemes) > 1 or "pack-quantized" not in stored["format"]:
        return {}
    compressor, found = BaseCompressor.get_value_from_registry(stored["format"]), {}
    for base in (name.removesuffix("_packed") for name in tensors if name.endswith(".weight_packed")):
        prefix = base.removesuffix("weight")
        own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(base)}
        found[base] = compressor.decompress(own, schemes[0])["weight"]
    return found


TOOL = Tool(
    "llm-compressor",
    (
        "llmcompressor==0.14.0.1", "compressed-tensors==0.19.0", "auto-round==0.15.1", "datasets==5.2.0",
        "nvidia-ml-py==13.615.71", "pillow==13.0.0", "requests==2.34.2", "transformers==5.17.0",
        "certifi==2026.10.19.post1", "charset-normalizer==3.5.3", "dill==0.4.1",
        "huggingface-hub==1.33.0", "multiprocess==0.70.19", "pyarrow==26.0.1", "urllib3==2.8.0",
        "pandas==3.1.1", "py-cpuinfo==9.0.0", "xxhash==4.1.0", "httpx==0.28.1", "httpcore==1.0.9",
        "python-dateutil==4.0.0", "tzdata==2026.6", "loguru==0.7.3", "h11==0.16.0", "anyio==4.16.0",
        "sniffio==1.3.1", "idna==3.20",
    ),
    SCHEMES,
    write,
    second_opinion=second_opinion,
)  # fmt: skip
