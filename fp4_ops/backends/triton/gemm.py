"""The matrix-product kernel of all fp4 operators that run on Triton, except for FP4 x FP4 (scaled/).

    out[row, n] = global[e] * a_factor[source(row)]
                  * sum_k (code[e, n, k] * block_scale[e, n, k // block]) * a[source(row), k]
                  + bias[e, n]

The weights are `tl.dot`'s *left* operand. A tile is BLOCK_N weight rows by BLOCK_M tokens, so a few tokens
waste little. Codes are expanded in registers, because Hopper's wgmma can read its left operand from there.

Order of k: a thread holds 32-bit words of eight codes, so k is ordered in planes inside a tile. Plane i is
nibble i of every word, where k % 8 == i. The activations are already in this order inside chunks of BLOCK_K
(`routing.py` and this kernel's gated epilogue write them so). So both operands are read with wide loads.

Activations are sums of bfloat16 terms (one for bfloat16, two for float16, three for float32). So every
product is exact, and one kernel serves every dtype. bfloat16 also holds e2m1 times its block scale. It does
not hold int4 times its scale: for int4, a tile lies within one block of scales, and the scales multiply its
sums.

KIND is the format of the weights: "nvfp4", "mxfp4", or "int4" with any block.
"""

from __future__ import annotations

import triton
import triton.language as tl

# e2m1 bits in the exponent of a bfloat16 mean the value times 2^-126. The block scale takes the missing
# factor. With the whole factor, e4m3 scales of 4 and more would overflow. So the scale takes 2^119, and the
# epilogue multiplies by 2^7.
NVFP4_REST = 2.0**7

# Converts two words a, b (16 codes) and their scales, as bfloat16 pairs, to planes: plane i is the pair
# (nibble i of a, nibble i of b). A product with 65 << s copies the sign six places above the magnitude, where
# bfloat16 has its sign. fma with -0 is an exact product; it exists from sm_80 on, unlike mul.bf16x2.


def _expand_asm(scale_steps: str) -> str:
    def plane(out: int, src: str, nibble: int) -> str:
        move = {
            0: f"and.b32 t, {src}, 0x000F000F; mul.lo.u32 t, t, 4160; and.b32 t, t, 0x81C081C0;",
            1: f"and.b32 t, {src}, 0x00F000F0; mul.lo.u32 t, t, 260; and.b32 t, t, 0x81C081C0;",
            2: f"shr.u32 u, {src}, 8; and.b32 t, u, 0x000F000F; mul.lo.u32 t, t, 4160; "
            "and.b32 t, t, 0x81C081C0;",
            3: f"shr.u32 t, {src}, 6; and.b32 t, t, 0x01C001C0; and.b32 u, {src}, 0x80008000; "
            "or.b32 t, t, u;",
        }[nibble]
        return move + scale_steps.replace("OUT", f"${out}")

    body = "".join(plane(i, "p" if i < 4 else "q", i % 4) for i in range(8))
    return (
        "{ .reg .b32 p, q, t, u, z; mov.b32 z, 0x80008000;"
        "prmt.b32 p, $8, $9, 0x5410; prmt.b32 q, $8, $9, 0x7632;" + body + "}"
    )


EXPAND_ASM = {
    "nvfp4": tl.constexpr(_expand_asm("fma.rn.bf16x2 OUT, t, $10, z;")),
    # A scale from 2^-127 to 2^127 would overflow with the factor 2^126 (0x7E80), so there are two exact
    # products.
    "mxfp4": tl.constexpr(
        _expand_asm("mov.b32 u, 0x7E807E80; fma.rn.bf16x2 t, t, u, z; fma.rn.bf16x2 OUT, t, $10, z;")
    ),
}
NVFP4_ASM: tl.constexpr = EXPAND_ASM["nvfp4"]
MXFP4_ASM: tl.constexpr = EXPAND_ASM["mxfp4"]
EXPAND_CONSTRAINTS: tl.constexpr = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r")


