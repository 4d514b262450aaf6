"""The product kernel and the GPU it runs on: what it is compiled for, what it needs, which tile fits.

Triton decides how much shared memory a kernel takes, anew with each version. So the compiled kernel is asked,
tile by tile in the order of `tiles.ranked`, until one fits. Where a launch fails all the same, because the
device gives less than it says, that tile is not used again and the next one is.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from ..meta.formats import known_activation
from . import gemm, tiles
from .tiles import Device, Problem, Tile

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"

# A pass of Triton's own that gives up, as one for sm_100 does on some tiles that are 32 deep.
COMPILER_FAILED = "PassManager::run failed"

# Columns of tensor memory, where Blackwell's products keep their sums.
TENSOR_MEMORY = 512

logger = logging.getLogger("fp4_ops")


class Spec(NamedTuple):
    """Everything that gemm_kernel is compiled for, but the tile."""

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


def uses_asm(device: Device) -> bool:
    """Whether weights are expanded by inline PTX; elsewhere, in float32."""
    return device.capability >= (8, 0)


def compute(asm: bool) -> tuple[torch.dtype, tl.dtype]:
    return (torch.bfloat16, tl.bfloat16) if asm else (torch.float32, tl.float32)


@lru_cache(maxsize=4096)
def constants(spec: Spec, tile: Tile) -> dict[str, Any]:
    """The kernel's constants and options, by name."""
    act = known_activation(spec.gate or "silu")
    return dict(
        MODE=spec.mode, HAS_ROWS=spec.has_rows, A_DIV=spec.a_div, KIND=spec.kind, BLOCK=spec.block, K=spec.k,
        KP=triton.cdiv(spec.k, tile.block_k) * tile.block_k, TERMS=spec.terms,
        HAS_BIAS=spec.bias is not None, HAS_A_FACTOR=spec.has_a_factor,
        GATED=spec.gate is not None, INTERLEAVED=act.interleaved, ACT=act.function, ALPHA=act.alpha,
        LIMIT=act.limit, UP_OFFSET=act.up_offset if act.gated else None,
        OUT_KP=spec.out_kp, OUT_CHUNK=spec.out_chunk, OUT_TERMS=spec.out_terms, SPLIT_K=1,
        BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, BLOCK_K=tile.block_k, STAGES=tile.stages,
        BYTES=spec.bytes, ASM=spec.asm, COMPUTE=compute(spec.asm)[1], num_warps=tile.warps,
    )  # fmt: skip


def arguments(spec: Spec) -> tuple[Any, ...]:
    """What stands for the kernel's other arguments where it is compiled only: a tensor by its dtype."""
    f32, i32 = torch.float32, torch.int32
    mapped = None if spec.mode == "dense" else i32
    return (
        compute(spec.asm)[0], torch.uint8, spec.scale, f32 if spec.has_global_scale else None, spec.bias,
        f32 if spec.has_a_factor else None, spec.out, mapped, i32 if spec.has_rows else None,
        2, 2, spec.n, 2, 2, 2, 1.0,
    )  # fmt: skip


class Need(NamedTuple):
    """What the compiled kernel takes of a thread block's resources."""

    shared_memory: int
    tensor_memory: int


def compiled(spec: Spec, tile: Tile):
    """The kernel as compiled for the current device, now or before."""
    kernel = gemm.gemm_kernel.warmup(*arguments(spec), grid=(1,), **constants(spec, tile))
    return kernel.result() if hasattr(kernel, "result") else kernel


def need(spec: Spec, tile: Tile) -> Need:
    if INTERPRET:
        return Need(0, 0)
    kernel = compiled(spec, tile)
    return Need(kernel.metadata.shared, getattr(kernel.metadata, "tmem_size", 0) or 0)


_fits: dict[tuple[Device, Spec, Tile], bool] = {}


def fits(spec: Spec, tile: Tile, device: Device) -> bool:
    """Whether the device can run the kernel: it has what the kernel needs, and no launch has failed."""
    key = (device, spec, tile)
    known = _fits.get(key)
    if known is None:
        try:
            needed = need(spec, tile)
        except RuntimeError as error:
            if COMPILER_FAILED not in str(error):
                raise
            logger.warning("fp4: Triton does not compile tile %s of %s for %s", tile, spec.kind, device.name)
            known = False
        else:
            known = needed.shared_memory <= device.shared_memory and needed.tensor_memory <= TENSOR_MEMORY
        _fits[key] = known
    return known


def problem(spec: Spec) -> Problem:
    columns = spec.mode == "k"
    two_sums = spec.kind == "int4" or spec.terms > 1 or columns
    scaled = spec.has_a_factor and spec.mode == "mapped"
    found = Problem(
        spec.n, spec.k, spec.terms, two_sums=two_sums, bytes=spec.bytes, columns=columns, scaled=scaled
    )
    # A tile of int4 lies within one block of scales, which multiply its sums.
    return found._replace(deepest=spec.block) if spec.kind == "int4" else found


def choose(rows: int, experts: int, specs: Sequence[Callable[..., Spec]], device: Device) -> tuple[Tile, ...]:
    """A tile that fits for each product. They have as many tokens: one map of tiles serves all.

    Each of `specs` is called with the tiles that were chosen for those before it.
    """
    for block_m in tiles.token_blocks(rows, experts):
        chosen: tuple[Tile, ...] = ()
        for spec_after in specs:
            spec = spec_after(*chosen)
            order = tiles.ranked(rows, experts, problem(spec), block_m, device)
            found = next((tile for tile in order if fits(spec, tile, device)), None)
            if found is None:
                break
            chosen += (found,)
        else:
            return chosen
    raise RuntimeError(
        f"fp4_ops: no tile of the product kernel for {spec.kind} weights fits {device.name}, where a thread "
        f"block has {device.shared_memory} bytes of shared memory (Triton {triton.__version__}). Please "
        "report this; until then, multiply by torch.ops.fp4.dequantize(...)"
    )


class TryNext(Exception):
    """A launch failed for want of resources, and its tile will not be chosen again."""


def _wants_resources(error: Exception) -> bool:
    """CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES comes as a RuntimeError with the driver's words."""
    words = ("out of resource", "too many resources requested")
    return isinstance(error, OutOfResources) or any(w in str(error).lower() for w in words)


def launch(spec: Spec, tile: Tile, device: Device, grid: tuple[int, ...], *args) -> None:
    try:
        gemm.gemm_kernel[grid](*args, **constants(spec, tile))
    except (OutOfResources, RuntimeError) as error:
        if not _wants_resources(error):
            raise
        _fits[device, spec, tile] = False
        logger.warning(
            "%s refused tile %s of the product kernel (%s); the next one is used", device.name, tile, error
        )
        raise TryNext from error
