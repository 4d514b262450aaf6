"""Launches csrc/device/gemv.cu: products of few rows, bound by latency, and what combines them."""

from __future__ import annotations

import ctypes
from typing import ClassVar

from torch import Tensor

from ... import native
from ...meta.formats import Activation
from .library import DTYPE_CODES, address, call, multiprocessors, stream
from .product import ProductParams, Routing, Weight, describe


class _Params(ProductParams):
    """GemvParams of csrc/device/interface.h; what the launcher fills in comes last."""

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
    combined = topk_weights is not None
    config = native.gemv_config(routing, rows, columns, w.n, w.kp, combined, blocks)
    assert config is not None, "the caller asks `native.gemv_config` first"
    params = _Params(columns=columns, slices=config.slices, tiles=config.tiles)
    describe(params, x, w, route, routing, rows, out, x_scale, a_div, gate, early)
    if topk_weights is not None:
        params.topk_weights, params.weight_type = address(topk_weights), DTYPE_CODES[topk_weights.dtype]
        params.tokens, params.top_k = topk_weights.shape
    call("fp4_kernel_gemv", ctypes.byref(params), blocks, stream())
