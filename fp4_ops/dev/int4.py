"""Launches csrc/sm90/prefill_int4.cu: int4 weights with group scales, one kernel for every number of rows."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..backends.launchers.int4 import LAYOUT
from ..meta.formats import Activation
from ..meta.layouts import Layout
from .prefill import CHOOSE, launch
from .product import Routing


class Int4Weight(NamedTuple):
    """A weight in layout sm90_int4, [groups, n, kp]. Its values are code * scale * factor, with one scale
    for `group` k."""

    codes: Tensor
    scales: Tensor
    factor: Tensor
    group: int
    bias: Tensor | None
    groups: int
    n: int
    kp: int

    @property
    def layout(self) -> Layout:
        return LAYOUT

    @property
    def bf16(self) -> bool:
        """False: no kernel multiplies these weights by 16-bit rows (see product.NativeWeight)."""
        return False


def run(
    x: Tensor, x_scale: Tensor, w: Int4Weight, route: Tensor | None, routing: Routing, rows: int, out: Tensor,
    *, gate: Activation | None = None, early: bool = False, config: int = CHOOSE,
) -> None:  # fmt: skip
    """Launches the int4 kernel, as prefill.run. x is e4m3 [M, kp]; weights are rounded to e4m3."""
    kernel = {128: "int4", 64: "int4_g64", 32: "int4_g32"}[w.group]
    launch(kernel, x, x_scale, w, w.factor, route, routing, rows, out, gate, early, config)
