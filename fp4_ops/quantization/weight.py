"""`quantize_weight`: a weight to 4 bits by any of the methods, in plain torch on any device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..meta.formats import FORMATS, Format
from .gptq import damping, gptq
from .grid import (
    E2M1_MAX,
    codes_per_octave,
    divide,
    encode,
    join_blocks,
    max_scale_code,
    nearest_scale_code,
    quantize_magnitude,
    scale_value,
    split_blocks,
)
from .methods import Method, find_method

# Elements taken together, whole matrices of them: as few as keep the device busy.
CHUNK = {"cpu": 1 << 21, "cuda": 1 << 27}
# Of those, elements rounded at a time: a CPU's cache holds them, and the eight or so float32 copies.
ROUNDED = {"cpu": 1 << 17, "cuda": 1 << 27}
SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantize_weight(
    w: Tensor,
    format: str,
    method: str = "rtn",
    *,
    calibration: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """w [..., N, K] -> (packed uint8 [..., N, K/2], block_scale [..., N, ceil(K/block)], global_scale [...]).

    w ~ code x block_scale x global_scale, in the plain layout of `fp4::quantize`, which method "rtn" equals
    bit for bit. global_scale is float32 for nvfp4 and None for the others.

    w: float32, bfloat16 or float16, finite, K even.
    method: a name of `METHODS`; what each one does is written there.
    calibration: about the inputs x that meet the weight (y = w x). For "weighted" float32 [..., K], the mean
        of x_k^2; for "gptq" float32 [..., K, K], the mean of x x^T, of which "weighted" takes the diagonal.
        `calibrate` measures both.

    Matrices are taken a few at a time, so that the extra memory is bounded by the largest one.
    Raises ValueError naming the argument that does not fit.
    """
    fmt = _check(w, format)
    chosen = find_method(method, format)
    check_calibration(w.shape, chosen, None if calibration is None else calibration.shape)
    if fmt.element == "int4":  # its one method is the operator
        if not w.isfinite().all():
            raise ValueError("fp4: w holds NaN or infinity")
        packed, block_scale, _ = torch.ops.fp4.quantize(w.detach(), format)
        return packed, block_scale, None
    shape, (n, k) = w.shape, w.shape[-2:]
    w = w.detach().reshape(math.prod(shape[:-2]), n, k)
    if calibration is None or chosen.calibration == "none":
        calibration = None
    else:
        calibration = calibration.reshape(-1, *calibration.shape[len(shape) - 2 :])
        if chosen.calibration == "diagonal" and calibration.dim() == 3:
            calibration = calibration.diagonal(dim1=-2, dim2=-1)
    count, blocks = w.shape[0], fmt.num_blocks(k)
    packed = w.new_empty((count, n, k // 2), dtype=torch.uint8)
    codes = w.new_empty((count, n, blocks), dtype=torch.uint8)
    global_scale = w.new_ones(count, dtype=torch.float32)

    at_once = matrices_at_once(w.device.type, n, k)
    for start in range(0, count, at_once):
        part = slice(start, start + at_once)
        inputs = calibration[part].float() if calibration is not None else None
        global_scale[part] = _global_scale(w[part], fmt, chosen)
        if chosen.compensate:
            rows = [slice(None)]  # H is factored once for all rows
        else:
            rows = _slices(n, ROUNDED.get(w.device.type, ROUNDED["cpu"]) // max(1, len(w[part]) * k))
        for row in rows:
            made = _quantize(w[part, row].float(), fmt, chosen, global_scale[part], inputs)
            packed[part, row], codes[part, row] = made

    lead = shape[:-2]
    block_scale = codes.view(fmt.scale_dtype).view(*lead, n, blocks)
    factor = global_scale.view(lead) if fmt.has_global_scale else None
    return packed.view(*lead, n, k // 2), block_scale, factor


def matrices_at_once(device_type: str, n: int, k: int) -> int:
    """How many [N, K] are quantised together."""
    return max(1, CHUNK.get(device_type, CHUNK["cpu"]) // max(1, n * k))


def check_calibration(shape: Sequence[int], method: Method, calibration: Sequence[int] | None) -> None:
    """Raises ValueError unless a calibration of that shape is what the method needs for w [..., N, K]."""
    *lead, _, k = shape
    shapes = {"none": [], "diagonal": [(*lead, k), (*lead, k, k)], "full": [(*lead, k, k)]}[
        method.calibration
    ]
    if shapes and (calibration is None or tuple(calibration) not in shapes):
        got = "missing" if calibration is None else f"{tuple(calibration)}"
        raise ValueError(
            f"fp4: calibration is {got}; method {method.name!r} needs {' or '.join(map(str, shapes))}, "
            "see fp4_ops.quantization.calibrate"
        )


def _check(w: Tensor, format: str) -> Format:
    if format not in FORMATS:
        raise ValueError(f"fp4: format is {format!r}; it must be one of: {', '.join(FORMATS)}")
    if w.dim() < 2 or w.dtype not in SOURCE_DTYPES:
        raise ValueError(
            f"fp4: w is {w.dtype} {tuple(w.shape)}; it must be float32, bfloat16 or float16 [..., N, K]"
        )
    if w.shape[-1] % 2:
        raise ValueError(f"fp4: w has K = {w.shape[-1]}; it must be even")
    if w.is_meta:
        raise ValueError("fp4: w is on the meta device")
    return FORMATS[format]


@dataclass(frozen=True)
class _Candidates:
    """Scale codes to try for each block: around `base` by `offsets`, those that are allowed."""

    base: Tensor  # int16 [targets, E, N, blocks]
    offsets: range
    fmt: Format
    mantissas: tuple[int, ...]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yields (scale codes uint8 [E, N, blocks], bool of the same shape or None: which are allowed)."""
        for base in self.base:
            for offset in self.offsets:
                code = (base + offset).clamp_(0, max_scale_code(self.fmt)).to(torch.uint8)
                yield code, self._allowed(code)

    def _allowed(self, code: Tensor) -> Tensor | None:
        if len(self.mantissas) == 8:
            return None
        bits = torch.full_like(code, sum(1 << m for m in self.mantissas))
        return (bits >> (code & 7) & 1).bool()


