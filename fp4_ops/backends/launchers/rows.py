"""Launches csrc/device/{route,rows*,weights}.cu: routing, quantisation, gates, combine, and layout
conversions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...meta.formats import Activation, Format
from ...meta.layouts import LAYOUTS
from .. import anywhere
from .library import DTYPE_CODES, FUNCTIONS, address, call, gate_fields, stream

LAYOUT = LAYOUTS["sm90"]
ROUTE_CHUNK = 1024
MAX_WIDTH, MAX_FP4_WIDTH = 32768, 16384
"""The largest number of columns of a row. One thread block of the row kernels holds a whole row."""
SAME, FP8, HALF = range(3)
"""Values of `Form` in csrc/device/interface.h."""
E8M0_BINADES = 17
"""How far the exponents of mxfp4 scales in a matrix may lie apart, so that the layout's e4m3 scales hold
them.
"""


def route(ids: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts rows by expert, stably. Returns offs [groups], the row at each position, each row's position.

    Ids outside [0, groups) come last and count in no offset.
    """
    rows = ids.numel()
    chunks = -(-rows // ROUTE_CHUNK)
    made = torch.empty(chunks * (groups + 1) + groups + 2 * rows, dtype=torch.int32, device=ids.device)
    counts, offs, sorted_rows, position = made.split([chunks * (groups + 1), groups, rows, rows])
    call(
        "fp4_kernel_route", address(ids), ids.dtype == torch.int64, rows, groups,
        address(counts), address(offs), address(sorted_rows), address(position), stream(),
    )  # fmt: skip
    return offs, sorted_rows, position


def gates(gate: Activation) -> bool:
    """True if csrc/device/gate.cuh has this activation."""
    return gate.gated and gate.function in FUNCTIONS


def _gate_arguments(gate: Activation | None) -> tuple[int | float, ...]:
    return *gate_fields(gate), gate is not None and gate.interleaved


def _shape(
    x: Tensor, gate: Activation | None, position: Tensor | None, most: int = MAX_WIDTH
) -> tuple[int, int, int]:
    """Returns (rows of the output, its width, number of output rows for each row of x)."""
    width = x.shape[1] if gate is None else x.shape[1] // 2
    if width > most:
        raise RuntimeError(
            f"fp4: rows have {width} columns; the native kernels take at most {most}. Use layout 'plain'"
        )
    if position is None:
        return x.shape[0], width, 1
    return position.numel(), width, position.numel() // max(x.shape[0], 1)


def _rows(
    form: int,
    dtype: torch.dtype,
    x: Tensor,
    gate: Activation | None,
    position: Tensor | None,
    end: Tensor | None,
    dependent: bool,
) -> tuple[Tensor, Tensor | None]:
    count, width, copies = _shape(x, gate, position)
    padded = LAYOUT.padded(width)
    out = torch.empty((count, width if form == SAME else padded), dtype=dtype, device=x.device)
    scale = None if form == SAME else torch.empty(count, dtype=torch.float32, device=x.device)
    call(
        "fp4_kernel_rows", address(x), DTYPE_CODES[x.dtype], x.shape[0], address(position), copies,
        address(end), *_gate_arguments(gate), width, padded, form, address(out), address(scale),
        dependent, stream(),
    )  # fmt: skip
    return out, scale


def quantize_fp8(
    x: Tensor, gate: Activation | None = None, position: Tensor | None = None, end: Tensor | None = None, *,
    dependent: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Quantises x [M, K] (16-bit) to e4m3 [.., Kp] in the layout's order and float32 scales, in one pass.

    With `gate`, x is [M, 2 K] and gate(x) is quantised. With `position` (int32 [M * copies], a permutation),
    row r of x becomes the rows position[r * copies ..] of the result. Rows of the result from end[0] on may
    be left unwritten. `dependent`: the kernel is launched while the kernel before it may still run, and waits
    for it. The kernel before may make `position`; x must then be older than that kernel.
    """
    out, scale = _rows(FP8, torch.float8_e4m3fn, x, gate, position, end, dependent)
    assert scale is not None
    return out, scale


def to_half(
    x: Tensor, gate: Activation | None = None, position: Tensor | None = None, end: Tensor | None = None, *,
    dependent: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Converts x [M, K] (16-bit) to fp16 [.., Kp] in the order of csrc/device/e2m1_sm90.cuh, and factors.

    A row's float32 factor is a power of two that scales its largest value to at least 2^14. A bfloat16 row
    loses bits only of values below 2^-31 of the largest. The other arguments are as in `quantize_fp8`.
    """
    out, factor = _rows(HALF, torch.float16, x, gate, position, end, dependent)
    assert factor is not None
    return out, factor


def quantize_fp4(
    x: Tensor, gate: Activation | None = None, position: Tensor | None = None, end: Tensor | None = None, *,
    format: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Quantises x [M, K] row by row to FP4. Returns values bf16 [.., K] and factors; value * factor is exact.

    Gate and position are as in `quantize_fp8`, but all rows are written. A row with a NaN or infinity gets
    the factor NaN.
    """
    count, width, copies = _shape(x, gate, position, MAX_FP4_WIDTH)
    out = torch.empty((count, width), dtype=torch.bfloat16, device=x.device)
    factor = torch.empty(count, dtype=torch.float32, device=x.device)
    call(
        "fp4_kernel_rows_fp4", address(x), DTYPE_CODES[x.dtype], x.shape[0], address(position), copies,
        *_gate_arguments(gate), width, format == "nvfp4", address(out), address(factor), stream(),
    )  # fmt: skip
    return out, factor


def quantize_fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `fp4::quantize_fp8` with layout sm90, for x [..., K] of any dtype and K."""
    k = x.shape[-1]
    if x.dtype != torch.float32 and k % 16 == 0 and 0 < k <= MAX_WIDTH and x.numel():
        codes, scale = quantize_fp8(x.contiguous().view(-1, k))
        return codes.view(*x.shape[:-1], -1), scale.view(x.shape[:-1])
    return anywhere.fp8_rows(x, LAYOUT)


def same(
    x: Tensor, gate: Activation | None = None, position: Tensor | None = None, end: Tensor | None = None, *,
    dependent: bool = False,
) -> Tensor:  # fmt: skip
    """Gates x [M, K] (16-bit), moves rows to their positions, or both. Keeps dtype and plain order.

    The arguments are as in `quantize_fp8`.
    """
    return _rows(SAME, x.dtype, x, gate, position, end, dependent)[0]


def combine(
    y: Tensor, position: Tensor | None, ids: Tensor, weights: Tensor, bias: Tensor | None, groups: int,
    out: Tensor,
) -> None:  # fmt: skip
    """Computes out[t] = sum over j of weights[t, j] * (y[position[t * k + j]] + bias[ids[t, j]]), float32."""
    tokens, top_k = ids.shape
    if bias is not None and bias.data_ptr() % 16:  # a view that is not aligned to 16 bytes
        bias = bias.clone()
    call(
        "fp4_kernel_combine", address(y), DTYPE_CODES[y.dtype], address(position), address(ids),
        ids.dtype == torch.int64, address(weights), DTYPE_CODES[weights.dtype], address(bias),
        DTYPE_CODES[bias.dtype] if bias is not None else 0, address(out), DTYPE_CODES[out.dtype],
        tokens, top_k, groups, y.shape[1], stream(),
    )  # fmt: skip


def prepack(
    packed: Tensor, block_scale: Tensor, global_scale: Tensor | None, fmt: Format, bf16: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Packs a plain weight [..., N, K/2] into layout mma_bf16 or sm90.

    Gives the same bytes as `fp4::prepack` on a CPU.
    """
    *lead, n, half = packed.shape
    k, kp = 2 * half, LAYOUT.padded(2 * half)
    name = "mma_bf16" if bf16 else "sm90"
    packed = packed.contiguous().view(torch.uint8)
    scale = block_scale.contiguous().view(torch.uint8)
    nan = 0x7F if fmt.has_global_scale else 0xFF
    if bool((scale >= nan).any()):  # one wait for the device; NaN is the largest byte without a sign
        if not bool((scale & nan == nan).any()):
            raise RuntimeError(f"block_scale has negative values; layout '{name}' cannot hold them")
        raise RuntimeError("block_scale has NaN values; the weight is damaged")
    if fmt.has_global_scale:
        assert global_scale is not None
        factor = global_scale.clone()
    else:
        scale, factor = _e4m3_from_e8m0(packed, scale, fmt, name)
    to_packed = packed.new_empty((*lead, n, kp // 2))
    to_scale = packed.new_empty((*lead, n, kp // fmt.block))
    rows = to_packed.numel() // (kp // 2) if kp else 0
    call(
        "fp4_kernel_pack", address(packed), address(scale), rows, k, kp, fmt.block, bf16,
        address(to_packed), address(to_scale), stream(),
    )  # fmt: skip
    return to_packed, to_scale, factor


def _e4m3_from_e8m0(packed: Tensor, scale: Tensor, fmt: Format, name: str) -> tuple[Tensor, Tensor]:
    """Converts scales that are powers of two to e4m3 bytes and one factor for each matrix. Raises if this is
    not exact.
    """
    *lead, n, blocks = scale.shape
    half = packed.shape[-1]
    padding = blocks * (fmt.block // 2) - half
    codes = torch.nn.functional.pad(packed & 0x77, (0, padding)) if padding else packed & 0x77
    counts = codes.view(*lead, n, blocks, fmt.block // 2).amax(-1) > 0
    exponent = scale.to(torch.int16)
    largest = torch.where(counts, exponent, -1).amax((-2, -1))
    least = torch.where(counts, exponent, 255).amin((-2, -1))
    spread = torch.where(largest < 0, 0, largest - least)
    if int(spread.max()) > E8M0_BINADES:
        matrix = int(spread.flatten().argmax())
        raise RuntimeError(
            f"block_scale of matrix {matrix} spreads over {int(spread.max())} binades; "
            f"layout '{name}' holds at most {E8M0_BINADES}"
        )
    largest = torch.where(largest < 0, 135, largest)
    power = exponent - largest[..., None, None] + 8
    byte = torch.where(power >= -6, (power + 7) << 3, 1 << (power + 9).clamp(0, 2))
    byte = torch.where(counts, byte, 0).to(torch.uint8)
    factor = torch.ldexp(torch.ones_like(largest, dtype=torch.float32), largest.int() - 135)
    return byte, factor


def dequantize(
    packed: Tensor, block_scale: Tensor, global_scale: Tensor, fmt: Format, dtype: torch.dtype, bf16: bool
) -> Tensor:
    """Returns the values [..., N, Kp] of a weight in layout mma_bf16 or sm90."""
    *lead, n, half = packed.shape
    out = torch.empty((*lead, n, 2 * half), dtype=dtype, device=packed.device)
    rows = out.numel() // (2 * half) if half else 0
    code = 3 if dtype == torch.float64 else DTYPE_CODES[dtype]
    call(
        "fp4_kernel_dequantize", address(packed), address(block_scale), address(global_scale.contiguous()),
        rows, n, 2 * half, fmt.block, bf16, address(out), code, stream(),
    )  # fmt: skip
    return out
