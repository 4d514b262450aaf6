"""Defines a dialect, and the weights that a folder stores in it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...meta.formats import FORMATS
from ..files import INCOMPLETE, CheckpointError, TensorInfo, read_json

Read = Callable[[TensorInfo], Tensor]

STACKS = ("_proj", "_linear")
"""Endings of the names of tensors that hold all experts. The codes have no further suffix; the scales have
one."""


@dataclass
class Codes:
    """One weight as the operators take it: value = code * block_scale * global_scale."""

    packed: Tensor
    """uint8 [..., N, K/2]"""
    block_scale: Tensor
    """[..., N, K/block] in one of the format's scale dtypes"""
    global_scale: Tensor | None
    """float32 [] or None"""


@dataclass(frozen=True)
class Dialect(ABC):
    """One way to store weights: the names of the tensors, and their arithmetic.

    A weight `NAME` (a linear layer, or one expert's matrix) is stored as NAME + each suffix below. A subclass
    implements other arithmetic or shapes.
    """

    name: str
    format: str
    """A key of FORMATS, or a description of weights that no operator computes with."""
    packed: str
    """The suffix of the codes. By default they are [N, K/2], with the lower k in the low nibble."""
    block_scale: str
    """Suffix of the block scales. By default they are [N, K/block]."""
    global_scale: str | None = None
    """Suffix of the second scale, one number."""
    unused: tuple[str, ...] = ()
    """Suffixes that are ignored: scales for activations, which the operators choose when they run."""
    forbidden: tuple[str, ...] = ()
    """Suffixes of tensors that are an error, because they change the weight in a way that no operator
    computes.
    """
    reads: tuple[str, ...] = ()
    """Suffixes of other tensors that `decode` reads, if they exist."""
    stacked: bool = False
    """True if one tensor holds all experts. Its first dimension is E."""
    code_dtypes: tuple[torch.dtype, ...] = (torch.uint8, torch.int8)
    """Dtypes of the tensor of codes. An int32 holds eight codes."""
    codes_per_byte: int = 2
    targets: tuple[str, ...] = ()
    """The weights that have this dialect. A folder with several dialects needs it if names and dtypes of the
    tensors do not say which one a weight has. Each entry is a name, "re:" and a regular expression, or a
    class of layers."""

    @property
    def is_dense(self) -> bool:
        """Returns whether weights are dequantised to ordinary ones, because no operator computes with the
        stored ones.
        """
        return False

    @property
    @abstractmethod
    def block(self) -> int:
        """Returns the number of elements along K that share a block scale."""

    @property
    @abstractmethod
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        """Returns the dtypes in which block scales are stored."""

    @abstractmethod
    def decode(self, stored: StoredWeight, read: Read) -> Codes:
        """Reads a weight and converts it, exactly, to the operators' codes and scales.

        Raises CheckpointError for scales that are NaN, and for a global scale that is not a positive number.
        """

    def values(self, stored: StoredWeight, read: Read) -> Tensor:
        """Returns the values of the weight, float32 [N, K]. They are needed for weights that are
        requantised.
        """
        raise NotImplementedError(f"{self.name} is not quantised anew")

    def dequantize(self, stored: StoredWeight, read: Read, dtype: torch.dtype) -> Tensor:
        """Returns the weight in `dtype` and in its stored shape ([N, K], or all experts'). Only for dense
        dialects.
        """
        raise NotImplementedError(f"{self.name} is not dense")

    def matrix(
        self, stored: StoredWeight, expert: int | None, codes: Tensor, read: Read, dtype: torch.dtype
    ) -> Tensor:
        """Dequantises one matrix whose codes were already read: the weight, or one expert of it."""
        raise NotImplementedError(f"{self.name} is not dense")

    def scale_dtype(self, weights: list[StoredWeight]) -> torch.dtype:
        """Returns a dtype of the operators that holds the block scales of all these weights."""
        return FORMATS[self.format].scale_dtype

    @property
    def suffixes(self) -> tuple[str, ...]:
        return (
            self.packed,
            self.block_scale,
            *((self.global_scale,) if self.global_scale else ()),
            *self.unused,
        )

    def base(self, name: str) -> str | None:
        """Returns the name of the weight whose codes a tensor `name` would be, or None."""
        return name.removesuffix(self.packed) if name.endswith(self.packed) else None

    def is_packed(self, info: TensorInfo) -> bool:
        """Returns whether a tensor holds codes. The dtype decides, because ModelOpt also uses the name
        `weight`.
        """
        return self.base(info.name) is not None and info.dtype in self.code_dtypes

    def shape(self, packed: TensorInfo) -> tuple[int, ...]:
        """Returns [N, K] of the weight, or [E, N, K] if it stacks all experts."""
        if len(packed.shape) != 2:
            raise CheckpointError(f"fp4: {packed} has {len(packed.shape)} dimensions; it must have 2")
        return packed.shape[0], packed.shape[1] * packed.dtype.itemsize * self.codes_per_byte

    def scale_shape(self, packed: TensorInfo) -> tuple[int, ...]:
        """Returns the shape of the block scales that belong to these codes."""
        *rows, k = self.shape(packed)
        return *rows, -(-k // self.block)

    def scale_shapes(self, packed: TensorInfo) -> tuple[tuple[int, ...], ...]:
        """Returns all shapes that the block scales of these codes may have."""
        return (self.scale_shape(packed),)

    def check_scale(self, packed: TensorInfo, scale: TensorInfo) -> None:
        """Raises CheckpointError unless `scale` can be the block scales of these codes."""
        shapes = self.scale_shapes(packed)
        if scale.shape not in shapes:
            raise CheckpointError(
                f"fp4: {scale} has shape {list(scale.shape)}; beside codes {list(packed.shape)} it must be "
                + " or ".join(str(list(shape)) for shape in shapes)
                + self._misfit
            )
        if scale.dtype not in self.scale_dtypes:
            wanted = " or ".join(str(d).removeprefix("torch.") for d in self.scale_dtypes)
            raise CheckpointError(f"fp4: {scale} is {scale.dtype}; it must be {wanted}{self._misfit}")

    @property
    def _misfit(self) -> str:
        """Returns the end of an error message about tensors that the config does not describe."""
        return (
            f", as config.json says {self.name}. Take the config.json that was written with the files, or "
            "export the folder again"
        )

    def module_name(self, base: str) -> str:
        """Returns the name that the weight has in a model that is not quantised."""
        return base if self.stacked else base + ".weight"


@dataclass(frozen=True)
class StoredWeight:
    """The tensors of one weight in the files. They are checked against each other, but not read."""

    name: str
    dialect: Dialect
    packed: TensorInfo
    block_scale: TensorInfo
    global_scale: TensorInfo | None
    others: tuple[TensorInfo, ...] = ()
    """Tensors of `dialect.reads` that exist."""

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        second = (self.global_scale,) if self.global_scale else ()
        # GGUF has scales and codes in one tensor
        return tuple(dict.fromkeys((self.packed, self.block_scale, *second, *self.others)))

    def other(self, suffix: str) -> TensorInfo | None:
        """Returns the one of `others` with this suffix, or None."""
        return next((info for info in self.others if info.name == self.name + suffix), None)

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns [N, K], or [E, N, K] if all experts are stacked."""
        return self.dialect.shape(self.packed)


def scale_dtype(weights: Iterable[StoredWeight]) -> torch.dtype:
    """Returns a dtype of the operators that holds the block scales of all these weights, which have one
    dialect.
    """
    weights = list(weights)
    return weights[0].dialect.scale_dtype(weights)


def quantization_config(config: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the part of a model's config that says how its weights are stored."""
    for part in (config, config.get("text_config") or {}):
        for key in ("quantization_config", "compression_config"):
            if part.get(key):
                if not isinstance(part[key], dict):
                    raise CheckpointError(
                        f"fp4: {key} of config.json is {part[key]!r}; it must be an object. Take the "
                        "config.json that was written with the files"
                    )
                # DeepSeek-V4 has expert_dtype beside quantization_config, V4.1 has it inside.
                beside = {"expert_dtype": part["expert_dtype"]} if part.get("expert_dtype") else {}
                return {**beside, **part[key]}
    return None


def stored_config(path: Path) -> dict[str, Any] | None:
    """Reads from a folder how its weights are stored, or returns None.

    Older exports of ModelOpt say it in a separate file, hf_quant_config.json. Newer ones also say it in
    config.json.
    """
    stored = quantization_config(read_json(path / "config.json"))
    older = path / "hf_quant_config.json"
    if not needs_older(stored) or not older.exists():
        return stored
    return with_older(stored, read_json(older))


def needs_older(stored: dict[str, Any] | None) -> bool:
    """Return whether ModelOpt's hf_quant_config.json must be read, because config.json lacks something.

    Exports before 0.40 with mixed precision list their layers only in hf_quant_config.json.
    """
    if stored is None:
        return True
    return stored.get("quant_algo") == "MIXED_PRECISION" and not stored.get("quantized_layers")


def with_older(stored: dict[str, Any] | None, older: dict[str, Any]) -> dict[str, Any]:
    """Return a folder's quantization_config with what its hf_quant_config.json adds."""
    if stored is None:
        return older
    inner = older.get("quantization")
    layers = inner.get("quantized_layers") if isinstance(inner, dict) else None
    return {**stored, "quantized_layers": layers} if layers else stored


def stored_weights(tensors: dict[str, TensorInfo], dialects: Iterable[Dialect]) -> dict[str, StoredWeight]:
    """Returns every weight that the tensors hold in these dialects.

    Raises CheckpointError for parts that are missing, misshapen or of another dtype.
    """
    dialects = tuple(dialects)
    found = {}
    taken: set[str] = set()
    needed = tuple(s for d in dialects for s in (d.packed, d.block_scale, d.global_scale) if s)
    for info in tensors.values():
        if info.foreign and info.name.endswith(needed):
            raise CheckpointError(
                f"fp4: {info} has dtype {info.foreign}, which no dialect has. Export the weights again, or "
                "quantise the original ones with `python -m fp4_ops quantize`"
            )
        possible = [d for d in dialects if d.is_packed(info)]
        if not possible:
            continue
        # If several dialects use the same name for codes, the dtype of the scales decides.
        fitting = [d for d in possible if _has_scales(d, info, tensors)] or possible
        dialect = max(fitting, key=lambda d: _names(d, info))  # if several name it equally well, the first
        base = dialect.base(info.name)
        assert base is not None
        if other := next((base + s for s in dialect.forbidden if base + s in tensors), None):
            raise CheckpointError(
                f"fp4: {tensors[other]} scales the inputs of {base}, which the operators do not do. Export "
                "the checkpoint with a method that leaves inputs alone (no AWQ), or quantise the original "
                "weights with `python -m fp4_ops quantize`"
            )
        found[base] = _stored_weight(base, info, tensors, dialect)
        taken.update(base + suffix for suffix in dialect.suffixes)
    for dialect in dialects:
        scales = [s for s in (dialect.block_scale, dialect.global_scale) if s]
        for info in tensors.values():
            suffix = next((s for s in scales if info.name.endswith(s)), None)
            if suffix and info.name not in taken:
                codes = tensors.get(info.name.removesuffix(suffix) + dialect.packed)
                codes = codes or tensors.get(info.name.removesuffix(suffix) + ".weight")
                if codes is None:
                    raise CheckpointError(
                        f"fp4: {info} has no {dialect.name} codes beside it: they are missing. {INCOMPLETE}"
                    )
                raise CheckpointError(
                    f"fp4: {info} has no {dialect.name} codes beside it: {codes.name} is {codes.dtype}, and "
                    "the config does not say what that means. Take the config that the tool wrote beside "
                    "these files"
                )
    return found


def _names(dialect: Dialect, packed: TensorInfo) -> int:
    """Return how closely the dialect's targets name a weight: 2 by name, 1 by the class of a layer, 0 not."""
    base = dialect.base(packed.name)
    assert base is not None
    by_name = (
        re.match(target[3:], base) if target.startswith("re:") else target == base
        for target in dialect.targets
    )
    return 2 if any(by_name) else int("Linear" in dialect.targets)


def _has_scales(dialect: Dialect, packed: TensorInfo, tensors: dict[str, TensorInfo]) -> bool:
    base = dialect.base(packed.name)
    assert base is not None
    scale = tensors.get(base + dialect.block_scale)
    second = dialect.global_scale is None or base + dialect.global_scale in tensors
    return scale is not None and scale.dtype in dialect.scale_dtypes and second


def _stored_weight(
    base: str, packed: TensorInfo, tensors: dict[str, TensorInfo], dialect: Dialect
) -> StoredWeight:
    def beside(suffix: str) -> TensorInfo:
        if base + suffix not in tensors:
            raise CheckpointError(
                f"fp4: {packed} has no scale beside it: {base + suffix} is missing. {INCOMPLETE}"
            )
        return tensors[base + suffix]

    block_scale = beside(dialect.block_scale)
    dialect.check_scale(packed, block_scale)
    global_scale = None
    if dialect.global_scale:
        global_scale = beside(dialect.global_scale)
        experts = ((dialect.shape(packed)[0],),) if dialect.stacked else ()
        if global_scale.shape not in ((), (1,), *experts):
            raise CheckpointError(
                f"fp4: {global_scale} has shape {list(global_scale.shape)}; it must be one number"
                + " or one an expert" * dialect.stacked
            )
        if global_scale.dtype != torch.float32:
            raise CheckpointError(f"fp4: {global_scale} is {global_scale.dtype}; it must be float32")
    others = tuple(tensors[base + suffix] for suffix in dialect.reads if base + suffix in tensors)
    return StoredWeight(base, dialect, packed, block_scale, global_scale, others)
