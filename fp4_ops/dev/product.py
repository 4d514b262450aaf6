"""Parameters that decode and gemv share: a weight, activation rows, the expert of each row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..backends.launchers.int4 import LAYOUT
from ..backends.launchers.library import address, gate_fields
from ..meta.formats import Activation
from ..meta.layouts import LAYOUTS, Layout
from ._native import Act, DecodeParams, DType, Gate, GemvParams, Routing

DTYPES = {
    torch.float32: DType.FLOAT32,
    torch.bfloat16: DType.BFLOAT16,
    torch.float16: DType.FLOAT16,
    torch.float8_e4m3fn: DType.FLOAT8,
}


class NativeWeight(NamedTuple):
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
    """Number of k that share a scale."""

    @property
    def bf16(self) -> bool:
        return self.layout.order == "mma_bf16"


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


def bias_type(bias: Tensor | None) -> DType:
    return DTYPES[bias.dtype] if bias is not None else DType.FLOAT32


def gate_of(activation: Activation | None) -> Gate:
    function, *numbers = gate_fields(activation)
    return Gate(Act(function), *numbers)


def describe(
    params: DecodeParams | GemvParams,
    x: Tensor,
    w: NativeWeight,
    route: Tensor | None,
    routing: Routing,
    rows: int,
    out: Tensor,
    x_scale: Tensor | None,
    a_div: int,
    gate: Activation | None,
    early: bool,
) -> None:
    """Sets the fields that every launch has."""
    params.x, params.x_scale = address(x), address(x_scale)
    params.codes, params.scales = address(w.codes), address(w.scales)
    params.global_scale, params.bias = address(w.global_scale), address(w.bias)
    params.out, params.route = address(out), address(route)
    params.rows, params.groups, params.n, params.k, params.kp = rows, w.groups, w.n, x.shape[-1], w.kp
    params.a_div, params.routing = a_div, routing
    params.x_type, params.out_type, params.bias_type = DTYPES[x.dtype], DTYPES[out.dtype], bias_type(w.bias)
    params.gate = gate_of(gate)
    params.scale_block, params.early, params.bf16_words = w.block, early, w.bf16
