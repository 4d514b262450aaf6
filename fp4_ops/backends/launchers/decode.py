"""Launches csrc/device/decode.cu: grouped products with a few rows an expert, bound by the weights' bytes."""

from __future__ import annotations

import ctypes
from typing import ClassVar

from torch import Tensor

from ... import native
from ...meta.formats import Activation
from .library import address, call, multiprocessors, stream
from .product import ProductParams, Routing, Weight, describe

MAX_IDS = 2048
"""Rows up to which the kernel sorts expert ids itself."""
FEW_WARPS, MANY_WARPS = 16, 24
"""The most warps that compute, of its two kernels."""


class _Params(ProductParams):
    """DecodeParams of csrc/device/interface.h; what the launcher fills in comes last."""

    _fields_: ClassVar = [
        ("sorted_rows", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("max_m", "k_warps", "row_warps", "passes", "ring")),
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
    config: native.DecodeConfig | None = None,
) -> None:
    """out [rows, n] (or [rows, n / 2] with `gate`, whose weight has gate and up rows interleaved).

    Row r reads row r // a_div of x, rows of no expert become zeros. `early`: the routing was known before the
    kernel launched before this one began, so the weights may be requested before that one ends.
    """
    blocks = multiprocessors(x.device.index)
    config = config or native.decode_config(rows, w.groups, w.n, w.kp, blocks)
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
        ring=config.ring,
    )
    describe(params, x, w, route, routing, rows, out, x_scale, a_div, gate, early)
    call("fp4_kernel_decode", ctypes.byref(params), blocks, stream())
