"""The layouts of GPTQ (GPTQModel, AutoGPTQ, AutoRound's auto_gptq, Qwen's) and AWQ (AutoAWQ, auto_awq).

AWQ multiplies a layer's weights by factors, and folds their inverse into the layer before. So the files hold
ordinary weights, without scales for inputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..files import CheckpointError
from .base import Dialect
from .int4 import ASYMMETRIC, OUT_OF_ORDER, of_group
from .keys import ROTATED, ROTATIONS, TUNING, Keys, is_set, other_than
from .words import AWQDialect, GPTQDialect, WordsDialect

GPTQ = GPTQDialect("gptq", "int4", ".qweight", ".scales", unused=(".qzeros", ".g_idx"))
AWQ = AWQDialect("awq", "int4", ".qweight", ".scales", unused=(".qzeros",))
DIALECTS: tuple[Dialect, ...] = (GPTQ, AWQ)

_COMMON = (
    "act_group_aware", "backend", "block_name_to_quantize", "cache_block_outputs", "exllama_config",
    "lm_head", "max_input_length", "meta", "model_file_base_name", "model_name_or_path", "model_seqlen",
    "tokenizer", "modules_in_block_to_quantize", "modules_to_not_convert",
    "module_name_preceding_first_block", "pad_token_id", "use_exllama", "disable_exllama", "use_cuda_fp16",
    *TUNING,
)  # fmt: skip
_REFUSED = {
    **ROTATIONS,
    "rotation": is_set(ROTATED),
    "pack_dtype": other_than("int32", reason="and codes must be packed in int32"),
    "is_marlin_format": is_set("codes in Marlin's order, which is not read"),
}
GPTQ_KEYS = Keys(
    "GPTQ",
    ("quant_method", "bits", "group_size", "sym", "desc_act", "data_type", "checkpoint_format", "format",
     "dynamic"),
    (*_COMMON, "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse", "method",
     "activation", "adapter", "gptaq", "foem", "weight_only"),
    _REFUSED,
)  # fmt: skip
AWQ_KEYS = Keys(
    "AWQ",
    ("quant_method", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "sym",
     "data_type", "dynamic", "format", "checkpoint_format"),
    (*_COMMON, "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "method", "activation", "damp_percent",
     "true_sequential", "desc_act", "apply_clip", "duo_scaling"),
    {**_REFUSED, "pack_method": other_than("reorder", reason="and codes must be in AWQ's order ('reorder')")},
)  # fmt: skip

_GPTQ_VERSIONS = {"gptq": 1, "gptq_v2": 0}
"""The number that was subtracted from the stored zero points, by `checkpoint_format`."""


def claims(config: dict[str, Any], where: str) -> tuple[Dialect, ...] | None:
    method = config.get("quant_method")
    if method == "gptq":
        GPTQ_KEYS.check(config, where)
        version = config.get("checkpoint_format") or config.get("format") or "gptq"
        if version not in _GPTQ_VERSIONS:
            raise CheckpointError(
                f"fp4: {where} has GPTQ's checkpoint_format {version!r}; it must be one of: "
                f"{', '.join(_GPTQ_VERSIONS)}. Export with one of them (GPTQModel: format='gptq')"
            )
        return (gptq(config, where, _GPTQ_VERSIONS[version]),)
    if method == "awq":
        AWQ_KEYS.check(config, where)
        version = config.get("version") or config.get("format") or "gemm"
        if str(version).lower() != "gemm":
            raise CheckpointError(
                f"fp4: {where} has AWQ's version {version!r}; it must be 'gemm'. Export with that"
            )
        return (awq(config, where),)
    return None


def gptq(config: dict[str, Any], where: str, zero_offset: int = 1) -> WordsDialect:
    """Returns the dialect that a config of GPTQ describes."""
    symmetric, in_order = bool(config.get("sym", True)), not config.get("desc_act", False)
    return _of(replace(GPTQ, zero_offset=zero_offset), config, where, symmetric, in_order)


def awq(config: dict[str, Any], where: str) -> WordsDialect:
    """Returns the dialect that a config of AWQ describes."""
    return _of(AWQ, config, where, not config.get("zero_point", True), True)


def _of(
    dialect: WordsDialect, config: dict[str, Any], where: str, symmetric: bool, in_order: bool
) -> WordsDialect:
    bits = config.get("bits", config.get("w_bit"))
    size = config.get("group_size", config.get("q_group_size"))
    if bits != 4 or config.get("data_type", "int") != "int":
        raise CheckpointError(
            f"fp4: {where} has {dialect.name} weights of {bits} bits; they must have 4. Quantise the "
            "original weights with bits=4, or with `python -m fp4_ops quantize`"
        )
    for name, own in (config.get("dynamic") or {}).items():
        changed = {k: v for k, v in (own or {}).items() if k in _SETTINGS and v != config.get(k)}
        if changed and not str(name).startswith("-:"):
            raise CheckpointError(
                f"fp4: {where} has {changed} for {name!r}; {dialect.name} weights must all have the same. "
                "Leave those modules in bf16 when you quantise"
            )
    made = replace(dialect, **of_group(size))
    if symmetric and in_order:
        return made
    required = (".qzeros",) * (not symmetric) + (".g_idx",) * (not in_order)
    return replace(made, format=OUT_OF_ORDER if symmetric else ASYMMETRIC, required=required)


_SETTINGS = ("bits", "group_size", "sym", "desc_act")
