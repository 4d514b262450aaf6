"""The grids of 4-bit weights in plain torch: which values exist, and the nearest one.

Bit for bit what `fp4::quantize` and `fp4::dequantize` compute, in pieces that the methods put together.
Weights are handled as blocks [..., ceil(K / block), block], the last one padded with zeros; block scales as
scale codes, the uint8 of their e4m3 or e8m0 bits, in which one more is the next larger scale.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..meta.formats import E2M1_VALUES, ELEMENTS, Format

E2M1_MAX, E4M3_MAX = 6.0, 448.0


def divide(x: Tensor, by: float) -> Tensor:
    """x / by, rounded once. With a number, torch multiplies by its reciprocal on CUDA: other last bits."""
    return x / torch.full_like(x, by)


def split_blocks(w: Tensor, block: int) -> Tensor:
    """[..., K] -> [..., ceil(K / block), block]."""
    k = w.shape[-1]
    count = (k + block - 1) // block
    return F.pad(w, (0, count * block - k)).unflatten(-1, (count, block))


def join_blocks(w: Tensor, k: int) -> Tensor:
    """The inverse of `split_blocks`."""
    return w.flatten(-2)[..., :k]


def round_e2m1_(magnitude: Tensor) -> Tensor:
    """Nearest e2m1 magnitude of each value >= 0, ties to the even code, at most 6; in place, float32."""
    # Below 2 the grid's step is 0.5, up to 4 it is 1, above it is 2: half the power of two at or below.
    power = magnitude.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    step = power.mul_(0.5).clamp_(0.5, 2.0)
    return magnitude.div_(step).round_().mul_(step).clamp_(max=E2M1_MAX)


def quantize_magnitude(magnitude: Tensor, step: Tensor) -> Tensor:
    """The e2m1 magnitude nearest to magnitude / step; 0 where the step is 0."""
    return round_e2m1_(magnitude / step.masked_fill(step == 0, torch.inf))


def encode(magnitude: Tensor, sign: Tensor) -> Tensor:
    """e2m1 magnitudes and signs (bool) [..., K] -> packed uint8 [..., K / 2]."""
    table = torch.zeros(13, dtype=torch.uint8)  # the index is twice the magnitude
    table[[round(2 * v) for v in E2M1_VALUES]] = torch.arange(8, dtype=torch.uint8)
    code = table.to(magnitude.device)[(2 * magnitude).int()] | sign.to(torch.uint8) << 3
    return code[..., ::2] | code[..., 1::2] << 4


def decode(packed: Tensor, fmt: Format) -> Tensor:
    """packed uint8 [..., K / 2] -> the values of the codes, float32 [..., K]."""
    values = torch.tensor(ELEMENTS[fmt.element], device=packed.device)
    code = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return values[code.int()]


def scale_value(code: Tensor, fmt: Format) -> Tensor:
    """Scale codes -> float32."""
    return code.view(fmt.scale_dtype).float()


def max_scale_code(fmt: Format) -> int:
    """Of the largest finite scale: 448, or 2**127. The code above is NaN."""
    return 0x7E if fmt.scale_dtype == torch.float8_e4m3fn else 0xFE


def codes_per_octave(fmt: Format) -> int:
    return 8 if fmt.scale_dtype == torch.float8_e4m3fn else 1


def nearest_scale_code(amax: Tensor, target: float, fmt: Format, global_scale: Tensor) -> Tensor:
    """The scale that puts a block's largest magnitude at the e2m1 magnitude `target`.

    e4m3: rounded to nearest. e8m0: floor(log2(amax)) - 2 (OCP MX v1), whatever the target: from 4 to 8.
    """
    if fmt.scale_dtype == torch.float8_e4m3fn:
        return (divide(amax, target) / global_scale).clamp(max=E4M3_MAX).to(fmt.scale_dtype).view(torch.uint8)
    exponent = torch.frexp(amax).exponent - 3  # amax = fraction * 2**exponent, fraction < 1
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
