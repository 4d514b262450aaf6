"""Runs scaled_kernel. Rows stay packed; only a map of tiles is made before a product."""

from __future__ import annotations

import math

import torch
import triton

from ....meta.formats import FORMATS, Format, known_activation
from ....runtime.oracle import dequantize, relative_error
from ...launchers import scaled as launcher
from ...launchers.scaled import Rows
from .. import launch, ops
from ..activations import gated
from ..launch import TryNext
from ..ops import Route, WeightArgs
from ..tiles import Device, Tile, device_of
from . import native
from .spec import Scaled


def rows_of(packed, block_scale, factor) -> Rows:
    """Returns the packed activations [..., K/2] of an operator as rows. `factor` has one number for all rows,
    one for each group, or one for each row."""
    lead = packed.shape[:-1]
    if factor is not None:
        each = factor.reshape(*factor.shape, *[1] * (len(lead) - factor.dim())).expand(lead)
        factor = each.reshape(-1).contiguous()
    codes, scale = (ops.as_bytes(t).view(lead.numel(), t.shape[-1]) for t in (packed, block_scale))
    return Rows(codes, scale, factor)


def fp8_rows(codes, factor) -> Rows:
    """Returns the e4m3 activations [..., K] of an operator, with a factor each, as rows."""
    return Rows(codes.reshape(-1, codes.shape[-1]).contiguous(), None, factor.reshape(-1).contiguous())


def quantized(x: torch.Tensor, a_format: str) -> Rows:
    """Returns x [rows, K] as rows of a format that the kernels multiply."""
    if a_format == "fp8":
        return fp8_rows(*ops.quantize_fp8(x))
    return Rows(*ops.quantize_rows(x, FORMATS[a_format]))


def _spec(prepare, a: Rows, w: WeightArgs, out: torch.dtype, a_div: int = 1, check: bool = True) -> Scaled:
    mode, has_rows = ops.MODES[prepare]
    assert a.scale is not None
    return Scaled(
        mode, has_rows, a_div, w.fmt.name, w.n, w.k, a.scale.shape[1],
        None if w.bias is None else w.bias.dtype, a.factor is not None, out, first_error if check else None,
    )  # fmt: skip


def _route(prepare, rows: torch.Tensor, m: int, tile: Tile, *args, **kwargs) -> Route:
    """Returns the route that `prepare` makes, without permuting rows.

    Only shape and device of `rows` matter.
    """
    if prepare is ops.prepare_dense:
        return Route("dense", None, None, triton.cdiv(m, tile.block_m), m)
    if prepare is ops.prepare_columns:
        (ends,) = args
        return Route("k", ends, None, triton.cdiv(m, tile.block_m), m, ends.shape[0])
    if prepare is ops.prepare_masked:
        (counts,) = args
        max_m = m // counts.shape[0]
        return Route(
            "masked", counts.contiguous(), None, triton.cdiv(max_m, tile.block_m), max_m, counts.shape[0]
        )
    nothing = torch.empty((m, 0), dtype=torch.bfloat16, device=rows.device)
    none = ops.Activations(nothing, rows=0, kp=8, chunk=8, terms=1)
    return prepare(nothing, none, *args, tile, **kwargs)


def _launch(a: Rows, w: WeightArgs, route: Route, out: torch.Tensor, tile: Tile, spec: Scaled) -> None:
    n_blocks = triton.cdiv(w.n, tile.block_n)
    launch.launch(
        spec, tile, device_of(a.packed.device), (route.tiles * route.groups * n_blocks,),
        a.packed, a.scale, a.factor, w.codes, w.scale, w.global_scale, w.bias, out, route.map,
        route.sorted_rows, w.n, n_blocks, route.m, route.tiles,
    )  # fmt: skip


def run_triton(prepare, a: Rows, m: int, w: WeightArgs, out: torch.Tensor, *args, **kwargs) -> None:
    """Computes `out` by Triton's kernels. Raises NoTile if none can run here."""
    device = device_of(a.packed.device)
    spec = _spec(prepare, a, w, out.dtype)
    while True:
        (tile,) = launch.choose(m, w.groups, [lambda: spec], device)
        route = _route(prepare, a.packed, m, tile, *args, **kwargs)
        try:
            return _launch(a, w, route, out, tile, spec)
        except TryNext:
            continue


