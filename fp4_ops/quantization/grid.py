"""Implements the grids of 4-bit weights in plain torch: the values that codes represent, and rounding to the
nearest value.

The functions compute the same bits as `fp4::quantize` and `fp4::dequantize`. The quantisation methods combine
them. Weights are blocks [..., ceil(K / block), block], the last one padded with zeros. Block scales are scale
codes: their bits as integers, where code + 1 is the next larger scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..meta.formats import E2M1_VALUES, ELEMENTS, Format

E4M3_MAX = 448.0


def divide(x: Tensor, by: float) -> Tensor:
    """Returns x / by, rounded once. For a Python number, torch on CUDA would multiply by the reciprocal,
    whose last bits differ."""
    return x / torch.full_like(x, by)


def split_blocks(w: Tensor, block: int) -> Tensor:
    """Reshapes [..., K] to [..., ceil(K / block), block]."""
    k = w.shape[-1]
    count = (k + block - 1) // block
    return F.pad(w, (0, count * block - k)).unflatten(-1, (count, block))


def join_blocks(w: Tensor, k: int) -> Tensor:
    """Undoes `split_blocks`."""
    return w.flatten(-2)[..., :k]


def _round_e2m1_(x: Tensor) -> Tensor:
    # The grid's step is 0.5 below 2, 1 below 4, and 2 above. That is half of the largest power of two that is
    # at most x.
    power = x.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    step = power.mul_(0.5).clamp_(0.5, 2.0)
    return x.div_(step).round_().mul_(step).clamp_(-6.0, 6.0)


def _code_e2m1(values: Tensor) -> Tensor:
    table = torch.zeros(13, dtype=torch.uint8, device="cpu")  # indexed by twice the magnitude
    table[[round(2 * v) for v in E2M1_VALUES]] = torch.arange(8, dtype=torch.uint8, device="cpu")
    return table.to(values.device)[(2 * values.abs()).int()] | values.signbit().to(torch.uint8) << 3


def _round_int4_(x: Tensor) -> Tensor:
    return x.round_().clamp_(-8.0, 7.0)


def _code_int4(values: Tensor) -> Tensor:
    return values.to(torch.int8).view(torch.uint8) & 15


@dataclass(frozen=True)
class Element:
    """The arithmetic of one of `meta.formats.ELEMENTS`."""

    top: float
    """The magnitude to which round-to-nearest scales the largest value of a block."""
    reach: tuple[float, float]
    """The range of a search below and above that scale, in octaves."""
    saturated: float
    """The smallest |w| / scale of a value that counts as saturated."""
    round_: Callable[[Tensor], Tensor]
    """Rounds to the nearest value, ties to the even code; in place, float32."""
    code: Callable[[Tensor], Tensor]
    """Returns the uint8 codes of values. e2m1 has two zeros, distinguished by their signs."""


_ELEMENTS = {
    # A search scales the largest value of a block to 3.6 to 10; a wider range changed nothing. 7 is half-way
    # between 6 and 8, which e2m1 cannot represent.
    "e2m1": Element(6.0, (0.75, 0.75), 7.0, _round_e2m1_, _code_e2m1),
    # The grid is uniform, so using a smaller part of it only makes it coarser. One exception: with a largest
    # value of 7, a positive value is not clipped.
    "int4": Element(7.5, (0.5, 0.125), 8.0, _round_int4_, _code_int4),
}


def element(fmt: Format) -> Element:
    return _ELEMENTS[fmt.element]


@dataclass(frozen=True)
class ScaleGrid:
    """The block scales of one dtype, as scale codes."""

    bits: torch.dtype
    """The integer dtype of a code."""
    largest: int
    """Code of the largest finite scale. Larger codes are infinity or NaN."""
    octave: int
    """Number of codes from a power of two to the next."""
    stride: int = 1
    """The distance in codes between candidates of a search. Trying all bfloat16 scales would lower int4's
    squared error by another 0.1 to 0.4 %, and take four times as long."""


_SCALES = {
    torch.float8_e4m3fn: ScaleGrid(torch.uint8, 0x7E, 8),
    torch.float8_e8m0fnu: ScaleGrid(torch.uint8, 0xFE, 1),
    torch.bfloat16: ScaleGrid(torch.int16, 0x7F7F, 128, stride=4),
}


def scale_grid(fmt: Format) -> ScaleGrid:
    return _SCALES[fmt.scale_dtype]


def quantize_values(x: Tensor, step: Tensor, fmt: Format) -> Tensor:
    """Returns the code value nearest to x / step, or 0 where the step is 0."""
    return element(fmt).round_(x / step.masked_fill(step == 0, torch.inf))


def encode(values: Tensor, fmt: Format) -> Tensor:
    """Packs code values [..., K] to uint8 [..., K / 2]."""
    code = element(fmt).code(values)
    return code[..., ::2] | code[..., 1::2] << 4


def decode(packed: Tensor, fmt: Format) -> Tensor:
    """Unpacks uint8 [..., K / 2] to code values, float32 [..., K]."""
    values = torch.tensor(ELEMENTS[fmt.element], device=packed.device)
    code = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return values[code.int()]


def scale_value(code: Tensor, fmt: Format) -> Tensor:
    """Returns scale codes as float32 scales."""
    return code.view(fmt.scale_dtype).float()


def nearest_scale_code(amax: Tensor, target: float, fmt: Format, factor: Tensor) -> Tensor:
    """Returns the scale code whose scale x factor brings a block's largest magnitude to `target`.

    The scale is rounded to nearest. For e8m0 it is floor(log2(amax / factor)) - 2 (OCP MX v1) for any target,
    which brings the magnitude to 4 to 8.
    """
    if fmt.scale_dtype != torch.float8_e8m0fnu:
        scale = (divide(amax, target) / factor).clamp(max=torch.finfo(fmt.scale_dtype).max)
        return scale.to(fmt.scale_dtype).view(scale_grid(fmt).bits)
    exponent = torch.frexp(amax / factor).exponent - 3  # amax = fraction * 2**exponent, fraction < 1
    code = exponent.clamp(-127, 127) + 127
    return code.masked_fill(amax == 0, 0).to(torch.uint8)


def dequantize_weight(
    packed: Tensor,
    block_scale: Tensor,
    global_scale: Tensor | None,
    fmt: Format,
    *,
    significant_bits: int | None = None,
) -> Tensor:
    """Returns the float32 weight [..., N, K] that plain-layout codes represent.

    significant_bits: code x block scale is first rounded to this many bits, like in kernels that convert
        weights to another number format (4 for e4m3, whose range is not modelled here).
    """
    values = decode(packed, fmt)
    k = values.shape[-1]
    values = split_blocks(values, fmt.block) * block_scale.float()[..., None]
    if significant_bits is not None:
        fraction, exponent = torch.frexp(values)
        values = torch.ldexp((fraction * 2**significant_bits).round(), exponent - significant_bits)
    values = join_blocks(values, k)
    if global_scale is not None and global_scale.numel():
        values = values * global_scale[..., None, None]
    return values
