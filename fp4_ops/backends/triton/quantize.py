"""Elementwise kernels: quantize (matrices, and rows one by one), dequantize, quantize_int8, quantize_fp8. The
results are the same bits as those of csrc/cpu.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gemm import decode_e2m1, decode_e4m3, decode_e8m0


@triton.jit
def _encode_e4m3(v):
    """Returns the e4m3 byte of v >= 0, rounded to nearest even and saturated at 448 (0x7E). NaN becomes 0: it
    is the 0 / 0 of tiny matrices.
    """
    bits = v.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # rebias the exponent, 120 << 3
    # Below 2^-6, e4m3 has uniform steps of 2^-9. Adding 2^14 leaves the rounded multiple in the low bits.
    subnormal = (v + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    byte = tl.where(bits < 0x3C800000, subnormal, tl.minimum(normal, 0x7E))
    return tl.where(bits > 0x7F800000, 0, byte)


@triton.jit
def _encode_e2m1(v):
    """Returns the nearest e2m1 code; ties go to the even code. Saturates at 6, and keeps the sign of zero."""
    a = tl.abs(v)
    # Compare with the midpoints between neighbours. A tie goes down if the lower code is even.
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
    code += (
        (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    )
    sign = (v.to(tl.int32, bitcast=True) >> 28) & 8
    return code | sign


@triton.jit
def _bf16_bits(v):
    """Returns the bits of a bfloat16, rounded to nearest even. It uses integers, because the interpreter
    truncates.
    """
    bits = v.to(tl.int32, bitcast=True)
    return tl.where(bits > 0x7F800000, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@triton.jit
def _encode_blocks(x, gs, KIND: tl.constexpr):
    """Quantises blocks of float32 values [T, BLOCK], with zeros past the end. Returns the bytes or bits of
    their scales [T], and their codes [T, BLOCK]. gs: the float32 global scale of nvfp4, one for all blocks or
    one for each.
    """
    amax = tl.max(tl.abs(x), 1)
    if KIND == "nvfp4":
        byte = _encode_e4m3(tl.div_rn(tl.div_rn(amax, 6.0), gs))
        scale = decode_e4m3(byte) * gs
    elif KIND == "int4":
        byte = _bf16_bits(tl.div_rn(amax, 7.5))
        scale = (byte << 16).to(tl.float32, bitcast=True)
    else:
        # floor(log2(amax)) - 2 in the e8m0 bias is the float32 exponent field less 2.
        byte = tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) - 2, 0)
        scale = decode_e8m0(byte)
    usable = scale > 0.0
    value = tl.div_rn(x, tl.where(usable, scale, 1.0)[:, None])
    if KIND == "int4":
        # Adding 1.5 * 2^23 rounds to nearest even and leaves the integer in the low bits.
        rounded = tl.minimum(tl.maximum(value, -8.0), 7.0) + 12582912.0
        code = tl.where(usable[:, None], rounded.to(tl.int32, bitcast=True) & 15, 0)
    else:
        # If a block's scale is zero, its values are zeros or too small for any scale. Only their signs stay.
        code = _encode_e2m1(value)
        code = tl.where(usable[:, None], code, code & 8)
    return byte, code


@triton.jit
def _pairs(code):
    """Packs codes [T, BLOCK] into bytes [T, BLOCK/2]."""
    T: tl.constexpr = code.shape[0]
    BLOCK: tl.constexpr = code.shape[1]
    low, high = tl.split(tl.reshape(code, (T, BLOCK // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit(do_not_specialize=["rows", "rows_per_matrix"])
def quantize_kernel(
    x_ptr,  # [rows, K]
    gs_ptr,  # [rows / rows_per_matrix] float32, nvfp4
    packed_ptr,  # [rows, K/2]
    scale_ptr,  # [rows, BLOCKS] uint8; int4: the bits of bfloat16 as int16
    rows,
    rows_per_matrix,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    TILE: tl.constexpr,  # scale blocks a program
):
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    row = i // BLOCKS
    block = i % BLOCKS
    inside = row < rows
    k = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = inside[:, None] & (k < K)
    x = tl.load(x_ptr + row[:, None] * K + k, mask=mask, other=0.0).to(tl.float32)
    gs = tl.load(gs_ptr + row // rows_per_matrix, mask=inside, other=1.0) if KIND == "nvfp4" else 1.0
    byte, code = _encode_blocks(x, gs, KIND)
    tl.store(scale_ptr + i, byte.to(scale_ptr.dtype.element_ty), mask=inside)
    byte_k = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    out = packed_ptr + row[:, None] * (K // 2) + byte_k
    tl.store(out, _pairs(code), mask=inside[:, None] & (byte_k < K // 2))


@triton.jit
def quantize_rows_kernel(
    x_ptr,  # [rows, K]
    packed_ptr,  # [rows, K/2] uint8
    scale_ptr,  # [rows, SCALES] uint8
    factor_ptr,  # [rows] float32
    K: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    TILE: tl.constexpr,  # scale blocks at a time
):
    """Quantises each row to FP4, as a matrix of its own. A program takes one row. factor is the global scale,
    or 1 for mxfp4; it is NaN if the row has a NaN or infinity. Scales past the row's blocks are zero
    bytes.
    """
    row = tl.program_id(0).to(tl.int64)
    i_block = tl.arange(0, TILE)
    i_k = i_block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    # As integers, the bits of a NaN are above those of every number.
    top = tl.zeros((TILE, BLOCK), dtype=tl.int32)
    for start in range(0, K, TILE * BLOCK):
        x = tl.load(x_ptr + row * K + start + i_k, mask=start + i_k < K, other=0.0).to(tl.float32)
        top = tl.maximum(top, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    bits = tl.max(tl.max(top, 1), 0)
    amax = bits.to(tl.float32, bitcast=True)
    gs = tl.where(bits == 0, 1.0, tl.div_rn(amax, 2688.0)) if KIND == "nvfp4" else 1.0
    tl.store(factor_ptr + row, tl.where(bits < 0x7F800000, gs, float("nan")))
    each = tl.zeros((TILE,), dtype=tl.float32) + gs
    for start in range(0, SCALES, TILE):
        k = start * BLOCK + i_k
        x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        byte, code = _encode_blocks(x, each, KIND)
        block = start + i_block
        byte = tl.where(block * BLOCK < K, byte, 0)
        tl.store(scale_ptr + row * SCALES + block, byte.to(tl.uint8), mask=block < SCALES)
        byte_k = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        tl.store(packed_ptr + row * (K // 2) + byte_k, _pairs(code), mask=byte_k < K // 2)


@triton.jit(do_not_specialize=["rows", "rows_per_matrix"])
def dequantize_kernel(
    packed_ptr,
    scale_ptr,
    gs_ptr,
    out_ptr,
    rows,
    rows_per_matrix,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
):
    """Computes value = (code * block scale) * global scale, rounded once to float32 (not at all for
    float64).
    """
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    row = i // BLOCKS
    block = i % BLOCKS
    inside = row < rows
    byte_k = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    mask = inside[:, None] & (byte_k < K // 2)
    packed = tl.load(packed_ptr + row[:, None] * (K // 2) + byte_k, mask=mask, other=0).to(tl.int32)
    scale = tl.load(scale_ptr + i, mask=inside, other=0)
    code = tl.reshape(tl.join(packed & 15, packed >> 4), (TILE, BLOCK))
    # float32 holds every e2m1 times e4m3 exactly. But six times the largest e8m0 becomes infinity.
    WIDE: tl.constexpr = tl.float64 if out_ptr.dtype.element_ty == tl.float64 else tl.float32
    if KIND == "int4":
        value = ((code ^ 8) - 8).to(WIDE) * scale.to(WIDE)[:, None]
    elif KIND == "nvfp4":
        gs = tl.load(gs_ptr + row // rows_per_matrix, mask=inside, other=1.0).to(WIDE)
        value = decode_e2m1(code).to(WIDE) * decode_e4m3(scale).to(WIDE)[:, None] * gs[:, None]
    else:
        value = decode_e2m1(code).to(WIDE) * decode_e8m0(scale).to(WIDE)[:, None]
    k = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    out = out_ptr + row[:, None] * K + k
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (k < K))


@triton.jit(do_not_specialize=["rows"])
def quantize_int8_kernel(x_ptr, codes_ptr, scale_ptr, rows, K: tl.constexpr, TILE: tl.constexpr):
    """Quantises blocks of 32: scale = amax / 127, codes rounded to nearest even. A block of zeros gets scale
    0.
    """
    BLOCK: tl.constexpr = 32
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    row = i // BLOCKS
    inside = row < rows
    k = (i % BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = inside[:, None] & (k < K)
    x = tl.load(x_ptr + row[:, None] * K + k, mask=mask, other=0.0).to(tl.float32)
    # As integers, the bits of a NaN are above those of every number, so a NaN reaches the scale.
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    scale = tl.div_rn(top.to(tl.float32, bitcast=True), 127.0)
    tl.store(scale_ptr + i, scale, mask=inside)
    usable = ((scale > 0.0) & (top < 0x7F800000))[:, None]
    # Adding 1.5 * 2^23 rounds to nearest even and leaves the integer in the low bits.
    rounded = tl.div_rn(tl.where(usable, x, 0.0), tl.where(usable, scale[:, None], 1.0)) + 12582912.0
    code = rounded.to(tl.int32, bitcast=True).to(tl.int8)
    tl.store(codes_ptr + row[:, None] * K + k, tl.where(usable, code, 0).to(tl.int8), mask=mask)


@triton.jit
def quantize_fp8_kernel(
    x_ptr,  # [rows, K]
    codes_ptr,  # [rows, KP] uint8
    scale_ptr,  # [rows] float32
    K: tl.constexpr,
    KP: tl.constexpr,
    SM90: tl.constexpr,  # the order of layout sm90 inside each 64: csrc/common/sm90_layout.h
    CHUNK: tl.constexpr,
):
    """Quantises one row in each program: scale = amax / 448, codes rounded to nearest even. A row of zeros
    gets scale 0.
    """
    row = tl.program_id(0).to(tl.int64)
    # As integers, the bits of a NaN are above those of every number, so a NaN reaches the scale.
    top = tl.zeros((CHUNK,), dtype=tl.int32)
    for start in range(0, K, CHUNK):
        k = start + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        top = tl.maximum(top, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    amax = tl.max(top, 0)
    scale = tl.div_rn(amax.to(tl.float32, bitcast=True), 448.0)
    tl.store(scale_ptr + row, scale)
    # The factor is zero if the row has no usable scale. Its codes are then zeros.
    usable = tl.where(amax < 0x7F800000, scale, 0.0)
    divisor = tl.zeros((CHUNK,), dtype=tl.float32) + tl.where(usable > 0.0, usable, 1.0)
    for start in range(0, KP, CHUNK):
        k = start + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        value = tl.div_rn(x, divisor)
        sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
        code = tl.where(usable > 0.0, _encode_e4m3(tl.abs(value)) | sign, 0)
        if SM90:  # k = 16 t + 8 s + 4 q + i lies at 32 s + 16 q + 4 t + i
            at = k // 64 * 64 + k // 8 % 2 * 32 + k // 4 % 2 * 16 + k // 16 % 4 * 4 + k % 4
        else:
            at = k
        tl.store(codes_ptr + row * KP + at, code.to(tl.uint8), mask=k < KP)
