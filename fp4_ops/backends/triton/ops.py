"""Runs the Triton kernels: allocates results and launches. Nothing here reads device memory on the host.

Every product has two launches. The first permutes the activations and maps tiles to experts, the second is
`gemm_kernel`. `launch.choose` chooses the tile for both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from ...meta import operand_checks
from ...meta.formats import Format, known_activation
from ...meta.layouts import LAYOUTS, Layout
from ...runtime.fitted import groups
from . import launch, quantize, routing
from .launch import Spec, TryNext
from .tiles import Device, Tile, device_of

SORT_BY_COMPARISON = groups("triton")["tiles"].values["sort_by_comparison"]
"""Most rows that one launch sorts by comparing all pairs. For more rows, ids are counted first."""
SCAN = 1024
SORT = 32
BLOCK_R = 4


class WeightArgs(NamedTuple):
    """A weight operand, as the kernel takes it."""

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


class Hidden(NamedTuple):
    """The rows that a gated product writes, in plane order for the next one."""

    kp: int
    chunk: int
    terms: int


def _pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    t = t.contiguous()
    return t if t.dtype == torch.uint8 else t.view(torch.uint8)


def _scales(t: torch.Tensor) -> torch.Tensor:
    """Returns block scales as the kernels take them: float8 as bytes."""
    return as_bytes(t) if t.dtype.itemsize == 1 else t.contiguous()


def _kind(fmt: Format) -> str:
    """Returns the kernels' name of a format: "nvfp4", "mxfp4" or "int4"."""
    return fmt.name if fmt.element == "e2m1" else fmt.element


def refuse_int8(op: str, dtype: torch.dtype) -> None:
    if dtype == torch.int8:
        raise RuntimeError(
            f"fp4::{op}: a has dtype int8; int8 activations run on CPU only. On CUDA a must be float32, "
            "bfloat16, float16, float8_e4m3fn or packed FP4"
        )


def weight(b, b_scale, b_global_scale, bias, w: operand_checks.Weight) -> WeightArgs:
    return WeightArgs(
        as_bytes(b),
        _scales(b_scale),
        b_global_scale.contiguous() if w.format.has_global_scale else None,
        bias.contiguous() if bias is not None else None,
        w.groups,
        w.n,
        w.k,
        w.format,
    )


def _terms(dtype: torch.dtype, device: Device) -> int:
    """Returns the number of bfloat16 terms that hold a value of this dtype exactly."""
    return {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}[dtype] if launch.uses_asm(device) else 1


def _permuted(rows: int, k: int, chunk: int, dtype: torch.dtype, place: torch.device) -> Activations:
    """Returns an empty buffer for `rows` rows of k values in plane order."""
    device = device_of(place)
    terms = _terms(dtype, device)
    kp = triton.cdiv(k, chunk) * chunk
    data = torch.empty((terms, rows, kp), dtype=launch.compute(launch.uses_asm(device))[0], device=place)
    return Activations(data, rows, kp, chunk, terms)


