"""Compiles product kernels, finds what resources they need, and chooses a tile that fits the GPU.

How much shared memory a kernel takes depends on the version of Triton. So tiles are compiled in the order of
`tiles.ranked` until one fits. Its launch can still fail, because the device gives less memory than it
reports. Then the tile is not used again, and the next one is tried.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from ...meta.formats import known_activation
from . import gemm, tiles
from .tiles import Device, Problem, Tile

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"

# Message of a failed pass of Triton. For example, a pass for sm_100 fails on some tiles of depth 32.
COMPILER_FAILED = "PassManager::run failed"

# Columns of tensor memory. Blackwell's products keep their sums there.
TENSOR_MEMORY = 512

logger = logging.getLogger("fp4_ops")


class Compilable(Protocol):
    """A product kernel with everything that it is compiled for, except the tile. Hashable."""

    def __hash__(self) -> int: ...

    @property
    def kernel(self) -> Any:
        """Returns the Triton function."""

    @property
    def what(self) -> str:
        """Describes the operands, for messages."""

    def arguments(self) -> tuple[Any, ...]:
        """Returns the arguments for a compilation without a launch. Each tensor is replaced by its dtype."""

    def constants(self, tile: Tile) -> dict[str, Any]:
        """Returns the compile-time constants and options by name."""

    def ranked(self, rows: int, experts: int, block_m: int, device: Device) -> tuple[Tile, ...]:
        """Lists tiles of `block_m` tokens for `rows` rows, each of one expert, the best first."""

    def as_meant(self, kernel: Any) -> bool:
        """True if the compiled kernel has the instructions that it was written for."""

    def trusted(self, tile: Tile, device: Device) -> bool:
        """True if the kernel is known to be correct on the device. May run the kernel."""


class Spec(NamedTuple):
    """`Compilable` of gemm_kernel."""

    mode: str
    has_rows: bool
    a_div: int
    kind: str
    block: int
    n: int
    k: int
    terms: int
    scale: torch.dtype
    has_global_scale: bool
    bias: torch.dtype | None
    has_a_factor: bool
    out: torch.dtype
    gate: str | None
    out_kp: int
    out_chunk: int
    out_terms: int
    bytes: bool
    asm: bool

    @property
    def kernel(self) -> Any:
        return gemm.gemm_kernel

    @property
    def what(self) -> str:
        return f"{self.kind} weights"

    def constants(self, tile: Tile) -> dict[str, Any]:
        act = known_activation(self.gate or "silu")
        gate_cap, up_cap = act.caps or (None, None)
        return dict(
            MODE=self.mode, HAS_ROWS=self.has_rows, A_DIV=self.a_div, KIND=self.kind, BLOCK=self.block,
            K=self.k, KP=triton.cdiv(self.k, tile.block_k) * tile.block_k, TERMS=self.terms,
            HAS_BIAS=self.bias is not None, HAS_A_FACTOR=self.has_a_factor,
            GATED=self.gate is not None, INTERLEAVED=act.interleaved, ACT=act.function, ALPHA=act.alpha,
            LIMIT=act.limit, UP_OFFSET=act.up_offset if act.gated else None,
            GATE_CAP=gate_cap, UP_CAP=up_cap,
            OUT_KP=self.out_kp, OUT_CHUNK=self.out_chunk, OUT_TERMS=self.out_terms, SPLIT_K=1,
            BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, BLOCK_K=tile.block_k, STAGES=tile.stages,
            BYTES=self.bytes, ASM=self.asm, COMPUTE=compute(self.asm)[1], num_warps=tile.warps,
        )  # fmt: skip

    def arguments(self) -> tuple[Any, ...]:
        f32, i32 = torch.float32, torch.int32
        mapped = None if self.mode == "dense" else i32
        return (
            compute(self.asm)[0], torch.uint8, self.scale, f32 if self.has_global_scale else None, self.bias,
            f32 if self.has_a_factor else None, self.out, mapped, i32 if self.has_rows else None,
            2, 2, self.n, 2, 2, 2, 1.0,
        )  # fmt: skip

    def problem(self) -> Problem:
        columns = self.mode == "k"
        found = Problem(
            self.n, self.k, self.terms, two_sums=self.kind == "int4" or self.terms > 1 or columns,
            bytes=self.bytes, columns=columns, scaled=self.has_a_factor and self.mode == "mapped",
        )  # fmt: skip
        # int4 scales multiply the sums of a tile, so a tile must lie within one block of scales.
        return found._replace(deepest=self.block) if self.kind == "int4" else found

    def ranked(self, rows: int, experts: int, block_m: int, device: Device) -> tuple[Tile, ...]:
        return tiles.ranked(rows, experts, self.problem(), block_m, device)

    def as_meant(self, kernel: Any) -> bool:
        return True

    def trusted(self, tile: Tile, device: Device) -> bool:
        return True


def uses_asm(device: Device) -> bool:
    """True if inline PTX expands the weights, False if float32 arithmetic does."""
    return device.capability >= (8, 0)


def compute(asm: bool) -> tuple[torch.dtype, tl.dtype]:
    return (torch.bfloat16, tl.bfloat16) if asm else (torch.float32, tl.float32)


@lru_cache(maxsize=4096)
def constants(spec: Compilable, tile: Tile) -> dict[str, Any]:
    return spec.constants(tile)


class Need(NamedTuple):
    """Resources of a thread block that the compiled kernel needs."""

    shared_memory: int
    tensor_memory: int
    as_meant: bool = True
    """True if the compiled kernel has the instructions that it was written for."""


def compiled(spec: Compilable, tile: Tile):
    """Returns the kernel compiled for the current device. Compiles it at the first call."""
    kernel = spec.kernel.warmup(*spec.arguments(), grid=(1,), **constants(spec, tile))
    return kernel.result() if hasattr(kernel, "result") else kernel


def need(spec: Compilable, tile: Tile) -> Need:
    if INTERPRET:
        return Need(0, 0)
    kernel = compiled(spec, tile)
    return Need(kernel.metadata.shared, getattr(kernel.metadata, "tmem_size", 0) or 0, spec.as_meant(kernel))


_fits: dict[tuple[Device, Compilable, Tile], bool] = {}


def fits(spec: Compilable, tile: Tile, device: Device) -> bool:
    """True if the device has the resources that the kernel needs, and no launch with this tile has failed."""
    key = (device, spec, tile)
    known = _fits.get(key)
    if known is None:
        try:
            needed = need(spec, tile)
        except RuntimeError as error:
            if COMPILER_FAILED not in str(error):
                raise
            logger.warning("fp4: Triton does not compile tile %s of %s for %s", tile, spec.what, device.name)
            known = False
        else:
            held = needed.shared_memory <= device.shared_memory and needed.tensor_memory <= TENSOR_MEMORY
            known = held and needed.as_meant
        _fits[key] = known
    return known


class NoTile(RuntimeError):
    """No tile of a product kernel can run here."""


def choose(
    rows: int, experts: int, specs: Sequence[Callable[..., Compilable]], device: Device
) -> tuple[Tile, ...]:
    """Chooses a tile that fits for each product. All tiles have the same number of tokens, so the products
    share one map of tiles.

    Each of `specs` is called with the tiles that were chosen for the products before. Raises NoTile.
    """
    for block_m in tiles.token_blocks(rows, experts):
        chosen: tuple[Tile, ...] = ()
        for spec_after in specs:
            spec = spec_after(*chosen)
            order = spec.ranked(rows, experts, block_m, device)
            found = next((t for t in order if fits(spec, t, device) and spec.trusted(t, device)), None)
            if found is None:
                break
            chosen += (found,)
        else:
            return chosen
    raise NoTile(
        f"fp4_ops: no tile of the product kernel for {spec.what} fits {device.name}. There, a thread "
        f"block has {device.shared_memory} bytes of shared memory (Triton {triton.__version__}). Please "
        "report this; until then, multiply by torch.ops.fp4.dequantize(...)"
    )


class TryNext(Exception):
    """A launch failed for lack of resources. Its tile will not be chosen again."""


def _wants_resources(error: Exception) -> bool:
    """True for CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, which Triton may raise as a RuntimeError with the driver's
    message.
    """
    words = ("out of resource", "too many resources requested")
    return isinstance(error, OutOfResources) or any(w in str(error).lower() for w in words)


def launch(spec: Compilable, tile: Tile, device: Device, grid: tuple[int, ...], *args) -> None:
    try:
        spec.kernel[grid](*args, **constants(spec, tile))
    except (OutOfResources, RuntimeError) as error:
        if not _wants_resources(error):
            raise
        _fits[device, spec, tile] = False
        logger.warning(
            "%s refused tile %s of the product kernel (%s); the next one is used", device.name, tile, error
        )
        raise TryNext from error
