"""Tile shapes of the product kernel: an enumerated list, filtered by rules. Nothing is tuned at run time.

`python -m fp4_ops.triton.tiles` prints the list and what is chosen for well-known shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Tile:
    """BLOCK_N weight rows by BLOCK_M tokens, BLOCK_K deep, `stages` tiles in flight."""

    block_n: int
    block_m: int
    block_k: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.block_n}x{self.block_m}x{self.block_k} w{self.warps} s{self.stages}"


# By tokens: weights are read once for each tile of tokens, so decode wants the fewest tokens that hold an
# expert's rows; prefill wants many, so that each expanded weight is used often.
CANDIDATES = (
    Tile(64, 16, 256, 4, 4),
    Tile(64, 16, 128, 4, 4),
    Tile(64, 32, 256, 4, 3),
    Tile(64, 32, 128, 4, 4),
    Tile(128, 64, 128, 8, 4),
    Tile(128, 128, 128, 8, 3),
)

_forced: Tile | None = None


def force(tile: Tile | None) -> None:
    """Use this tile for every product (None: choose again). For tests and benchmarks."""
    global _forced
    _forced = tile


@lru_cache(maxsize=4096)
def _choose(rows_per_expert: int, k: int, terms: int) -> Tile:
    fits = [
        t
        for t in CANDIDATES
        # A tile of tokens that the usual expert fills, and no bigger one: its empty columns cost time.
        if t.block_m >= min(rows_per_expert * 5 // 4, 128)
        # Deep tiles amortise the loop, but K must have two of them for the pipeline to overlap anything.
        and (t.block_k <= 128 or k >= 2 * t.block_k)
        # Every term of the activations is another tile in shared memory.
        and (terms == 1 or t.block_m * t.block_k <= 64 * 128)
    ]
    return fits[0] if fits else Tile(128, 64, 128, 8, 3)


def choose(rows: int, experts: int, n: int, k: int, terms: int) -> Tile:
    """The tile for `rows` rows over `experts` experts (each row one expert) of [n, k] weights."""
    if _forced is not None:
        return _forced
    return _choose(-(-rows // max(1, min(experts, rows))), k, terms)


if __name__ == "__main__":
    print("candidates (weight rows x tokens x k, warps, stages):")
    for tile in CANDIDATES:
        print(f"  {tile}")
    print("rows an expert -> tile, K = 2048, bfloat16")
    for rows in (1, 4, 8, 16, 32, 64, 128, 512):
        print(f"  {rows:4d}  {choose(rows, 1, 2048, 2048, 1)}")