def product(prepare, a: Rows, m: int, w: WeightArgs, out_dtype: torch.dtype, *args, **kwargs) -> torch.Tensor:
    """Returns out [m, w.n], as ops.run_product. Raises NoTile if no kernel can run here. fp8 rows are for the
    CUDA kernels only."""
    out = torch.empty((m, w.n), dtype=out_dtype, device=a.packed.device)
    if out.numel() and (a.scale is None or native.takes(w, w.fmt.name, m)):
        rows, route = native_route(prepare, m, *args)
        native.multiply(a, w, out, rows, route)
    elif out.numel():
        run_triton(prepare, a, m, w, out, *args, **kwargs)
    return out


def native_route(prepare, m: int, *args) -> tuple[int, launcher.Route]:
    """Returns the number of rows (of each group, if masked) and the route that `prepare` stands for."""
    if prepare is ops.prepare_dense:
        return m, launcher.Route(launcher.DENSE)
    if prepare is ops.prepare_masked:
        (counts,) = args
        most = m // counts.shape[0]
        return most, launcher.Route(launcher.MASKED, counts.clamp(0, most).int())
    if prepare is ops.prepare_grouped:
        (offs,) = args
        return m, launcher.Route(launcher.CONTIGUOUS, offs.clamp(0, m).int())
    ids, groups = args
    return m, native.by_ids(ids, groups)


