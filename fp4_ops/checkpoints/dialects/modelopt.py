"""NVIDIA's ModelOpt."""

from __future__ import annotations

from typing import Any

from ..files import CheckpointError
from .base import Dialect
from .fp4 import FP4Dialect

MODELOPT_NVFP4 = FP4Dialect(
    "modelopt-nvfp4", "nvfp4", ".weight", ".weight_scale", ".weight_scale_2", unused=(".input_scale",)
)
DIALECTS: tuple[Dialect, ...] = (MODELOPT_NVFP4,)


def claims(config: dict[str, Any], where: str) -> tuple[Dialect, ...] | None:
    """`quant_algo` is in the config itself, or in its "quantization" (hf_quant_config.json)."""
    algorithm = config.get("quant_algo") or config.get("quantization", {}).get("quant_algo")
    if config.get("quant_method") != "modelopt" and not algorithm:
        return None
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        return (MODELOPT_NVFP4,)
    raise CheckpointError(
        f"fp4: {where} has ModelOpt's quant_algo {algorithm!r}; those that can be read are: NVFP4, "
        "W4A16_NVFP4. Export with one of them, or quantise the original weights with "
        "`python -m fp4_ops quantize`"
    )