def _permute_programs(a: Activations) -> int:
    return triton.cdiv(a.rows, BLOCK_R) * (a.kp // a.chunk)


class Route(NamedTuple):
    """Map from tiles to rows. `tiles` is an upper bound for each group; only the device knows the number."""

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
    """Prepares groups along K. `ends` must rise and stay within K."""
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
    """Prepares rows by expert ids. `ids` has one expert for each row of the output. `tail`: rows of no expert
    are written as zeros.
    """
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


# For each function: the mode of the routes that it makes, and whether they sort rows.
MODES = {
    prepare_dense: ("dense", False),
    prepare_masked: ("masked", False),
    prepare_columns: ("k", False),
    prepare_grouped: ("mapped", False),
    prepare_indexed: ("mapped", True),
}


def spec_of(
    prepare, w: WeightArgs, terms: int, out: torch.dtype, device: Device, *,
    a_div: int = 1, a_factor: bool = False, gate: str | None = None, h: Hidden | None = None,
) -> Spec:  # fmt: skip
    """Returns the `Spec` of a product's kernel. h is the output of a gated product."""
    mode, has_rows = MODES[prepare]
    return Spec(
        mode, has_rows, a_div, _kind(w.fmt), w.fmt.block, w.n, w.k, terms, w.scale.dtype,
        w.global_scale is not None, None if w.bias is None else w.bias.dtype, a_factor, out,
        gate, h.kp if h else 0, h.chunk if h else 8, h.terms if h else 1,
        # Whole words can be loaded as int32 only if each row starts at a word.
        bytes=w.k % 8 != 0 or w.codes.data_ptr() % 4 != 0, asm=launch.uses_asm(device),
    )  # fmt: skip


def product(
    a: Activations, w: WeightArgs, route: Route, out: torch.Tensor, out_rows: int, tile: Tile, spec: Spec,
    a_factor: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Launches the kernel into `out`. Row r of the output reads row r // a_div of a."""
    assert tile.block_k == a.chunk, "the activations were permuted for another tile"
    # Columns of h up to its padded width are also written, as zeros, because the next product reads them.
    columns = known_activation(spec.gate).parts * spec.out_kp if spec.gate is not None else w.n
    n_blocks = triton.cdiv(columns, tile.block_n)
    launch.launch(
        spec, tile, device_of(a.data.device), (route.tiles * route.groups * n_blocks, 1),
        a.data, w.codes, w.scale, w.global_scale, w.bias, a_factor, out,
        route.map, route.sorted_rows, a.rows, out_rows, w.n, n_blocks, route.m, route.tiles, 1.0,
    )  # fmt: skip


def _run(
    prepare, x, rows: int, w: WeightArgs, out: torch.Tensor, out_rows: int, a_factor, *args, **kwargs
) -> None:
    """Chooses a tile, prepares, and multiplies into `out`. Tries the next tile if a launch fails."""
    device = device_of(x.device)
    terms = _terms(x.dtype, device)
    spec = spec_of(prepare, w, terms, out.dtype, device, a_factor=a_factor is not None)
    while True:
        (tile,) = launch.choose(rows, w.groups, [lambda: spec], device)
        a = _permuted(rows, w.k, tile.block_k, x.dtype, x.device)
        try:
            return product(a, w, prepare(x, a, *args, tile, **kwargs), out, out_rows, tile, spec, a_factor)
        except TryNext:
            continue


def run_product(
    prepare, x: torch.Tensor, rows: int, w: WeightArgs, out_dtype: torch.dtype, *args,
    a_factor: torch.Tensor | None = None, **kwargs,
):  # fmt: skip
    """Prepares and multiplies. Returns out [rows, w.n], with every row written. `a_factor`: float32, one for
    each row of x.
    """
    out = torch.empty((rows, w.n), dtype=out_dtype, device=x.device)
    if out.numel():
        _run(prepare, x, rows, w, out, rows, a_factor, *args, **kwargs)
    return out


def grouped_mm_k(x, w: WeightArgs, offs: torch.Tensor, out_dtype: torch.dtype, a_factor: torch.Tensor | None):
    """Returns [G, M, N]: out[g] = x[:, offs[g-1]:offs[g]] @ w[:, offs[g-1]:offs[g]].T."""
    m, groups = x.shape[0], offs.shape[0]
    out = torch.zeros((groups, m, w.n), dtype=out_dtype, device=x.device)
    if out.numel() and w.k:
        ends = offs.clamp(0, w.k).cummax(0).values
        _run(prepare_columns, x, m, w._replace(groups=1), out, m, a_factor, ends)
    return out


def moe(x, topk_ids, topk_weights, up: WeightArgs, down: WeightArgs, activation: str, out_dtype: torch.dtype):
    """Computes `fp4::moe` in four launches: route and permute, gate/up with its activation, down, combine."""
    tokens, top_k = topk_ids.shape
    out = torch.empty((tokens, down.n), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    if top_k == 0 or up.groups == 0 or down.k == 0:
        return out.zero_()
    topk_ids = topk_ids.contiguous()
    while True:
        try:
            y = _experts(x, topk_ids, up, down._replace(bias=None), activation, out_dtype)
        except TryNext:
            continue
        combine(y, topk_ids, topk_weights, down, out)
        return out


def _experts(
    x, topk_ids, up: WeightArgs, down: WeightArgs, activation: str, out_dtype: torch.dtype
) -> torch.Tensor:
    """Returns each expert's output for each of its tokens, float32 [tokens * top_k, H]. The bias is not
    added, and routing weights are not applied.
    """
    top_k = topk_ids.shape[1]
    rows = topk_ids.numel()
    device = device_of(x.device)
    terms = _terms(x.dtype, device)
    # The hidden state has as many terms as the output's dtype needs.
    h_terms = _terms(out_dtype, device)
    down_spec = spec_of(prepare_indexed, down, h_terms, torch.float32, device)
    dtype = launch.compute(launch.uses_asm(device))[0]

    def up_spec(down_tile: Tile) -> Spec:
        # The first product writes in the order that the second product's tile reads.
        kp = triton.cdiv(down.k, down_tile.block_k) * down_tile.block_k
        return spec_of(
            prepare_indexed, up, terms, dtype, device, a_div=top_k, gate=activation,
            h=Hidden(kp, down_tile.block_k, h_terms),
        )  # fmt: skip

    down_tile, up_tile = launch.choose(rows, up.groups, [lambda: down_spec, up_spec], device)
    a = _permuted(x.shape[0], up.k, up_tile.block_k, x.dtype, x.device)
    route = prepare_indexed(x, a, topk_ids, up.groups, up_tile, tail=False)
    h = _permuted(rows, down.k, down_tile.block_k, out_dtype, x.device)
    product(a, up, route, h.data, rows, up_tile, up_spec(down_tile))
    y = torch.empty((rows, down.n), dtype=torch.float32, device=x.device)
    product(h, down, route, y, rows, down_tile, down_spec)
    return y


def combine(y: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, down: WeightArgs, out):
    """Computes out[t] = sum over j of weights[t, j] * (y[t, j] + bias[ids[t, j]]), in float32 and in the
    order of j.
    """
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
        # A maximum is exact in any dtype, so this makes no float32 copy of x.
        dims = tuple(range(max(0, x.dim() - 2), x.dim()))
        amax = torch.maximum(x.amax(dims), -x.amin(dims)).float()
        # Divide by a tensor: torch turns a division by a number into a product, which rounds differently.
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


def quantize_rows(x: torch.Tensor, fmt: Format):
    """Quantises x [rows, K] to FP4, each row as a matrix of its own.

    Returns packed [rows, K/2]; block scales as bytes [rows, S], where S is the number of blocks of a row,
    rounded up to a multiple of 16 (the rest is zeros); and float32 [rows]: the global scale, or 1 for mxfp4.
    It is NaN for a row with a NaN or infinity.
    """
    x = x.contiguous()
    rows, k = x.shape
    blocks = fmt.num_blocks(k)
    packed = torch.empty((rows, k // 2), dtype=torch.uint8, device=x.device)
    scale = torch.empty((rows, triton.cdiv(blocks, 16) * 16), dtype=torch.uint8, device=x.device)
    factor = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        quantize.quantize_rows_kernel[(rows,)](
            x, packed, scale, factor, K=k, SCALES=scale.shape[1], BLOCK=fmt.block, KIND=_kind(fmt),
            TILE=min(1024 // fmt.block, _pow2(blocks)),
        )  # fmt: skip
    return packed, scale, factor


def dequantize(packed, block_scale, global_scale, fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    k = packed.shape[-1] * 2
    out = torch.empty((*packed.shape[:-1], k), dtype=dtype, device=packed.device)
    if out.numel():
        rows = out.numel() // k
        per_matrix = packed.shape[-2] if packed.dim() >= 2 else 1
        tile = 64
        gs = global_scale.contiguous() if fmt.has_global_scale else None
        quantize.dequantize_kernel[(triton.cdiv(rows * fmt.num_blocks(k), tile),)](
            as_bytes(packed), _scales(block_scale), gs, out, rows, per_matrix, K=k, BLOCK=fmt.block,
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


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_groups(src: torch.Tensor, ends: torch.Tensor, m: int, max_m: int, *, to_masked: bool):
    """Copies [m, W] to [G, max_m, W] if to_masked, else back. Returns the rows, and the clamped counts or
    offsets.
    """
    src, ends = src.contiguous(), ends.contiguous()
    groups, width = ends.shape[0], src.shape[-1]
    shape = (groups, max_m, width) if to_masked else (m, width)
    out = torch.empty(shape, dtype=src.dtype, device=src.device)
    # Rows are copied as bits: GPUs before sm_89 have no float8, and the kernel need not know the dtype.
    bits = _BITS[src.dtype.itemsize]
    clamped = torch.empty_like(ends)
    # Program 0 also writes `clamped`, so it runs even if there is no row to write.
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
        src.view(bits), out.view(bits), ends, clamped, m, max_m, width,
        G=groups, GP=_pow2(groups), TO_MASKED=to_masked, BLOCK=min(1024, _pow2(width)),
    )  # fmt: skip
    return out, clamped
