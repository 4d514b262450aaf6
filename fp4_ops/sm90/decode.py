"""Launches csrc/sm90/decode.cu: grouped products with a few rows an expert, bound by the weights' bytes."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from ..meta.formats import Activation
from .library import address, call, multiprocessors, stream
from .product import ProductParams, Routing, Weight, describe

SLICE_K = 256
"""K that one warp owns in a pass."""
MAX_SEGMENTS = 32
MAX_GROUPS = 640
MAX_IDS = 2048
"""Rows up to which the kernel sorts expert ids itself."""
SHARED_BYTES = 227 * 1024
CHUNK = 8
"""Rows of an expert that share one reading of its weights."""
FEW_WARPS, MANY_WARPS = 16, 24
"""The most warps that compute. With more warps more weights are on their way, but a block begins later."""
SCHEDULERS = 4
"""Of a multiprocessor: 12 warps are faster than 15 where they have few row tiles."""
MAX_PASSES = 8
MANY_ROW_TILES = 24
"""Of a block, from which the longer start of more warps pays."""


@dataclass(frozen=True)
class Config:
    """`k_warps` share K in `passes`, `row_warps` tiles of N a step."""

    k_warps: int
    row_warps: int
    passes: int

    def __str__(self) -> str:
        return (
            f"decode: {self.k_warps} x {self.row_warps} warps (K x rows), "
            f"{self.passes} pass{'es' * (self.passes > 1)}"
        )

    @property
    def shared_bytes(self) -> int:
        """As DecodeBuffers in csrc/sm90/decode_plan.cuh adds them up, with room for the fixed part."""
        vectors = 2 * self.k_warps * 256 + 4 * self.k_warps * self.row_warps * 32
        vectors += 32 * 32 if self.passes > 1 else 0
        return 16 * vectors + MAX_SEGMENTS * CHUNK * 4 + 14 * 1024

    def value(self, kp: int) -> float:
        """How busy the warps are, if nothing else counted; each pass but the first costs a quarter."""
        warps = self.k_warps * self.row_warps
        most = FEW_WARPS if warps <= FEW_WARPS else MANY_WARPS
        return -(-kp // SLICE_K) / (self.passes * self.k_warps) * warps / most - (self.passes - 1) / 4

    def balanced(self) -> Config:
        """Without the last of several row warps where that gives all schedulers the same number of warps."""
        uneven = self.k_warps * self.row_warps % SCHEDULERS
        return replace(self, row_warps=self.row_warps - 1) if 0 < uneven == self.k_warps else self


@functools.cache
def warps_for(kp: int, compute_warps: int) -> Config | None:
    """The split of so many warps that keeps most of them busy."""
    slices = -(-kp // SLICE_K)
    splits = (
        Config(k_warps, compute_warps // k_warps, passes)
        for passes in range(1, MAX_PASSES + 1)
        if (k_warps := -(-slices // passes)) <= compute_warps
    )
    fit = [config for config in splits if config.shared_bytes <= SHARED_BYTES]
    return max(fit, key=lambda config: config.value(kp), default=None)


def rows_per_expert(rows: int, groups: int) -> float:
    """Expected rows of an expert that has any, under uniform routing."""
    if rows == 0 or groups == 0:
        return 0.0
    return rows / (groups * (1 - (1 - 1 / groups) ** rows))


def choose(rows: int, groups: int, n: int, kp: int, blocks: int) -> Config | None:
    """The configuration for `rows` activation rows, or None where the kernel cannot run them.

    More warps pay where they save a pass, or share K much better (K = 2880 keeps 12 of 16 busy, and 24 of 24)
    and have enough to do.
    """
    few, many = warps_for(kp, FEW_WARPS), warps_for(kp, MANY_WARPS)
    chunks = min(rows, groups) + rows // CHUNK
    if groups > MAX_GROUPS or few is None or chunks // blocks + 2 > MAX_SEGMENTS:
        return None
    row_tiles = rows / max(rows_per_expert(rows, groups), 1.0) * n / 16 / blocks
    many_tiles = row_tiles >= MANY_ROW_TILES
    shares_better = many is not None and many.value(kp) - few.value(kp) > 0.2
    if many is not None and shares_better and (many.passes < few.passes or many_tiles):
        return many
    return few if many_tiles else few.balanced()


class _Params(ProductParams):
    """DecodeParams of csrc/sm90/decode_plan.cuh; what the launcher fills in comes last."""

    _fields_: ClassVar = [
        ("sorted_rows", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("max_m", "k_warps", "row_warps", "passes")),
        ("inverses", ctypes.c_float * 2),
        ("chunks", ctypes.c_uint32 * 4),
    ]


def run(
    x: Tensor,
    w: Weight,
    route: Tensor | None,
    routing: Routing,
    rows: int,
    out: Tensor,
    *,
    x_scale: Tensor | None = None,
    sorted_rows: Tensor | None = None,
    a_div: int = 1,
    max_m: int = 0,
    gate: Activation | None = None,
    early: bool = False,
    config: Config | None = None,
) -> None:
    """out [rows, n] (or [rows, n / 2] with `gate`, whose weight has gate and up rows interleaved).

    Row r reads row r // a_div of x, rows of no expert become zeros. `early`: the routing was known before the
    kernel launched before this one began, so the weights may be requested before that one ends.
    """
    blocks = multiprocessors(x.device.index)
    config = config or choose(rows, w.groups, w.n, w.kp, blocks)
    if config is None:
        raise RuntimeError(
            f"fp4: {rows} rows of {str(x.dtype).removeprefix('torch.')} over {w.groups} experts, K = {w.kp}, "
            "are more than the Hopper decode kernel takes. Use bfloat16 rows, or weights in layout 'plain'"
        )
    params = _Params(
        sorted_rows=address(sorted_rows),
        max_m=max_m,
        k_warps=config.k_warps,
        row_warps=config.row_warps,
        passes=config.passes,
    )
    describe(params, x, w, route, routing, rows, out, x_scale, a_div, gate, early)
    call("fp4_sm90_decode", ctypes.byref(params), blocks, stream())
