"""GPT-OSS's own mxfp4, with all experts in one tensor."""

from __future__ import annotations

from typing import Any

from .base import Dialect
from .fp4 import StackedBlocks
from .keys import Keys

GPT_OSS_MXFP4 = StackedBlocks("gpt-oss-mxfp4", "mxfp4", "_blocks", "_scales")
DIALECTS: tuple[Dialect, ...] = (GPT_OSS_MXFP4,)

KEYS = Keys("GPT-OSS", ("quant_method",), ("modules_to_not_convert", "dequantize"))


def claims(config: dict[str, Any], where: str) -> tuple[Dialect, ...] | None:
    if config.get("quant_method") != "mxfp4":
        return None
    KEYS.check(config, where)
    return (GPT_OSS_MXFP4,)
