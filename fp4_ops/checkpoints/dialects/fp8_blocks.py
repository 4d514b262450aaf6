"""transformers' own FP8 (`quant_method` fp8): DeepSeek-V3 and R1, Kimi-K2-Instruct, MiniMax-M2, Qwen3-FP8.

It has no 4-bit weights. It is read only as a source of `quantize`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..files import CheckpointError
from .base import Dialect
from .fp8 import EightBits
from .keys import Keys, other_than

FP8_BLOCKS = EightBits(
    "fp8", "fp8", ".weight", ".weight_scale_inv", unused=(".activation_scale", ".input_scale")
)
"""Codes are multiplied by the scale, although its name says "inverse"."""
FP8_STACKED = replace(
    FP8_BLOCKS, name="fp8-stacked", packed="", block_scale="_scale_inv", stacked=True,
    unused=("_activation_scale", "_input_scale"),
)  # fmt: skip
"""The dialect of families that keep all experts in one tensor, [E, N, K]."""
DIALECTS: tuple[Dialect, ...] = (FP8_BLOCKS, FP8_STACKED)

KEYS = Keys(
    "FP8",
    ("quant_method", "weight_block_size", "expert_dtype"),
    ("activation_scheme", "dequantize", "fmt", "ignored_layers", "kv_cache_scheme", "modules_to_convert",
     "modules_to_not_convert"),
    {"scale_fmt": other_than("float", "ue8m0", reason="and scales must be 'float' or 'ue8m0'")},
)  # fmt: skip


def claims(config: dict[str, Any], where: str) -> tuple[Dialect, ...] | None:
    if config.get("quant_method") != "fp8":
        return None
    KEYS.check(config, where)
    size = config.get("weight_block_size") or (128, 128)
    if len(size) != 2:
        raise CheckpointError(f"fp4: {where} has weight_block_size {size!r}; it must be two numbers")
    return tuple(replace(dialect, blocks=tuple(size)) for dialect in (FP8_BLOCKS, FP8_STACKED))
