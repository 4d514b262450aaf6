"""Reads the weights of a GGUF file: experts as packed stored weights, the rest as ordinary tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ...experts.names import HALVES
from ...meta.formats import FORMATS, FP4_FORMATS
from ..dialects import Codes, Read, StoredWeight
from ..dialects.fp4 import FP4Dialect
from ..dialects.int4 import OFFSET
from ..files import DAMAGED, OTHER_MODEL, CheckpointError, Reader, TensorInfo
from .architectures import WHOLE, Architecture, architecture_of, layers_of
from .reader import GGUF, shape_of
from .types import BY_NAME, TYPES, neighbours, unsigned_e4m3, values

OURS = {"MXFP4": "mxfp4", "NVFP4": "nvfp4", "Q4_0": "int4_g32"}
"""Formats of the operators, by ggml's types. Their bits are equal, except for the order of the nibbles."""

_LAYER = re.compile(r"^blk\.(\d+)\.(.*)$")
_STACK = re.compile(r"^ffn_(gate|up|down|gate_up)_exps\.(weight|bias|scale)$")
_SINGLE = re.compile(r"^ffn_(gate|up|down)\.(\d+)\.(weight)$")
"""Pattern of the name of one expert's matrix, in files from before llama.cpp stacked experts."""
_CHUNK = 1 << 22
"""Elements that are dequantised at a time."""

_NAMES = {kind.dtype: kind.name for kind in TYPES.values() if kind.dtype is not None}


def type_of(info: TensorInfo) -> str:
    """Returns ggml's name of a tensor's type."""
    return info.foreign or _NAMES[info.dtype]


