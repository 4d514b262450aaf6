"""GPT-OSS's own mxfp4: all experts in one tensor."""

from __future__ import annotations

from typing import Any

from .base import Dialect
from .fp4 import StackedBlocks

GPT_OSS_MXFP4 = StackedBlocks("gpt-oss-mxfp4", "mxfp4", "_blocks", "_scales")
DIALECTS: tuple[Dialect, ...] = (GPT_OSS_MXFP4,)


def claims(config: dict[str, Any], where: str) -> tuple[Dialect, ...] | None:
    return (GPT_OSS_MXFP4,) if config.get("quant_method") == "mxfp4" else None
