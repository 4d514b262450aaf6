"""Writes weights in compressed-tensors' dialects, or those of GPT-OSS in mxfp4 in GPT-OSS's own dialect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...meta.formats import FORMATS
from .base import Codes, Dialect
from .compressed_tensors import FLOAT8, MXFP4_PACK, NVFP4_PACK, PACK_INT4
from .fp4 import FP4Dialect
from .fp8 import EightBits
from .gpt_oss import GPT_OSS_MXFP4
from .int4 import OFFSET, Int4Dialect


def writing_dialect(
    format: str, model_type: str | None, k: Iterable[int], experts_alone: bool = True
) -> Dialect:
    """Return the dialect that is written for weights in one format.

    It is a dialect of compressed-tensors. For GPT-OSS it is GPT-OSS's own dialect, if its blocks divide every
    K. That dialect can only hold experts, so a folder with other weights in 4 bits (`experts_alone=False`)
    does not use it.

    Raises ValueError for int4 with a K that `pack-quantized` cannot hold, because readers divide a row into
    groups of one size.
    """
    k, block = list(k), FORMATS[format].block
    if FORMATS[format].element == "int4":
        odd = [n for n in k if n % min(block, n) or n % 8]
        if odd:
            raise ValueError(
                f"fp4: {PACK_INT4.name} cannot hold {format} with K = {odd[0]}; it must be a multiple of "
                f"{block}"
            )
        return replace(PACK_INT4, format=format, group=block)
    own = model_type == "gpt_oss" and format == "mxfp4" and all(n % block == 0 for n in k)
    if own and experts_alone:
        return GPT_OSS_MXFP4
    return {"nvfp4": NVFP4_PACK, "mxfp4": MXFP4_PACK}[format]


EXPERTS_TARGET = r"re:.*experts\.\d+\..*"


def describe(groups: Sequence[tuple[Dialect, list[str]]], ignore: list[str]) -> dict[str, Any]:
    """Return the `quantization_config` of a folder in the dialects that are written.

    groups: the dialects, each with its targets. A target is the name of a linear layer, or "re:" and a
        regular expression.
    ignore: the linear layers that are not quantised.
    """
    if any(dialect.stacked for dialect, _ in groups):
        return {"quant_method": "mxfp4", "modules_to_not_convert": ignore}
    names = {dialect.name for dialect, _ in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": names.pop() if len(names) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": _group(*group) for i, group in enumerate(groups)},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def _group(dialect: Dialect, targets: list[str]) -> dict[str, Any]:
    """Return the entry of `config_groups` for the weights in one dialect."""
    return {
        "targets": targets,
        "weights": _weights(dialect),
        "input_activations": None,
        "output_activations": None,
        "format": dialect.name,
    }


def _weights(dialect: Dialect) -> dict[str, Any]:
    """Return compressed-tensors' description of weights in one dialect."""
    same = {"symmetric": True, "dynamic": False}
    if isinstance(dialect, EightBits):
        assert dialect.name == FLOAT8.name
        return {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None, **same}
    format = FORMATS[dialect.format]
    is_int = isinstance(dialect, Int4Dialect)
    weights = {
        "num_bits": 4,
        "type": "int" if is_int else "float",
        "strategy": "tensor_group" if format.has_global_scale else "group",
        "group_size": format.block,
        **same,
    }
    if not is_int:
        weights["scale_dtype"] = "torch.float8_e4m3fn" if format.has_global_scale else "torch.uint8"
    return weights


def _reciprocal(factor: Tensor) -> Tensor:
    """Returns a float32 whose reciprocal is `factor`. If there is none, returns one whose reciprocal is
    nearest to it.
    """
    near = 1.0 / factor
    if 1.0 / near != factor:
        for candidate in (near.nextafter(torch.zeros_like(near)), near.nextafter(2 * near)):
            if 1.0 / candidate == factor:
                return candidate
    return near


def encode_rows(name: str, codes: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Returns the tensors that store a weight in fp8 with a scale for each row [N], in the dialect FLOAT8."""
    return {name + FLOAT8.packed: codes, name + FLOAT8.block_scale: scale[:, None]}


def encode(name: str, codes: Codes, dialect: Dialect) -> dict[str, Tensor]:
    """Returns the tensors that store a weight in this dialect. This is the inverse of `Dialect.decode`."""
    packed, block_scale = codes.packed, codes.block_scale
    if isinstance(dialect, Int4Dialect):
        shape = torch.tensor([packed.shape[0], 2 * packed.shape[1]])
        words = (packed ^ OFFSET).view(torch.int32)
        return {
            name + dialect.packed: words,
            name + dialect.block_scale: block_scale,
            name + dialect.unused[0]: shape,
        }
    if block_scale.dtype == torch.float8_e8m0fnu:
        block_scale = block_scale.view(torch.uint8)  # all other writers of this dialect do so
    if dialect.stacked:
        packed = packed.view(*block_scale.shape, -1)
    tensors = {name + dialect.packed: packed, name + dialect.block_scale: block_scale}
    if dialect.global_scale:
        assert isinstance(dialect, FP4Dialect)
        assert codes.global_scale is not None
        stored = _reciprocal(codes.global_scale) if dialect.reciprocal else codes.global_scale
        tensors[name + dialect.global_scale] = stored.detach().cpu().reshape(1)
    return tensors
