"""The grids of 4-bit weights in plain torch: which values exist, and the nearest one.

Bit for bit what `fp4::quantize` and `fp4::dequantize` compute, in pieces that the methods put together.
Weights are handled as blocks [..., ceil(K / block), block], the last one padded with zeros; block scales as
scale codes, the integers of their bits, in which one more is the next larger scale.
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
    """x / by, rounded once. With a number, torch multiplies by its reciprocal on CUDA: other last bits."""
    return x / torch.full_like(x, by)


def split_blocks(w: Tensor, block: int) -> Tensor:
    """[..., K] -> [..., ceil(K / block), block]."""
    k = w.shape[-1]
    count = (k + block - 1) // block
    return F.pad(w, (0, count * block - k)).unflatten(-1, (count, block))


def join_blocks(w: Tensor, k: int) -> Tensor:
    """Undoes `split_blocks`."""
    return w.flatten(-2)[..., :k]


def _round_e2m1_(x: Tensor) -> Tensor:
    # Below 2 the grid's step is 0.5, up to 4 it is 1, above it is 2: half the power of two at or below.
    power = x.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    step = power.mul_(0.5).clamp_(0.5, 2.0)
    return x.div_(step).round_().mul_(step).clamp_(-6.0, 6.0)


def _code_e2m1(values: Tensor) -> Tensor:
    table = torch.zeros(13, dtype=torch.uint8, device="cpu")  # the index is twice the magnitude
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
    """The magnitude at which round-to-nearest puts the largest value of a block."""
    reach: tuple[float, float]
    """Range of a search below and above that scale, in octaves."""
    saturated: float
    """Least |w| / scale of a value that counts as saturated."""
    round_: Callable[[Tensor], Tensor]
    """The nearest of the values, ties to the even code; in place, float32."""
    code: Callable[[Tensor], Tensor]
    """The codes uint8 of values; e2m1 tells zeros by their signs."""


_ELEMENTS = {
    # The largest value of a block lands between 3.6 and 10; wider changed nothing. Half-way from 6 to the 8
    # that e2m1 lacks is 7.
    "e2m1": Element(6.0, (0.75, 0.75), 7.0, _round_e2m1_, _code_e2m1),
    # The grid is uniform: less of it used only coarsens it, except that at 7 a positive value is not clipped.
    "int4": Element(7.5, (0.5, 0.125), 8.0, _round_int4_, _code_int4),
}


def element(fmt: Format) -> Element:
    return _ELEMENTS[fmt.element]


@dataclass(frozen=True)
class ScaleGrid:
    """The block scales of one dtype, as scale codes."""

    bits: torch.dtype
    """The integers that hold a code."""
    largest: int
    """Code of the largest finite scale. Larger codes are infinity or NaN."""
    octave: int
    """Number of codes from a power of two to the next."""
    stride: int = 1
    """Codes from one candidate of a search to the next. All of bfloat16's would lower int4's squared error by
    another 0.1 to 0.4 %, and take four times as long."""


_SCALES = {
    torch.float8_e4m3fn: ScaleGrid(torch.uint8, 0x7E, 8),
    torch.float8_e8m0fnu: ScaleGrid(torch.uint8, 0xFE, 1),
    torch.bfloat16: ScaleGrid(torch.int16, 0x7F7F, 128, stride=4),
}


def scale_grid(fmt: Format) -> ScaleGrid:
    return _SCALES[fmt.scale_dtype]


def quantize_values(x: Tensor, step: Tensor, fmt: Format) -> Tensor:
    """The value of a code nearest to x / step; 0 where the step is 0."""
    return element(fmt).round_(x / step.masked_fill(step == 0, torch.inf))


def encode(values: Tensor, fmt: Format) -> Tensor:
    """Values of codes [..., K] -> packed uint8 [..., K / 2]."""
    code = element(fmt).code(values)
    return code[..., ::2] | code[..., 1::2] << 4


def decode(packed: Tensor, fmt: Format) -> Tensor:
    """packed uint8 [..., K / 2] -> the values of the codes, float32 [..., K]."""
    values = torch.tensor(ELEMENTS[fmt.element], device=packed.device)
    code = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return values[code.int()]


def scale_value(code: Tensor, fmt: Format) -> Tensor:
    """Scale codes -> float32."""
    return code.view(fmt.scale_dtype).float()


def nearest_scale_code(amax: Tensor, target: float, fmt: Format, factor: Tensor) -> Tensor:
    """The code whose scale x factor puts a block's largest magnitude at `target`.

    Rounded to nearest; e8m0: floor(log2(amax / factor)) - 2 (OCP MX v1), whatever the target: from 4 to 8.
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
    """The float32 weight [..., N, K] that plain-layout codes stand for.

    significant_bits: code x block scale is first rounded to so many, as kernels do that bring weights to
    another number format (4 for e4m3, whose range is not modelled here).
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
