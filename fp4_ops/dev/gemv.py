"""Launches csrc/device/gemv.cu: products of few rows, limited by latency, and their weighted sum."""

from __future__ import annotations

from torch import Tensor

from ..backends.launchers.library import address, call, multiprocessors, stream
from ..meta.formats import Activation
from . import planner
from ._native import GemvParams
from .product import DTYPES, NativeWeight, Routing, describe


def run(
    x: Tensor,
    w: NativeWeight,
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
    """Launches gemv. The arguments are as in decode.run. With `topk_weights` [tokens, k], out [tokens, n]
    sums k weighted rows."""
    blocks, columns = multiprocessors(x.device.index), -(-rows // a_div)
    combined = topk_weights is not None
    config = planner.gemv_config(routing, rows, columns, w.n, w.kp, combined, blocks)
    assert config is not None, "the caller asks `planner.gemv_config` first"
    params = GemvParams(columns=columns, slices=config.slices, tiles=config.tiles)
    describe(params, x, w, route, routing, rows, out, x_scale, a_div, gate, early)
    if topk_weights is not None:
        params.topk_weights, params.weight_type = address(topk_weights), DTYPES[topk_weights.dtype]
        params.tokens, params.top_k = topk_weights.shape
    call("fp4_kernel_gemv", params.address, blocks, stream())
