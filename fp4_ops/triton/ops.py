"""The operators over the Triton kernels: allocate, launch, return. Nothing here reads device memory.

Every product is: one launch that permutes the activations and maps tiles to experts, then `gemm_kernel`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..meta import checks
from ..meta.formats import ACTIVATIONS, Format
from ..meta.layouts import LAYOUTS, Layout
from . import gemm, quantize, routing, tiles
from .tiles import Tile

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"

# Rows up to which one launch sorts by comparing all pairs; above, ids are counted first.
SORT_BY_COMPARISON = 8192
SCAN = 1024
SORT = 32
BLOCK_R = 4


class Weight(NamedTuple):
    """A weight operand as the kernel takes it."""

    codes: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None
    bias: torch.Tensor | None
    groups: int
    n: int
    k: int
    fmt: Format


class Activations(NamedTuple):
    """Rows in plane order: [terms, rows, kp], inside chunks of `chunk`."""

    data: torch.Tensor
    rows: int
    kp: int
    chunk: int
    terms: int


class Gate(NamedTuple):
    """The gated epilogue: which activation, and its output, in plane order for the next product."""

    activation: str
    h: Activations


def _pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _bytes(t: torch.Tensor) -> torch.Tensor:
    t = t.contiguous()
    return t if t.dtype == torch.uint8 else t.view(torch.uint8)


def _scales(t: torch.Tensor) -> torch.Tensor:
    """Block scales as the kernels take them: float8 as its bytes."""
    return _bytes(t) if t.dtype.itemsize == 1 else t.contiguous()


def _kind(fmt: Format) -> str:
    """What the kernels tell formats apart by."""
    return fmt.name if fmt.element == "e2m1" else fmt.element


def refuse_layout(op: str, layout: str) -> None:
    if layout != "plain":
        readers = "CPU" if layout == "tile16" else "Hopper"
        raise RuntimeError(
            f"fp4::{op}: layout is '{layout}', which only the {readers} kernels read; here it must be "
            "'plain' (convert with torch.ops.fp4.unpack)"
        )


def refuse_int8(op: str, dtype: torch.dtype) -> None:
    if dtype == torch.int8:
        raise RuntimeError(
            f"fp4::{op}: a has dtype int8; int8 activations run on CPU only. On CUDA a must be float32, "
            "bfloat16, float16, float8_e4m3fn or packed FP4"
        )


def copy_weight(packed, block_scale, global_scale):
    """New tensors: no output of an operator shares memory with an input."""
    contiguous = torch.contiguous_format
    if global_scale is None:
        global_scale = packed.new_empty(0, dtype=torch.float32)
    packed = packed.view(torch.uint8)
    return tuple(t.clone(memory_format=contiguous) for t in (packed, block_scale, global_scale))


def on_cpu(convert, packed, block_scale, global_scale, format, layout):
    """A conversion that the CPU owns, for tensors of this device."""
    factor = None if global_scale is None else global_scale.cpu()
    return tuple(
        t.to(packed.device) for t in convert(packed.cpu(), block_scale.cpu(), factor, format, layout)
    )


def weight(b, b_scale, b_global_scale, bias, w: checks.Weight, fmt: Format) -> Weight:
    return Weight(
        _bytes(b),
        _scales(b_scale),
        b_global_scale.contiguous() if fmt.has_global_scale else None,
        bias.contiguous() if bias is not None else None,
        1 if w.groups is None else w.groups,
        w.n,
        w.k,
        fmt,
    )


def _use_asm(device: torch.device) -> bool:
    return not INTERPRET and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _compute(asm: bool) -> tuple[torch.dtype, tl.dtype]:
    return (torch.bfloat16, tl.bfloat16) if asm else (torch.float32, tl.float32)


def _terms(dtype: torch.dtype, asm: bool) -> int:
    """How many bfloat16 terms hold a value of this dtype exactly."""
    return {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}[dtype] if asm else 1


def _tile(rows: int, w: Weight, terms: int) -> Tile:
    """The tile for `rows` rows; of int4 within one block of scales."""
    tile = tiles.choose(rows, w.groups, w.n, w.k, terms)
    return tile if w.fmt.element == "e2m1" else replace(tile, block_k=min(tile.block_k, w.fmt.block))


def _permuted(rows: int, k: int, chunk: int, dtype: torch.dtype, device: torch.device) -> Activations:
    """An empty buffer for `rows` rows of k values in plane order."""
    asm = _use_asm(device)
    terms = _terms(dtype, asm)
    kp = triton.cdiv(k, chunk) * chunk
    data = torch.empty((terms, rows, kp), dtype=_compute(asm)[0], device=device)
    return Activations(data, rows, kp, chunk, terms)


def _permute_programs(a: Activations) -> int:
    return triton.cdiv(a.rows, BLOCK_R) * (a.kp // a.chunk)


class Route(NamedTuple):
    """Which tile serves which rows. `tiles` bounds those of each of `groups`; the device knows the number."""

    mode: str
    map: torch.Tensor | None
    sorted_rows: torch.Tensor | None
    tiles: int
    m: int
    groups: int = 1


def _map(bound: int, device: torch.device) -> torch.Tensor:
    return torch.empty(4 + 4 * bound, dtype=torch.int32, device=device)


def prepare_dense(x: torch.Tensor, a: Activations, tile: Tile) -> Route:
    x = x.contiguous()
    m = x.shape[0]
    routing.prepare_offs[(_permute_programs(a),)](
        x, a.data, None, None, a.rows, m, G=0, GP=1, MAPPED=False, K=x.shape[-1], KP=a.kp, CHUNK=a.chunk,
        TERMS=a.terms, BLOCK_R=BLOCK_R, BLOCK_M=tile.block_m,
    )  # fmt: skip
    return Route("dense", None, None, triton.cdiv(m, tile.block_m), m)


def prepare_masked(x: torch.Tensor, a: Activations, masked_m: torch.Tensor, tile: Tile) -> Route:
    groups, max_m, k = x.shape
    prepare_dense(x.reshape(groups * max_m, k), a, tile)
    return Route("masked", masked_m.contiguous(), None, triton.cdiv(max_m, tile.block_m), max_m, groups)


def prepare_columns(x: torch.Tensor, a: Activations, ends: torch.Tensor, tile: Tile) -> Route:
    """Groups along K; `ends` rise and stay within it."""
    prepare_dense(x, a, tile)
    return Route("k", ends, None, triton.cdiv(x.shape[0], tile.block_m), x.shape[0], ends.shape[0])


def prepare_grouped(x: torch.Tensor, a: Activations, offs: torch.Tensor, tile: Tile) -> Route:
    x, offs = x.contiguous(), offs.contiguous()
    m, groups = x.shape[0], offs.shape[0]
    bound = m // tile.block_m + min(groups, m) + 1
    tile_map = _map(bound, x.device)
    routing.prepare_offs[(1 + _permute_programs(a),)](
        x, a.data, offs, tile_map, a.rows, m, G=groups, GP=_pow2(groups), MAPPED=True, K=x.shape[-1], KP=a.kp,
        CHUNK=a.chunk, TERMS=a.terms, BLOCK_R=BLOCK_R, BLOCK_M=tile.block_m,
    )  # fmt: skip
    return Route("mapped", tile_map, None, bound, m)


def prepare_indexed(
    x: torch.Tensor, a: Activations, ids: torch.Tensor, groups: int, tile: Tile, *, tail: bool
) -> Route:
    """`ids` has one expert for each row of the output; `tail`: rows of no expert are written as zeros."""
    x, ids = x.contiguous(), ids.contiguous()
    m = ids.numel()
    bound = m // tile.block_m + min(groups, m) + 1
    tile_map = _map(bound, x.device)
    sorted_rows = torch.empty(m, dtype=torch.int32, device=x.device)
    common = dict(G=groups, BINS=_pow2(groups + 2), SCAN=SCAN)
    permute = dict(K=x.shape[-1], KP=a.kp, CHUNK=a.chunk, TERMS=a.terms, BLOCK_R=BLOCK_R)
    sort = dict(BLOCK_M=tile.block_m, SORT=SORT, TAIL=tail)
    if m <= SORT_BY_COMPARISON:
        common["SCAN"] = min(SCAN, max(SORT, _pow2(m)))
        route_programs = 1 + triton.cdiv(m, SORT)
        routing.prepare_ids[(route_programs + _permute_programs(a),)](
            x, a.data, ids, sorted_rows, tile_map, a.rows, m, route_programs, **common, **permute, **sort
        )
    else:
        chunks = triton.cdiv(m, SCAN)
        counts = torch.empty((chunks, common["BINS"]), dtype=torch.int32, device=x.device)
        routing.count_ids[(chunks + _permute_programs(a),)](
            x, a.data, ids, counts, a.rows, m, chunks, **common, **permute
        )
        routing.sort_ids[(1 + triton.cdiv(m, SORT),)](
            ids, counts, sorted_rows, tile_map, m, chunks, **common, **sort
        )
    return Route("mapped", tile_map, sorted_rows, bound, m)


def product(
    a: Activations, w: Weight, route: Route, out: torch.Tensor, out_rows: int, tile: Tile, *,
    a_div: int = 1, split_k: int = 1, gate: Gate | None = None, a_factor: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Launches the kernel into `out`. Row r of the output reads row r // a_div of a."""
    assert tile.block_k == a.chunk, "the activations were permuted for another tile"
    act = ACTIVATIONS[gate.activation] if gate is not None else ACTIVATIONS["silu"]
    # Columns of a gated output up to its padded width are written too, as zeros: the next product reads them.
    columns = 2 * gate.h.kp if gate is not None else w.n
    n_blocks = triton.cdiv(columns, tile.block_n)
    count = route.tiles * route.groups
    asm = _use_asm(a.data.device)
    gemm.gemm_kernel[(count * n_blocks, split_k)](
        a.data, w.codes, w.scale, w.global_scale, w.bias if split_k == 1 else None, a_factor, out,
        route.map, route.sorted_rows, a.rows, out_rows, w.n, n_blocks, route.m, route.tiles, 1.0,
        MODE=route.mode, HAS_ROWS=route.sorted_rows is not None, A_DIV=a_div,
        KIND=_kind(w.fmt), BLOCK=w.fmt.block, K=w.k, KP=a.kp, TERMS=a.terms,
        HAS_BIAS=w.bias is not None and split_k == 1, HAS_A_FACTOR=a_factor is not None,
        GATED=gate is not None, INTERLEAVED=act.interleaved, ACT=act.function, ALPHA=act.alpha,
        LIMIT=act.limit, UP_OFFSET=act.up_offset,
        OUT_KP=gate.h.kp if gate else 0, OUT_CHUNK=gate.h.chunk if gate else 8,
        OUT_TERMS=gate.h.terms if gate else 1,
        SPLIT_K=split_k, BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, BLOCK_K=tile.block_k, STAGES=tile.stages,
        # int32 loads of whole words need rows that start at a word.
        BYTES=w.k % 8 != 0 or w.codes.data_ptr() % 4 != 0, ASM=asm, COMPUTE=_compute(asm)[1],
        num_warps=tile.warps,
    )  # fmt: skip


