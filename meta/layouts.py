"""Orders of the bytes inside a packed weight, as data. C++ gets the same rows: csrc/generate/tables.py.

`plain`: row n, byte j holds the codes of k = 2j (low nibble) and k = 2j + 1 (high nibble); always accepted.

`tile16`: made by `fp4::prepack` for the CPU kernels: panels of 16 rows, interleaved so that one vector
register holds the same few k of 16 rows. Rows past the last whole panel, and matrices whose K no
`TILE16_K` divides, keep the plain order. csrc/cpu/layout.h defines the order inside a panel. Shapes, dtypes
and byte counts are those of `plain`.

`sm90`: made by `fp4::prepack` for the Hopper kernels. It holds nvfp4 and mxfp4: e2m1 codes, an e4m3 scale a
block of the format, one float32 factor a matrix; K, a multiple of 16, is padded to Kp, a multiple of 128,
with zero codes. So packed is uint8 [..., N, Kp/2], block_scale uint8 [..., N, Kp/block] and global_scale
float32 [...], for mxfp4 too. csrc/common/sm90_layout.h defines the order of the bits.

`mma_bf16`: `sm90` with codes and bits in another order and other scale bytes, for the kernels of bfloat16
activations, which all GPUs from compute capability 8.0 on have: products are faster there than in `sm90`, and
take rows as they are, but fp8 rows find no kernel.

`sm90_int4`: made by `fp4::prepack` for the Hopper kernel of int4 weights and fp8 activations. packed has the
shape of `sm90`, block_scale is float32 [..., N, Kp/block], its values in the order [..., N/16, Kp/block, 16
rows], and global_scale float32 [...]: the power of two by which a matrix's block scales were divided, so that
8 times the largest of them is 224 to 448, the largest e4m3. csrc/cpu/sm90_layout.h has the bits of a code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from .formats import A_FORMATS, FORMAT_NAMES, FORMATS, FP4_NAMES, INT4_FORMATS, Format


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
    scale_dtype: torch.dtype | None = None
    """If set, block scales have this dtype, whatever the format, and there are those of the padded K."""
    has_factor: bool = False
    """Whether there is one float32 factor a matrix, whatever the format."""
    formats: tuple[str, ...] = FORMAT_NAMES
    """Those that it holds, sorted."""
    native: bool = False
    """Whether it is for the native CUDA kernels, which alone read it."""
    interleaved: bool = False
    """Whether they apply the gate of an expert block to a gate and an up row that lie side by side."""
    a_dtypes: tuple[torch.dtype, ...] = ()
    """The activations that its kernels read; empty: all."""
    a_formats: tuple[str, ...] = ()
    """The `a_format`s of `fp4::moe` that give such activations; empty: all."""
    a_layout: str = "plain"
    """The order of fp8 activations: the `layout` of `fp4::quantize_fp8`."""

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        return () if self.scale_dtype is None else (self.scale_dtype,)

    def padded(self, k: int) -> int:
        return (k + self.k_padding - 1) // self.k_padding * self.k_padding

    def leaves(self, a_format: str) -> bool:
        """Whether with this `a_format` of `fp4::moe` its kernels may read activations in their own dtype."""
        if a_format == "int8":
            return self.native  # few rows are left
        return a_format == "none" or (a_format == "auto" and "none" in (self.a_formats or A_FORMATS))

    def fits(
        self,
        weights: tuple[tuple[int, int], ...],
        dtype: torch.dtype | None,
        format: str | None,
        a_format: str,
        a_dtypes: Collection[torch.dtype],
    ) -> bool:
        """Whether it holds these weights (N, K) and its kernels, which read `a_dtypes`, read the activations,
        those of both 16-bit dtypes where `dtype` is not known: `preferred_layout`."""
        if any(n % self.n_multiple or k % self.k_multiple for n, k in weights):
            return False
        if format is not None and format not in self.formats:
            return False
        if self.a_formats and a_format not in self.a_formats:
            return False
        if not a_dtypes or not self.leaves(a_format):
            return True
        return dtype in a_dtypes if dtype is not None else torch.float16 in a_dtypes


_SM90 = Layout(
    "sm90",
    n_multiple=64,
    k_multiple=16,
    k_padding=128,
    scale_dtype=torch.uint8,
    has_factor=True,
    formats=FP4_NAMES,
    native=True,
    interleaved=True,
    a_dtypes=(torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.float4_e2m1fn_x2),
    a_formats=("none", "fp8", "nvfp4", "mxfp4", "auto"),
    a_layout="sm90",
)

LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("plain"),
        Layout("tile16"),
        _SM90,
        replace(
            _SM90,
            name="mma_bf16",
            a_dtypes=(torch.bfloat16, torch.float16, torch.uint8, torch.float4_e2m1fn_x2),
            a_formats=("none", "int8", "nvfp4", "mxfp4"),
            a_layout="plain",
        ),
        Layout(
            "sm90_int4",
            n_multiple=64,
            k_multiple=16,
            k_padding=128,
            scale_dtype=torch.float32,
            has_factor=True,
            formats=tuple(sorted(INT4_FORMATS)),
            native=True,
            a_dtypes=(torch.float8_e4m3fn,),
            a_formats=("fp8", "auto"),
            a_layout="sm90",
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
    if layout.scale_dtype is None:
        scale = ((*lead, n, fmt.num_blocks(k)), scale_dtype or fmt.scale_dtype)
    else:
        scale = ((*lead, n, k // fmt.block), layout.scale_dtype)
    spec = [((*lead, n, k // 2), torch.uint8), scale]
    if fmt.has_global_scale or layout.has_factor:
        spec.append((lead, torch.float32))
    return spec


def byte_view(operand: torch.Tensor) -> torch.Tensor:
    """`operand` as modules and tensor subclasses hold it: what has one byte an element as uint8, uncopied.

    Pickle, collectives, numpy and `torch.equal` know uint8; of float8 each lacks something.
    """
    if operand.dtype == torch.uint8 or operand.dtype.itemsize != 1:
        return operand
    with torch.inference_mode(False):  # whose views could not be written to later
        return operand.view(torch.uint8)


def block_scales(scale: torch.Tensor, format: str, layout: str) -> torch.Tensor:
    """Return block scales as operators take them, uncopied: the inverse of `byte_view`."""
    if scale.dtype != torch.uint8:
        return scale
    dtype = LAYOUTS[layout].scale_dtype or FORMATS[format].scale_dtype
    if not torch.jit.is_tracing():
        return scale.view(dtype)
    # TorchScript cannot record view(dtype). While recording is off, the view becomes a constant of the trace.
    recording = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        return scale.view(dtype)
    finally:
        torch._C._set_tracing_state(recording)  # type: ignore[attr-defined]


LAYOUT_NAMES = tuple(sorted(LAYOUTS))

A_LAYOUTS = ("plain", "sm90")
"""The orders in which `fp4::quantize_fp8` can write a row."""

TILE16_ROWS = 16
TILE16_K = 32


_preferred: dict[str, Callable[[], tuple[str, ...]]] = {"cpu": lambda: ("tile16",)}


_plain: dict[str, Callable[[str | None, str], bool]] = {}

_reads: dict[str, Callable[[str], Collection[torch.dtype]]] = {}


def prefer(
    device_type: str,
    layouts: Callable[[], tuple[str, ...]],
    plain: Callable[[str | None, str], bool] = lambda format, a_format: False,
    reads: Callable[[str], Collection[torch.dtype]] = lambda layout: LAYOUTS[layout].a_dtypes,
) -> None:
    """Kernels of one device say which layouts they read fastest, asked for when weights are packed, for which
    (format, a_format) they read `plain` fastest, and which activations they read with a layout."""
    _preferred[device_type], _plain[device_type], _reads[device_type] = layouts, plain, reads


def preferred_layout(
    device_type: str,
    *weights: tuple[int, int],
    dtype: torch.dtype | None = None,
    format: str | None = None,
    a_format: str = "none",
) -> str:
    """The layout this device's kernels read fastest, of those that can hold all these weights (N, K).

    `dtype`: of the activations, `format`: of the weights, where they are known. `a_format`: how activations
    will be quantised in front of each product, as `fp4::moe` names it.
    """
    if device_type in _plain and _plain[device_type](format, a_format):
        return "plain"
    names = _preferred.get(device_type, tuple)()
    if a_format == "auto" and not any("auto" in LAYOUTS[name].a_formats for name in names):
        a_format = "none"  # all that `fp4_ops.experts.auto_a_format` finds there
    for name in names:
        a_dtypes = _reads[device_type](name) if device_type in _reads else LAYOUTS[name].a_dtypes
        if LAYOUTS[name].fits(weights, dtype, format, a_format, a_dtypes):
            return name
    return "plain"
