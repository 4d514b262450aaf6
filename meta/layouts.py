"""Table of layouts: the order of bytes inside a packed weight. csrc/generate/tables.py writes it for C++.

`plain`: byte j of row n holds the codes of k = 2j (low nibble) and k = 2j + 1 (high nibble). Every kernel
family has a path for it.

`tile16`: for the CPU kernels, made by `fp4::prepack`. Panels of 16 rows are interleaved so that one vector
register holds the same few k of 16 rows. Rows after the last whole panel keep the plain order, and so does a
matrix whose K is no multiple of `TILE16_K`. Shapes and dtypes are those of `plain`. csrc/cpu/layout.h defines
the order inside a panel.

`sm90`: for the Hopper kernels, made by `fp4::prepack`. It holds nvfp4 and mxfp4: e2m1 codes, an e4m3 scale
for each block, a float32 factor for each matrix. K is a multiple of 16, and zero codes pad it to Kp, a
multiple of 128. packed is uint8 [..., N, Kp/2], block_scale uint8 [..., N, Kp/block], global_scale float32
[...] for both formats. csrc/common/sm90_layout.h defines the order of the bits.

`mma_bf16`: `sm90` with another order of bits and other scale bytes. Its kernels multiply bfloat16 and float16
activations on all GPUs from compute capability 8.0 on, and are faster than those of `sm90` there. No kernel
of this layout reads fp8 activations. Only `fp4::moe` takes int8 activations with it, and only for many rows.

`sm90_int4`: for the Hopper kernel of int4 weights and fp8 activations, made by `fp4::prepack`. packed has the
shape of `sm90`. block_scale is float32 [..., N, Kp/block] with its values in the order [..., N/16, Kp/block,
16 rows]. global_scale is float32 [...]: a power of two that divides the matrix's block scales, so that 8
times the largest of them lies between 224 and 448, the largest e4m3. csrc/cpu/sm90_layout.h has the bits.

`tile16_invariant`, `sm90_invariant`, `mma_bf16_invariant`, `sm90_int4_invariant`: the bytes of the layout
without `_invariant`. The name tells the kernels that the bits of a row must not depend on the other rows of a
call. So they sum in one order for any number of rows (docs/operators.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from .formats import A_FORMATS, FORMAT_NAMES, FORMATS, FP4_NAMES, INT4_FORMATS, Format
from .torch_internals import torchscript_trace, without_recording


@dataclass(frozen=True)
class Layout:
    """Requirements of a layout on its operands, beside the order of the bytes."""

    name: str
    n_multiple: int = 1
    """N must be a multiple of this."""
    k_multiple: int = 1
    """K must be a multiple of this."""
    k_padding: int = 1
    """K is padded with zeros to a multiple of this."""
    scale_dtype: torch.dtype | None = None
    """Dtype of the block scales, whatever the format. If set, the padding of K has block scales, too."""
    has_factor: bool = False
    """True if each matrix has one float32 factor, whatever the format."""
    formats: tuple[str, ...] = FORMAT_NAMES
    """Formats that the layout can hold, sorted."""
    native: bool = False
    """True if only the native CUDA kernels read this layout."""
    interleaved: bool = False
    """True if the kernels expect each gate row beside its up row in an expert block."""
    a_dtypes: tuple[torch.dtype, ...] = ()
    """Dtypes of activations that the kernels read. Empty: all."""
    a_formats: tuple[str, ...] = ()
    """Values of `a_format` that `fp4::moe` takes with this layout. Empty: all."""
    a_layout: str = "plain"
    """Order of fp8 activations: the `layout` of `fp4::quantize_fp8`."""
    base: str = ""
    """Layout with the same bytes. Empty: no other has them."""
    batch_invariant: bool = False
    """True if the kernels sum a row in one order, whatever other rows are in a call."""

    @property
    def order(self) -> str:
        """Name of the order of the bytes."""
        return self.base or self.name

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        return () if self.scale_dtype is None else (self.scale_dtype,)

    def padded(self, k: int) -> int:
        return (k + self.k_padding - 1) // self.k_padding * self.k_padding

    def leaves(self, a_format: str) -> bool:
        """True if kernels may read activations unquantised with this `a_format` of `fp4::moe`."""
        if a_format == "int8":
            return self.native  # the native kernels do not quantise few rows
        return a_format == "none" or (a_format == "auto" and "none" in (self.a_formats or A_FORMATS))

    def fits(
        self,
        weights: tuple[tuple[int, int], ...],
        dtype: torch.dtype | None,
        format: str | None,
        a_format: str,
        a_dtypes: Collection[torch.dtype],
    ) -> bool:
        """True if this layout can store weights (N, K) of `format` and its kernels accept the activations.

        `a_dtypes` are the dtypes that the kernels read. If `dtype` is None, they must read bf16 and fp16.
        """
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

_TILE16 = Layout("tile16")

_MMA_BF16 = replace(
    _SM90,
    name="mma_bf16",
    a_dtypes=(torch.bfloat16, torch.float16, torch.uint8, torch.float4_e2m1fn_x2),
    a_formats=("none", "int8", "nvfp4", "mxfp4"),
    a_layout="plain",
)

_SM90_INT4 = Layout(
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
)


def _invariant(layout: Layout) -> Layout:
    """Returns the layout of the same bytes whose kernels sum a row in one order."""
    formats = layout.a_formats
    if "none" in formats:  # "auto" would choose by the number of rows
        formats = tuple(a for a in formats if a != "auto")
    return replace(
        layout, name=f"{layout.name}_invariant", base=layout.name, batch_invariant=True, a_formats=formats
    )


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("plain"),
        _TILE16,
        _SM90,
        _MMA_BF16,
        _SM90_INT4,
        *map(_invariant, (_TILE16, _SM90, _MMA_BF16, _SM90_INT4)),
    )
}
"""By name. State dicts hold a layout's place in here, so new ones go to the end."""


