"""Stored weights to the operators' terms and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..meta.formats import FORMATS
from .dialects import Dialect, StoredWeight
from .files import CheckpointError, TensorInfo

Read = Callable[[TensorInfo], Tensor]


@dataclass
class Codes:
    """One weight in the operators' terms: value = code * block_scale * global_scale."""

    packed: Tensor
    """uint8 [..., N, K/2]"""
    block_scale: Tensor
    """[..., N, K/block] in one of the format's scale dtypes"""
    global_scale: Tensor | None
    """float32 [] or None"""


def decode(stored: StoredWeight, read: Read) -> Codes:
    """Reads a weight and turns it into the operators' terms; `read` maps a TensorInfo to a tensor.

    Raises CheckpointError for scales that are NaN, and for a global scale that is not a positive number.
    """
    if stored.dialect.group:
        return _decode_int4(stored, read)
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


OFFSET = 0x88
"""Packed int4 codes are stored plus 8, which in two's complement turns one bit."""


def _decode_int4(stored: StoredWeight, read: Read) -> Codes:
    """Exact: scales are repeated for each block of a group, and float16 is widened to float32."""
    codes, scale = read(stored.packed).view(torch.uint8), _int4_scale(stored, read)
    if stored.dialect.codes_per_byte == 2:
        packed = codes ^ OFFSET
    else:
        packed = (codes[..., ::2] & 15) | codes[..., 1::2] << 4
    format, k = FORMATS[stored.dialect.format], stored.shape[-1]
    blocks = format.num_blocks(k)
    each = -(-min(stored.dialect.group, k) // format.block)
    scale = scale.repeat_interleave(each, -1)[..., :blocks].to(scale_dtype([stored])).contiguous()
    return Codes(packed, scale, None)


def _int4_scale(stored: StoredWeight, read: Read) -> Tensor:
    scale = read(stored.block_scale)
    if not scale.isfinite().all():
        raise CheckpointError(f"fp4: {stored.block_scale} holds NaN or infinity")
    return scale


def scale_dtype(weights: Iterable[StoredWeight]) -> torch.dtype:
    """The dtype in which the operators can hold the block scales of all these weights of one dialect."""
    weights = list(weights)
    format = FORMATS[weights[0].dialect.format]
    same = not weights[0].dialect.group or all(w.block_scale.dtype == format.scale_dtype for w in weights)
    return format.scale_dtype if same or format.wide_scale_dtype is None else format.wide_scale_dtype


def int4_values(stored: StoredWeight, read: Read) -> Tensor:
    """float32 [N, K]: code * block_scale, of int4 in groups of any size."""
    dialect, (n, k) = stored.dialect, stored.shape
    codes = read(stored.packed)
    if dialect.codes_per_byte == 2:
        codes = codes.view(torch.uint8)
        codes = torch.stack([codes & 15, codes >> 4], -1).view(n, k).to(torch.int8) - 8
    scale = _int4_scale(stored, read).float()
    return codes.float() * scale.repeat_interleave(min(dialect.block, k), -1)[:, :k]


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
    if dialect.group:
        shape = torch.tensor([packed.shape[0], 2 * packed.shape[1]])
        words = (packed ^ OFFSET).view(torch.int32)
        return {
            name + dialect.packed: words,
            name + dialect.block_scale: block_scale,
            name + dialect.unused[0]: shape,
        }
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
