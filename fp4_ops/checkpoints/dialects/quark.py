"""AMD's Quark: mxfp4 weights under ordinary names, with their scales beside them."""

from __future__ import annotations

from typing import Any

from ..files import CheckpointError
from .base import Dialect
from .fp4 import FP4Dialect
from .keys import Keys, algorithms, is_set, other_than

QUARK_MXFP4 = FP4Dialect(
    "quark-mxfp4", "mxfp4", ".weight", ".weight_scale", unused=(".input_scale", ".output_scale")
)
DIALECTS: tuple[Dialect, ...] = (QUARK_MXFP4,)

KEYS = Keys(
    "Quark",
    ("quant_method", "global_quant_config", "layer_quant_config", "layer_type_quant_config"),
    ("exclude", "export", "gpu_resident_blocks", "keep_prequantized_layers", "kv_cache_group",
     "kv_cache_post_rope", "kv_cache_quant_config", "log_severity_level", "min_kv_scale", "packer",
     "quant_flow", "quant_mode", "quark_version", "shared_scale_groups", "softmax_quant_spec",
     "sync_moe_expert_input_amax", "version"),
    {"algo_config": algorithms, "pre_quant_opt_config": algorithms},
)  # fmt: skip
LAYER_KEYS = Keys("Quark", ("weight",), ("input_tensors", "output_tensors", "bias", "target_device"))
WEIGHT_KEYS = Keys(
    "Quark",
    ("dtype", "group_size", "scale_format"),
    ("is_dynamic", "observer_cls", "qscheme", "round_method", "symmetric", "scale_type",
     "enable_buffer_reuse", "scale_calculation_mode", "max_input_numel", "zero_point_type", "qat_spec"),
    {"ch_axis": other_than(-1, 1, reason="and blocks must lie along the inputs (-1)"),
     "mx_element_dtype": other_than("fp4", reason="and codes must be fp4"),
     "is_scale_quant": is_set("scales that are quantised themselves, which are not read")},
)  # fmt: skip


def claims(config: dict[str, Any], where: str) -> tuple[Dialect, ...] | None:
    """Returns the dialect. Also checks the layers that `layer_quant_config` and `layer_type_quant_config`
    name."""
    if config.get("quant_method") != "quark":
        return None
    parts = {"global_quant_config": config.get("global_quant_config")}
    for key in ("layer_quant_config", "layer_type_quant_config"):
        parts |= config.get(key) or {}
    for name, part in parts.items():
        weight = (part or {}).get("weight")
        if isinstance(weight, list):  # several steps of quantisation; the result of the last one is stored
            weight = weight[-1] if len(weight) == 1 else {"dtype": "several dtypes"}
        if weight is None and name != "global_quant_config":
            continue  # a layer that is not quantised
        kind, size = (weight or {}).get("dtype"), (weight or {}).get("group_size")
        scale = str((weight or {}).get("scale_format", "e8m0"))
        if (kind, size, scale) != ("fp4", 32, "e8m0"):
            raise CheckpointError(
                f"fp4: {where} has Quark's {kind} in groups of {size}, scales {scale}, for {name}; it must "
                "be fp4 in groups of 32 with scales e8m0 (MXFP4). Quantise the original weights to that, or "
                "with `python -m fp4_ops quantize`"
            )
        LAYER_KEYS.check(part, where, f" of {name!r}")
        WEIGHT_KEYS.check(weight, where, f" of {name!r}, weight")
    KEYS.check(config, where)
    return (QUARK_MXFP4,)
