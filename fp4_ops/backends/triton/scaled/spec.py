"""Defines what scaled_kernel is compiled for. `launch.py` chooses its tile and launches it."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch

from .. import launch
from ..tiles import Device, Tile
from . import support, tiles
from .kernel import scaled_kernel

INSTRUCTIONS = {
    "nvfp4": re.compile(r"mma\.\S*kind::mxf4nvf4\.block_scale\.(scale_vec::4X|block16)"),
    "mxfp4": re.compile(r"mma\.\S*kind::mxf4(nvf4)?\.block_scale\.(scale_vec::2X|block32)"),
}
"""Instructions in PTX by format: tcgen05.mma and mma.sync with a scale for 16 or 32 k, old and new names."""


class Scaled(NamedTuple):
    """`Compilable` of scaled_kernel: everything that it is compiled for, except the tile."""

    mode: str
    has_rows: bool
    a_div: int
    format: str
    n: int
    k: int
    a_scales: int
    bias: torch.dtype | None
    has_a_factor: bool
    out: torch.dtype
    check: support.FirstError | None
    """The check that a tile must have passed. None while that check runs."""

    @property
    def kernel(self) -> Any:
        return scaled_kernel

    @property
    def what(self) -> str:
        return f"{self.format} rows and weights"

    def constants(self, tile: Tile) -> dict[str, Any]:
        return dict(
            MODE=self.mode, HAS_ROWS=self.has_rows, A_DIV=self.a_div, NVFP4=self.format == "nvfp4", K=self.k,
            A_SCALES=self.a_scales, HAS_BIAS=self.bias is not None, HAS_A_FACTOR=self.has_a_factor,
            BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, BLOCK_K=tile.block_k, STAGES=tile.stages,
            ASM=not launch.INTERPRET, num_warps=tile.warps,
        )  # fmt: skip

    def arguments(self) -> tuple[Any, ...]:
        u8, f32, i32 = torch.uint8, torch.float32, torch.int32
        return (
            u8, u8, f32 if self.has_a_factor else None, u8, u8, f32 if self.format == "nvfp4" else None,
            self.bias, self.out, None if self.mode == "dense" else i32, i32 if self.has_rows else None,
            self.n, 2, 2, 2,
        )  # fmt: skip

    def ranked(self, rows: int, experts: int, block_m: int, device: Device) -> tuple[Tile, ...]:
        return tiles.ranked(rows, experts, self.n, self.k, block_m, device)

    def as_meant(self, kernel: Any) -> bool:
        return INSTRUCTIONS[self.format].search(kernel.asm["ptx"]) is not None

    def trusted(self, tile: Tile, device: Device) -> bool:
        return self.check is None or support.trusted(self.format, tile, device, self.check)