def grouped_mm_k(a: Rows, w: WeightArgs, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Does the same as ops.grouped_mm_k. Groups must begin and end at blocks of scales of both operands."""
    m, groups = a.packed.shape[0], offs.shape[0]
    w = w._replace(groups=1)
    cuda = native.takes_along_k(w, w.fmt.name)
    make = torch.empty if cuda else torch.zeros
    out = make((groups, m, w.n), dtype=out_dtype, device=a.packed.device)
    if out.numel() == 0 or w.k == 0:
        return out
    ends = offs.clamp(0, w.k).cummax(0).values
    if cuda:
        native.multiply(a, w, out, m, launcher.Route(launcher.DENSE, k_ends=ends))
    else:
        run_triton(ops.prepare_columns, a, m, w, out, ends)
    return out


def moe(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, up: WeightArgs, down: WeightArgs,
    activation: str, out_dtype: torch.dtype, a_format: str,
) -> torch.Tensor:  # fmt: skip
    """Computes fp4::moe with a_format the weights' format, or with fp8 if the CUDA kernels take it: quantise,
    route, gate/up, gate, quantise, down, combine.

    Results between the products are float32, as in activations.moe_quantized.
    """
    out = torch.zeros((topk_ids.shape[0], down.n), dtype=out_dtype, device=x.device)
    if out.numel() == 0 or topk_ids.shape[1] == 0 or up.groups == 0 or down.k == 0:
        return out
    topk_ids = topk_ids.contiguous()
    while True:
        try:
            y = _experts(x, topk_ids, up, down._replace(bias=None), activation, a_format)
        except TryNext:
            continue
        ops.combine(y, topk_ids, topk_weights, down, out)
        return out


def _experts(x, topk_ids, up: WeightArgs, down: WeightArgs, activation: str, a_format: str) -> torch.Tensor:
    """Returns each expert's output for each of its tokens, float32 [tokens * top_k, H], without bias and
    routing weight.
    """
    rows, device = topk_ids.numel(), device_of(x.device)
    if a_format == "fp8" or all(native.takes(w, a_format, rows) for w in (up, down)):
        return _native_experts(x, topk_ids, up, down, activation, a_format)
    a = quantized(x, a_format)
    up_spec = _spec(ops.prepare_indexed, a, up, torch.float32, topk_ids.shape[1])
    # The hidden rows are quantised like x, and padded for their own K.
    scales = triton.cdiv(down.fmt.num_blocks(down.k), 16) * 16
    down_spec = up_spec._replace(n=down.n, k=down.k, a_scales=scales, a_div=1, bias=None)
    up_tile, down_tile = launch.choose(rows, up.groups, [lambda: up_spec, lambda _: down_spec], device)
    ids = topk_ids.view(-1)
    route = _route(ops.prepare_indexed, x, rows, up_tile, ids, up.groups, tail=True)
    y = torch.empty((rows, up.n), dtype=torch.float32, device=x.device)
    _launch(a, up, route, y, up_tile, up_spec)
    h = quantized(gated(y, down.k, known_activation(activation)), a_format)
    y = torch.empty((rows, down.n), dtype=torch.float32, device=x.device)
    _launch(h, down, route, y, down_tile, down_spec)
    return y


def _native_experts(
    x, topk_ids, up: WeightArgs, down: WeightArgs, activation: str, a_format: str
) -> torch.Tensor:
    """Does the same by the CUDA kernels."""
    rows, route = topk_ids.numel(), native.by_ids(topk_ids.view(-1), up.groups)
    a, route, a_div, order = native.in_order(quantized(x, a_format), route, topk_ids.shape[1], rows)
    y = torch.empty((rows, up.n), dtype=torch.float32, device=x.device)
    native.multiply(a, up, y, rows, route, a_div)
    h = quantized(gated(y, down.k, known_activation(activation)), a_format)
    y = torch.empty((rows, down.n), dtype=torch.float32, device=x.device)
    native.multiply(h, down, y, rows, route)
    return y if order is None else torch.empty_like(y).index_copy_(0, order, y)


# --- the check of a tile's first use ---


def first_error(
    format: str, tile: Tile, device: Device, place: torch.device, blocks: int = 20, repeats: int = 8
) -> float:
    """Returns the larger error of two products, relative to the norm; infinity if repeats differ in a bit.

    One product has a K that is a multiple of the tile's, the other a K that ends inside a tile and inside a
    block of scales. Each product runs about five tiles of tokens times `blocks` programs, because a race in
    compiled code shows only in some of many programs.
    """
    fmt, found = FORMATS[format], 0.0
    generator = torch.Generator().manual_seed(tile.block_n * tile.block_k + tile.block_m)
    groups, n, rows = 3, blocks * tile.block_n + 40, 2 * tile.block_m + 5

    def random(*shape: int) -> torch.Tensor:  # whatever the user's default device and dtype are
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).to(place)

    for k in (3 * tile.block_k, tile.block_k + 32 + fmt.block // 2):
        a = ops.quantize_matrix(random(rows, 1, k), fmt, None)  # each row as a matrix of its own
        b = ops.quantize_matrix(random(groups, n, k), fmt, None)
        ids = torch.arange(rows, device=place) * 7 % groups
        got = _with_tile(a, b, ids, k, fmt, tile, device)
        if any(not torch.equal(_with_tile(a, b, ids, k, fmt, tile, device), got) for _ in range(repeats)):
            return math.inf
        a_exact, w_exact = (dequantize(codes, scale, factor, format) for codes, scale, factor in (a, b))
        want = (a_exact[:, 0] @ w_exact.mT)[ids, torch.arange(rows, device=place)]
        found = max(found, relative_error(got, want))
    return found


def _with_tile(a, b, ids: torch.Tensor, k: int, fmt: Format, tile: Tile, device: Device) -> torch.Tensor:
    """Multiplies quantised a [rows, 1, K] and b [G, N, K] with exactly this tile, which is not checked."""
    (codes, scale, factor), (w_codes, w_scale, w_factor) = a, b
    groups, n = w_codes.shape[:2]
    if not fmt.has_global_scale:
        factor = w_factor = None
    w = WeightArgs(w_codes, ops.as_bytes(w_scale), w_factor, None, groups, n, k, fmt)
    x = Rows(codes[:, 0], ops.as_bytes(scale)[:, 0], factor)
    spec = _spec(ops.prepare_indexed, x, w, torch.float32, check=False)
    if not launch.fits(spec, tile, device):
        raise TryNext
    route = _route(ops.prepare_indexed, codes, len(ids), tile, ids, groups, tail=True)
    out = torch.empty((len(ids), n), dtype=torch.float32, device=codes.device)
    _launch(x, w, route, out, tile, spec)
    return out
