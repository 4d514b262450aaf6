"""How others store 4-bit weights: one row for each dialect. Which one a folder speaks, its config says.

Nothing is ever guessed from values: compressed-tensors and ModelOpt store the second scale of nvfp4 as
reciprocals of one another, under different names, and no number tells which is which.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..meta.formats import FORMATS
from .files import CheckpointError, TensorInfo


@dataclass(frozen=True)
class Dialect:
    """The names and the arithmetic of one way to store 4-bit weights.

    A weight `NAME` (a linear layer, or one expert's matrix) is stored as NAME + each suffix below:
    packed [N, K/2] with the lower k in the low nibble, block_scale [N, K/block], global_scale one number.
    """

    name: str
    format: str
    packed: str
    block_scale: str
    global_scale: str | None = None
    reciprocal: bool = False
    """The file's global scale divides: value = code * block_scale / global_scale."""
    unused: tuple[str, ...] = ()
    """What else may lie beside a weight: scales for activations, which the operators choose when they run."""
    stacked: bool = False
    """One tensor holds all experts, packed [E, N, K/block, block/2] and block_scale [E, N, K/block]."""

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
        return self.base(info.name) is not None and info.dtype in (torch.uint8, torch.int8)


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

DIALECTS = {d.name: d for d in (MODELOPT_NVFP4, NVFP4_PACK, MXFP4_PACK, GPT_OSS_MXFP4)}


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
    if method == "modelopt" or config.get("quant_algo"):
        algorithm = config.get("quant_algo")
        if algorithm in ("NVFP4", "W4A16_NVFP4"):
            return MODELOPT_NVFP4
        raise _unknown(where, f"ModelOpt's quant_algo {algorithm!r}")
    if method == "compressed-tensors":
        groups = config.get("config_groups", {}).values()
        formats = {str(part.get("format")) for part in (config, *groups)} - {"None", "mixed-precision"}
        if len(formats) == 1 and formats <= {NVFP4_PACK.name, MXFP4_PACK.name}:
            return DIALECTS[formats.pop()]
        raise _unknown(where, f"compressed-tensors' format {' and '.join(sorted(formats)) or None!r}")
    if method == "mxfp4":
        return GPT_OSS_MXFP4
    raise _unknown(where, f"quant_method {method!r}")


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
    def shape(self) -> tuple[int, ...]:
        """[N, K], or [E, N, K] where all experts are stacked."""
        if self.dialect.stacked:
            e, n, blocks, half = self.packed.shape
            return e, n, blocks * half * 2
        return *self.packed.shape[:-1], self.packed.shape[-1] * 2


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
    format = FORMATS[dialect.format]

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
        if len(packed.shape) != 4 or packed.shape[-1] != format.block // 2:
            want = f"[E, N, K/{format.block}, {format.block // 2}]"
            raise CheckpointError(f"fp4: {packed} has shape {list(packed.shape)}; it must be {want}")
        scale_shape: tuple[int, ...] = packed.shape[:-1]
    else:
        if len(packed.shape) != 2:
            raise CheckpointError(f"fp4: {packed} has {len(packed.shape)} dimensions; it must have 2")
        scale_shape = (packed.shape[0], format.num_blocks(packed.shape[1] * 2))
    block_scale = beside(dialect.block_scale)
    # e8m0 is stored as its bytes by those whose torch had no such dtype
    raw = (torch.uint8,) if format.scale_dtype == torch.float8_e8m0fnu else ()
    check(block_scale, scale_shape, (format.scale_dtype, *raw))
    global_scale = None
    if dialect.global_scale:
        global_scale = beside(dialect.global_scale)
        check(global_scale, (1,) if global_scale.shape else (), (torch.float32,))
    return StoredWeight(base, dialect, packed, block_scale, global_scale)


@dataclass
class Codes:
    """One weight in the operators' terms: value = e2m1 code * block_scale * global_scale."""

    packed: Tensor
    """uint8 [..., N, K/2]"""
    block_scale: Tensor
    """[..., N, K/block] in the format's scale dtype"""
    global_scale: Tensor | None
    """float32 [] or None"""


def decode(stored: StoredWeight, read: Any) -> Codes:
    """Reads a weight and turns it into the operators' terms; `read` maps a TensorInfo to a tensor.

    Raises CheckpointError for scales that are NaN, and for a global scale that is not a positive number.
    """
    format = FORMATS[stored.dialect.format]
    packed = read(stored.packed).view(torch.uint8).reshape(*stored.shape[:-1], stored.shape[-1] // 2)
    block_scale = read(stored.block_scale).view(format.scale_dtype)
    raw = block_scale.view(torch.uint8)
    # NaN is 0xff in e8m0 and s1111111 in e4m3
    nan = raw == 0xFF if format.scale_dtype == torch.float8_e8m0fnu else (raw & 0x7F) == 0x7F
    if nan.any():
        raise CheckpointError(f"fp4: {stored.block_scale} holds NaN")
    global_scale = None
    if stored.global_scale is not None:
        global_scale = read(stored.global_scale).reshape(())
        if not (global_scale.isfinite() and global_scale > 0):
            raise CheckpointError(
                f"fp4: {stored.global_scale} is {global_scale.item()}; it must be positive and finite"
            )
        if stored.dialect.reciprocal:
            global_scale = 1.0 / global_scale
    return Codes(packed, block_scale, global_scale)


def writing_dialect(format: str, model_type: str | None, k: Iterable[int]) -> Dialect:
    """The dialect that is written: compressed-tensors', or GPT-OSS's own where its blocks divide every K."""
    if model_type == "gpt_oss" and format == "mxfp4" and all(n % FORMATS[format].block == 0 for n in k):
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
        "type": "float",
        "strategy": "tensor_group" if format.has_global_scale else "group",
        "group_size": format.block,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn" if format.has_global_scale else "torch.uint8",
    }
    group = {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": dialect.name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": dialect.name}},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def _reciprocal(factor: Tensor) -> Tensor:
    """The float32 whose reciprocal is `factor`; where there is none, one whose reciprocal is next to it."""
    near = 1.0 / factor
    if 1.0 / near != factor:
        for candidate in (near.nextafter(torch.zeros_like(near)), near.nextafter(2 * near)):
            if 1.0 / candidate == factor:
                return candidate
    return near


def encode(name: str, codes: Codes, dialect: Dialect) -> dict[str, Tensor]:
    """The tensors that hold a weight in a dialect that is written: `decode` backwards."""
    packed, block_scale = codes.packed, codes.block_scale
    if block_scale.dtype == torch.float8_e8m0fnu:
        block_scale = block_scale.view(torch.uint8)  # as all of its writers do
    if dialect.stacked:
        packed = packed.view(*block_scale.shape, -1)
    tensors = {name + dialect.packed: packed, name + dialect.block_scale: block_scale}
    if dialect.global_scale:
        assert codes.global_scale is not None
        stored = _reciprocal(codes.global_scale) if dialect.reciprocal else codes.global_scale
        tensors[name + dialect.global_scale] = stored.detach().cpu().reshape(1)
    return tensors
