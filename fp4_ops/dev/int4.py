"""Launches csrc/sm90/prefill_int4.cu: int4 weights with group scales, one kernel for every number of rows."""

from __future__ import annotations

from torch import Tensor

from ..meta.formats import Activation
from .prefill import CHOOSE, launch
from .product import Int4Weight, Routing


def run(
    x: Tensor, x_scale: Tensor, w: Int4Weight, route: Tensor | None, routing: Routing, rows: int, out: Tensor,
    *, gate: Activation | None = None, early: bool = False, config: int = CHOOSE,
) -> None:  # fmt: skip
    """Launches the int4 kernel, as prefill.run. x is e4m3 [M, kp]; weights are rounded to e4m3."""
    kernel = {128: "int4", 64: "int4_g64", 32: "int4_g32"}[w.group]
    launch(kernel, x, x_scale, w, w.factor, route, routing, rows, out, gate, early, config)
