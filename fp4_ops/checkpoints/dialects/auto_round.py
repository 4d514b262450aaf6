"""Intel's AutoRound, in its own format. `packing_format` names the tool whose layout the tensors have."""

from __future__ import annotations

from typing import Any

from ..files import CheckpointError
from . import gptq
from .base import Dialect
from .compressed_tensors import MXFP4_PACK, NVFP4_PACK
from .keys import ROTATIONS, TUNING, Keys, all_of, is_set, transforms

DIALECTS: tuple[Dialect, ...] = ()

_FLOATS = {("mx_fp", 32): MXFP4_PACK, ("nv_fp", 16): NVFP4_PACK}
"""Dialects of weights that are packed like llm-compressor's, by `data_type` and `group_size`."""

_NESTED = is_set("scales that are quantised themselves, which are not read")
KEYS = Keys(
    "AutoRound",
    ("quant_method", "bits", "group_size", "sym", "data_type", "packing_format", "extra_config", "desc_act"),
    (*TUNING, "block_name_to_quantize", "backend", "damp_percent", "lm_head", "modules_to_not_convert",
     "true_sequential", "fixed_by_user"),
    {**ROTATIONS, "transform_config": transforms, "super_bits": _NESTED, "super_group_size": _NESTED},
)  # fmt: skip


def claims(config: dict[str, Any], where: str) -> tuple[Dialect, ...] | None:
    if config.get("quant_method") not in ("auto-round", "auto_round", "intel/auto-round"):
        return None
    KEYS.check(config, where)
    for of, own in all_of(config.get("extra_config")):
        KEYS.check(own, where, of)
    bits, kind = config.get("bits"), str(config.get("data_type", "int"))
    packing = str(config.get("packing_format") or "")
    for name, own in (config.get("extra_config") or {}).items():
        if (own or {}).get("bits", bits) not in (bits, 16, 32):
            raise CheckpointError(
                f"fp4: {where} has {own['bits']} bits for {name!r}; those of AutoRound must all have {bits}, "
                "or 16. Leave that layer in 16 bits when you quantise"
            )
    if bits == 4 and "llm_compressor" in packing:
        # some data types have an ending for the scales of activations: nv_fp4_with_static_gs
        for (name, size), dialect in _FLOATS.items():
            if kind.startswith(name) and config.get("group_size") == size:
                return (dialect,)
    if bits == 4 and kind == "int" and "gptq" in packing:
        return (gptq.gptq(config, where),)
    if bits == 4 and kind == "int" and "awq" in packing:
        return (gptq.awq({**config, "zero_point": not config.get("sym", True)}, where),)
    raise CheckpointError(
        f"fp4: {where} has AutoRound's {kind!r} weights of {bits} bits, packing_format {packing!r}; those "
        "that can be read are int of 4 bits (auto_round:auto_gptq, auto_round:auto_awq), mx_fp and "
        "nv_fp (auto_round:llm_compressor). Export with format='auto_gptq', 'auto_awq' or 'llm_compressor'"
    )
