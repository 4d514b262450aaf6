"""The layouts of GPTQ (GPTQModel, AutoGPTQ, AutoRound's auto_gptq, Qwen's) and AWQ (AutoAWQ, auto_awq).

AWQ scales the inputs of a layer by what it divides its weights by, and puts that into the layer before it:
the files hold ordinary weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..files import CheckpointError
from .base import Dialect
from .int4 import ASYMMETRIC, OUT_OF_ORDER, of_group
from .words import AWQDialect, GPTQDialect, WordsDialect

GPTQ = GPTQDialect("gptq", "int4", ".qweight", ".scales", unused=(".qzeros", ".g_idx"))
AWQ = AWQDialect("awq", "int4", ".qweight", ".scales", unused=(".qzeros",))
DIALECTS: tuple[Dialect, ...] = (GPTQ, AWQ)

_GPTQ_VERSIONS = {"gptq": 1, "gptq_v2": 0}
"""`checkpoint_format` to what was taken from the stored zero points."""


def claims(config: dict[str, Any], where: str) -> tuple[Dialect, ...] | None:
    method = config.get("quant_method")
    if method == "gptq":
        version = config.get("checkpoint_format", "gptq")
        if version not in _GPTQ_VERSIONS:
            raise CheckpointError(
                f"fp4: {where} has GPTQ's checkpoint_format {version!r}; it must be one of: "
                f"{', '.join(_GPTQ_VERSIONS)}. Export with one of them (GPTQModel: format='gptq')"
            )
        return (gptq(config, where, _GPTQ_VERSIONS[version]),)
    if method == "awq":
        version = config.get("version", "gemm")
        if str(version).lower() != "gemm":
            raise CheckpointError(
                f"fp4: {where} has AWQ's version {version!r}; it must be 'gemm'. Export with that"
            )
        return (awq(config, where),)
    return None


def gptq(config: dict[str, Any], where: str, zero_offset: int = 1) -> WordsDialect:
    """The dialect that a config of GPTQ's describes."""
    symmetric, in_order = bool(config.get("sym", True)), not config.get("desc_act", False)
    return _of(replace(GPTQ, zero_offset=zero_offset), config, where, symmetric, in_order)


def awq(config: dict[str, Any], where: str) -> WordsDialect:
    """The dialect that a config of AWQ's describes."""
    return _of(AWQ, config, where, not config.get("zero_point", True), True)


def _of(
    dialect: WordsDialect, config: dict[str, Any], where: str, symmetric: bool, in_order: bool
) -> WordsDialect:
    bits = config.get("bits", config.get("w_bit"))
    size = config.get("group_size", config.get("q_group_size"))
    if bits != 4 or config.get("data_type", "int") != "int":
        raise CheckpointError(
            f"fp4: {where} has {dialect.name} weights of {bits} bits; they must have 4. Quantise the "
            "original weights with bits=4, or with `python -m fp4_ops quantize`"
        )
    for name, own in (config.get("dynamic") or {}).items():
        changed = {k: v for k, v in (own or {}).items() if k in _SETTINGS and v != config.get(k)}
        if changed and not str(name).startswith("-:"):
            raise CheckpointError(
                f"fp4: {where} has {changed} for {name!r}; {dialect.name} weights must all have the same. "
                "Leave those modules in bf16 when you quantise"
            )
    made = replace(dialect, **of_group(size))
    if symmetric and in_order:
        return made
    required = (".qzeros",) * (not symmetric) + (".g_idx",) * (not in_order)
    return replace(made, format=OUT_OF_ORDER if symmetric else ASYMMETRIC, required=required)


_SETTINGS = ("bits", "group_size", "sym", "desc_act")
