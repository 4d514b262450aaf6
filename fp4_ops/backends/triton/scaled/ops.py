"""Runs scaled_kernel. Rows stay packed; only a map of tiles is made before a product."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton

from ....meta.formats import Format, known_activation
from ...launchers import scaled as launcher
from .. import launch, ops
from ..activations import gated
from ..launch import TryNext
from ..ops import Route, WeightArgs
from ..tiles import Device, Tile, device_of
from . import native
from .spec import Scaled

Quantized = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""packed, block scales, global scales, as `fp4::quantize` makes them."""


class FP4Rows(NamedTuple):
    """a[r, k] = e2m1 code * block scale * factor[r]."""

    packed: torch.Tensor
    """uint8 [rows, K/2]."""
    scale: torch.Tensor
    """Bytes [rows, S], of which the first ceil(K/block) count."""
    factor: torch.Tensor | None
    """float32 [rows], or None for ones."""
    fmt: Format


def rows_of(packed, block_scale, factor, fmt: Format) -> FP4Rows:
    """Packed activations of an operator, [..., K/2]; a factor is one for all, one a group or one a row."""
    lead = packed.shape[:-1]
    if factor is not None:
        each = factor.reshape(*factor.shape, *[1] * (len(lead) - factor.dim())).expand(lead)
        factor = each.reshape(-1).contiguous()
    codes, scale = (ops.as_bytes(t).view(lead.numel(), t.shape[-1]) for t in (packed, block_scale))
    return FP4Rows(codes, scale, factor, fmt)


def _quantized(x: torch.Tensor, fmt: Format) -> FP4Rows:
    packed, scale, factor = ops.quantize_rows(x, fmt)
    return FP4Rows(packed, scale, factor, fmt)


