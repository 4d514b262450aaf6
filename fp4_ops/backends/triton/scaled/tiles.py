"""Tile shapes of the FP4 x FP4 product kernel: an enumerated list, ranked by rules. Nothing was measured.

`launch.py` asks the compiled kernel what it needs, and takes the first that fits and that has the FP4
instruction: where its rules are not met, the compiler multiplies by bfloat16 without a word.
"""

from __future__ import annotations

from dataclasses import replace

from ....runtime.fitted import groups
from .. import tiles
from ..tiles import Device, Tile

SHAPES = tuple(Tile(*numbers) for numbers in groups("triton")["fp4_tiles"].values["shapes"])
"""In order of preference, each with the most stages that pay. A step of 256 k is four instructions, of 64 k
each, for one wait. Eight warps where four would spill."""
CANDIDATES = tuple(replace(t, stages=s) for t in SHAPES for s in range(t.stages, 1, -1))


def usable(tile: Tile, k: int, device: Device) -> bool:
    """Return whether the tile makes sense for weights [..., k], if it fits."""
    # tcgen05 multiplies 128 rows of its left operand; with 64 Triton 3.6 fails or goes back to bfloat16.
    if device.sums_in_tensor_memory and tile.block_n % 128:
        return False
    # cp.async takes 4 bytes at least. Where rows of codes start elsewhere, a step passes through registers.
    if k % 8 and (tile.block_k > 128 or tile.block_m > 64):
        return False
    # Deep tiles amortise the loop, but the pipeline needs several of them to overlap anything.
    return tile.block_k <= 128 or k >= 3 * tile.block_k


def ranked(rows: int, experts: int, n: int, k: int, block_m: int, device: Device) -> tuple[Tile, ...]:
    """Tiles of block_m tokens for `rows` rows, each of one expert, best first; none may be usable."""
    if (forced := tiles.forced()) is not None:
        return (forced,)
    fits = [t for t in CANDIDATES if t.block_m == block_m and usable(t, k, device)]
    return tuple(tiles.by_programs(fits, *tiles.spread_of(rows, experts), n, device))
