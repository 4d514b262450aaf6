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


# Weights are read once for each tile of tokens, so decode wants the fewest tokens that hold an expert's rows;
# prefill wants many, so that each expanded weight is used often. In order of preference.
CANDIDATES = (
    Tile(128, 16, 256, 8, 3),
    Tile(128, 16, 128, 8, 4),
    Tile(64, 16, 256, 4, 4),
    Tile(64, 16, 128, 4, 4),
    Tile(128, 32, 128, 8, 4),
    Tile(256, 64, 128, 8, 3),
    Tile(128, 64, 128, 8, 3),
    Tile(256, 128, 128, 16, 3),
    Tile(128, 128, 64, 8, 3),
)

# Fewer programs than this leave multiprocessors of a large GPU idle.
ENOUGH_PROGRAMS = 132

_forced: Tile | None = None


def force(tile: Tile | None) -> None:
    """Use this tile for every product (None: choose again). For tests and benchmarks."""
    global _forced
    _forced = tile


def tokens(rows_per_expert: int) -> int:
    """Tokens of a tile. Routing is uneven: one of 16 still holds most experts that have 10 on average."""
    for limit, block_m in ((10, 16), (20, 32), (80, 64)):
        if rows_per_expert <= limit:
            return block_m
    return 128


@lru_cache(maxsize=4096)
def _choose(rows_per_expert: int, experts: int, n: int, k: int, terms: int) -> Tile:
    block_m = tokens(rows_per_expert)
    fits = [
        t
        for t in CANDIDATES
        if t.block_m == block_m
        # Deep tiles amortise the loop, but the pipeline needs several of them to overlap anything.
        and (t.block_k <= 128 or k >= 3 * t.block_k)
        # Every term of the activations is one more tile in shared memory and in registers.
        and t.block_m * t.block_k * terms * t.stages <= 128 * 128 * 3 * min(terms, 2)
        and (terms == 1 or t.block_n <= 128)
    ]
    # Fewer weight rows a tile where that brings more multiprocessors to work.
    token_tiles = experts * -(-rows_per_expert // block_m)
    crowded = [t for t in fits if token_tiles * -(-n // t.block_n) >= ENOUGH_PROGRAMS]
    return crowded[0] if crowded else min(fits, key=lambda t: t.block_n)


def choose(rows: int, experts: int, n: int, k: int, terms: int) -> Tile:
    """The tile for `rows` rows over `experts` experts (each row one expert) of [n, k] weights."""
    if _forced is not None:
        return _forced
    hit = max(1, min(experts, rows))
    return _choose(-(-rows // hit), hit, n, k, terms)


if __name__ == "__main__":
    print("candidates (weight rows x tokens x k, warps, stages):")
    for tile in CANDIDATES:
        print(f"  {tile}")
    for name, experts, n, k in (("qwen3-30b gate/up", 128, 1536, 2048), ("down", 128, 2048, 768)):
        print(f"{name}: rows -> tile")
        for rows in (8, 64, 512, 1024, 4096, 16384, 32768):
            print(f"  {rows:6d}  {choose(rows, experts, n, k, 1)}")
