"""Ranks the tile shapes of the product kernel (constants.json) by fixed rules. Nothing is tuned at run time.

Only the compiled kernel knows what resources a tile needs, so `launch.py` compiles tiles in this order and
takes the first that fits. `python -m fp4_ops.backends.triton.tiles` prints the list, and the preferred tiles
of well-known shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from ...runtime.fitted import groups


@dataclass(frozen=True)
class Tile:
    """A tile of BLOCK_N weight rows by BLOCK_M tokens, BLOCK_K deep, with `stages` tiles in flight."""

    block_n: int
    block_m: int
    block_k: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.block_n}x{self.block_m}x{self.block_k} w{self.warps} s{self.stages}"


_DATA = groups("triton")["tiles"].values

SHAPES = tuple(Tile(*numbers) for numbers in _DATA["shapes"])
"""Tiles in order of preference, each with the largest useful number of stages. If a tile does not fit, fewer
stages are tried.

Weights are read once for each tile of tokens. For decode, the best tile has the smallest number of tokens
that holds an expert's rows. For prefill it has many tokens, so that each expanded weight is used often.
"""
CANDIDATES = tuple(replace(t, stages=s) for t in SHAPES for s in range(t.stages, 1, -1))

# Most bytes of shared memory of a thread block: on sm_86, 89, 120 and 121; on sm_80; on sm_90 and 100.
SHARED_MEMORY = {"99 KB": 101376, "163 KB": 166912, "227 KB": 232448}


@dataclass(frozen=True)
class Device:
    """Properties of a GPU that the choice of a tile depends on."""

    name: str
    capability: tuple[int, int]
    """Compute capability. (0, 0) means no CUDA, so no inline PTX."""
    shared_memory: int
    """Bytes of shared memory that one thread block may use."""
    multiprocessors: int

    @property
    def holds_256x128(self) -> bool:
        """True if 16 warps can hold 256 x 128 sums without spilling registers. This needs Hopper's wgmma.

        With tcgen05, Triton multiplies with 4 or 8 warps. Their epilogue spills if there are so many sums.
        """
        return self.capability[0] == 9

    @property
    def sums_in_registers(self) -> bool:
        """True if registers hold sums and both operands (mma.sync). wgmma reads one operand from memory."""
        return self.capability[0] not in (9, 10, 11)

    @property
    def sums_in_tensor_memory(self) -> bool:
        """True for tcgen05.

        Its sums pass through registers to be added. A tile of 128 x 128 with int4 spills 256 bytes.
        """
        return self.capability[0] in (10, 11)


class Problem(NamedTuple):
    """Properties of a product with [n, k] weights that the choice of a tile depends on."""

    n: int
    k: int
    terms: int = 1
    """Number of bfloat16 terms of the activations."""
    deepest: int = 1 << 20
    """Largest depth of a tile along k."""
    two_sums: bool = False
    """True if a part of k is summed separately, which doubles the registers for sums."""
    bytes: bool = False
    """True if rows of weights start at any byte, so that each word takes four loads."""
    columns: bool = False
    """True if groups are along k, so that activations are masked in registers."""
    scaled: bool = False
    """True if each row has a factor and a map of tiles assigns rows."""


HOPPER = Device("Hopper", (9, 0), SHARED_MEMORY["227 KB"], 132)
# In the interpreter, everything fits.
INTERPRETER = Device("interpreter", (0, 0), 1 << 40, HOPPER.multiprocessors)

_forced: Tile | None = None
_pretended: Device | None = None


def force(tile: Tile | None) -> None:
    """Forces this tile for every product (None: choose again). For tests and benchmarks."""
    global _forced
    _forced = tile


def forced() -> Tile | None:
    return _forced


def pretend(device: Device | None) -> None:
    """Makes the choice for this device instead of the real one (None: undo). For tests and benchmarks."""
    global _pretended
    _pretended = device


@lru_cache(maxsize=64)
def _properties(index: int) -> Device:
    p = torch.cuda.get_device_properties(index)
    optin = getattr(p, "shared_memory_per_block_optin", 0) or p.shared_memory_per_block
    capability = (0, 0) if torch.version.hip is not None else (p.major, p.minor)
    return Device(p.name, capability, optin, p.multi_processor_count)


def device_of(device: torch.device) -> Device:
    """Returns the properties of the device that holds a tensor."""
    if _pretended is not None:
        return _pretended
    if device.type != "cuda":
        return INTERPRETER
    return _properties(torch.cuda.current_device() if device.index is None else device.index)


def tokens(rows_per_expert: int) -> int:
    """Returns the tokens of a tile. It allows for uneven routing: 16 tokens are enough for most experts if
    they have 10 on average.
    """
    for limit, block_m in zip(_DATA["rows_per_expert"], _DATA["tokens"]):
        if rows_per_expert <= limit:
            return int(block_m)
    return int(_DATA["tokens"][-1])


def usable(tile: Tile, problem: Problem, device: Device) -> bool:
    """True if the tile is useful for the problem. Whether it fits is another question."""
    sums = tile.block_n * tile.block_m
    # On Hopper, 264 to 408 bytes of each thread spilled if rows come from a map and have factors.
    crowded = problem.two_sums or problem.bytes or problem.scaled
    if sums == 256 * 128 and (crowded or not device.holds_256x128):
        return False
    if problem.terms > 1:
        few = 128 * 64 if device.sums_in_registers else 128 * 128
        if tile.block_n > 128 or sums > few:
            return False
        # On sm_120, 64 x 16 x 256 spilled 264 bytes of each thread.
        if problem.columns and (tile.block_m * tile.block_k > 64 * 64 or tile.block_k > 128):
            return False
    # If words are put together from bytes, fewer registers are left for the second sum.
    if problem.bytes and problem.two_sums and sums > 128 * 64:
        return False
    if problem.two_sums and tile.block_m == 128 and device.sums_in_tensor_memory:
        return False
    # Deep tiles amortise the loop, but the pipeline needs several of them to overlap anything.
    return tile.block_k <= 128 or problem.k >= 3 * tile.block_k


def within(tile: Tile, problem: Problem) -> Tile:
    return replace(tile, block_k=min(tile.block_k, problem.deepest))


@lru_cache(maxsize=4096)
def _ranked(
    per_expert: int, experts: int, problem: Problem, block_m: int, device: Device
) -> tuple[Tile, ...]:
    fits = [t for t in CANDIDATES if t.block_m == block_m and usable(t, problem, device)]
    order = by_programs(fits, per_expert, experts, problem.n, device)
    return tuple(dict.fromkeys(within(t, problem) for t in order))


def by_programs(fits: list[Tile], per_expert: int, experts: int, n: int, device: Device) -> list[Tile]:
    """Orders tiles of one number of tokens: tiles with fewer weight rows come first if more multiprocessors
    then have work.
    """

    def programs(t: Tile) -> int:
        return experts * -(-per_expert // t.block_m) * -(-n // t.block_n)

    crowded = [t for t in fits if programs(t) >= device.multiprocessors]
    return crowded + sorted((t for t in fits if t not in crowded), key=lambda t: t.block_n)


def spread_of(rows: int, experts: int) -> tuple[int, int]:
    """Returns (rows of an expert, experts that have rows), if each row has one expert."""
    hit = max(1, min(experts, rows))
    return -(-rows // hit), hit


def token_blocks(rows: int, experts: int) -> tuple[int, ...]:
    """Returns numbers of tokens of a tile, best first. Tiles with fewer tokens need less memory, but there
    are more of them.
    """
    if _forced is not None:
        return (_forced.block_m,)
    best = tokens(spread_of(rows, experts)[0])
    return tuple(b for b in (128, 64, 32, 16) if b <= best)


def ranked(rows: int, experts: int, problem: Problem, block_m: int, device: Device) -> tuple[Tile, ...]:
    """Lists tiles of block_m tokens for `rows` rows, each of one expert, best first. It may be empty."""
    if _forced is not None:
        return (within(_forced, problem),)
    return _ranked(*spread_of(rows, experts), problem, block_m, device)


def preferred(rows: int, experts: int, problem: Problem, device: Device = HOPPER) -> Tile:
    """Returns the tile that is tried first."""
    orders = (ranked(rows, experts, problem, b, device) for b in token_blocks(rows, experts))
    return next(order[0] for order in orders if order)


if __name__ == "__main__":
    print("candidates (weight rows x tokens x k, warps, stages):")
    for tile in CANDIDATES:
        print(f"  {tile}")
    for name, experts, n, k in (("qwen3-30b gate/up", 128, 1536, 2048), ("down", 128, 2048, 768)):
        print(f"{name}: rows -> tile on Hopper")
        for rows in (8, 64, 512, 1024, 4096, 16384, 32768):
            print(f"  {rows:6d}  {preferred(rows, experts, Problem(n, k))}")
