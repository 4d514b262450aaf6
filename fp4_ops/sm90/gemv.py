"""Launches csrc/sm90/gemv.cu: products of few rows, bound by latency, and what combines them."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..meta.formats import Activation
from .decode import CHUNK, SHARED_BYTES, SLICE_K
from .library import DTYPE_CODES, address, call, multiprocessors, stream
from .product import ProductParams, Routing, Weight, describe

MAX_ROWS, MAX_SLICES = 8, 64
MAX_UNITS = 12 * 32
"""Of 16 rows of a weight by SLICE_K, for a thread block."""
TILE_ROWS = 16
FIXED_BYTES = 3 * 1024
"""Of shared memory, with room."""


@dataclass(frozen=True)
class Config:
    """Each thread block has at most `tiles` row tiles, of `slices` units each."""

    columns: int
    slices: int
    tiles: int

    @property
    def units(self) -> int:
        return self.tiles * self.slices

    @property
    def shared_bytes(self) -> int:
        """As GemvBuffers in csrc/sm90/gemv.cuh adds them up."""
        return FIXED_BYTES + 2 * self.slices * SLICE_K * self.columns + self.units * TILE_ROWS * 4

    def __str__(self) -> str:
        return f"gemv: {self.units} units of 16 x {SLICE_K} a block"


@functools.cache
def configure(
    routing: Routing, rows: int, columns: int, n: int, kp: int, combined: bool, blocks: int
) -> Config | None:
    """For `rows` rows, which are `columns` rows of x; None where the kernel cannot run them, or where they
    share weights, which it would read for each."""
    slices, tiles_n = -(-kp // SLICE_K), n // TILE_ROWS
    if routing == Routing.MASKED or (routing == Routing.DENSE and rows > 1):
        return None
    tiles = -(-tiles_n // blocks) * rows if combined else -(-tiles_n * rows // blocks)
    config = Config(columns, slices, tiles)
    fits = rows <= MAX_ROWS and columns <= CHUNK and slices <= MAX_SLICES and config.units <= MAX_UNITS
    return config if fits and config.shared_bytes <= SHARED_BYTES else None


class _Params(ProductParams):
    """GemvParams of csrc/sm90/gemv.cuh; what the launcher fills in comes last."""

    _fields_: ClassVar = [
        ("topk_weights", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("weight_type", "top_k", "tokens")),
        *((name, ctypes.c_int) for name in ("columns", "slices", "tiles")),
        ("inverses", ctypes.c_float * 2),
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
    a_div: int = 1,
    gate: Activation | None = None,
    early: bool = False,
    topk_weights: Tensor | None = None,
) -> None:
    """As decode.run; with `topk_weights` [tokens, k] out [tokens, n] = sum of k rows each, times them."""
    blocks, columns = multiprocessors(x.device.index), -(-rows // a_div)
    config = configure(routing, rows, columns, w.n, w.kp, topk_weights is not None, blocks)
    assert config is not None, "the caller asks `configure` first"
    params = _Params(columns=columns, slices=config.slices, tiles=config.tiles)
    describe(params, x, w, route, routing, rows, out, x_scale, a_div, gate, early)
    if topk_weights is not None:
        params.topk_weights, params.weight_type = address(topk_weights), DTYPE_CODES[topk_weights.dtype]
        params.tokens, params.top_k = topk_weights.shape
    call("fp4_sm90_gemv", ctypes.byref(params), blocks, stream())
