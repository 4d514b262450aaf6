"""AMD's Quark: mxfp4 under ordinary names, the scales beside them."""

from __future__ import annotations

from typing import Any

from ..files import CheckpointError
from .base import Dialect
from .fp4 import FP4Dialect

QUARK_MXFP4 = FP4Dialect(
    "quark-mxfp4", "mxfp4", ".weight", ".weight_scale", unused=(".input_scale", ".output_scale")
)
DIALECTS: tuple[Dialect, ...] = (QUARK_MXFP4,)


def claims(config: dict[str, Any], where: str) -> tuple[Dialect, ...] | None:
    """`layer_quant_config` and `layer_type_quant_config` may differ from the `global_quant_config`."""
    if config.get("quant_method") != "quark":
        return None
    parts = {"global_quant_config": config.get("global_quant_config")}
    for key in ("layer_quant_config", "layer_type_quant_config"):
        parts |= config.get(key) or {}
    for name, part in parts.items():
        weight = (part or {}).get("weight")
        if isinstance(weight, list):  # several steps, of which the last one is stored
            weight = weight[-1] if len(weight) == 1 else {"dtype": "several dtypes"}
        if weight is None and name != "global_quant_config":
            continue  # a layer that is as it was
        kind, size = (weight or {}).get("dtype"), (weight or {}).get("group_size")
        scale = str((weight or {}).get("scale_format", "e8m0"))
        if (kind, size, scale) != ("fp4", 32, "e8m0"):
            raise CheckpointError(
                f"fp4: {where} has Quark's {kind} in groups of {size}, scales {scale}, for {name}; it must "
                "be fp4 in groups of 32 with scales e8m0 (MXFP4). Quantise the original weights to that, or "
                "with `python -m fp4_ops quantize`"
            )
    return (QUARK_MXFP4,)
