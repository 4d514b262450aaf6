"""Defines `quantize_weight`, which quantises a weight to 4 bits with any of the methods, in plain torch on
any device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from ..meta.formats import FORMATS, Format
from .gptq import Candidate, damping, gptq
from .grid import (
    divide,
    element,
    encode,
    join_blocks,
    nearest_scale_code,
    quantize_values,
    scale_grid,
    scale_value,
    split_blocks,
)
from .methods import Method, find_method

# The number of elements (whole matrices) that are quantised together. It is the smallest number that keeps
# the device busy.
CHUNK = {"cpu": 1 << 21, "cuda": 1 << 27}
# The number of these elements that are rounded at a time. They and about eight float32 copies fit into a
# CPU's cache.
ROUNDED = {"cpu": 1 << 17, "cuda": 1 << 27}
SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantize_weight(
    w: Tensor,
    format: str,
    method: str = "rtn",
    *,
    calibration: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantises w [..., N, K] to packed uint8 [..., N, K/2], block_scale [..., N, ceil(K/block)],
    global_scale [...].

    w ~ code x block_scale x global_scale, in the plain layout of `fp4::quantize`. Method "rtn" gives the same
    bits as `fp4::quantize`. global_scale is float32 for nvfp4 and None for the others.

    w: float32, bfloat16 or float16, finite, K even.
    method: a name of `METHODS`, which describes each method.
    calibration: moments of the weight's inputs x (y = w x). "weighted" needs the mean of x_k^2, float32
        [..., K]; "gptq" needs the mean of x x^T, float32 [..., K, K]. "weighted" also takes the latter, and
        uses its diagonal. `calibrate` measures both.

    A few matrices are quantised at a time, so the largest one bounds the extra memory. Raises ValueError,
    naming the argument that does not fit.
    """
    fmt = _check(w, format)
    chosen = find_method(method, format)
    check_calibration(w.shape, chosen, None if calibration is None else calibration.shape)
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
    codes = w.new_empty((count, n, blocks), dtype=scale_grid(fmt).bits)
    global_scale = w.new_ones(count, dtype=torch.float32)

    def quantize(part: slice) -> None:
        inputs = calibration[part].float() if calibration is not None else None
        global_scale[part] = _global_scale(w[part], fmt, chosen)
        if chosen.compensate:
            rows = [slice(None)]  # H is factored once for all rows
        else:
            rows = _slices(n, ROUNDED.get(w.device.type, ROUNDED["cpu"]) // max(1, len(w[part]) * k))
        for row in rows:
            # If two scales are nearly equally good, the rounding of a sum decides between them. It depends on
            # the order of the terms, and so on the strides.
            here = w[part, row].float().contiguous()
            made = _quantize(here, fmt, chosen, global_scale[part], inputs)
            packed[part, row], codes[part, row] = made

    at_once = matrices_at_once(w.device.type, n, k)
    parts = [slice(start, start + at_once) for start in range(0, count, at_once)]
    # GPTQ's sums depend on the number of threads, so it uses one, however many parts there are.
    _for_each(parts, quantize, w.device, alone=chosen.compensate)
    lead = shape[:-2]
    block_scale = codes.view(fmt.scale_dtype).view(*lead, n, blocks)
    factor = global_scale.view(lead) if fmt.has_global_scale else None
    return packed.view(*lead, n, k // 2), block_scale, factor


def matrices_at_once(device_type: str, n: int, k: int) -> int:
    """Returns how many matrices [N, K] one thread quantises together."""
    return max(1, CHUNK.get(device_type, CHUNK["cpu"]) // max(1, n * k))


def threads_of(device: torch.device) -> int:
    """Returns how many threads `quantize_weight` uses at a time."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def _for_each(
    parts: Sequence[slice], function: Callable[[slice], None], device: torch.device, alone: bool
) -> None:
    """Calls `function` for each part. On a CPU each part has its own thread, which is faster than sharing
    every operation among threads.

    alone: a single part must run on one thread, too.
    """
    threads, inference = threads_of(device), torch.is_inference_mode_enabled()
    if threads == 1 or not parts or (len(parts) == 1 and not alone):
        for part in parts:
            function(part)
        return

    def run(part: slice) -> None:
        with torch.inference_mode(inference):  # each thread has its own modes
            function(part)

    with ThreadPoolExecutor(
        min(threads, len(parts)), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        try:
            for done in [pool.submit(run, part) for part in parts]:
                done.result()
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)  # MKL has one number for all threads


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
        raise ValueError("fp4: w is on the meta device; load its values first")
    return FORMATS[format]


@dataclass(frozen=True)
class _Candidates:
    """The scales to try for each block: the codes `base` plus `offsets`, as far as they are allowed."""

    base: Tensor  # int32 [targets, E, N, blocks]
    offsets: range
    factor: Tensor
    fmt: Format
    mantissas: tuple[int, ...]

    def __iter__(self) -> Iterator[Candidate]:
        """Yields tensors [E, N, blocks]."""
        grid = scale_grid(self.fmt)
        for base in self.base:
            for offset in self.offsets:
                code = (base + offset).clamp_(0, grid.largest).to(grid.bits)
                yield code, scale_value(code, self.fmt) * self.factor, self._allowed(code)

    def _allowed(self, code: Tensor) -> Tensor | None:
        if len(self.mantissas) == 8:
            return None
        bits = torch.full_like(code, sum(1 << m for m in self.mantissas))
        return (bits >> (code & 7) & 1).bool()


def _candidates(blocks: Tensor, fmt: Format, method: Method, factor: Tensor) -> _Candidates:
    """Returns the candidates for blocks [E, N, blocks, block]. factor [E, 1, 1] multiplies a scale, in
    units of the blocks."""
    amax, grid = blocks.abs().amax(-1), scale_grid(fmt)
    targets = (element(fmt).top, *method.targets)
    base = torch.stack([nearest_scale_code(amax, t, fmt, factor) for t in targets])
    below, above = (round(octaves * grid.octave) if method.search else 0 for octaves in element(fmt).reach)
    assert below % grid.stride == 0  # round-to-nearest's scale is one of them
    offsets = range(-below, above + 1, grid.stride)
    return _Candidates(base.to(torch.int32), offsets, factor, fmt, method.mantissas)


def _slices(count: int, size: int) -> list[slice]:
    size = max(1, size)
    return [slice(start, start + size) for start in range(0, count, size)]


def _largest(w: Tensor) -> Tensor:
    """Returns max |w| of each matrix, float32 [E]."""
    return w.abs().flatten(1).amax(-1).float() if w[0].numel() else w.new_zeros(len(w), dtype=torch.float32)


def _global_scale(w: Tensor, fmt: Format, method: Method) -> Tensor:
    """Returns the global scales, float32 [E], of w [E, N, K]. They are ones if the format has none."""
    amax = _largest(w)
    if not amax.isfinite().all():
        raise ValueError("fp4: w holds NaN or infinity, which have no 4-bit code; correct it first")
    if not fmt.has_global_scale:
        return torch.ones_like(amax)
    return torch.where(amax == 0, 1.0, divide(amax, element(fmt).top * method.largest_scale))


def _unit(w: Tensor) -> Tensor:
    """Returns a power of two near the largest magnitude of each matrix, float32 [E]."""
    amax = _largest(w)
    return torch.ldexp(torch.ones_like(amax), torch.frexp(amax).exponent.clamp(-126, 126))


def _quantize(
    w: Tensor, fmt: Format, method: Method, global_scale: Tensor, inputs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Quantises float32 w [E, N, K] to (packed, scale codes)."""
    k = w.shape[-1]
    if not method.chooses:
        # Like the operator, this divides only once, by block scale x global scale.
        blocks = split_blocks(w, fmt.block)
        code, step, _ = next(iter(_candidates(blocks, fmt, method, global_scale[:, None, None])))
        return encode(join_blocks(quantize_values(blocks, step[..., None], fmt), k), fmt), code

    # Work in units of the global scale, or of a power of two: squared errors then neither underflow nor
    # overflow.
    unit = global_scale if fmt.has_global_scale else _unit(w)
    w = w / unit[:, None, None]
    factor = (global_scale / unit)[:, None, None]
    if method.compensate:
        assert inputs is not None
        values, code = gptq(w, inputs, fmt, lambda blocks: _candidates(blocks, fmt, method, factor))
        return encode(values, fmt), code
    blocks = split_blocks(w, fmt.block)
    weights = None
    if inputs is not None:
        weights = split_blocks(inputs + damping(inputs), fmt.block)[:, None]
    code, step = _search(blocks, _candidates(blocks, fmt, method, factor), weights)
    return encode(join_blocks(quantize_values(blocks, step[..., None], fmt), k), fmt), code


def _search(blocks: Tensor, candidates: _Candidates, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns (scale codes, steps): for each block, the candidate with the least (weighted) squared error."""
    best = torch.full_like(blocks[..., 0], torch.inf)
    chosen = torch.zeros_like(best, dtype=scale_grid(candidates.fmt).bits)
    steps = torch.zeros_like(best)
    for code, step, allowed in candidates:
        wide = step[..., None]
        error = quantize_values(blocks, wide, candidates.fmt).mul_(wide).sub_(blocks).square_()
        if weights is not None:
            error.mul_(weights)
        total = error.sum(-1)
        if allowed is not None:
            total.masked_fill_(~allowed, torch.inf)
        better = total < best
        best = torch.where(better, total, best)
        chosen = torch.where(better, code, chosen)
        steps = torch.where(better, step, steps)
    return chosen, steps
