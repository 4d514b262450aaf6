"""Dialects: how other tools store 4-bit weights. A folder's config says which dialects it uses.

Each maker has one file ("room") with its dialects and with `claims(config, where)`. This function returns the
dialects that a `quantization_config` describes, or None if another maker wrote the config. If this maker
wrote it but it cannot be read, it raises a CheckpointError that says what to do. A new dialect takes a new
file and a line in ROOMS.

Nothing is guessed from values. For example, the second scale of nvfp4 in compressed-tensors is the reciprocal
of the second scale in ModelOpt. Only the names of the tensors say which of the two it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ...meta.formats import FORMATS, FP4_FORMATS
from ..files import CheckpointError
from . import auto_round, compressed_tensors, deepseek, fp8_blocks, gpt_oss, gptq, modelopt, quark
from .base import (
    Codes,
    Dialect,
    Read,
    StoredWeight,
    needs_older,
    quantization_config,
    scale_dtype,
    stored_config,
    stored_weights,
    with_older,
)
from .compressed_tensors import FLOAT8
from .int4 import ASYMMETRIC, OUT_OF_ORDER
from .writing import EXPERTS_TARGET, describe, encode, encode_rows, writing_dialect

__all__ = [
    "DIALECTS",
    "EXPERTS_TARGET",
    "FLOAT8",
    "METHODS",
    "Codes",
    "Dialect",
    "Read",
    "StoredWeight",
    "check_four_bits",
    "check_order",
    "check_requantize",
    "check_target",
    "describe",
    "dialects_of",
    "encode",
    "encode_rows",
    "holds_fp4",
    "is_eight_bits",
    "needs_older",
    "quantization_config",
    "scale_dtype",
    "stored_config",
    "stored_weights",
    "with_older",
    "writing_dialect",
]

ROOMS = (modelopt, compressed_tensors, gpt_oss, gptq, auto_round, quark, deepseek, fp8_blocks)

METHODS = (
    "modelopt", "compressed-tensors", "mxfp4", "gptq", "awq", "auto-round", "auto_round", "intel/auto-round",
    "quark", "fp8",
)  # fmt: skip
"""The `quant_method`s of the dialects."""

DIALECTS: dict[str, Dialect] = {d.name: d for room in ROOMS for d in room.DIALECTS}

_CLAIMS: tuple[Callable[[dict[str, Any], str], tuple[Dialect, ...] | None], ...] = tuple(
    room.claims for room in ROOMS
)


def dialects_of(config: dict[str, Any], where: str = "the config") -> tuple[Dialect, ...]:
    """Returns the dialects that a `quantization_config` describes. There are several if its precision is
    mixed.

    where: the file of the config, for error messages. Raises CheckpointError if no dialect fits.
    """
    for claims in _CLAIMS:
        try:
            dialects = claims(config, where)
        except (AttributeError, KeyError, TypeError) as error:  # a value has a wrong type
            raise CheckpointError(
                f"fp4: {where} has a quantization_config that is not as its tool writes it ({error}). Take "
                "the config.json that was written with the files"
            ) from None
        if dialects is not None:
            return dialects
    raise CheckpointError(
        f"fp4: {where} has {_method_of(config)}; those that can be read are: {', '.join(METHODS)}. "
        "Quantise the original bf16 weights with `python -m fp4_ops quantize`"
    )


def _method_of(config: dict[str, Any]) -> str:
    method = config.get("quant_method")
    return f"quant_method {method!r}" if method else "a quantization_config without a quant_method"


def check_four_bits(dialects: Iterable[Dialect], where: str) -> None:
    """Raises CheckpointError if none of a folder's dialects has 4 bits."""
    if all(d.is_dense for d in dialects):
        kinds = " and ".join(sorted({d.format for d in dialects}))
        raise CheckpointError(
            f"fp4: {where} describes weights in {kinds} and none in 4 bits. `python -m fp4_ops quantize` "
            "takes such a folder, and writes one in 4 bits"
        )


def holds_fp4(config: dict[str, Any]) -> bool:
    """Returns whether a `quantization_config` says that any weight is a 4-bit float, even one that cannot be
    read.
    """
    groups = _groups(config)
    kinds = [g.get("weights") or {} for g in groups]
    formats = [str(part.get("format")) for part in (config, *groups)]
    return any(w.get("num_bits") == 4 and w.get("type") == "float" for w in kinds) or any(
        "fp4" in f for f in formats
    )


def _groups(config: dict[str, Any]) -> list[dict[str, Any]]:
    groups = config.get("config_groups")
    return [g for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []


def is_eight_bits(config: dict[str, Any]) -> bool:
    """Returns whether a `quantization_config` says that no weight is in 4 bits. transformers may know such a
    folder.
    """
    bits = [(g.get("weights") or {}).get("num_bits") for g in _groups(config)]
    if config.get("quant_method") == "fp8" or config.get("bits", 4) != 4:
        return True
    return bool(bits) and 4 not in bits


def check_order(dialects: Iterable[Dialect]) -> None:
    """Raises CheckpointError for int4 weights that no operator computes with. (transformers would silently
    skip them in stacked experts.)
    """
    for dialect in dialects:
        if dialect.format in (ASYMMETRIC, OUT_OF_ORDER):
            raise CheckpointError(
                f"fp4: {dialect.name} holds {dialect.format}, which no operator computes with: "
                "fp4_ops.load_checkpoint(None, folder, requantize='nvfp4') quantises it anew (lossy: the "
                "report says how much). Linear layers alone: load it before register_with_transformers()"
            )


def check_target(requantize: str | None) -> None:
    """Raises ValueError unless `requantize` is None or a format to which weights can be requantised."""
    if requantize is not None and requantize not in FP4_FORMATS:
        formats = " or ".join(map(repr, FP4_FORMATS))
        raise ValueError(f"fp4: requantize is {requantize!r}; it must be {formats}, or None")


def check_requantize(dialects: Iterable[Dialect], requantize: str | None) -> None:
    """Raises ValueError if weights need `requantize` and it is missing, or if it is given for weights other
    than int4.
    """
    formats = " or ".join(map(repr, FP4_FORMATS))
    check_target(requantize)
    for dialect in (d for d in dialects if not d.is_dense):
        if dialect.format in FORMATS and FORMATS[dialect.format].element != "int4" and requantize is not None:
            raise ValueError(
                f"fp4: requantize is {requantize!r}; {dialect.name} holds {dialect.format}, which is not "
                "converted. Leave requantize out: it is for int4 folders"
            )
        if requantize is None and dialect.format not in FORMATS:
            raise CheckpointError(
                f"fp4: {dialect.name} holds {dialect.format}, which no operator computes with: requantize is "
                f"None; it must be {formats} (lossy: the report says how much)"
            )