def _candidates(magnitude: Tensor, fmt: Format, method: Method, factor: Tensor) -> _Candidates:
    """magnitude [E, N, blocks, block]; factor: the global scale, where magnitude is not in its units."""
    amax = magnitude.amax(-1)
    base = torch.stack([nearest_scale_code(amax, t, fmt, factor) for t in method.targets])
    reach = round(method.reach * codes_per_octave(fmt))
    return _Candidates(base.to(torch.int16), range(-reach, reach + 1), fmt, method.mantissas)


def _slices(count: int, size: int) -> list[slice]:
    size = max(1, size)
    return [slice(start, start + size) for start in range(0, count, size)]


def _global_scale(w: Tensor, fmt: Format, method: Method) -> Tensor:
    """float32 [E] of w [E, N, K]; ones where the format has none."""
    amax = w.abs().flatten(1).amax(-1).float() if w[0].numel() else w.new_zeros(len(w), dtype=torch.float32)
    if not amax.isfinite().all():
        raise ValueError("fp4: w holds NaN or infinity")
    if not fmt.has_global_scale:
        return torch.ones_like(amax)
    return torch.where(amax == 0, 1.0, divide(amax, E2M1_MAX * method.largest_scale))


def _quantize(
    w: Tensor, fmt: Format, method: Method, global_scale: Tensor, inputs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """float32 w [E, N, K] -> (packed, scale codes)."""
    k, one = w.shape[-1], w.new_ones(())
    factor = global_scale[:, None, None]
    if not method.chooses:
        # As the operator: divided by block scale x global scale, and by nothing before.
        magnitude = split_blocks(w.abs(), fmt.block)
        code = _candidates(magnitude, fmt, method, factor).base[0].to(torch.uint8)
        step = scale_value(code, fmt) * factor
        nearest = join_blocks(quantize_magnitude(magnitude, step[..., None]), k)
        return encode(nearest, w.signbit()), code

    # In units of the global scale, where squared errors neither underflow nor overflow.
    w = w / factor
    if method.compensate:
        assert inputs is not None
        values, code = gptq(w, inputs, fmt, lambda magnitude: _candidates(magnitude, fmt, method, one))
        return encode(values.abs(), values.signbit()), code
    magnitude = split_blocks(w.abs(), fmt.block)
    weights = None
    if inputs is not None:
        weights = split_blocks(inputs + damping(inputs), fmt.block)[:, None]
    code = _search(magnitude, _candidates(magnitude, fmt, method, one), weights)
    nearest = join_blocks(quantize_magnitude(magnitude, scale_value(code, fmt)[..., None]), k)
    return encode(nearest, w.signbit()), code


def _search(magnitude: Tensor, candidates: _Candidates, weights: Tensor | None) -> Tensor:
    """The candidate scale codes with the least (weighted) squared error in each block."""
    best = torch.full_like(magnitude[..., 0], torch.inf)
    chosen = torch.zeros_like(best, dtype=torch.uint8)
    for code, allowed in candidates:
        step = scale_value(code, candidates.fmt)[..., None]
        error = quantize_magnitude(magnitude, step).mul_(step).sub_(magnitude).square_()
        if weights is not None:
            error.mul_(weights)
        total = error.sum(-1)
        if allowed is not None:
            total.masked_fill_(~allowed, torch.inf)
        better = total < best
        best = torch.where(better, total, best)
        chosen = torch.where(better, code, chosen)
    return chosen