def run_product(
    prepare, x: torch.Tensor, rows: int, w: Weight, out_dtype: torch.dtype, *args,
    a_factor: torch.Tensor | None = None, **kwargs,
):  # fmt: skip
    """Prepare, multiply: out [rows, w.n], every row written. `a_factor` float32: one for each row of x."""
    out = torch.empty((rows, w.n), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    terms = _terms(x.dtype, _use_asm(x.device))
    tile = _tile(rows, w, terms)
    a = _permuted(rows, w.k, tile.block_k, x.dtype, x.device)
    product(a, w, prepare(x, a, *args, tile, **kwargs), out, rows, tile, a_factor=a_factor)
    return out


def grouped_mm_k(x, w: Weight, offs: torch.Tensor, out_dtype: torch.dtype, a_factor: torch.Tensor | None):
    """out[g] = x[:, offs[g-1]:offs[g]] @ w[:, offs[g-1]:offs[g]].T: [G, M, N]."""
    m, groups = x.shape[0], offs.shape[0]
    out = torch.zeros((groups, m, w.n), dtype=out_dtype, device=x.device)
    if out.numel() == 0 or w.k == 0:
        return out
    ends = offs.clamp(0, w.k).cummax(0).values
    terms = _terms(x.dtype, _use_asm(x.device))
    tile = _tile(m, w._replace(groups=1), terms)
    a = _permuted(m, w.k, tile.block_k, x.dtype, x.device)
    product(a, w, prepare_columns(x, a, ends, tile), out, m, tile, a_factor=a_factor)
    return out


def moe(x, topk_ids, topk_weights, up: Weight, down: Weight, activation: str, out_dtype: torch.dtype):
    """Four launches: route and permute, gate/up with its activation, down, combine."""
    tokens, top_k = topk_ids.shape
    rows = tokens * top_k
    out = torch.empty((tokens, down.n), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    if rows == 0 or up.groups == 0 or down.k == 0:
        return out.zero_()
    asm = _use_asm(x.device)
    terms = _terms(x.dtype, asm)
    up_tile = _tile(rows, up, terms)
    down_tile = _tile(rows, down, _terms(out_dtype, asm))
    # One tile map serves both products, so they agree on the tokens of a tile.
    if down_tile.block_m != up_tile.block_m:
        down_tile = up_tile
    a = _permuted(tokens, up.k, up_tile.block_k, x.dtype, x.device)
    topk_ids = topk_ids.contiguous()
    route = prepare_indexed(x, a, topk_ids, up.groups, up_tile, tail=False)
    # The hidden state is as exact as the output.
    h = _permuted(rows, down.k, down_tile.block_k, out_dtype, x.device)
    product(a, up, route, h.data, rows, up_tile, a_div=top_k, gate=Gate(activation, h))
    y = torch.empty((rows, down.n), dtype=torch.float32, device=x.device)
    product(h, down._replace(bias=None), route, y, rows, down_tile)
    combine(y, topk_ids, topk_weights, down, out)
    return out


def combine(y: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, down: Weight, out):
    """out[t] = sum over j of weights[t, j] * (y[t, j] + bias[ids[t, j]]) in float32, in the order of j."""
    tokens, top_k = topk_ids.shape
    block = min(1024, _pow2(down.n)) if tokens > 64 else min(256, _pow2(down.n))
    routing.combine_kernel[(tokens, triton.cdiv(down.n, block))](
        y, topk_ids, topk_weights.contiguous(), down.bias, out, tokens, tokens * top_k, down.n, G=down.groups,
        TOP_K=top_k, PARTS=1, HAS_BIAS=down.bias is not None, BLOCK=block,
    )  # fmt: skip


def quantize_matrix(x: torch.Tensor, fmt: Format, global_scale: torch.Tensor | None):
    x = x.contiguous()
    k = x.shape[-1]
    rows = x.numel() // k if k else 0
    packed = torch.empty((*x.shape[:-1], k // 2), dtype=torch.uint8, device=x.device)
    bits = torch.uint8 if fmt.scale_dtype.itemsize == 1 else torch.int16
    scale = torch.empty((*x.shape[:-1], fmt.num_blocks(k)), dtype=bits, device=x.device)
    matrices = x.shape[:-2]
    if not fmt.has_global_scale:
        gs = torch.empty(0, dtype=torch.float32, device=x.device)
    elif global_scale is not None:
        gs = global_scale.clone()
    elif x.numel() == 0:
        gs = torch.ones(matrices, dtype=torch.float32, device=x.device)
    else:
        # Max is exact in any dtype, so no float32 copy of x is made.
        dims = tuple(range(max(0, x.dim() - 2), x.dim()))
        amax = torch.maximum(x.amax(dims), -x.amin(dims)).float()
        # By a tensor: torch turns a division by a number into a product, which rounds differently.
        gs = torch.where(amax == 0, 1.0, amax / torch.full_like(amax, 6.0 * 448.0)).contiguous()
    if rows:
        per_matrix = x.shape[-2] if x.dim() >= 2 else 1
        tile = 64
        quantize.quantize_kernel[(triton.cdiv(rows * fmt.num_blocks(k), tile),)](
            x,
            gs,
            packed,
            scale,
            rows,
            per_matrix,
            K=k,
            BLOCK=fmt.block,
            KIND=_kind(fmt),
            TILE=tile,
        )
    return packed, scale.view(fmt.scale_dtype), gs


def dequantize(packed, block_scale, global_scale, fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    k = packed.shape[-1] * 2
    out = torch.empty((*packed.shape[:-1], k), dtype=dtype, device=packed.device)
    if out.numel():
        rows = out.numel() // k
        per_matrix = packed.shape[-2] if packed.dim() >= 2 else 1
        tile = 64
        gs = global_scale.contiguous() if fmt.has_global_scale else None
        quantize.dequantize_kernel[(triton.cdiv(rows * fmt.num_blocks(k), tile),)](
            _bytes(packed), _scales(block_scale), gs, out, rows, per_matrix, K=k, BLOCK=fmt.block,
            KIND=_kind(fmt), TILE=tile,
        )  # fmt: skip
    return out


def quantize_int8(x: torch.Tensor):
    x = x.contiguous()
    k = x.shape[-1]
    blocks = triton.cdiv(k, 32)
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty((*x.shape[:-1], blocks), dtype=torch.float32, device=x.device)
    if x.numel():
        rows = x.numel() // k
        quantize.quantize_int8_kernel[(triton.cdiv(rows * blocks, 64),)](x, codes, scale, rows, K=k, TILE=64)
    return codes, scale


def quantize_fp8(x: torch.Tensor, layout: Layout = LAYOUTS["plain"]):
    x = x.contiguous()
    k = x.shape[-1]
    kp = layout.padded(k)
    codes = torch.empty((*x.shape[:-1], kp), dtype=torch.uint8, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if scale.numel():
        chunk = min(1024, _pow2(kp))
        quantize.quantize_fp8_kernel[(scale.numel(),)](
            x, codes, scale, K=k, KP=kp, SM90=layout.name == "sm90", CHUNK=chunk
        )
    return codes.view(torch.float8_e4m3fn), scale


def copy_groups(src: torch.Tensor, ends: torch.Tensor, m: int, max_m: int, *, to_masked: bool):
    """to_masked: [m, W] -> [G, max_m, W]; else back. Returns the rows and the clamped counts or offsets."""
    src, ends = src.contiguous(), ends.contiguous()
    groups, width = ends.shape[0], src.shape[-1]
    shape = (groups, max_m, width) if to_masked else (m, width)
    out = torch.empty(shape, dtype=src.dtype, device=src.device)
    clamped = torch.empty_like(ends)
    # Program 0 also writes `clamped`, so there is one even when there is no row to write.
    rows = max(1, groups * max_m if to_masked else m)
    if groups == 0:
        return out.zero_(), clamped
    if out.numel() == 0:
        count = ends.clamp(0, m if to_masked else max_m)
        if to_masked:
            count = torch.diff(count.cummax(0).values, prepend=count.new_zeros(1)).clamp(max=max_m)
            return out, count
        return out, count.cumsum(0).clamp(max=m).to(ends.dtype)
    routing.copy_groups[(rows,)](
        src, out, ends, clamped, m, max_m, width, G=groups, GP=_pow2(groups), TO_MASKED=to_masked,
        BLOCK=min(1024, _pow2(width)),
    )  # fmt: skip
    return out, clamped
