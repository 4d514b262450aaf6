"""Orders of the bytes inside a packed weight, as data. The C++ twin is csrc/common/formats.h.

`plain`: row n, byte j holds the codes of k = 2j (low nibble) and k = 2j + 1 (high nibble); always accepted.

`tile16`: made by `fp4::prepack` for the CPU kernels: panels of 16 rows, interleaved so that one vector
register holds the same few k of 16 rows. Rows past the last whole panel, and matrices whose K no
`TILE16_K` divides, keep the plain order. csrc/cpu/layout.h defines the order inside a panel. Shapes, dtypes
and byte counts are those of `plain`.

`sm90`: made by `fp4::prepack` for the Hopper kernels. It holds nvfp4 and mxfp4 in one shape: e2m1 codes, one
scale byte a block of 16, one float32 factor a matrix; K, a multiple of 16, is padded to Kp, a multiple of
128, with zero codes and zero scales. So packed is uint8 [..., N, Kp/2], block_scale uint8 [..., N, Kp/16] and
global_scale float32 [...], for mxfp4 too. csrc/cpu/sm90_layout.h defines the order of the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .formats import ELEMENTS, FORMATS, Format


@dataclass(frozen=True)
class Layout:
    """What a layout asks of the operands, beyond the order of the bytes."""

    name: str
    n_multiple: int = 1
    """N must be a multiple of this."""
    k_multiple: int = 1
    """K must be a multiple of this, ..."""
    k_padding: int = 1
    """... and is padded with zeros to a multiple of this."""
    block: int | None = None
    """If set, every format has one uint8 scale a block of this many k and one float32 factor a matrix."""
    elements: tuple[str, ...] = tuple(ELEMENTS)
    """Of the formats that it holds."""
    a_dtypes: tuple[torch.dtype, ...] | None = None
    """The activations that its kernels read; None: all."""
    a_formats: tuple[str, ...] | None = None
    """The `a_format`s of `fp4::moe` that give such activations; None: all."""

    def padded(self, k: int) -> int:
        return (k + self.k_padding - 1) // self.k_padding * self.k_padding


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("plain"),
        Layout("tile16"),
        Layout(
            "sm90",
            n_multiple=64,
            k_multiple=16,
            k_padding=128,
            block=16,
            elements=("e2m1",),
            a_dtypes=(
                torch.bfloat16,
                torch.float16,
                torch.float8_e4m3fn,
                torch.uint8,
                torch.float4_e2m1fn_x2,
            ),
            a_formats=("none", "fp8", "nvfp4", "mxfp4", "auto"),
        ),
    )
}


def packed_spec(
    fmt: Format,
    layout: Layout,
    lead: tuple[int, ...],
    n: int,
    k: int,
    scale_dtype: torch.dtype | None = None,
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of packed, block_scale and, if there is one, global_scale of a weight [*lead, n, k].

    `scale_dtype`: of its block scales in the plain layout, where they are not as `fp4::quantize` makes them.
    """
    k = layout.padded(k)
    if layout.block is None:
        scale = ((*lead, n, fmt.num_blocks(k)), scale_dtype or fmt.scale_dtype)
    else:
        scale = ((*lead, n, k // layout.block), torch.uint8)
    spec = [((*lead, n, k // 2), torch.uint8), scale]
    if fmt.has_global_scale or layout.block is not None:
        spec.append((lead, torch.float32))
    return spec


A_LAYOUTS = ("plain", "sm90")
"""The orders in which `fp4::quantize_fp8` can write a row."""

TILE16_ROWS = 16
TILE16_K = 32


_preferred: dict[str, Callable[[], str]] = {"cpu": lambda: "tile16"}


def prefer(device_type: str, layout: Callable[[], str]) -> None:
    """Kernels of one device say which layout they read fastest, asked for when weights are packed."""
    _preferred[device_type] = layout


def preferred_layout(
    device_type: str,
    *weights: tuple[int, int],
    dtype: torch.dtype | None = None,
    format: str | None = None,
) -> str:
    """The layout this device's kernels read fastest, if it can hold all these weights (N, K).

    `dtype`: of the activations, `format`: of the weights, where they are known.
    """
    name = _preferred.get(device_type, lambda: "plain")()
    layout = LAYOUTS[name]
    fits = all(n % layout.n_multiple == 0 and k % layout.k_multiple == 0 for n, k in weights)
    if layout.a_dtypes is not None and dtype is not None:
        fits = fits and dtype in layout.a_dtypes
    if format is not None:
        fits = fits and FORMATS[format].element in layout.elements
    return name if fits else "plain"
