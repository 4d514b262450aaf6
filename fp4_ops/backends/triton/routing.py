"""Kernels before and after the product. The steps before it take one launch (two for very many rows), and the
host reads nothing back.

The launch puts the activations into plane order (see gemm.py) and writes the map from tiles to experts:

    tiles[0] = number of tiles
    tiles[4 + 4 i : 8 + 4 i] = expert, first row, end of valid rows, end of written rows

Rows are positions in expert order. Rows that belong to no expert form a last group, expert -1, and are
written as zeros. Offsets and ids are clamped: bad routing gives wrong rows, but no access outside the
tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gemm import store_terms


@triton.jit
def permute_rows(
    x_ptr, out_ptr, rows, pid, K: tl.constexpr, KP: tl.constexpr, CHUNK: tl.constexpr, TERMS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Writes x [rows, K] to out [TERMS, rows, KP] in plane order: inside each CHUNK of k, all k % 8 == 0 come
    first, then all k % 8 == 1, and so on.
    """
    chunks: tl.constexpr = KP // CHUNK
    row = (pid // chunks) * BLOCK_R + tl.arange(0, BLOCK_R)
    base = (pid % chunks) * CHUNK
    word = tl.arange(0, CHUNK // 8)
    plane = tl.arange(0, 8)
    k = base + 8 * word[None, :, None] + plane[None, None, :]
    row3 = row.to(tl.int64)[:, None, None]
    x = tl.load(x_ptr + row3 * K + k, mask=(row3 < rows) & (k < K), other=0.0).to(tl.float32)
    x = tl.permute(x, (0, 2, 1))
    col = base + plane[None, :, None] * (CHUNK // 8) + word[None, None, :]
    keep = (row3 < rows) & (col < KP)
    store_terms(out_ptr, row3 * KP + col, x, keep, rows.to(tl.int64) * KP, TERMS)


@triton.jit
def write_tiles(tiles_ptr, starts, ends, experts, m, BLOCK_M: tl.constexpr, TAIL: tl.constexpr):
    """Writes the tile map of groups [starts, ends). With TAIL, the rows from the last end to m are added as
    expert -1.
    """
    count = (ends - starts + BLOCK_M - 1) // BLOCK_M
    first = tl.cumsum(count, 0) - count
    total = tl.sum(count, 0)
    for i in range(tl.max(count, 0)):
        entry = tiles_ptr + 4 + 4 * (first + i)
        mask = i < count
        tl.store(entry, experts, mask=mask)
        tl.store(entry + 1, starts + i * BLOCK_M, mask=mask)
        tl.store(entry + 2, ends, mask=mask)
        tl.store(entry + 3, ends, mask=mask)
    if TAIL:
        start = tl.max(ends, 0)
        tail = (m - start + BLOCK_M - 1) // BLOCK_M
        for i in range(tail):
            entry = tiles_ptr + 4 + 4 * (total + i)
            tl.store(entry, -1)
            tl.store(entry + 1, start + i * BLOCK_M)
            tl.store(entry + 2, 0)
            tl.store(entry + 3, m)
        total += tail
    tl.store(tiles_ptr, total)


@triton.jit
def _ends_of_offs(offs_ptr, m, G, GP: tl.constexpr):
    """Loads cumulative ends, makes them monotone and clamps them to [0, m]. Groups past G are empty."""
    g = tl.arange(0, GP)
    ends = tl.load(offs_ptr + g, mask=g < G, other=0)
    return tl.associative_scan(tl.minimum(tl.maximum(ends, 0), m), 0, _maximum)


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["rows", "m"])
def prepare_offs(
    x_ptr, a_ptr, offs_ptr, tiles_ptr, rows, m, G: tl.constexpr, GP: tl.constexpr, MAPPED: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, CHUNK: tl.constexpr, TERMS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Program 0 writes the tile map of `offs`, if MAPPED. The others permute x."""
    pid = tl.program_id(0)
    if MAPPED:
        if pid == 0:
            ends = _ends_of_offs(offs_ptr, m, G, GP)
            g = tl.arange(0, GP)
            starts = tl.where(g == 0, 0, _ends_of_offs_shifted(offs_ptr, m, G, GP))
            write_tiles(tiles_ptr, starts, ends, g, m, BLOCK_M, True)
        else:
            permute_rows(x_ptr, a_ptr, rows, pid - 1, K, KP, CHUNK, TERMS, BLOCK_R)
    else:
        permute_rows(x_ptr, a_ptr, rows, pid, K, KP, CHUNK, TERMS, BLOCK_R)


@triton.jit
def _ends_of_offs_shifted(offs_ptr, m, G, GP: tl.constexpr):
    """Returns, for each group, the clamped end of the group before it."""
    g = tl.arange(0, GP)
    ends = tl.load(offs_ptr + g - 1, mask=(g > 0) & (g <= G), other=0)
    return tl.associative_scan(tl.minimum(tl.maximum(ends, 0), m), 0, _maximum)


@triton.jit
def _load_ids(ids_ptr, r, m, G: tl.constexpr):
    """Loads the expert ids of rows r. Ids outside [0, G) become G. Rows past m get G + 1."""
    e = tl.load(ids_ptr + r, mask=r < m, other=0)
    e = tl.where((e >= 0) & (e < G), e, G).to(tl.int32)
    return tl.where(r < m, e, G + 1)


@triton.jit(do_not_specialize=["rows", "m", "route_programs"])
def prepare_ids(
    x_ptr, a_ptr, ids_ptr, sorted_ptr, tiles_ptr, rows, m, route_programs, G: tl.constexpr,
    BINS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, CHUNK: tl.constexpr, TERMS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr, SCAN: tl.constexpr, SORT: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Sorts rows by id. Program 0 counts, and writes the tile map. The next programs sort the m rows, and the
    rest permute x.

    A row's place is the number of rows with a smaller (id, row). The m^2 comparisons are spread over the
    programs. Up to several thousand rows they are cheaper than a second launch.
    """
    pid = tl.program_id(0)
    if pid == 0:
        count = tl.zeros((BINS,), dtype=tl.int32)
        for base in range(0, m, SCAN):
            count += tl.histogram(_load_ids(ids_ptr, base + tl.arange(0, SCAN), m, G), BINS)
        bins = tl.arange(0, BINS)
        count = tl.where(bins < G, count, 0)
        ends = tl.cumsum(count, 0)
        write_tiles(tiles_ptr, ends - count, ends, bins, m, BLOCK_M, TAIL)
    elif pid < route_programs:
        r = (pid - 1) * SORT + tl.arange(0, SORT)
        mine = _load_ids(ids_ptr, r, m, G)
        place = tl.zeros((SORT,), dtype=tl.int32)
        for base in range(0, m, SCAN):
            other = base + tl.arange(0, SCAN)
            e = _load_ids(ids_ptr, other, m, G)
            before = (e[None, :] < mine[:, None]) | (
                (e[None, :] == mine[:, None]) & (other[None, :] < r[:, None])
            )
            place += tl.sum(before.to(tl.int32), 1)
        tl.store(sorted_ptr + place, r, mask=r < m)
    else:
        permute_rows(x_ptr, a_ptr, rows, pid - route_programs, K, KP, CHUNK, TERMS, BLOCK_R)


@triton.jit(do_not_specialize=["rows", "m", "count_programs"])
def count_ids(
    x_ptr, a_ptr, ids_ptr, counts_ptr, rows, m, count_programs, G: tl.constexpr, BINS: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, CHUNK: tl.constexpr, TERMS: tl.constexpr, BLOCK_R: tl.constexpr,
    SCAN: tl.constexpr,
):  # fmt: skip
    """First launch for many rows: counts each id in each SCAN rows. Other programs permute x."""
    pid = tl.program_id(0)
    if pid < count_programs:
        count = tl.histogram(_load_ids(ids_ptr, pid * SCAN + tl.arange(0, SCAN), m, G), BINS)
        tl.store(counts_ptr + pid * BINS + tl.arange(0, BINS), count)
    else:
        permute_rows(x_ptr, a_ptr, rows, pid - count_programs, K, KP, CHUNK, TERMS, BLOCK_R)


@triton.jit(do_not_specialize=["m", "count_programs"])
def sort_ids(
    ids_ptr, counts_ptr, sorted_ptr, tiles_ptr, m, count_programs, G: tl.constexpr, BINS: tl.constexpr,
    BLOCK_M: tl.constexpr, SCAN: tl.constexpr, SORT: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Second launch for many rows: program 0 writes the tile map, and each other program sorts SORT rows."""
    pid = tl.program_id(0)
    bins = tl.arange(0, BINS)
    r0 = (pid - 1) * SORT
    chunk = r0 // SCAN
    total = tl.zeros((BINS,), dtype=tl.int32)
    earlier = tl.zeros((BINS,), dtype=tl.int32)
    for c in range(count_programs):
        count = tl.load(counts_ptr + c * BINS + bins)
        total += count
        earlier += tl.where(c < chunk, count, 0)
    if pid == 0:
        total = tl.where(bins < G, total, 0)
        ends = tl.cumsum(total, 0)
        write_tiles(tiles_ptr, ends - total, ends, bins, m, BLOCK_M, TAIL)
    else:
        r = r0 + tl.arange(0, SORT)
        mine = _load_ids(ids_ptr, r, m, G)
        place = tl.gather(tl.cumsum(total, 0) - total + earlier, mine, 0)
        for base in range(chunk * SCAN, r0 + SORT, SORT):
            other = base + tl.arange(0, SORT)
            e = _load_ids(ids_ptr, other, m, G)
            before = (e[None, :] == mine[:, None]) & (other[None, :] < r[:, None])
            place += tl.sum(before.to(tl.int32), 1)
        tl.store(sorted_ptr + place, r, mask=r < m)


@triton.jit(do_not_specialize=["tokens", "rows"])
def combine_kernel(
    y_ptr,  # [PARTS, rows, H] float32: row t * TOP_K + j
    ids_ptr,  # [tokens, TOP_K]
    weights_ptr,  # [tokens, TOP_K]
    bias_ptr,  # [G, H]
    out_ptr,  # [tokens, H]
    tokens,
    rows,
    H,
    G: tl.constexpr,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes out[t] = sum over j, in order, of weights[t, j] * (y[t, j] + bias[ids[t, j]]). Ids outside [0,
    G) add nothing.
    """
    t = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < H
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        e = tl.load(ids_ptr + t * TOP_K + j)
        ok = (e >= 0) & (e < G)
        taken = col < tl.where(ok, H, 0)
        weight = tl.load(weights_ptr + t * TOP_K + j).to(tl.float32)
        y = tl.zeros((BLOCK,), dtype=tl.float32)
        for part in tl.static_range(PARTS):
            offset = (part * rows.to(tl.int64) + t * TOP_K + j) * H + col
            y += tl.load(y_ptr + offset, mask=taken, other=0.0).to(tl.float32)
        if HAS_BIAS:
            y += tl.load(bias_ptr + e.to(tl.int64) * H + col, mask=taken, other=0.0).to(tl.float32)
        acc += tl.where(ok, weight * y, 0.0)
    tl.store(out_ptr + t * H + col, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["m"])
def copy_groups(
    src_ptr, dst_ptr, ends_ptr, clamped_ptr, m, max_m, width, G: tl.constexpr, GP: tl.constexpr,
    TO_MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies rows from [m, width], sorted by group, to [G, max_m, width], or back. Each program writes one
    row.

    `ends` is offs (TO_MASKED) or masked_m. Every destination row is written, padding as zeros.
    `clamped` receives the counts that fit (TO_MASKED) or the offsets.
    """
    row = tl.program_id(0)
    g = tl.arange(0, GP)
    if TO_MASKED:
        ends = _ends_of_offs(ends_ptr, m, G, GP)
        starts = tl.where(g == 0, 0, _ends_of_offs_shifted(ends_ptr, m, G, GP))
        count = tl.minimum(ends - starts, max_m)
        if row == 0:
            tl.store(clamped_ptr + g, count, mask=g < G)
        group = row // max_m
        i = row % max_m
        src = tl.sum(tl.where(g == group, starts, 0), 0) + i
        valid = i < tl.sum(tl.where(g == group, count, 0), 0)
    else:
        count = tl.load(ends_ptr + g, mask=g < G, other=0)
        count = tl.minimum(tl.maximum(count, 0), max_m)
        ends = tl.minimum(tl.cumsum(count, 0), m)
        if row == 0:
            tl.store(clamped_ptr + g, ends, mask=g < G)
        # The number of a row's group is the number of groups that end at or before it.
        group = tl.sum(((ends <= row) & (g < G)).to(tl.int32), 0)
        start = tl.max(tl.where(g < group, ends, 0), 0)
        src = group * max_m + row - start
        valid = group < G
    for base in range(0, width, BLOCK):
        col = base + tl.arange(0, BLOCK)
        mask = col < tl.where(valid, width, 0)
        value = tl.load(src_ptr + src.to(tl.int64) * width + col, mask=mask, other=0.0)
        tl.store(dst_ptr + row.to(tl.int64) * width + col, value, mask=col < width)
