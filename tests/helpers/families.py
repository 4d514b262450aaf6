"""Makes tiny models of transformers' Mixture-of-Experts families with the families' own config classes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

# Each config gets the sizes for which it has names.
_SIZES = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "intermediate_size": 64,
    "moe_intermediate_size": 32, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_k": 2, "moe_num_experts": 8, "moe_topk": 2, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "shared_expert_intermediate_size": 32,
    "num_dense_layers": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 16,
    "decoder_sparse_step": 1, "moe_layer_start_index": 1, "moe_num_shared_experts": 1,
    "num_shared_experts": 1,
    "shared_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "mamba_n_heads": 8,
    "mamba_d_head": 16, "mamba_d_state": 8, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8,
    "n_groups": 2, "mamba_n_groups": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "attention_chunk_size": 16, "num_mtp_layers": 0,
}  # fmt: skip

_NOTHING = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe", "granitemoeshared", "ernie4_5_moe",
    "glm4_moe", "glm4_moe_lite", "hunyuan_v1_moe", "minimax_m2", "dots1", "flex_olmo", "exaone_moe",
    "solar_open", "afmoe", "cohere2_moe", "mimo_v2_flash", "hy_v3", "aria_text", "axk1", "axk2",
    "bailing_hybrid", "deepseek_v32", "glm4v_moe_text", "glm_moe_dsa", "granitemoe_swa", "hy_v4",
    "inkling_text", "inkling2_text", "kimi_linear", "kolibri1", "laguna", "mellum",
    "minimax_m3_vl_text", "mistral4", "mistral_large4_text", "muse_spark_text", "openai_privacy_filter",
    "qwen3_5_moe_text", "qwen3_vl_moe_text", "qwen4_exp_text", "jetmoe",
)  # fmt: skip

# Maps a family, or a variant of it after a comma, to the settings that its tiny config needs in addition to
# the sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    **{family: {} for family in _NOTHING},
    "deepseek_v2": {"num_key_value_heads": 4, "topk_method": "greedy", "n_group": 1},
    "deepseek_v3": {"num_key_value_heads": 4},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "granitemoehybrid": {"layer_types": ["attention", "attention"]},
    "jamba": {
        "expert_layer_period": 1, "expert_layer_offset": 0, "attn_layer_period": 1, "attn_layer_offset": 0,
        "use_mamba_kernels": False,
    },
    "lfm2_moe": {"layer_types": ["full_attention", "full_attention"]},
    "llama4_text": {"interleave_moe_layer_step": 1, "no_rope_layers": [1, 1]},
    "minimax": {"layer_types": ["full_attention", "full_attention"]},
    "nemotron_h": {"layers_block_type": ["attention", "moe"]},
    "nemotron_h, latent": {"layers_block_type": ["attention", "moe"], "moe_latent_size": 32},
    "deepseek_v4": {"mlp_layer_types": ["moe", "moe"]},
    "dbrx": {
        "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2, "hidden_size": 64},
    },
    "nllb-moe": {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "expert_capacity": 8,
        "encoder_sparse_step": 1, "decoder_sparse_step": 1,
    },
    "switch_transformers": {
        "d_model": 64, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
        "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2, "expert_capacity": 8,
    },
    "longcat_flash": {"zero_expert_num": 2},
    "qwen3_next": {"layer_types": ["full_attention", "full_attention"]},
}  # fmt: skip
TRANSPOSED = ("gpt_oss", "llama4_text", "aria_text", "openai_privacy_filter")
LOOPS = {
    "dbrx": "DbrxFFN", "jetmoe": "JetMoeMoE", "longcat_flash": "LongcatFlashMoE",
    "nllb-moe": "NllbMoeSparseMLP", "switch_transformers": "SwitchTransformersSparseMLP",
}  # fmt: skip
"""Families whose experts are not in transformers' registry. They have their own loop. Each has the class of
its block."""


def tiny(family: str, implementation: str = "", **changes: Any) -> nn.Module:
    """Make a float32 model with random weights and biases. changes: changes of its config."""
    import pytest
    import transformers

    kind = family.partition(",")[0]
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    cls = transformers.CONFIG_MAPPING[kind]
    names = {*inspect.signature(cls.__init__).parameters, *getattr(cls, "__annotations__", {}), *dir(cls)}
    sizes = {k: v for k, v in _SIZES.items() if k in names}
    config = cls(**{**sizes, **FAMILIES[family], **changes})
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    except ValueError:  # a family without such a head
        model = transformers.AutoModel.from_config(config, dtype=torch.float32).eval()
    if implementation:
        model.set_experts_implementation(implementation)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 3 or "bias" in name:
                p.normal_(0, 0.1)
    return model


def expert_block(model: nn.Module) -> nn.Module:
    """Return the module that routes and runs the experts of the last layer with experts."""
    loops = [m for m in model.modules() if type(m).__name__ in LOOPS.values()]
    if loops:
        return loops[-1]
    weights = [name for name, p in model.named_parameters() if p.dim() == 3 and "conv" not in name]
    return model.get_submodule(weights[-1].rsplit(".", 2)[0])
