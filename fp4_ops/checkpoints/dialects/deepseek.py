"""DeepSeek-V4's own folders: experts in mxfp4, with codes stored as int8, and other layers in fp8 with e8m0
scales.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..files import CheckpointError
from .base import Dialect
from .fp4 import FP4Dialect
from .fp8 import EightBits
from .fp8_blocks import KEYS

DEEPSEEK_FP4 = FP4Dialect("deepseek-fp4", "mxfp4", ".weight", ".scale", code_dtypes=(torch.int8,))
DEEPSEEK_FP8 = EightBits("deepseek-fp8", "fp8", ".weight", ".scale")
DIALECTS: tuple[Dialect, ...] = (DEEPSEEK_FP4, DEEPSEEK_FP8)


def claims(config: dict[str, Any], where: str) -> tuple[Dialect, ...] | None:
    """Returns the dialects if `expert_dtype` is "fp4". Folders that are completely in fp8 lack this key."""
    if config.get("quant_method") != "fp8" or config.get("expert_dtype") != "fp4":
        return None
    KEYS.check(config, where)
    size = config.get("weight_block_size") or (128, 128)
    if len(size) != 2:
        raise CheckpointError(f"fp4: {where} has weight_block_size {size!r}; it must be two numbers")
    return DEEPSEEK_FP4, replace(DEEPSEEK_FP8, blocks=tuple(size))