@dataclass(frozen=True)
class GGUFDialect(FP4Dialect):
    """ggml's blocks. The scale of a block precedes its codes."""

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    def scale_dtype(self, weights: list[StoredWeight]) -> torch.dtype:
        format = FORMATS[self.format]
        return format.wide_scale_dtype or format.scale_dtype

    def shape(self, packed: TensorInfo) -> tuple[int, ...]:
        return shape_of(packed)

    def decode(self, stored: StoredWeight, read: Read) -> Codes:
        kind, info = BY_NAME[type_of(stored.packed)], stored.packed
        blocks = read(info).unflatten(-1, (-1, kind.nbytes))
        if kind.name == "Q4_0":
            scale = blocks[..., :2].contiguous().view(torch.float16).float()
            codes = neighbours(blocks[..., 2:]) ^ OFFSET
            if not scale.isfinite().all():
                raise CheckpointError(f"fp4: {info} holds scales that are NaN or infinity. {DAMAGED}")
        elif (blocks[..., : kind.nbytes - kind.block // 2] == 255).any():
            raise CheckpointError(f"fp4: {info} holds scales that are NaN. {DAMAGED}")
        elif kind.name == "MXFP4":
            scale, codes = blocks[..., :1].view(torch.float8_e8m0fnu), neighbours(blocks[..., 1:])
        else:
            scale = unsigned_e4m3(blocks[..., :4])
            codes = neighbours(blocks[..., 4:].unflatten(-1, (4, 8))).flatten(-2)
        second = None
        if FORMATS[self.format].has_global_scale:
            second = self.read_global_scale(stored, read)
            second = torch.ones((), device=codes.device) if second is None else second
        return Codes(codes.flatten(-2).contiguous(), scale.flatten(-2).contiguous(), second)

    def values(self, stored: StoredWeight, read: Read) -> Tensor:
        found = values(BY_NAME[type_of(stored.packed)], read(stored.packed))
        if not found.isfinite().all():
            raise CheckpointError(f"fp4: {stored.packed} holds NaN or infinity. {DAMAGED}")
        second = self.read_global_scale(stored, read)
        return found if second is None else found * second


def experts_of(file: GGUF, requantize: str | None) -> tuple[dict[str, StoredWeight], list[TensorInfo]]:
    """Returns the matrices of all experts, each by transformers' name, and the experts' biases.

    Raises CheckpointError for types that no operator computes with, unless `requantize` is given.
    """
    form, layers = architecture_of(file), layers_of(file)
    weights: dict[str, StoredWeight] = {}
    biases: list[TensorInfo] = []
    for info in file.tensors.values():
        layer, name = _in_layer(info)
        if layer is None or layer >= layers:
            continue
        if match := _SINGLE.match(name):
            parts = [(int(match[2]), match[1], info)]
        elif match := _STACK.match(name):
            parts = [*_parts(info, match[1])]
        else:
            continue
        for expert, matrix, part in parts:
            place = f"model.layers.{layer}." + form.experts[matrix].format(expert)
            if match[match.lastindex or 1] == "bias":
                biases.append(replace(part, name=f"{place}.bias"))
            elif match[match.lastindex or 1] == "weight":
                weights[place] = _stored(place, part, _second(file, info, expert))
    _check_types(weights.values(), requantize)
    return weights, biases


def _in_layer(info: TensorInfo) -> tuple[int | None, str]:
    match = _LAYER.match(info.name)
    return (int(match[1]), match[2]) if match else (None, info.name)


def _parts(info: TensorInfo, matrix: str) -> Iterable[tuple[int, str, TensorInfo]]:
    """Yields (expert, matrix, its tensor) for each expert of a stack."""
    for expert in range(info.shape[0]):
        row = info.row(expert)
        if matrix == "gate_up" and len(info.shape) > 1:
            half = row.shape[0] // 2
            yield from ((expert, m, row.rows(range(i * half, (i + 1) * half))) for i, m in enumerate(HALVES))
        else:
            yield expert, matrix, row


def _second(file: GGUF, info: TensorInfo, expert: int) -> TensorInfo | None:
    """Returns the second scale of an expert in NVFP4, or None."""
    scale = file.tensors.get(info.name.removesuffix(".weight") + ".scale")
    if scale is None:
        return None
    return scale.row(expert) if len(scale.shape) == 1 and scale.shape[0] > 1 else scale


def _stored(name: str, info: TensorInfo, second: TensorInfo | None) -> StoredWeight:
    kind = type_of(info)
    dialect = GGUFDialect(f"GGUF {kind}", OURS.get(kind, kind), ".weight", ".weight")
    return StoredWeight(name, dialect, info, info, second)


def _check_types(weights: Iterable[StoredWeight], requantize: str | None) -> None:
    one_format: dict[str, StoredWeight] = {}
    formats = " or ".join(map(repr, FP4_FORMATS))
    anew = f"Give requantize={formats} to quantise experts anew (lossy: the report says how much)"
    for stored in weights:
        tensor = replace(stored.packed, name=stored.packed.name.partition("[")[0])
        kind = type_of(stored.packed)
        if stored.dialect.format not in FORMATS:
            _check_known(tensor)
            if requantize is None:
                raise CheckpointError(
                    f"fp4: {tensor} holds experts in {kind}, which no operator computes with. {anew}"
                )
        first = one_format.setdefault(stored.name.partition(".experts.")[0], stored)
        if requantize is None and first.dialect.format != stored.dialect.format:
            other = replace(first.packed, name=first.packed.name.partition("[")[0])
            raise CheckpointError(
                f"fp4: {tensor} is in {kind}, and {other.name} in {type_of(first.packed)}; a layer's experts "
                f"must be in one format. {anew}"
            )


def _check_known(info: TensorInfo) -> None:
    if info.foreign and BY_NAME[info.foreign].dequantize is None:
        readable = ", ".join(kind.name for kind in TYPES.values() if kind.dequantize is not None)
        raise CheckpointError(
            f"fp4: {info} is in {info.foreign}, whose values are not read. Take a file in one of {readable}"
        )


def dense_of(file: GGUF, config: PretrainedConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns all tensors except the experts', by transformers' names.

    Quantised tensors become `dtype`; the others keep theirs. Raises CheckpointError for a tensor whose
    name is not known.
    """
    form, layers = architecture_of(file), layers_of(file)
    found: dict[str, Tensor] = {}
    split: dict[str, dict[str, Tensor]] = {}
    with torch.no_grad(), Reader() as reader:
        for info in file.tensors.values():
            layer, name = _in_layer(info)
            if name.endswith(".input_scale") or _STACK.match(name) or _SINGLE.match(name):
                continue
            if layer is not None and layer >= layers:
                continue  # layers that predict further tokens
            _check_known(info)
            tensor = _dense(info, reader, dtype)
            module, _, suffix = name.rpartition(".")
            prefix = "" if layer is None else f"model.layers.{layer}."
            if layer is not None and module in ("attn_k_b", "attn_v_b"):
                split.setdefault(prefix, {})[module] = tensor
                continue
            place = _place(form, info, module, suffix, layer is None)
            if form.permuted and module in ("attn_q", "attn_k"):
                tensor = _straightened(tensor, info, config, module)
            if place.endswith("shared_expert_gate.weight"):
                tensor = tensor.reshape(1, -1)
            found[prefix + place] = tensor
    for prefix, parts in split.items():
        found[f"{prefix}self_attn.kv_b_proj.weight"] = _joined(prefix, parts)
    return found


def _place(form: Architecture, info: TensorInfo, module: str, suffix: str, whole: bool) -> str:
    names = WHOLE if whole else form.layer_names
    place = None if whole else form.whole_names.get(f"{module}.{suffix}")
    if place is None and module in names and suffix in ("weight", "bias"):
        place = f"{names[module]}.{suffix}"
    if place is None:
        raise CheckpointError(
            f"fp4: {info} is not known, and may change what the model computes. Give the model's folder of "
            "safetensors files"
        )
    return place


def _dense(info: TensorInfo, reader: Reader, dtype: torch.dtype) -> Tensor:
    data = reader.read(info)
    if not info.foreign:
        return data
    kind, shape = BY_NAME[info.foreign], shape_of(info)
    whole = torch.empty(shape, dtype=dtype).view(-1, shape[-1])
    rows = max(1, _CHUNK // shape[-1])
    for part, raw in zip(whole.split(rows), data.view(-1, data.shape[-1]).split(rows)):
        part.copy_(values(kind, raw))
    return whole.view(shape)


def _straightened(tensor: Tensor, info: TensorInfo, config: PretrainedConfig, module: str) -> Tensor:
    """Puts rows of q or k into transformers' order. llama.cpp stores the two rows of a rotation side by
    side.
    """
    heads: Any = config.num_attention_heads if module == "attn_q" else config.num_key_value_heads
    if tensor.shape[0] % (2 * heads):
        raise CheckpointError(
            f"fp4: {info} has {tensor.shape[0]} rows, and the config {heads} heads. {OTHER_MODEL}"
        )
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)


def _joined(prefix: str, parts: dict[str, Tensor]) -> Tensor:
    """Joins DeepSeek's kv_b_proj. llama.cpp stores k [heads, rank, K] and v [heads, V, rank] separately."""
    if len(parts) != 2:
        raise CheckpointError(
            f"fp4: {prefix} has {next(iter(parts))} alone, of attn_k_b and attn_v_b. {DAMAGED}"
        )
    k, v = parts["attn_k_b"], parts["attn_v_b"]
    return torch.cat([k.transpose(1, 2), v], 1).flatten(0, 1)
