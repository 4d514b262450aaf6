"""Describes llama.cpp's architectures: transformers' names of their tensors, and the config that follows from
their metadata.

The names are the same as in the family's own folders, with one matrix for each expert. So transformers' rules
for the family find their places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from ..files import DAMAGED, CheckpointError
from .reader import GGUF, shape_of

Values = dict[str, Any]

OTHER_CONFIG = (
    "The config is not that of this file: transformers leaves out sizes when it reads a file's metadata. "
    "Give from_pretrained config=gguf_config(GGUF.open(path)), both of fp4_ops.checkpoints.gguf, or use "
    "fp4_ops.load_checkpoint"
)
"""Advice if the model has other sizes than the GGUF file."""

WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Modules outside of layers."""

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_EXPERTS = {
    "gate": "mlp.experts.{}.gate_proj", "up": "mlp.experts.{}.up_proj", "down": "mlp.experts.{}.down_proj",
}  # fmt: skip


def _shared(place: str) -> dict[str, str]:
    return {f"ffn_{m}_shexp": f"mlp.{place}.{m}_proj" for m in ("gate", "up", "down")}


_MLA = {
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}  # fmt: skip

_COMMON = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_used_count": "num_experts_per_tok",
}  # fmt: skip
"""Maps a key of the metadata to the key of the config that has the same value."""
_GROUPS = {
    "leading_dense_block_count": "first_k_dense_replace", "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob", "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """The names of an architecture's tensors, and its config."""

    model_type: str
    config: dict[str, str]
    """Keys of the config by keys of the metadata, in addition to those that all architectures have.
    """
    experts_key: str
    """The config's key for the number of experts."""
    names: dict[str, str] = field(default_factory=dict)
    """transformers' name of a layer's module by ggml's name, in addition to the names that all architectures
    have.
    """
    whole_names: dict[str, str] = field(default_factory=dict)
    """The same for tensors whose suffix differs, too."""
    experts: dict[str, str] = field(default_factory=lambda: _EXPERTS)
    permuted: bool = False
    """True if rows of q and k have the order of llama.cpp's own rope."""
    more: Callable[[GGUF], Values] = lambda _: {}
    """Returns further keys of the config and their values."""

    @property
    def layer_names(self) -> dict[str, str]:
        return {**_LAYER, **self.names}


def _mixtral(file: GGUF) -> Values:
    return {"head_dim": file.get("attention.key_length", file.get("rope.dimension_count"))}


def _qwen2(file: GGUF) -> Values:
    found = {
        "moe_intermediate_size": _width(file, "ffn_down_exps"), "norm_topk_prob": False,
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
    }  # fmt: skip
    if "blk.0.ffn_down_shexp.weight" in file.tensors:
        found["shared_expert_intermediate_size"] = _width(file, "ffn_down_shexp")
    return found


def _qwen3(file: GGUF) -> Values:
    return {"moe_intermediate_size": _width(file, "ffn_down_exps"), "norm_topk_prob": True}


def _gpt_oss(file: GGUF) -> Values:
    found: Values = {"intermediate_size": _width(file, "ffn_down_exps")}
    if file.get("rope.scaling.type") == "yarn":
        found["rope_parameters"] = {**_yarn(file), "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return found


def _deepseek(file: GGUF) -> Values:
    sigmoid = file.get("expert_gating_func", 1) == 2
    rotated, heads = file.get("rope.dimension_count"), file.get("attention.head_count")
    key = file.get("attention.key_length_mla", file.get("attention.key_length"))
    groups = file.get("expert_group_count", 1)
    found = {
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "num_key_value_heads": heads, "qk_rope_head_dim": rotated, "qk_nope_head_dim": key - rotated,
        "v_head_dim": file.get("attention.value_length_mla", file.get("attention.value_length")),
        "q_lora_rank": file.get("attention.q_lora_rank"),
        "moe_intermediate_size": _width(file, "ffn_down_exps"), "n_group": groups,
        "topk_group": file.get("expert_group_used_count", 1),
        "norm_topk_prob": file.get("expert_weights_norm", False),
    }  # fmt: skip
    if not sigmoid:
        found["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    if file.get("rope.scaling.type") == "yarn":
        # llama.cpp stores 0.1 * mscale_all_dim; the published models have the same mscale
        scale = {}
        if (stored := file.get("rope.scaling.yarn_log_multiplier")) is not None:
            scale = dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * stored, 6))
        found["rope_parameters"] = {**_yarn(file), "beta_fast": 32, "beta_slow": 1, **scale}
    return found


def _glm4(file: GGUF) -> Values:
    head, rotated = file.get("attention.key_length"), file.get("rope.dimension_count")
    return {
        "moe_intermediate_size": _width(file, "ffn_down_exps"), "n_group": 1, "topk_group": 1,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "rope_parameters": {"partial_rotary_factor": rotated / head} if rotated and head else {},
    }  # fmt: skip


ARCHITECTURES = {
    "llama": Architecture(
        "mixtral", {}, "num_local_experts", {"ffn_gate_inp": "block_sparse_moe.gate"},
        experts={
            m: f"block_sparse_moe.experts.{{}}.{w}" for m, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
        permuted=True, more=_mixtral,
    ),
    "qwen2moe": Architecture(
        "qwen2_moe", {}, "num_experts",
        {**_shared("shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}, more=_qwen2,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe", {"attention.key_length": "head_dim"}, "num_experts", more=_qwen3,
    ),
    "gpt-oss": Architecture(
        "gpt_oss", {"attention.key_length": "head_dim", "attention.sliding_window": "sliding_window"},
        "num_local_experts", {"ffn_gate_inp": "mlp.router"}, {"attn_sinks.weight": "self_attn.sinks"},
        more=_gpt_oss,
    ),
    "deepseek2": Architecture(
        "deepseek_v3", {**_GROUPS, "attention.kv_lora_rank": "kv_lora_rank"}, "n_routed_experts",
        {**_shared("shared_experts"), **_MLA}, {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        more=_deepseek,
    ),
    "glm4moe": Architecture(
        "glm4_moe", {**_GROUPS, "attention.key_length": "head_dim"}, "n_routed_experts",
        _shared("shared_experts"), {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}, more=_glm4,
    ),
}  # fmt: skip
"""Architectures by the value of general.architecture."""


def architecture_of(file: GGUF) -> Architecture:
    """Returns the file's architecture. Raises CheckpointError for an unknown one, and for a model without
    experts.
    """
    name = file.architecture
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"fp4: {file.path} has general.architecture {name!r}; those that are read are: "
            f"{', '.join(ARCHITECTURES)}. Give the model's folder of safetensors files"
        )
    if not file.get("expert_count"):
        raise CheckpointError(
            f"fp4: {file.path} has no experts ({name}.expert_count is {file.get('expert_count')}). Load it "
            "with transformers: from_pretrained(folder, gguf_file=...)"
        )
    return ARCHITECTURES[name]


def layers_of(file: GGUF) -> int:
    """Returns the number of decoder layers. Layers that predict further tokens come after them."""
    return int(_needed(file, "block_count")) - int(file.get("nextn_predict_layers", 0))


def config_of(file: GGUF) -> PretrainedConfig:
    """Returns transformers' config of a file, from its metadata and the shapes of its tensors."""
    form = architecture_of(file)
    found: Values = {"model_type": form.model_type, "num_hidden_layers": layers_of(file)}
    for key, name in {**_COMMON, **form.config}.items():
        if (value := file.get(key)) is not None:
            found[name] = value
    found[form.experts_key] = file.get("expert_count")
    found["vocab_size"] = _shape(file, "token_embd.weight")[0]
    found["tie_word_embeddings"] = "output.weight" not in file.tensors
    for token in ("bos", "eos"):
        found[f"{token}_token_id"] = file.metadata.get(f"tokenizer.ggml.{token}_token_id")
    found["pad_token_id"] = file.metadata.get("tokenizer.ggml.padding_token_id")
    found |= form.more(file)
    rope = {"rope_type": "default", **found.get("rope_parameters", {})}
    if (base := file.get("rope.freq_base")) is not None:
        rope["rope_theta"] = base
    found["rope_parameters"] = rope
    scaling = file.get("rope.scaling.type", "none")
    if scaling != "none" and rope["rope_type"] == "default":
        raise CheckpointError(
            f"fp4: {file.path} has rope.scaling.type {scaling!r}, which is not read for {file.architecture}. "
            "Put the model's config.json beside the file, or give load_checkpoint a config"
        )
    return AutoConfig.for_model(found.pop("model_type"), **found)


def _yarn(file: GGUF) -> Values:
    return {
        "rope_type": "yarn", "factor": _needed(file, "rope.scaling.factor"),
        "original_max_position_embeddings": _needed(file, "rope.scaling.original_context_length"),
    }  # fmt: skip


def _needed(file: GGUF, key: str) -> Any:
    value = file.get(key)
    if value is None:
        raise CheckpointError(f"fp4: {file.path} has no {file.architecture}.{key} in its metadata. {DAMAGED}")
    return value


def _shape(file: GGUF, name: str) -> tuple[int, ...]:
    if name not in file.tensors:
        raise CheckpointError(f"fp4: {file.path} has no tensor {name}. {DAMAGED}")
    return shape_of(file.tensors[name])


def _width(file: GGUF, name: str) -> int:
    """Returns the number of inputs of the first layer's matrix of that name."""
    layer = next((i for i in range(layers_of(file)) if f"blk.{i}.{name}.weight" in file.tensors), 0)
    return _shape(file, f"blk.{layer}.{name}.weight")[-1]
