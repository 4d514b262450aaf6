"""Tiny language models of transformers' Mixture-of-Experts families, as cases of a group."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from families import _SIZES
from groups import Group
from torch import nn

CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_key_value_heads": 4, "topk_method": "greedy", "n_group": 1},
    "deepseek_v3": {"num_key_value_heads": 4},
    "dbrx": {
        "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "doge": {"is_moe": True, "num_experts": 16},
    "granitemoehybrid": {"layer_types": ["attention", "attention"]},
    "jamba": {
        "expert_layer_period": 1, "expert_layer_offset": 0, "attn_layer_period": 1, "attn_layer_offset": 0,
        "use_mamba_kernels": False,
    },
    "jetmoe": {"kv_channels": 16},
    # transformers 4.51 creates a cache inside the model. Dynamo cannot trace this with any backend.
    "llama4_text": {"interleave_moe_layer_step": 1, "no_rope_layers": [1, 1], "use_cache": False},
    "longcat_flash": {
        "zero_expert_num": 2, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "num_layers": 2,
        "moe_topk": 3, "head_dim": 8, "num_key_value_heads": 4,
    },
    "minimax": {"layer_types": ["full_attention", "full_attention"]},
    "nllb-moe": {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "expert_capacity": 8,
        "encoder_sparse_step": 1, "decoder_sparse_step": 1,
    },
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "switch_transformers": {
        "d_model": 64, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
        "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2, "expert_capacity": 8,
    },
    **{
        family: {"rope_scaling": {"rope_type": "default", "type": "default", "mrope_section": section}}
        for family, section in (("glm4v_moe_text", [1, 1, 2]), ("qwen3_vl_moe_text", [2, 3, 3]))
    },
}  # fmt: skip
"""Settings of a family's config beyond the sizes that it has names for."""


class _Logits(nn.Module):
    """A model as a function of only token ids."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        both = {"decoder_input_ids": ids} if self.model.config.is_encoder_decoder else {}
        out = self.model(input_ids=ids, **both)
        return out.logits if "logits" in out else out.last_hidden_state


def tiny(family: str, **changes: Any) -> nn.Module:
    import transformers

    cls = transformers.CONFIG_MAPPING[family]
    names = {*inspect.signature(cls.__init__).parameters, *getattr(cls, "__annotations__", {}), *dir(cls)}
    sizes = {k: v for k, v in _SIZES.items() if k in names}
    config = cls(**{**sizes, **CHANGES.get(family, {}), **changes})
    autos = transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM, transformers.AutoModel
    model = next(auto for auto in autos if type(config) in auto._model_mapping)
    return _Logits(model.from_config(config))


_EXPERTS = r"experts\.|block_sparse_moe\.(in|out)put_linear|mlp\.(in|out)put_linear"
_TRANSPOSED = {
    **dict.fromkeys(("gpt_oss", "llama4_text", "qwen3_vl_moe_text"), r"experts\..*_proj$"),
    "aria_text": r"experts\.fc", "dbrx": r"experts\.mlp\.w2$",
}  # fmt: skip


def add(group: Group, *families: str, **how: Any) -> None:
    for family in families:
        settings = {"experts": _EXPERTS, "but": r"shared|bias", "takes": "ids", **how}
        if family == "jetmoe":  # its attention has experts, too: single products, which stay as they are
            settings["but"] = "self_attention|bias"
        if family in _TRANSPOSED:
            settings["transposed"] = _TRANSPOSED[family]
        group.case("transformers", family, **settings)(lambda family=family: tiny(family))