def _spec(
    prepare, a: FP4Rows, w: WeightArgs, out: torch.dtype, a_div: int = 1, checked: bool = True
) -> Scaled:
    mode, has_rows = ops.MODES[prepare]
    return Scaled(
        mode, has_rows, a_div, w.fmt.name, w.n, w.k, a.scale.shape[1],
        None if w.bias is None else w.bias.dtype, a.factor is not None, out, checked,
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


def _launch(a: FP4Rows, w: WeightArgs, route: Route, out: torch.Tensor, tile: Tile, spec: Scaled) -> None:
    n_blocks = triton.cdiv(w.n, tile.block_n)
    launch.launch(
        spec, tile, device_of(a.packed.device), (route.tiles * route.groups * n_blocks,),
        a.packed, a.scale, a.factor, w.codes, w.scale, w.global_scale, w.bias, out, route.map,
        route.sorted_rows, w.n, n_blocks, route.m, route.tiles,
    )  # fmt: skip


def _run(prepare, a: FP4Rows, m: int, w: WeightArgs, out: torch.Tensor, *args, **kwargs) -> None:
    device = device_of(a.packed.device)
    spec = _spec(prepare, a, w, out.dtype)
    while True:
        (tile,) = launch.choose(m, w.groups, [lambda: spec], device)
        route = _route(prepare, a.packed, m, tile, *args, **kwargs)
        try:
            return _launch(a, w, route, out, tile, spec)
        except TryNext:
            continue


def product(
    prepare, a: FP4Rows, m: int, w: WeightArgs, out_dtype: torch.dtype, *args, **kwargs
) -> torch.Tensor:
    """Returns out [m, w.n], as ops.run_product. Raises NoTile if no kernel can run here."""
    out = torch.empty((m, w.n), dtype=out_dtype, device=a.packed.device)
    if out.numel() and native.takes(w, w.fmt.name):
        rows, route = _native_route(prepare, m, *args)
        native.multiply(a, w, out, rows, route)
    elif out.numel():
        _run(prepare, a, m, w, out, *args, **kwargs)
    return out


def _native_route(prepare, m: int, *args) -> tuple[int, launcher.Route]:
    """Returns the rows (of a group, if masked) and the route of what `prepare` is for."""
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


def grouped_mm_k(a: FP4Rows, w: WeightArgs, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """As ops.grouped_mm_k, whose groups begin and end with blocks of scales of both operands."""
    m, groups = a.packed.shape[0], offs.shape[0]
    out = torch.zeros((groups, m, w.n), dtype=out_dtype, device=a.packed.device)
    if out.numel() and w.k:
        ends = offs.clamp(0, w.k).cummax(0).values
        _run(ops.prepare_columns, a, m, w._replace(groups=1), out, ends)
    return out


def moe(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, up: WeightArgs, down: WeightArgs,
    activation: str, out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """fp4::moe with a_format that of the weights: quantise, route, gate/up, gate, quantise, down, combine.

    What lies between the products is float32, as in activations.moe_quantized.
    """
    out = torch.zeros((topk_ids.shape[0], down.n), dtype=out_dtype, device=x.device)
    if out.numel() == 0 or topk_ids.shape[1] == 0 or up.groups == 0 or down.k == 0:
        return out
    topk_ids = topk_ids.contiguous()
    while True:
        try:
            y = _experts(x, topk_ids, up, down._replace(bias=None), activation)
        except TryNext:
            continue
        ops.combine(y, topk_ids, topk_weights, down, out)
        return out


def _experts(x, topk_ids, up: WeightArgs, down: WeightArgs, activation: str) -> torch.Tensor:
    """Returns each expert's output for each of its tokens, float32 [tokens * top_k, H], without bias and
    weight.
    """
    if native.takes(up, up.fmt.name) and native.takes(down, down.fmt.name):
        return _native_experts(x, topk_ids, up, down, activation)
    rows, device = topk_ids.numel(), device_of(x.device)
    a = _quantized(x, up.fmt)
    up_spec = _spec(ops.prepare_indexed, a, up, torch.float32, topk_ids.shape[1])
    # The rows in between are quantised as x, and padded as their own K asks for.
    scales = triton.cdiv(down.fmt.num_blocks(down.k), 16) * 16
    down_spec = up_spec._replace(n=down.n, k=down.k, a_scales=scales, a_div=1, bias=None)
    up_tile, down_tile = launch.choose(rows, up.groups, [lambda: up_spec, lambda _: down_spec], device)
    ids = topk_ids.view(-1)
    route = _route(ops.prepare_indexed, x, rows, up_tile, ids, up.groups, tail=True)
    y = torch.empty((rows, up.n), dtype=torch.float32, device=x.device)
    _launch(a, up, route, y, up_tile, up_spec)
    h = _quantized(gated(y, down.k, known_activation(activation)), down.fmt)
    y = torch.empty((rows, down.n), dtype=torch.float32, device=x.device)
    _launch(h, down, route, y, down_tile, down_spec)
    return y


def _native_experts(x, topk_ids, up: WeightArgs, down: WeightArgs, activation: str) -> torch.Tensor:
    """Does the same by the CUDA kernels."""
    rows, top_k = topk_ids.numel(), topk_ids.shape[1]
    route = native.by_ids(topk_ids.view(-1), up.groups)
    y = torch.empty((rows, up.n), dtype=torch.float32, device=x.device)
    native.multiply(_quantized(x, up.fmt), up, y, rows, route, top_k)
    h = _quantized(gated(y, down.k, known_activation(activation)), down.fmt)
    y = torch.empty((rows, down.n), dtype=torch.float32, device=x.device)
    native.multiply(h, down, y, rows, route)
    return y


def product_with(
    a: torch.Tensor, b: torch.Tensor, ids: torch.Tensor, fmt: Format, tile: Tile, device: Device
) -> tuple[Callable[[], torch.Tensor], Quantized, Quantized]:
    """a [rows, K] and b [G, N, K], quantised, multiplied with this very tile, which is not asked about.

    Returns what makes the product, and both operands as packed, scale and global scale; of `a` as matrices of
    one row.
    """
    rows, groups = a.shape[0], b.shape[0]
    packed, scale, factor = ops.quantize_matrix(a[:, None], fmt, None)
    w_packed, w_scale, w_factor = ops.quantize_matrix(b, fmt, None)
    given = factor if fmt.has_global_scale else None
    weight = WeightArgs(
        w_packed, ops.as_bytes(w_scale), w_factor if fmt.has_global_scale else None, None, groups, b.shape[1],
        b.shape[2], fmt,
    )  # fmt: skip
    x = FP4Rows(packed[:, 0], ops.as_bytes(scale)[:, 0], given, fmt)
    spec = _spec(ops.prepare_indexed, x, weight, torch.float32, checked=False)
    if not launch.fits(spec, tile, device):
        raise TryNext
    route = _route(ops.prepare_indexed, packed, rows, tile, ids, groups, tail=True)

    def run() -> torch.Tensor:
        out = torch.empty((rows, weight.n), dtype=torch.float32, device=a.device)
        _launch(x, weight, route, out, tile, spec)
        return out

    return run, (packed, scale, factor), (w_packed, w_scale, w_factor)
