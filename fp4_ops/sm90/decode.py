"""Launches csrc/sm90/decode.cu: grouped products with a few rows an expert, bound by the weights' bytes."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from ..meta.formats import Activation
from ..meta.layouts import LAYOUTS, Layout
from .library import DTYPE_CODES, Gate, address, call, gate_fields, multiprocessors, stream

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


class Routing(IntEnum):
    OFFS = 0
    IDS32 = 1
    IDS64 = 2
    MASKED = 3
    DENSE = 4


class Weight(NamedTuple):
    """A weight in layout sm90 or sm90_bf16: [groups, n, kp]."""

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
        return self.layout.name == "sm90_bf16"


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
    if many is not None and many.value(kp) - few.value(kp) > 0.2:
        if many.passes < few.passes or many_tiles:
            return many
    return few if many_tiles else few.balanced()


class _Params(ctypes.Structure):
    """DecodeParams of csrc/sm90/decode_plan.cuh; what the launcher fills in comes last but one."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "x_scale", "codes", "scales", "global_scale")),
        *((name, ctypes.c_void_p) for name in ("bias", "out", "route", "sorted_rows")),
        *((name, ctypes.c_int) for name in ("rows", "groups", "n", "k", "kp", "a_div", "max_m", "routing")),
        *((name, ctypes.c_int) for name in ("x_type", "out_type", "bias_type")),
        ("gate", Gate),
        *((name, ctypes.c_int) for name in ("k_warps", "row_warps", "passes")),
        ("launcher", ctypes.c_uint32 * 10),
        ("scale_block", ctypes.c_int),
        ("early", ctypes.c_bool),
        ("bf16_words", ctypes.c_bool),
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
        x=address(x),
        x_scale=address(x_scale),
        codes=address(w.codes),
        scales=address(w.scales),
        global_scale=address(w.global_scale),
        bias=address(w.bias),
        out=address(out),
        route=address(route),
        sorted_rows=address(sorted_rows),
        rows=rows,
        groups=w.groups,
        n=w.n,
        k=x.shape[-1],
        kp=w.kp,
        a_div=a_div,
        max_m=max_m,
        routing=routing,
        x_type=3 if x.dtype == torch.float8_e4m3fn else DTYPE_CODES[x.dtype],
        out_type=DTYPE_CODES[out.dtype],
        bias_type=DTYPE_CODES[w.bias.dtype] if w.bias is not None else 0,
        gate=gate_fields(gate),
        k_warps=config.k_warps,
        row_warps=config.row_warps,
        passes=config.passes,
        scale_block=w.block,
        early=early,
        bf16_words=w.bf16,
    )
    call("fp4_sm90_decode", ctypes.byref(params), blocks, stream())
