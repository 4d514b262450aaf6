"""compressed-tensors, the format of llm-compressor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..files import CheckpointError
from .base import Dialect
from .fp4 import FP4Dialect
from .int4 import Int4Dialect, of_group

NVFP4_PACK = FP4Dialect(
    "nvfp4-pack-quantized", "nvfp4", ".weight_packed", ".weight_scale", ".weight_global_scale",
    reciprocal=True, unused=(".input_global_scale",),
)  # fmt: skip
MXFP4_PACK = FP4Dialect(
    "mxfp4-pack-quantized", "mxfp4", ".weight_packed", ".weight_scale", unused=(".input_global_scale",)
)
PACK_INT4 = Int4Dialect(
    "pack-quantized", "int4", ".weight_packed", ".weight_scale",
    unused=(".weight_shape",), code_dtypes=(torch.int32,),
)  # fmt: skip
NAIVE_INT4 = Int4Dialect(  # what compressed-tensors makes of int4 weights that meet fp8 activations (W4AFP8)
    "naive-quantized", "int4", ".weight", ".weight_scale", code_dtypes=(torch.int8,), codes_per_byte=1
)
DIALECTS: tuple[Dialect, ...] = (NVFP4_PACK, MXFP4_PACK, PACK_INT4, NAIVE_INT4)
_INT4 = {d.name: d for d in (PACK_INT4, NAIVE_INT4)}
_FP4 = {d.name: d for d in (NVFP4_PACK, MXFP4_PACK)}


def claims(config: dict[str, Any], where: str) -> tuple[Dialect, ...] | None:
    """`format` is in the config, or in each of its `config_groups`."""
    if config.get("quant_method") != "compressed-tensors":
        return None
    groups = config.get("config_groups", {}).values()
    formats = {str(part.get("format")) for part in (config, *groups)} - {"None", "mixed-precision"}
    if len(formats) == 1 and formats <= set(_FP4):
        return (_FP4[formats.pop()],)
    if len(formats) == 1 and formats <= set(_INT4):
        return (_int4(_INT4[formats.pop()], [g.get("weights") or {} for g in groups], where),)
    raise _unknown(where, f"format {' and '.join(sorted(formats)) or None!r}")


def _int4(dialect: Int4Dialect, weights: list[dict[str, Any]], where: str) -> Int4Dialect:
    """The dialect with the group size that the config says, and the format whose blocks divide it."""
    kinds = {(w.get("num_bits"), w.get("type"), w.get("symmetric", True), w.get("actorder")) for w in weights}
    sizes = {w.get("group_size") or -1 for w in weights}
    if kinds != {(4, "int", True, None)} or len(sizes) != 1:
        raise _unknown(where, f"{dialect.name} weights other than symmetric int4 of one group size")
    return replace(dialect, **of_group(sizes.pop()))


def _unknown(where: str, what: str) -> CheckpointError:
    names = ", ".join(d.name for d in DIALECTS)
    return CheckpointError(
        f"fp4: {where} has compressed-tensors' {what}; those that can be read are: {names}. Quantise the "
        "original weights to one of them, with llm-compressor or with `python -m fp4_ops quantize`"
    )
