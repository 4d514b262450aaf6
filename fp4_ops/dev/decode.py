"""Launches csrc/device/decode.cu: grouped products with a few rows for each expert, limited by reading
weights."""

from __future__ import annotations

from torch import Tensor

from ..backends.launchers.library import address, call, multiprocessors, stream
from ..meta.formats import Activation
from . import planner
from ._native import DecodeParams
from .product import NativeWeight, Routing, describe


def run(
    x: Tensor,
    w: NativeWeight,
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
    config: planner.DecodeConfig | None = None,
) -> None:
    """Launches decode into out [rows, n], or [rows, n / 2] with `gate` (gate and up rows interleaved).

    Row r reads row r // a_div of x. Rows without an expert become zeros. `early`: the routing was known
    before the previous kernel began, so this one may request weights before that kernel ends.
    """
    blocks = multiprocessors(x.device.index)
    config = config or planner.decode_config(rows, w.groups, w.n, w.kp, blocks)
    if config is None:
        raise RuntimeError(
            f"fp4: {rows} rows of {str(x.dtype).removeprefix('torch.')} over {w.groups} experts, K = {w.kp}, "
            "are more than the decode kernel takes. Use bfloat16 rows, or weights in layout 'plain'"
        )
    params = DecodeParams(
        sorted_rows=address(sorted_rows),
        max_m=max_m,
        k_warps=config.k_warps,
        row_warps=config.row_warps,
        passes=config.passes,
        ring=config.ring,
    )
    describe(params, x, w, route, routing, rows, out, x_scale, a_div, gate, early)
    call("fp4_kernel_decode", params.address, blocks, stream())
