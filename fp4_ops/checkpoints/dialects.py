"""How others store 4-bit weights: one row for each dialect. Which one a folder speaks, its config says.

Nothing is ever guessed from values: compressed-tensors and ModelOpt store the second scale of nvfp4 as
reciprocals of one another, under different names, and no number tells which is which.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..meta.formats import FORMATS, FP4_FORMATS
from .files import CheckpointError, TensorInfo

WHOLE_ROW = 1 << 62
"""The group size of one scale a row."""


@dataclass(frozen=True)
class Dialect:
    """The names and the arithmetic of one way to store 4-bit weights.

    A weight `NAME` (a linear layer, or one expert's matrix) is stored as NAME + each suffix below:
    packed [N, K/2] with the lower k in the low nibble, block_scale [N, K/block], global_scale one number.
    """

    name: str
    format: str
    """A name of FORMATS, or, in words, what no operator computes with."""
    packed: str
    block_scale: str
    global_scale: str | None = None
    reciprocal: bool = False
    """The file's global scale divides: value = code * block_scale / global_scale."""
    unused: tuple[str, ...] = ()
    """What else may lie beside a weight: scales for activations, which the operators choose when they run."""
    stacked: bool = False
    """One tensor holds all experts, packed [E, N, K/block, block/2] and block_scale [E, N, K/block]."""
    code_dtypes: tuple[torch.dtype, ...] = (torch.uint8, torch.int8)
    """Of the tensor of codes. int32 holds eight."""
    codes_per_byte: int = 2
    group: int = 0
    """int4: elements along K that share a block scale; the config says how many. Codes are two's complement,
    stored plus 8 where they are packed."""

    @property
    def block(self) -> int:
        return self.group or FORMATS[self.format].block

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        if self.group:
            return (torch.bfloat16, torch.float16, torch.float32)
        dtype = FORMATS[self.format].scale_dtype
        # e8m0 is stored as its bytes by those whose torch had no such dtype
        return (dtype, torch.uint8) if dtype == torch.float8_e8m0fnu else (dtype,)

    @property
    def suffixes(self) -> tuple[str, ...]:
        return (
            self.packed,
            self.block_scale,
            *((self.global_scale,) if self.global_scale else ()),
            *self.unused,
        )

    def base(self, name: str) -> str | None:
        """The weight that a tensor named `name` would be the codes of, or None."""
        return name.removesuffix(self.packed) if name.endswith(self.packed) else None

    def is_packed(self, info: TensorInfo) -> bool:
        """Whether a tensor holds codes. ModelOpt calls them `weight` too: there the file's dtype decides."""
        return self.base(info.name) is not None and info.dtype in self.code_dtypes


MODELOPT_NVFP4 = Dialect(
    "modelopt-nvfp4", "nvfp4", ".weight", ".weight_scale", ".weight_scale_2", unused=(".input_scale",)
)
NVFP4_PACK = Dialect(
    "nvfp4-pack-quantized", "nvfp4", ".weight_packed", ".weight_scale", ".weight_global_scale",
    reciprocal=True, unused=(".input_global_scale",),
)  # fmt: skip
MXFP4_PACK = Dialect(
    "mxfp4-pack-quantized", "mxfp4", ".weight_packed", ".weight_scale", unused=(".input_global_scale",)
)
GPT_OSS_MXFP4 = Dialect("gpt-oss-mxfp4", "mxfp4", "_blocks", "_scales", stacked=True)
PACK_INT4 = Dialect(
    "pack-quantized", "int4", ".weight_packed", ".weight_scale",
    unused=(".weight_shape",), code_dtypes=(torch.int32,),
)  # fmt: skip
NAIVE_INT4 = Dialect(  # what compressed-tensors makes of int4 weights that meet fp8 activations (W4AFP8)
    "naive-quantized", "int4", ".weight", ".weight_scale", code_dtypes=(torch.int8,), codes_per_byte=1
)

DIALECTS = {d.name: d for d in (MODELOPT_NVFP4, NVFP4_PACK, MXFP4_PACK, GPT_OSS_MXFP4, PACK_INT4, NAIVE_INT4)}


def quantization_config(config: dict[str, Any]) -> dict[str, Any] | None:
    """The part of a model's config that says how its weights are stored."""
    for part in (config, config.get("text_config") or {}):
        for key in ("quantization_config", "compression_config"):
            if part.get(key):
                return part[key]
    return None


def dialect_of(config: dict[str, Any], where: str = "the config") -> Dialect:
    """The dialect that a `quantization_config` describes. Raises CheckpointError if none does."""
    method = config.get("quant_method")
    algorithm = config.get("quant_algo") or config.get("quantization", {}).get("quant_algo")
    if method == "modelopt" or algorithm:
        if algorithm in ("NVFP4", "W4A16_NVFP4"):
            return MODELOPT_NVFP4
        raise _unknown(where, f"ModelOpt's quant_algo {algorithm!r}")
    if method == "compressed-tensors":
        groups = config.get("config_groups", {}).values()
        formats = {str(part.get("format")) for part in (config, *groups)} - {"None", "mixed-precision"}
        if len(formats) == 1 and formats <= {NVFP4_PACK.name, MXFP4_PACK.name}:
            return DIALECTS[formats.pop()]
        if len(formats) == 1 and formats <= {PACK_INT4.name, NAIVE_INT4.name}:
            return _int4(DIALECTS[formats.pop()], [g.get("weights") or {} for g in groups], where)
        raise _unknown(where, f"compressed-tensors' format {' and '.join(sorted(formats)) or None!r}")
    if method == "mxfp4":
        return GPT_OSS_MXFP4
    raise _unknown(where, f"quant_method {method!r}")


def check_requantize(dialect: Dialect, requantize: str | None) -> None:
    """Raises ValueError unless the format to quantise to is given where one is needed, and only for int4."""
    formats = " or ".join(map(repr, FP4_FORMATS))
    if requantize is None and dialect.format not in FORMATS:
        raise ValueError(
            f"fp4: {dialect.name} holds {dialect.format}, which no operator computes with: requantize is "
            f"None; it must be {formats} (lossy: the report says how much)"
        )
    if requantize is not None and not dialect.group:
        raise ValueError(
            f"fp4: requantize is {requantize!r}; {dialect.name} holds {dialect.format}: not converted"
        )
    if requantize is not None and requantize not in FP4_FORMATS:
        raise ValueError(f"fp4: requantize is {requantize!r}; it must be {formats}, or None")


INT4_BLOCKS = {f.block: f.name for f in FORMATS.values() if f.element == "int4"}
"""In falling order."""


def _int4(dialect: Dialect, weights: list[dict[str, Any]], where: str) -> Dialect:
    """The dialect with the group size that the config says, and the format whose blocks divide it."""
    kinds = {(w.get("num_bits"), w.get("type"), w.get("symmetric", True), w.get("actorder")) for w in weights}
    sizes = {w.get("group_size") or -1 for w in weights}
    if kinds != {(4, "int", True, None)} or len(sizes) != 1:
        raise _unknown(where, f"{dialect.name} weights other than symmetric int4 of one group size")
    size = sizes.pop()
    if size < 0:  # one scale a row
        return replace(dialect, format=next(iter(INT4_BLOCKS.values())), group=WHOLE_ROW)
    # Groups of several blocks have the same scale in each of them.
    format = next((name for block, name in INT4_BLOCKS.items() if size % block == 0), None)
    return replace(dialect, format=format or f"int4 in groups of {size}", group=size)


def _unknown(where: str, what: str) -> CheckpointError:
    return CheckpointError(f"fp4: {where} has {what}; those that can be read are: {', '.join(DIALECTS)}")


@dataclass(frozen=True)
class StoredWeight:
    """The tensors of one weight as they lie in the files: checked against each other, not yet read."""

    name: str
    dialect: Dialect
    packed: TensorInfo
    block_scale: TensorInfo
    global_scale: TensorInfo | None

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return (self.packed, self.block_scale, *((self.global_scale,) if self.global_scale else ()))

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K], or [E, N, K] where all experts are stacked."""
        if self.dialect.stacked:
            e, n, blocks, half = self.packed.shape
            return e, n, blocks * half * 2
        per_element = self.packed.dtype.itemsize * self.dialect.codes_per_byte
        return *self.packed.shape[:-1], self.packed.shape[-1] * per_element


def stored_weights(tensors: dict[str, TensorInfo], dialect: Dialect) -> dict[str, StoredWeight]:
    """Every weight that the tensors hold in this dialect.

    Raises CheckpointError for parts that are missing, misshapen or of another dtype.
    """
    found = {}
    taken: set[str] = set()
    for info in tensors.values():
        if not dialect.is_packed(info):
            continue
        base = dialect.base(info.name)
        assert base is not None
        found[base] = _stored_weight(base, info, tensors, dialect)
        taken.update(base + suffix for suffix in dialect.suffixes)
    scales = [s for s in (dialect.block_scale, dialect.global_scale) if s]
    for info in tensors.values():
        suffix = next((s for s in scales if info.name.endswith(s)), None)
        if suffix and info.name not in taken:
            codes = tensors.get(info.name.removesuffix(suffix) + dialect.packed)
            why = f"{codes.name} is {codes.dtype}" if codes else "they are missing"
            raise CheckpointError(f"fp4: {info} has no {dialect.name} codes beside it: {why}")
    return found


def _stored_weight(
    base: str, packed: TensorInfo, tensors: dict[str, TensorInfo], dialect: Dialect
) -> StoredWeight:
    def beside(suffix: str) -> TensorInfo:
        if base + suffix not in tensors:
            raise CheckpointError(f"fp4: {packed} has no scale beside it: {base + suffix} is missing")
        return tensors[base + suffix]

    def check(info: TensorInfo, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        if info.shape != shape:
            raise CheckpointError(
                f"fp4: {info} has shape {list(info.shape)}; beside codes {list(packed.shape)} it must be "
                f"{list(shape)}"
            )
        if info.dtype not in dtypes:
            wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise CheckpointError(f"fp4: {info} is {info.dtype}; it must be {wanted}")

    if dialect.stacked:
        if len(packed.shape) != 4 or packed.shape[-1] != dialect.block // 2:
            want = f"[E, N, K/{dialect.block}, {dialect.block // 2}]"
            raise CheckpointError(f"fp4: {packed} has shape {list(packed.shape)}; it must be {want}")
        scale_shape: tuple[int, ...] = packed.shape[:-1]
    else:
        if len(packed.shape) != 2:
            raise CheckpointError(f"fp4: {packed} has {len(packed.shape)} dimensions; it must have 2")
        k = packed.shape[1] * packed.dtype.itemsize * dialect.codes_per_byte
        scale_shape = (packed.shape[0], -(-k // dialect.block))
    block_scale = beside(dialect.block_scale)
    check(block_scale, scale_shape, dialect.scale_dtypes)
    global_scale = None
    if dialect.global_scale:
        global_scale = beside(dialect.global_scale)
        check(global_scale, (1,) if global_scale.shape else (), (torch.float32,))
    return StoredWeight(base, dialect, packed, block_scale, global_scale)


def writing_dialect(format: str, model_type: str | None, k: Iterable[int]) -> Dialect:
    """The dialect that is written: compressed-tensors', or GPT-OSS's own where its blocks divide every K.

    Raises ValueError for int4 with a K that `pack-quantized` cannot hold: readers divide a row into groups of
    one size.
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
    if model_type == "gpt_oss" and format == "mxfp4" and all(n % block == 0 for n in k):
        return GPT_OSS_MXFP4
    return {"nvfp4": NVFP4_PACK, "mxfp4": MXFP4_PACK}[format]


EXPERTS_TARGET = r"re:.*experts\.\d+\..*"


def describe(dialect: Dialect, targets: list[str], ignore: list[str]) -> dict[str, Any]:
    """The `quantization_config` that says how a folder in one of the dialects that are written is stored.

    targets, ignore: names of linear layers, or "re:" and a regular expression, that are in 4 bits or not.
    """
    if dialect.stacked:
        return {"quant_method": "mxfp4", "modules_to_not_convert": ignore}
    format = FORMATS[dialect.format]
    weights = {
        "num_bits": 4,
        "type": "int" if dialect.group else "float",
        "strategy": "tensor_group" if format.has_global_scale else "group",
        "group_size": format.block,
        "symmetric": True,
        "dynamic": False,
    }
    if not dialect.group:
        weights["scale_dtype"] = "torch.float8_e4m3fn" if format.has_global_scale else "torch.uint8"
    group = {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": dialect.name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": dialect.name}},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }
