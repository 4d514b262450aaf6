"""Reads ggml's types: the number of bytes in a block, and the float32 values that they represent.

Each block holds its scales and its codes. Functions take blocks, uint8 [n, bytes of a block], and return
float32 [n, elements of a block]. The names are ggml's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Dequantize = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class GGMLType:
    name: str
    block: int
    """The number of elements in a block."""
    nbytes: int
    """Bytes of a block."""
    dtype: torch.dtype | None = None
    """torch's dtype of the same bytes."""
    dequantize: Dequantize | None = None
    """None if this package cannot compute the values."""


def values(kind: GGMLType, data: Tensor) -> Tensor:
    """Dequantise: uint8 [..., bytes of a row] to float32 [..., K]. Ordinary dtypes are converted."""
    if kind.dtype is not None:
        return data.float()
    assert kind.dequantize is not None
    blocks = kind.dequantize(data.reshape(-1, kind.nbytes))
    return blocks.reshape(*data.shape[:-1], data.shape[-1] // kind.nbytes * kind.block)


def halves(codes: Tensor) -> Tensor:
    """Unpacks 4-bit codes of blocks. ggml stores a block's first half in the low nibbles, and its second half
    in the high ones.
    """
    return torch.cat([codes & 15, codes >> 4], -1)


def neighbours(codes: Tensor) -> Tensor:
    """Repacks such codes in the order of fp4_ops: a byte holds two neighbours, the first in the low
    nibble.
    """
    first, second = (codes & 15).unflatten(-1, (-1, 2)), (codes >> 4).unflatten(-1, (-1, 2))
    return torch.cat([x[..., 0] | x[..., 1] << 4 for x in (first, second)], -1)


def _half(data: Tensor) -> Tensor:
    """Returns float16 scales (two bytes each) as float32."""
    return data.contiguous().view(torch.float16).float()


def _bits(data: Tensor, width: int) -> Tensor:
    """Unpacks numbers of `width` bits, [n, bytes] to [n, 8 / width, bytes]: the lowest bits of all bytes
    come first."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=data.device)
    return (data[:, None] >> shifts[:, None]) & ((1 << width) - 1)


def _high_bits(data: Tensor) -> Tensor:
    """Returns the 32 single bits of 4 bytes, in order."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data[..., None] >> shifts) & 1).flatten(-2)


def _q4_0(x: Tensor) -> Tensor:
    return _half(x[:, :2]) * (halves(x[:, 2:]).float() - 8)


def _q4_1(x: Tensor) -> Tensor:
    return _half(x[:, :2]) * halves(x[:, 4:]).float() + _half(x[:, 2:4])


def _q5_0(x: Tensor) -> Tensor:
    codes = halves(x[:, 6:]) | _high_bits(x[:, 2:6]) << 4
    return _half(x[:, :2]) * (codes.float() - 16)


def _q5_1(x: Tensor) -> Tensor:
    codes = halves(x[:, 8:]) | _high_bits(x[:, 4:8]) << 4
    return _half(x[:, :2]) * codes.float() + _half(x[:, 2:4])


def _q8_0(x: Tensor) -> Tensor:
    return _half(x[:, :2]) * x[:, 2:].contiguous().view(torch.int8).float()


def _q2_k(x: Tensor) -> Tensor:
    scales, codes = x[:, :16], x[:, 16:80]
    d, dmin = _half(x[:, 80:82]), _half(x[:, 82:84])
    q = torch.cat([_bits(part, 2).flatten(1) for part in codes.split(32, 1)], 1).unflatten(1, (16, 16))
    step, least = d * (scales & 15).float(), dmin * (scales >> 4).float()
    return (step[..., None] * q.float() - least[..., None]).flatten(1)


def _q3_k(x: Tensor) -> Tensor:
    mask, codes, packed, d = x[:, :32], x[:, 32:96], x[:, 96:108], _half(x[:, 108:110])
    low = _bits(packed[:, :8], 4).flatten(1)
    scales = (low | _bits(packed[:, 8:], 2).flatten(1) << 4).float() - 32
    q = torch.cat([_bits(part, 2).flatten(1) for part in codes.split(32, 1)], 1)
    q = q.float() - 4 * (1 - _bits(mask, 1).flatten(1).float())
    return ((d * scales)[..., None] * q.unflatten(1, (16, 16))).flatten(1)


def _scales_of_k(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpacks the 8 scales and 8 minima (six bits each) of Q4_K and Q5_K from 12 bytes."""
    scale, least, both = packed.split(4, 1)
    scales = torch.cat([scale & 63, both & 15 | scale >> 2 & 48], 1)
    minima = torch.cat([least & 63, both >> 4 | least >> 2 & 48], 1)
    return scales.float(), minima.float()


def _k_values(x: Tensor, q: Tensor) -> Tensor:
    """Returns the values of Q4_K and Q5_K, given codes q [n, 8, 32]."""
    scales, minima = _scales_of_k(x[:, 4:16])
    step, least = _half(x[:, :2]) * scales, _half(x[:, 2:4]) * minima
    return (step[..., None] * q.float() - least[..., None]).flatten(1)


def _pairs(codes: Tensor, width: int) -> Tensor:
    """Unpacks nibbles [n, bytes]: for each `width` bytes, first the low nibbles, then the high ones."""
    return torch.cat([halves(part) for part in codes.split(width, 1)], 1)


def _q4_k(x: Tensor) -> Tensor:
    return _k_values(x, _pairs(x[:, 16:], 32).unflatten(1, (8, 32)))


def _q5_k(x: Tensor) -> Tensor:
    low = _pairs(x[:, 48:], 32).unflatten(1, (8, 32))
    return _k_values(x, low | _bits(x[:, 16:48], 1) << 4)


def _q6_k(x: Tensor) -> Tensor:
    low = _pairs(x[:, :128], 64)
    high = torch.cat([_bits(part, 2).flatten(1) for part in x[:, 128:192].split(32, 1)], 1)
    q = (low | high << 4).float() - 32
    scales = _half(x[:, 208:210]) * x[:, 192:208].contiguous().view(torch.int8).float()
    return (scales[..., None] * q.unflatten(1, (16, 16))).flatten(1)


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)


def _look_up(table: tuple[float, ...], codes: Tensor) -> Tensor:
    return torch.tensor(table, dtype=torch.float32, device=codes.device)[codes.long()]


def _iq4_nl(x: Tensor) -> Tensor:
    return _half(x[:, :2]) * _look_up(_IQ4, halves(x[:, 2:]))


def _iq4_xs(x: Tensor) -> Tensor:
    high = x[:, 2:4].contiguous().view(torch.int16).int()[:, :, None]
    shifts = torch.arange(8, device=x.device, dtype=torch.int32)
    low = torch.stack([x[:, 4:8] & 15, x[:, 4:8] >> 4], -1).flatten(1).int()
    scales = (low | (high[:, 0] >> 2 * shifts & 3) << 4).float() - 32
    step = _half(x[:, :2]) * scales
    return (step[..., None] * _look_up(_IQ4, _pairs(x[:, 8:], 16)).unflatten(1, (8, 32))).flatten(1)


def _mxfp4(x: Tensor) -> Tensor:
    # exact in float64; the smallest values are subnormal in float32
    scale = torch.exp2(x[:, :1].double() - 127)
    return (scale * _look_up(_E2M1, halves(x[:, 1:])).double()).float()


def unsigned_e4m3(data: Tensor) -> Tensor:
    """Converts ggml's NVFP4 scales to e4m3. ggml ignores the sign, and reads NaN as 0."""
    data = data & 127
    return torch.where(data == 127, 0, data).view(torch.float8_e4m3fn)


def _nvfp4(x: Tensor) -> Tensor:
    scale = unsigned_e4m3(x[:, :4]).float()
    return (scale[..., None] * _look_up(_E2M1, _pairs(x[:, 4:], 8)).unflatten(1, (4, 16))).flatten(1)


TYPES = {
    0: GGMLType("F32", 1, 4, torch.float32),
    1: GGMLType("F16", 1, 2, torch.float16),
    2: GGMLType("Q4_0", 32, 18, None, _q4_0),
    3: GGMLType("Q4_1", 32, 20, None, _q4_1),
    6: GGMLType("Q5_0", 32, 22, None, _q5_0),
    7: GGMLType("Q5_1", 32, 24, None, _q5_1),
    8: GGMLType("Q8_0", 32, 34, None, _q8_0),
    10: GGMLType("Q2_K", 256, 84, None, _q2_k),
    11: GGMLType("Q3_K", 256, 110, None, _q3_k),
    12: GGMLType("Q4_K", 256, 144, None, _q4_k),
    13: GGMLType("Q5_K", 256, 176, None, _q5_k),
    14: GGMLType("Q6_K", 256, 210, None, _q6_k),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18, None, _iq4_nl),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136, None, _iq4_xs),
    24: GGMLType("I8", 1, 1, torch.int8),
    25: GGMLType("I16", 1, 2, torch.int16),
    26: GGMLType("I32", 1, 4, torch.int32),
    27: GGMLType("I64", 1, 8, torch.int64),
    28: GGMLType("F64", 1, 8, torch.float64),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2, torch.bfloat16),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17, None, _mxfp4),
    40: GGMLType("NVFP4", 64, 36, None, _nvfp4),
}
"""Types by their number in a file."""

BY_NAME = {kind.name: kind for kind in TYPES.values()}