def same_bytes(layout: str, other: str) -> bool:
    """True if weights in one layout are weights in the other under another name."""
    orders = {name: known.order for name, known in LAYOUTS.items()}
    return orders.get(layout, layout) == orders.get(other, other)


def packed_spec(
    fmt: Format,
    layout: Layout,
    lead: tuple[int, ...],
    n: int,
    k: int,
    scale_dtype: torch.dtype | None = None,
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Returns shape and dtype of packed, block_scale and any global_scale of a weight [*lead, n, k].

    `scale_dtype` is the dtype of the plain layout's block scales, if it is not that of `fp4::quantize`.
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
    """Returns `operand` as modules and tensor subclasses store it: dtypes of one byte become a uint8 view.

    Pickle, collectives, NumPy and `torch.equal` all support uint8; none of them supports all float8 dtypes.
    """
    if operand.dtype == torch.uint8 or operand.dtype.itemsize != 1:
        return operand
    with torch.inference_mode(False):  # a view made in inference mode cannot be written to later
        return operand.view(torch.uint8)


def block_scales(scale: torch.Tensor, format: str, layout: str) -> torch.Tensor:
    """Undoes `byte_view` for block scales: returns a view in the dtype that operators take."""
    if scale.dtype != torch.uint8:
        return scale
    dtype = LAYOUTS[layout].scale_dtype or FORMATS[format].scale_dtype
    if torchscript_trace() is None:
        return scale.view(dtype)
    return without_recording(lambda: scale.view(dtype))  # TorchScript cannot record view(dtype)


LAYOUT_NAMES = tuple(sorted(LAYOUTS))

A_LAYOUTS = ("plain", "sm90")
"""Orders in which `fp4::quantize_fp8` can write a row."""

TILE16_ROWS = 16
TILE16_K = 32


_preferred: dict[str, Callable[[], tuple[str, ...]]] = {"cpu": lambda: ("tile16", "tile16_invariant")}


_plain: dict[str, Callable[[str | None, str], bool]] = {}

_reads: dict[str, Callable[[str], Collection[torch.dtype]]] = {}


def prefer(
    device_type: str,
    layouts: Callable[[], tuple[str, ...]],
    plain: Callable[[str | None, str], bool] = lambda format, a_format: False,
    reads: Callable[[str], Collection[torch.dtype]] = lambda layout: LAYOUTS[layout].a_dtypes,
) -> None:
    """Registers the layouts that the kernels of a device type prefer.

    `layouts()` lists them, the fastest first; it is called when weights are packed. `plain(format, a_format)`
    is True if the kernels read layout `plain` fastest. `reads(layout)` gives the dtypes of activations.
    """
    _preferred[device_type], _plain[device_type], _reads[device_type] = layouts, plain, reads


def preferred_layout(
    device_type: str,
    *weights: tuple[int, int],
    dtype: torch.dtype | None = None,
    format: str | None = None,
    a_format: str = "none",
    batch_invariant: bool = False,
) -> str:
    """Returns the layout that the device's kernels read fastest, among those that hold all weights (N, K).

    `dtype` is the dtype of the activations, and `format` the format of the weights. Each is None if it is not
    known. `a_format` says how activations will be quantised before each product, as in `fp4::moe`.
    `batch_invariant`: choose among the layouts whose kernels are batch invariant; raises ValueError if the
    device has none. Weights on the meta device get layout plain, because they will be moved to another
    device.
    """
    if batch_invariant:
        if device_type == "meta":
            return "plain"
        if a_format == "auto":  # rows stay unquantised, unless the kernels read only fp8
            a_format = "auto" if format in INT4_FORMATS and device_type != "cpu" else "none"
    elif device_type in _plain and _plain[device_type](format, a_format):
        return "plain"
    names = [
        name
        for name in _preferred.get(device_type, tuple)()
        if LAYOUTS[name].batch_invariant == batch_invariant
    ]
    if a_format == "auto" and not any("auto" in LAYOUTS[name].a_formats for name in names):
        a_format = "none"  # as `fp4_ops.experts.auto_a_format` decides for such layouts
    for name in names:
        a_dtypes = _reads[device_type](name) if device_type in _reads else LAYOUTS[name].a_dtypes
        if LAYOUTS[name].fits(weights, dtype, format, a_format, a_dtypes):
            return name
    if batch_invariant:
        raise ValueError(_no_invariant(device_type, weights, format))
    return "plain"


def _no_invariant(device_type: str, weights: tuple[tuple[int, int], ...], format: str | None) -> str:
    """Returns the error where no batch invariant layout holds the weights on a device."""
    of = "".join(f" {n} x {k}," for n, k in weights)
    return (
        f"fp4: batch_invariant=True, and no batch invariant kernel on {device_type} multiplies weights"
        f"{of.rstrip(',')}{f' in {format}' if format else ''}. Hopper's and the mma kernels need "
        "N a multiple of 64 and K of 16; the CPU's kernels multiply all. "
        "Leave batch_invariant out, or move the model to the CPU"
    )
