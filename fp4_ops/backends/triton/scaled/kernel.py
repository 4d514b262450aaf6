"""Multiplies FP4 rows by FP4 weights in one kernel.

    out[row, n] = global[e] * a_factor[source(row)]
                  * sum_k (code[e, n, k] * block_scale[e, n, k // block])
                        * (a_code[source(row), k] * a_scale[source(row), k // block])
                  + bias[e, n]

Weights are the left operand of `tl.dot_scaled`, because tcgen05 multiplies 128 rows of it at a time, and
there may be few tokens. Codes go from memory to shared memory by cp.async and are never unpacked. Scales stay
in the plain order [rows, K / block]: they come by cp.async too, 16 bytes a row at most, and the compiler
moves them to tensor memory (sm_100) or registers (sm_120) from there. Bytes past K are read as zeros.

Tensor cores ignore the sign of nvfp4's scales. A row, or a weight row, with a negative scale becomes NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..gemm import tile_of, unused

# Combines signs of bytes. pack=4 puts four bytes into each word.
OR_ASM: tl.constexpr = tl.constexpr("or.b32 $0, $1, $2;")
OR_CONSTRAINTS: tl.constexpr = tl.constexpr("=r,r,r")


@triton.jit
def _either(a, b, ASM: tl.constexpr):
    """Returns a | b for bytes."""
    if ASM:
        return tl.inline_asm_elementwise(OR_ASM, OR_CONSTRAINTS, [a, b], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        return a | b


@triton.jit
def _has_sign(byte):
    """Returns, for each row of [N, B], whether any of its B bytes has a sign."""
    return tl.max(byte.to(tl.int32), 1) > 127


@triton.jit
def _scales(byte, NVFP4: tl.constexpr):
    """Reinterprets bytes as scales. e8m0 scales stay bytes, because Triton has no type for them."""
    return byte.to(tl.float8e4nv, bitcast=True) if NVFP4 else byte


@triton.jit(do_not_specialize=["n_blocks", "m", "m_tiles"])
def scaled_kernel(
    a_ptr,  # [rows, K/2] uint8
    as_ptr,  # [rows, A_SCALES] uint8, of which ceil(K/BLOCK) are read
    af_ptr,  # [rows] float32; HAS_A_FACTOR
    b_ptr,  # [G, N, K/2] uint8
    bs_ptr,  # [G, N, ceil(K/BLOCK)] uint8
    gs_ptr,  # [G] float32; NVFP4
    bias_ptr,  # [G, N]
    out_ptr,  # [rows, N]; MODE "k": [G, rows, N]
    tiles_ptr,  # as gemm_kernel's
    rows_ptr,  # sorted position -> row of the output; HAS_ROWS
    n,  # rows of the weight matrix
    n_blocks,
    m,  # rows of the output; MASKED: rows of one group
    m_tiles,  # tiles along tokens when not MAPPED; MASKED, K: of one group
    MODE: tl.constexpr,  # as gemm_kernel's
    HAS_ROWS: tl.constexpr,
    A_DIV: tl.constexpr,  # row r of the output reads row r // A_DIV of a
    NVFP4: tl.constexpr,
    K: tl.constexpr,
    A_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_A_FACTOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    if unused(tl.program_id(0), tiles_ptr, n_blocks, MODE):
        return
    tile, pid_n, expert, start, valid_end, write_end = tile_of(
        tl.program_id(0), tiles_ptr, n_blocks, m, m_tiles, MODE, BLOCK_M
    )
    pos = start + tl.arange(0, BLOCK_M)
    valid = pos < valid_end
    written = pos < write_end
    row = tl.load(rows_ptr + pos, mask=written, other=0) if HAS_ROWS else pos
    source = tl.where(valid, row // A_DIV, 0).to(tl.int64)
    i_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = i_n < n
    offs_n = tl.where(mask_n, i_n, 0)

    BLOCK: tl.constexpr = 16 if NVFP4 else 32
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    BYTES: tl.constexpr = BLOCK_K // 2
    SCALES: tl.constexpr = BLOCK_K // BLOCK
    EVEN_K: tl.constexpr = K % BLOCK_K == 0 and MODE != "k"
    e = tl.maximum(expert, 0).to(tl.int64)
    i_byte = tl.arange(0, BYTES)
    i_scale = tl.arange(0, SCALES)
    weight_row = e * n + offs_n
    a_base = a_ptr + source[None, :] * (K // 2) + i_byte[:, None]
    b_base = b_ptr + weight_row[:, None] * (K // 2) + i_byte[None, :]
    as_base = as_ptr + source[:, None] * A_SCALES + i_scale[None, :]
    bs_base = bs_ptr + weight_row[:, None] * BLOCKS + i_scale[None, :]

    first = 0
    last = tl.where(start < valid_end, K_TILES, 0)
    if MODE == "k":
        # Groups begin and end at multiples of a scale block. Bounds are written as such multiples, so that
        # the compiler knows that masks cut between vectors.
        group = tile // m_tiles
        k_end = tl.load(tiles_ptr + group)
        k_begin = tl.load(tiles_ptr + group - 1, mask=group > 0, other=0)
        first = k_begin // BLOCK_K
        last = tl.where(k_end > k_begin, (k_end + BLOCK_K - 1) // BLOCK_K, first)
        first_block = k_begin // BLOCK
        end_block = (k_end + BLOCK - 1) // BLOCK
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    w_signs = tl.zeros((BLOCK_N, SCALES), dtype=tl.uint8)
    x_signs = tl.zeros((BLOCK_M, SCALES), dtype=tl.uint8)
    for kk in tl.range(first, last, num_stages=STAGES):
        if EVEN_K:
            w = tl.load(b_base + kk * BYTES)
            x = tl.load(a_base + kk * BYTES)
            ws = tl.load(bs_base + kk * SCALES)
            xs = tl.load(as_base + kk * SCALES)
        else:
            byte = kk * BYTES + i_byte
            block = kk * SCALES + i_scale
            inside = byte < K // 2
            has_scale = block < BLOCKS
            if MODE == "k":
                inside &= (byte >= first_block * (BLOCK // 2)) & (byte < end_block * (BLOCK // 2))
                has_scale &= (block >= first_block) & (block < end_block)
            w = tl.load(b_base + kk * BYTES, mask=inside[None, :], other=0)
            x = tl.load(a_base + kk * BYTES, mask=inside[:, None], other=0)
            ws = tl.load(bs_base + kk * SCALES, mask=has_scale[None, :], other=0)
            xs = tl.load(as_base + kk * SCALES, mask=has_scale[None, :], other=0)
        if NVFP4:
            w_signs = _either(w_signs, ws, ASM)
            x_signs = _either(x_signs, xs, ASM)
        acc = tl.dot_scaled(w, _scales(ws, NVFP4), "e2m1", x, _scales(xs, NVFP4), "e2m1", acc)

    # --- epilogue ---
    if NVFP4:
        negative = _has_sign(w_signs)[:, None] | _has_sign(x_signs)[None, :]
        acc = tl.where(negative, float("nan"), acc * tl.load(gs_ptr + e))
    if HAS_A_FACTOR:
        acc = acc * tl.load(af_ptr + source, mask=valid, other=0.0)[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + weight_row, mask=mask_n, other=0.0).to(tl.float32)
        acc = acc + bias[:, None]
    acc = tl.where(valid[None, :], acc, 0.0)
    out_row = row.to(tl.int64)
    if MODE == "k":
        out_row += (tile // m_tiles).to(tl.int64) * m
    o = out_ptr + out_row[:, None] * n + i_n[None, :]
    tl.store(o, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=written[:, None] & mask_n[None, :])
