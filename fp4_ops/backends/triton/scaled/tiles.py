"""Ranks the tile shapes of the FP4 x FP4 product kernel by fixed rules. Nothing was measured.

`launch.py` compiles tiles in this order, and takes the first one that fits and that has the FP4 instruction.
For some tiles, the compiler silently multiplies in bfloat16 instead.
"""

from __future__ import annotations

from dataclasses import replace

from ....runtime.fitted import groups
from .. import tiles
from ..tiles import Device, Tile

SHAPES = tuple(Tile(*numbers) for numbers in groups("triton")["fp4_tiles"].values["shapes"])
"""Tiles in order of preference, each with the largest useful number of stages. A step of 256 k has four
instructions of 64 k each for one wait. Tiles for which four warps would spill registers have eight."""
CANDIDATES = tuple(replace(t, stages=s) for t in SHAPES for s in range(t.stages, 1, -1))


def usable(tile: Tile, k: int, device: Device) -> bool:
    """Return whether the tile is useful for weights [..., k]. Whether it fits is another question."""
    # tcgen05 multiplies 128 rows of its left operand; with 64 Triton 3.6 fails or goes back to bfloat16.
    if device.sums_in_tensor_memory and tile.block_n % 128:
        return False
    # cp.async takes 4 bytes at least. If rows of codes start at other addresses, a step passes through
    # registers.
    if k % 8 and (tile.block_k > 128 or tile.block_m > 64):
        return False
    # Deep tiles amortise the loop, but the pipeline needs several of them to overlap anything.
    return tile.block_k <= 128 or k >= 3 * tile.block_k


def ranked(rows: int, experts: int, n: int, k: int, block_m: int, device: Device) -> tuple[Tile, ...]:
    """Lists tiles of block_m tokens for `rows` rows, each of one expert, best first. The list may be
    empty."""
    if (forced := tiles.forced()) is not None:
        return (forced,)
    fits = [t for t in CANDIDATES if t.block_m == block_m and usable(t, k, device)]
    return tuple(tiles.by_programs(fits, *tiles.spread_of(rows, experts), n, device))