@triton.jit
def decode_e4m3(byte):
    """Returns the float32 value of an e4m3 byte (NaN stays NaN). It uses integers, because not every GPU
    converts float8.
    """
    b = byte.to(tl.int32)
    bits = ((b & 0x7F) << 20) | ((b & 0x80) << 24)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120, from exponent bias 7 to 127
    return tl.where((b & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def decode_e8m0(byte):
    """Returns the float32 value 2^(byte - 127). 255 is NaN, and 0 is the subnormal 2^-127."""
    b = byte.to(tl.int32)
    bits = tl.where(b == 0, 0x00400000, tl.where(b == 255, 0x7FC00000, b << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def decode_e2m1(code):
    """Returns the float32 value of a 4-bit code. Its bits in the exponent of a float32 mean the value times
    2^-126.
    """
    c = code.to(tl.int32)
    bits = ((c & 7) << 22) | ((c & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def _plane(w, scale, i: tl.constexpr, COMPUTE: tl.constexpr):
    return (decode_e2m1((w >> (4 * i)) & 15) * scale).to(COMPUTE)


@triton.jit
def _int4_plane(w, i: tl.constexpr, COMPUTE: tl.constexpr):
    return ((w << (28 - 4 * i)) >> 28).to(tl.float32).to(COMPUTE)


@triton.jit
def expand_int4(w, COMPUTE: tl.constexpr):
    """Expands int32 words [BN, W] to eight planes [BN, W]. Plane i has the integer of nibble i."""
    return (
        _int4_plane(w, 0, COMPUTE), _int4_plane(w, 1, COMPUTE),
        _int4_plane(w, 2, COMPUTE), _int4_plane(w, 3, COMPUTE),
        _int4_plane(w, 4, COMPUTE), _int4_plane(w, 5, COMPUTE),
        _int4_plane(w, 6, COMPUTE), _int4_plane(w, 7, COMPUTE),
    )  # fmt: skip


@triton.jit
def expand(w, scale_byte, NVFP4: tl.constexpr, ASM: tl.constexpr, COMPUTE: tl.constexpr):
    """Expands int32 words [BN, W] and scale bytes [BN, B] to eight planes [BN, W]: nibble i times its block
    scale.

    With ASM, nvfp4 planes lack the factor NVFP4_REST. The epilogue multiplies by it.
    """
    BN: tl.constexpr = w.shape[0]
    W: tl.constexpr = w.shape[1]
    B: tl.constexpr = scale_byte.shape[1]
    if NVFP4:
        scale = decode_e4m3(scale_byte)
        if ASM:
            scale = scale * 6.646139978924579e35  # 2^119
    else:
        scale = decode_e8m0(scale_byte)
    if ASM:
        scale = scale.to(tl.bfloat16)
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (BN, B, W // B)), (BN, W))
    if ASM:
        return tl.inline_asm_elementwise(
            NVFP4_ASM if NVFP4 else MXFP4_ASM, EXPAND_CONSTRAINTS, [w, scale],
            dtype=(
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
            ),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return (
            _plane(w, scale, 0, COMPUTE), _plane(w, scale, 1, COMPUTE),
            _plane(w, scale, 2, COMPUTE), _plane(w, scale, 3, COMPUTE),
            _plane(w, scale, 4, COMPUTE), _plane(w, scale, 5, COMPUTE),
            _plane(w, scale, 6, COMPUTE), _plane(w, scale, 7, COMPUTE),
        )  # fmt: skip


@triton.jit
def _load_words(ptr, offs_n, mask_n, word, K: tl.constexpr, BYTES: tl.constexpr, EVEN_K: tl.constexpr):
    """Loads int32 words of eight codes: words `word` of rows offs_n. BYTES: rows start at any byte (K % 8 !=
    0).
    """
    if BYTES:
        byte = 4 * word
        row = ptr + offs_n[:, None] * (K // 2)
        w = tl.zeros((offs_n.shape[0], word.shape[0]), dtype=tl.int32)
        for i in tl.static_range(4):
            m = mask_n[:, None] & (byte[None, :] + i < K // 2)
            w |= tl.load(row + byte[None, :] + i, mask=m, other=0).to(tl.int32) << (8 * i)
    else:
        p = ptr.to(tl.pointer_type(tl.int32)) + offs_n[:, None] * (K // 8) + word[None, :]
        if EVEN_K:
            w = tl.load(p, mask=mask_n[:, None], other=0)
        else:
            w = tl.load(p, mask=mask_n[:, None] & (word[None, :] < K // 8), other=0)
    return w


@triton.jit
def _swizzle(pid, tiles, n_blocks):
    """Returns (tile of tokens, block of weight rows) of a program. Eight tiles of tokens pass over all
    weights together, so that the expert's weights and these tokens stay in L2.
    """
    group = pid // (8 * n_blocks)
    size = tl.minimum(tiles - group * 8, 8)
    i = pid % (8 * n_blocks)
    return group * 8 + i % size, i // size


@triton.jit
def unused(pid, tiles_ptr, n_blocks, MODE: tl.constexpr):
    """Returns whether a program has no tile. If a map assigns tiles, the host knows only a bound on their
    number.
    """
    if MODE == "mapped":
        return pid >= tl.load(tiles_ptr) * n_blocks
    else:
        return False


@triton.jit
def tile_of(pid, tiles_ptr, n_blocks, m, m_tiles, MODE: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns tile, block of weight rows, expert, first row, end of the valid rows, end of the written
    rows.
    """
    if MODE == "mapped":
        tile, pid_n = _swizzle(pid, tl.load(tiles_ptr), n_blocks)
        entry = tiles_ptr + 4 + 4 * tile
        return tile, pid_n, tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    else:
        tile, pid_n = _swizzle(pid, tl.num_programs(0) // n_blocks, n_blocks)
        if MODE == "masked":
            expert = tile // m_tiles
            start = expert * m + (tile % m_tiles) * BLOCK_M
            valid_end = expert * m + tl.minimum(tl.maximum(tl.load(tiles_ptr + expert), 0), m)
            write_end = (expert + 1) * m
            return tile, pid_n, expert, start, valid_end, write_end
        else:
            return tile, pid_n, 0, tile % m_tiles * BLOCK_M, m, m


@triton.jit
def soft_cap(x, CAP: tl.constexpr):
    """Computes CAP * tanh(x / CAP) in float32."""
    y = x / CAP
    y2 = y * y
    near_zero = y * (1.0 - y2 * (1 / 3 - y2 * (2 / 15 - y2 * (17 / 315 - y2 * (62 / 2835)))))
    e = tl.exp(-2.0 * tl.abs(y))
    far = (1.0 - e) / (1.0 + e)
    return CAP * tl.where(y2 < 0.0625, near_zero, tl.where(y < 0.0, -far, far))


@triton.jit
def curve(x, ACT: tl.constexpr, ALPHA: tl.constexpr, GATE_CAP: tl.constexpr):
    """Computes f(x) in float32; see meta.formats.Activation."""
    if ACT == "gelu":
        f = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        f = x / (1.0 + tl.exp(-2.0 * inner))
    elif ACT == "relu2":
        positive = tl.where(x < 0.0, 0.0, x)  # a NaN stays one
        f = positive * positive
    elif ACT == "situ":
        f = soft_cap(x, GATE_CAP) / (1.0 + tl.exp(-x))
    else:
        f = x / (1.0 + tl.exp(-ALPHA * x))
    return f


@triton.jit
def activate(
    gate, up, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr,
):  # fmt: skip
    """Computes f(gate) * (up + UP_OFFSET) in float32; see meta.formats.ACTIVATIONS."""
    if LIMIT is not None:
        # Without `propagate_nan` a GPU gives the limit for a NaN.
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if UP_CAP is not None:
        up = soft_cap(up, UP_CAP)
    return curve(gate, ACT, ALPHA, GATE_CAP) * (up + UP_OFFSET)


@triton.jit
def store_terms(ptr, offset, value, mask, stride, TERMS: tl.constexpr):
    """Writes a float32 value as TERMS bfloat16 values. Their sum is the value (exactly, if there are
    three).
    """
    if ptr.dtype.element_ty == tl.float32:  # only in the interpreter: one exact term
        tl.store(ptr + offset, value, mask=mask)
    else:
        for t in tl.static_range(TERMS):
            part = value.to(tl.bfloat16)
            tl.store(ptr + t * stride + offset, part, mask=mask)
            value = value - part.to(tl.float32)


@triton.jit(do_not_specialize=["a_rows", "out_rows", "n_blocks", "m", "m_tiles"])
def gemm_kernel(
    a_ptr,  # [TERMS, rows, KP] bfloat16 (float32 under the interpreter), in plane order
    b_ptr,  # [G, N, K/2] uint8
    s_ptr,  # [G, N, ceil(K/BLOCK)] uint8; int4: bfloat16 or float32
    gs_ptr,  # [G] float32
    bias_ptr,  # [G, N]
    af_ptr,  # [rows of a] float32; HAS_A_FACTOR
    out_ptr,  # [rows, N]; GATED: [OUT_TERMS, rows, OUT_KP] in plane order; split: [SPLIT_K, rows, N] float32
    tiles_ptr,  # MAPPED: see routing.py; MASKED: masked_m [G]; K: the ends of the groups along K [G]
    rows_ptr,  # sorted position -> row of the output; HAS_ROWS
    a_rows,  # rows of a
    out_rows,  # rows of out
    n,  # rows of the weight matrix
    n_blocks,
    m,  # rows of the output; MASKED: rows of one group
    m_tiles,  # tiles along tokens when not MAPPED; MASKED, K: of one group
    one,  # 1.0
    MODE: tl.constexpr,  # "dense", "masked", "mapped", or "k": groups of columns, out is [G, rows, N]
    HAS_ROWS: tl.constexpr,
    A_DIV: tl.constexpr,  # row r of the output reads row r // A_DIV of a
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    TERMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_A_FACTOR: tl.constexpr,
    GATED: tl.constexpr,  # an activation follows: of gate and up, or of up alone if UP_OFFSET is None
    INTERLEAVED: tl.constexpr,
    ACT: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    GATE_CAP: tl.constexpr,
    UP_CAP: tl.constexpr,
    OUT_KP: tl.constexpr,
    OUT_CHUNK: tl.constexpr,
    OUT_TERMS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    BYTES: tl.constexpr,
    ASM: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    pid = tl.program_id(0)
    split = tl.program_id(1)
    # --- which tokens, which expert ---
    if unused(pid, tiles_ptr, n_blocks, MODE):
        return
    tile, pid_n, expert, start, valid_end, write_end = tile_of(
        pid, tiles_ptr, n_blocks, m, m_tiles, MODE, BLOCK_M
    )
    pos = start + tl.arange(0, BLOCK_M)
    valid = pos < valid_end
    written = pos < write_end
    if HAS_ROWS:
        row = tl.load(rows_ptr + pos, mask=written, other=0)
    else:
        row = pos
    source = tl.where(valid, row // A_DIV, 0).to(tl.int64)

    # --- which weight rows: tiles of gate and up alternate eight gate rows and their eight up rows, so that
    # one thread gets both values of a pair ---
    i_n = tl.arange(0, BLOCK_N)
    if GATED and UP_OFFSET is not None:
        pair = pid_n * (BLOCK_N // 2) + (i_n // 16) * 8 + i_n % 8
        is_up = (i_n // 8) % 2
        mask_n = pair < n // 2
        if INTERLEAVED:
            offs_n = 2 * pair + is_up
        else:
            offs_n = pair + is_up * (n // 2)
    else:
        offs_n = pid_n * BLOCK_N + i_n
        mask_n = offs_n < n
    offs_n = tl.where(mask_n, offs_n, 0)

    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    WORDS: tl.constexpr = BLOCK_K // 8
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    e = tl.maximum(expert, 0).to(tl.int64)
    b_base = b_ptr + e * n * (K // 2)
    s_base = s_ptr + e * n * BLOCKS
    i_word = tl.arange(0, WORDS)
    SCALES: tl.constexpr = 1 if KIND == "int4" else BLOCK_K // BLOCK
    i_block = tl.arange(0, SCALES)
    a_base = a_ptr + source[None, :] * KP + tl.arange(0, BLOCK_K)[:, None]

    k_tiles = tl.where(start < valid_end, K_TILES, 0)
    first = split * ((K_TILES + SPLIT_K - 1) // SPLIT_K)
    last = tl.minimum(k_tiles, first + (K_TILES + SPLIT_K - 1) // SPLIT_K)
    if MODE == "k":
        group = tile // m_tiles
        k_end = tl.load(tiles_ptr + group)
        k_begin = tl.load(tiles_ptr + group - 1, mask=group > 0, other=0)
        first = k_begin // BLOCK_K
        last = tl.where(k_end > k_begin, (k_end + BLOCK_K - 1) // BLOCK_K, first)
        # k at each place of a tile, in plane order.
        place = tl.arange(0, BLOCK_K)
        k_of = 8 * (place % WORDS) + place // WORDS
    a_stride = a_rows.to(tl.int64) * KP
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for kk in tl.range(first, last, num_stages=STAGES):
        w = _load_words(b_base, offs_n, mask_n, kk * WORDS + i_word, K, BYTES, EVEN_K)
        block = kk * BLOCK_K // BLOCK + i_block
        s_ptrs = s_base + offs_n[:, None] * BLOCKS + block[None, :]
        if EVEN_K:
            s = tl.load(s_ptrs, mask=mask_n[:, None], other=0)
        else:
            s = tl.load(s_ptrs, mask=mask_n[:, None] & (block[None, :] < BLOCKS), other=0)
        if KIND == "int4":
            w0, w1, w2, w3, w4, w5, w6, w7 = expand_int4(w, COMPUTE)
        else:
            w0, w1, w2, w3, w4, w5, w6, w7 = expand(w, s, KIND == "nvfp4", ASM, COMPUTE)
        planes = tl.join(tl.join(tl.join(w0, w4), tl.join(w2, w6)), tl.join(tl.join(w1, w5), tl.join(w3, w7)))
        planes = tl.reshape(tl.permute(planes, (0, 2, 3, 4, 1)), (BLOCK_N, BLOCK_K))
        if MODE == "k":
            k = kk * BLOCK_K + k_of
            inside = ((k >= k_begin) & (k < k_end))[:, None]
            part = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for t in tl.static_range(TERMS):
                a = tl.load(a_base + t * a_stride + kk * BLOCK_K, mask=inside, other=0.0)
                part = tl.dot(planes, a, part, input_precision="ieee")
            acc += part * s.to(tl.float32) if KIND == "int4" else part
        elif TERMS == 1 and KIND != "int4":
            acc = tl.dot(planes, tl.load(a_base + kk * BLOCK_K), acc, input_precision="ieee")
        else:
            # Tensor cores truncate when they accumulate. A new sum for each tile keeps float32's accuracy.
            part = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for t in tl.static_range(TERMS):
                a = tl.load(a_base + t * a_stride + kk * BLOCK_K)
                part = tl.dot(planes, a, part, input_precision="ieee")
            acc += part * s.to(tl.float32) if KIND == "int4" else part

    # --- epilogue ---
    out_row = row.to(tl.int64)
    if MODE == "k":
        out_row += (tile // m_tiles).to(tl.int64) * m
    # A bug of Triton 3.6's ptxas: if the first use of accumulators is a conversion to bfloat16, it converts
    # them before wgmma has written them. It does not do so if their first use is a product.
    # test_triton_interpret.py checks this.
    factor = one
    if KIND == "nvfp4":
        factor = tl.load(gs_ptr + e)
        if ASM:
            factor = factor * 128.0
    if HAS_A_FACTOR:
        acc = acc * (tl.load(af_ptr + source, mask=valid, other=0.0) * factor)[None, :]
    else:
        acc = acc * factor
    if SPLIT_K > 1:
        # The kernel that sums the parts masks the padding and adds the bias.
        o = out_ptr + split * out_rows.to(tl.int64) * n + out_row[None, :] * n + offs_n[:, None]
        tl.store(o, acc, mask=mask_n[:, None] & written[None, :])
        return
    if HAS_BIAS:
        bias = tl.load(bias_ptr + e * n + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        acc = acc + bias[:, None]
    acc = tl.where(valid[None, :], acc, 0.0)
    if GATED:
        WORDS_N: tl.constexpr = BLOCK_N // (8 if UP_OFFSET is None else 16)
        if UP_OFFSET is not None:
            pairs = tl.permute(tl.reshape(acc, (WORDS_N, 2, 8, BLOCK_M)), (0, 2, 3, 1))
            gate, up = tl.split(pairs)
            h = activate(gate, up, ACT, ALPHA, LIMIT, UP_OFFSET, GATE_CAP, UP_CAP)
        else:
            h = curve(tl.reshape(acc, (WORDS_N, 8, BLOCK_M)), ACT, ALPHA, GATE_CAP)
        h = tl.permute(h, (2, 1, 0))  # [token, plane, word]: the order the next product reads
        word = pid_n * WORDS_N + tl.arange(0, WORDS_N)
        plane = tl.arange(0, 8)
        CW: tl.constexpr = OUT_CHUNK // 8
        col = (word // CW * OUT_CHUNK + word % CW)[None, None, :] + plane[None, :, None] * CW
        # Columns from I to OUT_KP are padding that the next product reads. h is zero there.
        keep = written[:, None, None] & (word < OUT_KP // 8)[None, None, :]
        at = out_row[:, None, None] * OUT_KP + col
        store_terms(out_ptr, at, h, keep, out_rows.to(tl.int64) * OUT_KP, OUT_TERMS)
    else:
        o = out_ptr + out_row[:, None] * n + (pid_n * BLOCK_N + i_n)[None, :]
        tl.store(o, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=written[:, None] & mask_n[None, :])
