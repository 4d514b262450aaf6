"""What every decode launch is given: a weight, the rows that meet it, and which expert each has."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from ...meta.formats import Activation
from ...meta.layouts import LAYOUTS, Layout
from .library import DTYPE_CODES, Gate, address, gate_fields


class Routing(IntEnum):
    OFFS = 0
    IDS32 = 1
    IDS64 = 2
    MASKED = 3
    DENSE = 4


class Weight(NamedTuple):
    """A weight in layout sm90 or mma_bf16: [groups, n, kp]."""

    codes: Tensor
    scales: Tensor
    global_scale: Tensor
    bias: Tensor | None
    groups: int
    n: int
    kp: int
    layout: Layout = LAYOUTS["sm90"]
    block: int = 16
    """K that share a scale."""

    @property
    def bf16(self) -> bool:
        return self.layout.name == "mma_bf16"


class Int4Weight(NamedTuple):
    """A weight in layout sm90_int4: [groups, n, kp], value = code * scale of its `group` of k * factor."""

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
        return LAYOUTS["sm90_int4"]

    @property
    def bf16(self) -> bool:
        """As of Weight: no kernel reads 16-bit rows beside it."""
        return False


class ProductParams(ctypes.Structure):
    """Of csrc/device/interface.h; what the launcher fills in comes last."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "x_scale", "codes", "scales", "global_scale")),
        *((name, ctypes.c_void_p) for name in ("bias", "out", "route")),
        *((name, ctypes.c_int) for name in ("rows", "groups", "n", "k", "kp", "a_div", "routing")),
        *((name, ctypes.c_int) for name in ("x_type", "out_type", "bias_type")),
        ("gate", Gate),
        ("scale_block", ctypes.c_int),
        ("early", ctypes.c_bool),
        ("bf16_words", ctypes.c_bool),
        ("divisors", ctypes.c_uint32 * 4),
    ]


def describe(
    params: ProductParams,
    x: Tensor,
    w: Weight,
    route: Tensor | None,
    routing: Routing,
    rows: int,
    out: Tensor,
    x_scale: Tensor | None,
    a_div: int,
    gate: Activation | None,
    early: bool,
) -> None:
    """Fills in the fields of every launch."""
    params.x, params.x_scale = address(x), address(x_scale)
    params.codes, params.scales = address(w.codes), address(w.scales)
    params.global_scale, params.bias = address(w.global_scale), address(w.bias)
    params.out, params.route = address(out), address(route)
    params.rows, params.groups, params.n, params.k, params.kp = rows, w.groups, w.n, x.shape[-1], w.kp
    params.a_div, params.routing = a_div, routing
    params.x_type = 3 if x.dtype == torch.float8_e4m3fn else DTYPE_CODES[x.dtype]
    params.out_type = DTYPE_CODES[out.dtype]
    params.bias_type = DTYPE_CODES[w.bias.dtype] if w.bias is not None else 0
    params.gate = gate_fields(gate)
    params.scale_block, params.early, params.bf16_words = w.block, early, w.bf16
