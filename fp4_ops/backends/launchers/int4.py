"""Converts int4 weights with group scales to layout sm90_int4 and back, with torch operators."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...meta.formats import Format
from ...meta.layouts import LAYOUTS

LAYOUT = LAYOUTS["sm90_int4"]


def prepack(packed: Tensor, block_scale: Tensor, fmt: Format) -> tuple[Tensor, Tensor, Tensor]:
    """Packs a plain weight [..., N, K/2] into the layout. Gives the same bytes as `fp4::prepack` on a CPU."""
    *lead, n, half = packed.shape
    kp, d = LAYOUT.padded(2 * half), len(lead)
    blocks = kp // fmt.block
    held, factor = _divide(block_scale.float())
    codes = _nibbles(F.pad(packed.contiguous(), (0, kp // 2 - half))).view(torch.int32)
    # Reorder the words as lane 4g + t reads a tile: from rows 2g and 2g + 1, and from blocks t and words s of
    # each step of 64 k.
    words = codes.view(*lead, n // 16, 8, 2, kp // 64, 4, 2)
    words = words.permute(*range(d), d, d + 3, d + 1, d + 4, d + 2, d + 5).reshape(*lead, n, kp // 8)
    held = F.pad(held, (0, blocks - held.shape[-1])).view(*lead, n // 16, 16, blocks).transpose(-1, -2)
    return words.view(torch.uint8), _plain_strides(held.reshape(*lead, n, blocks)), factor


def unpack(packed: Tensor, block_scale: Tensor, factor: Tensor, fmt: Format) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the plain weight [..., N, Kp/2] with float32 scales."""
    *lead, n, half = packed.shape
    tiles, steps, d = n // 16, half // 32, len(lead)
    words = packed.contiguous().view(torch.int32).view(*lead, tiles, steps, 8, 4, 2, 2)
    words = words.permute(*range(d), d, d + 2, d + 4, d + 1, d + 3, d + 5).reshape(*lead, n, half // 4)
    blocks = 2 * half // fmt.block
    scales = block_scale.reshape(*lead, tiles, blocks, 16).transpose(-1, -2).reshape(*lead, n, blocks)
    scales = _plain_strides(scales * factor[..., None, None])
    return _codes(words.view(torch.uint8)), scales, scales.new_empty(0)


def _plain_strides(t: Tensor) -> Tensor:
    """Gives a tensor the strides of a new one. `contiguous()` keeps odd strides of dimensions of size one."""
    return t.clone(memory_format=torch.contiguous_format)


def _nibbles(codes: Tensor) -> Tensor:
    """Converts both codes of each byte from two's complement to the layout (csrc/cpu/sm90_layout.h)."""
    negative = codes & 0x88
    three = (negative >> 3) * 7  # the low bits of those nibbles
    less_one = ((codes & 0x77) + (0x77 ^ three) & 0x77) ^ three  # |c| - 1 of negative codes, inverted
    return (less_one & 0x44) << 1 | negative >> 1 | less_one & 0x33


def _codes(nibbles: Tensor) -> Tensor:
    """Undoes `_nibbles`."""
    negative = (nibbles & 0x44) << 1
    three = (negative >> 3) * 7
    less_one = (nibbles & 0x88) >> 1 | nibbles & 0x33
    return ((less_one ^ three) + (0x11 & ~three) & 0x77) | negative


def _divide(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Divides block scales [..., N, blocks] by a power of two for each matrix. Returns the quotients and the
    powers (meta/layouts.py).
    """
    every = F.pad(scale.flatten(-2), (0, 1))  # so that each matrix has at least one value
    least, largest = every.amin(-1), every.amax(-1)
    mantissa, exponent = torch.frexp(largest)
    power = (exponent - torch.where(mantissa <= 0.875, 6, 5)).clamp(min=-126)
    power = torch.where(largest == 0, 0, power).int()
    factor = (power + 127 << 23).view(torch.float32)
    held = scale / factor[..., None, None]
    lost = (held * factor[..., None, None] != scale).flatten(-2).any(-1)
    wrong = least.isnan(), least < 0, largest.isinf(), lost
    # One wait for the device.
    nan, negative, infinite, inexact = torch.stack([w.any() for w in wrong]).tolist()
    cannot = f"layout '{LAYOUT.name}' cannot hold them"
    if nan:
        raise RuntimeError("block_scale has NaN values; the weight is damaged")
    if negative:
        raise RuntimeError(f"block_scale has negative values; {cannot}")
    if infinite:
        raise RuntimeError(f"block_scale has infinite values; {cannot}")
    if inexact:
        matrix = int(lost.flatten().int().argmax())
        raise RuntimeError(f"block_scale of matrix {matrix} has values too far below its largest; {cannot}")
    return held + 0.0, factor  # turns -0 into 0
