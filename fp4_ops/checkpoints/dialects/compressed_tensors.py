"""compressed-tensors, the format of llm-compressor."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch

from ...meta.formats import FORMATS
from ..files import CheckpointError
from .base import Dialect
from .fp4 import FP4Dialect
from .fp8 import EightBits
from .int4 import ASYMMETRIC, OUT_OF_ORDER, Int4Dialect, of_group
from .keys import Keys, all_of, is_set, sparsity, transforms

_KV = (".k_scale", ".v_scale", ".q_scale")
NVFP4_PACK = FP4Dialect(
    "nvfp4-pack-quantized", "nvfp4", ".weight_packed", ".weight_scale", ".weight_global_scale",
    reciprocal=True, unused=(".input_global_scale", ".input_scale", *_KV),
)  # fmt: skip
MXFP4_PACK = FP4Dialect(
    "mxfp4-pack-quantized", "mxfp4", ".weight_packed", ".weight_scale",
    unused=(".input_global_scale", ".input_scale", *_KV),
)  # fmt: skip
PACK_INT4 = Int4Dialect(
    "pack-quantized", "int4", ".weight_packed", ".weight_scale",
    unused=(".weight_shape", ".weight_zero_point", ".weight_g_idx", *_KV), code_dtypes=(torch.int32,),
    reads=(".weight_zero_point", ".weight_g_idx"),
)  # fmt: skip
NAIVE_INT4 = Int4Dialect(  # compressed-tensors writes this for int4 weights with fp8 activations (W4AFP8)
    "naive-quantized", "int4", ".weight", ".weight_scale", code_dtypes=(torch.int8,), codes_per_byte=1,
    unused=(".weight_zero_point", *_KV), reads=(".weight_zero_point",),
)  # fmt: skip
FLOAT8 = EightBits("float-quantized", "fp8", ".weight", ".weight_scale", unused=(".input_scale", *_KV))
INT8 = replace(FLOAT8, name="int-quantized", format="int8", code_dtypes=(torch.int8,))
DIALECTS: tuple[Dialect, ...] = (NVFP4_PACK, MXFP4_PACK, PACK_INT4, NAIVE_INT4, FLOAT8, INT8)

_INT4 = {d.name: d for d in (PACK_INT4, NAIVE_INT4)} | {"int-quantized": NAIVE_INT4}
_FP4 = {d.name: d for d in (NVFP4_PACK, MXFP4_PACK)}
_MAKER = "compressed-tensors"
KEYS = Keys(
    _MAKER,
    ("quant_method", "format", "config_groups"),
    ("ignore", "kv_cache_scheme", "quantization_status", "global_compression_ratio", "version", "provider",
     "attention_input_activations", "run_compressed", "dequantize", "use_optimized_inference"),
    {"transform_config": transforms, "sparsity_config": sparsity,
     "moe_sparsity_config": is_set("the model runs without some of its experts, which is not read")},
)  # fmt: skip
GROUP_KEYS = Keys(_MAKER, ("weights", "format"), ("targets", "input_activations", "output_activations"))
WEIGHT_KEYS = Keys(
    _MAKER,
    ("num_bits", "type", "symmetric", "group_size", "block_structure", "actorder", "strategy"),
    ("dynamic", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
)
_EIGHT = ("float-quantized", "int-quantized", "naive-quantized", "mxfp8-quantized")


def claims(config: dict[str, Any], where: str) -> tuple[Dialect, ...] | None:
    """Returns the dialects of `config_groups`. A group without a format has the format of the config."""
    if config.get("quant_method") != "compressed-tensors":
        return None
    KEYS.check(config, where)
    for of, group in all_of(config.get("config_groups")):
        GROUP_KEYS.check(group, where, of)
        WEIGHT_KEYS.check((group or {}).get("weights"), where, f"{of}, weights")
    whole = config.get("format")
    groups = list((config.get("config_groups") or {}).values()) or [{}]
    # A group that quantises no weights describes activations or the cache.
    groups = [g for g in groups if g.get("weights") or g.get("format") or len(groups) == 1]
    found: dict[str, list[Dialect]] = {}
    for group in groups:
        weights = group.get("weights") or {}
        named = whole if whole != "mixed-precision" else None
        dialect = _dialect(group.get("format") or named or _format_of(weights), weights, where)
        targets = tuple(map(str, group.get("targets") or ()))
        found.setdefault(dialect.name, []).append(replace(dialect, targets=targets))
    dialects = [dialect for alike in found.values() for dialect in _told_apart(alike, where)]
    codes = [d for d in dialects if d.packed == ".weight" and torch.int8 in d.code_dtypes]
    if len({d.name for d in codes}) > 1:
        raise _unknown(
            where, f"{' and '.join(d.name for d in codes)} weights, which the files do not tell apart"
        )
    return tuple(dialects)


def _told_apart(alike: list[Dialect], where: str) -> list[Dialect]:
    """Return one dialect if the groups differ only in their targets. For int4 with several group sizes,
    return one dialect for each size, with its targets."""
    plain = list(dict.fromkeys(replace(dialect, targets=()) for dialect in alike))
    if len(plain) == 1:
        return plain
    if not all(d.format in FORMATS and d.targets for d in alike):
        raise _unknown(where, f"{alike[0].name} weights of several kinds that no targets tell apart")
    for target in (t for d in alike for t in d.targets if t.startswith("re:")):
        try:
            re.compile(target[3:])
        except re.error as error:
            raise _unknown(where, f"target {target!r}, which is no regular expression ({error})") from None
    return alike


def _format_of(weights: dict[str, Any]) -> str | None:
    """Returns the format that compressed-tensors chooses for such weights if a config names none."""
    bits, kind = weights.get("num_bits"), weights.get("type")
    if (bits, kind) == (4, "float"):
        return "nvfp4-pack-quantized" if weights.get("group_size") == 16 else "mxfp4-pack-quantized"
    names: dict[tuple[Any, Any], str] = {
        (8, "float"): "float-quantized", (8, "int"): "int-quantized", (4, "int"): "pack-quantized"
    }  # fmt: skip
    return names.get((bits, kind))


def _dialect(format: str | None, weights: dict[str, Any], where: str) -> Dialect:
    """Returns the dialect of one group."""
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    if format in _FP4:
        if not weights.get("symmetric", True):
            raise _unknown(where, f"{format} weights that are not symmetric")
        return _FP4[format]
    if format in _EIGHT and bits == 8:
        if not weights.get("symmetric", True):
            raise _unknown(where, f"{format} weights that are not symmetric")
        eight = FLOAT8 if kind == "float" else INT8
        return replace(eight, blocks=tuple(weights.get("block_structure") or eight.blocks))
    if format in _INT4:
        return _int4(_INT4[format], weights, where)
    raise _unknown(where, f"format {format!r}")


def _int4(dialect: Int4Dialect, weights: dict[str, Any], where: str) -> Int4Dialect:
    """Returns the dialect with the config's group size, and with the format whose block divides the group
    size."""
    if (weights.get("num_bits"), weights.get("type")) != (4, "int"):
        raise _unknown(where, f"{dialect.name} weights other than symmetric int4 of one group size")
    order = weights.get("actorder")
    made = replace(dialect, **of_group(weights.get("group_size")))
    # "weight" ("static"): GPTQ went through the columns in another order, which the bytes do not show.
    if order not in (None, False, "weight", "static"):
        made = replace(made, format=OUT_OF_ORDER, required=(".weight_g_idx",))
    if not weights.get("symmetric", True):
        made = replace(made, format=ASYMMETRIC, required=(*made.required, ".weight_zero_point"))
    return made


def _unknown(where: str, what: str) -> CheckpointError:
    names = ", ".join(d.name for d in DIALECTS)
    return CheckpointError(
        f"fp4: {where} has compressed-tensors' {what}; those that can be read are: {names}. Quantise the "
        "original weights to one of them, with llm-compressor or with `python -m fp4_ops quantize`"
    )
