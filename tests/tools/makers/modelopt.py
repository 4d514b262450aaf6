"""NVIDIA's ModelOpt. It quantises transformers' experts, and splits their stacks when it exports."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from cases import Scheme, Tool

FAMILIES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe", "granitemoeshared", "ernie4_5_moe",
    "glm4_moe", "glm4_moe_lite", "hunyuan_v1_moe", "minimax_m2", "dots1", "flex_olmo", "exaone_moe",
    "solar_open", "afmoe", "cohere2_moe", "mimo_v2_flash", "hy_v3", "hy_v4", "axk1", "axk2", "bailing_hybrid",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "granitemoe_swa", "granitemoehybrid",
    "gpt_oss", "inkling_text", "jamba", "kimi_linear", "kolibri1", "laguna", "lfm2_moe", "llama4_text",
    "mellum", "minimax", "minimax_m3_vl_text", "mistral4", "mistral_large4_text", "muse_spark_text",
    "nemotron_h", "deepseek_v4", "qwen3_next", "qwen3_5_moe_text", "qwen4_exp_text", "qwen3_vl_moe_text",
)  # fmt: skip
SOME = (
    "mixtral",
    "qwen3_moe",
    "glm4_moe",
    "gpt_oss",
    "llama4_text",
    "nemotron_h",
    "minimax_m2",
    "deepseek_v3",
)

ALONG_N = tuple((family, "blocks along N") for family in ("gpt_oss", "llama4_text"))
"""ModelOpt leaves these families' experts [E, K, N] as they are, and their blocks then lie along N."""
LONG_K = tuple(family for family in SOME if family != "deepseek_v3")
"""Families whose sizes are multiples of 32."""

CONFIGS = {
    "NVFP4": "NVFP4_DEFAULT_CFG",
    "NVFP4, FP8 kv cache": "NVFP4_DEFAULT_CFG",
    "NVFP4, experts only": "NVFP4_EXPERTS_ONLY_CFG",
    "NVFP4, MLP only": "NVFP4_MLP_ONLY_CFG",
    "W4A16_NVFP4": "W4A16_NVFP4_CFG",
    "W4A8_NVFP4_FP8": "W4A8_NVFP4_FP8_CFG",
    "MXFP4": "MXFP4_DEFAULT_CFG",
    "W4A8_MXFP4_FP8": "W4A8_MXFP4_FP8_CFG",
    "NVFP4 experts, FP8 attention": "NVFP4_DEFAULT_CFG",
    "NVFP4 experts, FP8_PB_WO attention": "NVFP4_DEFAULT_CFG",
    "NVFP4 experts, MXFP8 attention": "NVFP4_DEFAULT_CFG",
    "FP8": "FP8_DEFAULT_CFG",
}
SCHEMES = {
    "NVFP4": Scheme(FAMILIES, but=(("hy_v4", "missing keys: model.hc_head.hc_base"),)),
    **{name: Scheme(SOME, draw=2) for name in CONFIGS if name.startswith(("NVFP4,", "NVFP4 ", "W4A16"))},
    **{name: Scheme(LONG_K, draw=2, but=ALONG_N) for name in CONFIGS if "MXFP4" in name or "W4A8" in name},
    "NVFP4 experts, MXFP8 attention": Scheme(LONG_K, draw=2),
    "FP8": Scheme(SOME, draw=1, refused="weights in fp8 and none in 4 bits"),
}
"""Without a GPU it cannot do AWQ, SVDQuant and AutoQuantize in NVFP4, nor four-over-six."""

ATTENTION = {
    "FP8 attention": {"num_bits": (4, 3), "axis": None},
    "FP8_PB_WO attention": {"num_bits": (4, 3), "block_sizes": {-1: 128, -2: 128}},
    "MXFP8 attention": {
        "num_bits": (4, 3), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}
    },
}  # fmt: skip


def write(model: Any, scheme: str, source: Path, out: Path) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    ids = torch.randint(0, 128, (2, 16))
    config = copy.deepcopy(getattr(mtq, CONFIGS[scheme]))
    if own := ATTENTION.get(scheme.rpartition(", ")[2]):
        inputs = {"enable": False} if "PB_WO" in scheme else {"cfg": own}
        config["quant_cfg"] += [
            {"quantizer_name": "*attn*weight_quantizer", "cfg": own},
            {"quantizer_name": "*attn*input_quantizer", **inputs},
        ]
    if "kv cache" in scheme:
        config["quant_cfg"] += mtq.FP8_KV_CFG["quant_cfg"]
    model = mtq.quantize(model, config, lambda m: m(ids, use_cache=False))
    export_hf_checkpoint(model, export_dir=str(out))


def second_opinion(tensors: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    found = {}
    for name, packed in tensors.items():
        second = tensors.get(name + "_scale_2")
        if name.endswith(".weight") and second is not None:
            block = 2 * packed.shape[1] // tensors[name + "_scale"].shape[1]
            shape = torch.Size((packed.shape[0], 2 * packed.shape[1]))
            found[name] = NVFP4QTensor(shape, torch.float32, packed).dequantize(
                torch.float32, scale=tensors[name + "_scale"], double_scale=second, block_sizes={-1: block}
            )
    return found


TOOL = Tool(
    "ModelOpt",
    (
        "nvidia-modelopt==0.47.0", "nvidia-ml-py==13.615.71", "omegaconf==2.4.0", "PuLP==3.3.2",
        "scipy==1.17.1", "requests==2.34.2", "certifi==2026.10.19.post1", "charset-normalizer==3.5.3",
        "urllib3==2.8.0",
    ),
    SCHEMES,
    write,
    second_opinion=second_opinion,
)  # fmt: skip
