"""Checks the operands that several operators have: weights, their scales, activations, biases.

setup.py translates this file to C++, as checks.py. So the functions here use only what
csrc/generate/operator_checks.py can translate: conditions of check_parts.py, sizes, dtypes, rows of tables.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .check_parts import (
    Dtypes,
    Shape,
    check,
    check_device,
    check_dtype,
    check_name,
    check_shape,
    common,
    dtype_name,
    dtype_names,
    leading,
)
from .formats import FORMAT_NAMES, FORMATS, FP4_NAMES, INT8_BLOCK, Format
from .layouts import LAYOUT_NAMES, LAYOUTS, Layout

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
FLOATING_OR_DOUBLE = (*FLOATING, torch.float64)
PACKED = (torch.uint8, torch.float4_e2m1fn_x2)
INDEX = (torch.int32, torch.int64)
BOOLEAN = (torch.bool,)
INT32 = (torch.int32,)
FLOAT32 = (torch.float32,)
FLOAT8 = (torch.float8_e4m3fn,)
ACTIVATION = (*FLOATING, torch.int8, torch.float8_e4m3fn, *PACKED)


class Weight(NamedTuple):
    """Sizes of a packed weight. `k` includes the padding of its layout. `groups` is 1 for a single matrix."""

    groups: int
    n: int
    k: int
    format: Format
    layout: Layout
    scale_dtype: torch.dtype


class Stored(NamedTuple):
    format: Format
    layout: Layout


class Experts(NamedTuple):
    up: Weight
    down: Weight


def check_format(format: str) -> Format:
    check_name("format", format, FORMAT_NAMES)
    return FORMATS[format]


def check_layout(layout: str) -> Layout:
    check_name("layout", layout, LAYOUT_NAMES)
    return LAYOUTS[layout]


def check_holds(layout: Layout, fmt: Format) -> None:
    check_name("format", fmt.name, layout.formats, f"with layout '{layout.name}' ")


def check_dim(name: str, t: torch.Tensor, dim: int) -> None:
    check(t.dim() == dim, lambda: f"{name} has {t.dim()} dimensions; it must have {dim}")


def check_not_scalar(name: str, t: torch.Tensor) -> None:
    check(t.dim() >= 1, lambda: f"{name} has 0 dimensions; it must have 1 or more")


def check_matrices(packed: torch.Tensor) -> None:
    check(
        packed.dim() == 2 or packed.dim() == 3,
        lambda: f"packed has {packed.dim()} dimensions; it must have 2 or 3",
    )


def check_multiple(name: str, what: str, count: int, multiple: int, layout: Layout) -> None:
    check(
        count % multiple == 0,
        lambda: f"{name} has {count} {what}; layout '{layout.name}' needs a multiple of {multiple}",
    )


def check_count(name: str, count: int) -> None:
    check(count >= 0, lambda: f"{name} is {count}; it must be 0 or more")


def check_offsets(name: str, t: torch.Tensor) -> None:
    check_dtype(name, t, INT32)
    check_dim(name, t, 1)


def check_operand(
    name: str, t: torch.Tensor, like_name: str, like: torch.Tensor, shape: Shape, dtypes: Dtypes
) -> None:
    """Checks a tensor beside the activations: routing weights, offsets, expert ids, scales."""
    check_dtype(name, t, dtypes)
    check_device(name, t, like_name, like)
    check_shape(name, t, shape)


def check_like(name: str, t: torch.Tensor, like_name: str, like: torch.Tensor) -> None:
    """Checks that a tensor has the dtype and the device of another."""
    check(
        t.dtype == like.dtype,
        lambda: (
            f"{name} has dtype {dtype_name(t.dtype)}; {like_name} has {dtype_name(like.dtype)}, "
            "and they must be equal"
        ),
    )
    check_device(name, t, like_name, like)


def check_bias(
    name: str, bias: torch.Tensor | None, like_name: str, like: torch.Tensor, shape: Shape
) -> None:
    """Checks the bias: one row of N for each expert, or None."""
    if bias is not None:
        check_operand(name, bias, like_name, like, shape, FLOATING)


# --- weights ---


def check_block_scale(
    scale_name: str, scale: torch.Tensor, name: str, packed: torch.Tensor, fmt: Format
) -> None:
    """Checks block scales [..., ceil(K/block)] of packed [..., K/2]."""
    shape = (*leading(packed, -1), fmt.num_blocks(packed.shape[-1] * 2))
    check_operand(scale_name, scale, name, packed, shape, fmt.scale_dtypes)


def check_factor(scale_name: str, scale: torch.Tensor, name: str, packed: torch.Tensor) -> None:
    """Checks a float32 scale of shape packed.shape[:-2]: one factor for each matrix."""
    check_operand(scale_name, scale, name, packed, leading(packed, -2), FLOAT32)


def check_global_scale(
    scale_name: str, scale: torch.Tensor | None, name: str, packed: torch.Tensor, fmt: Format
) -> None:
    """Checks the global scale, one float32 factor for each matrix. Formats without one must get None."""
    if not fmt.has_global_scale:
        check(
            scale is None or scale.numel() == 0,
            lambda: f"{scale_name} was given; format {fmt.name} has no global scale",
        )
        return
    check(scale is not None, lambda: f"{scale_name} is missing; format {fmt.name} needs one")
    assert scale is not None
    check_factor(scale_name, scale, name, packed)


def check_scales(
    scale_name: str,
    block_scale: torch.Tensor,
    global_name: str,
    global_scale: torch.Tensor | None,
    name: str,
    packed: torch.Tensor,
    fmt: Format,
    layout: Layout,
) -> None:
    """Checks the scales of packed [..., N, K/2] (K padded) as the layout stores them."""
    if layout.scale_dtype is None:
        check_block_scale(scale_name, block_scale, name, packed, fmt)
        check_global_scale(global_name, global_scale, name, packed, fmt)
        return
    k = packed.shape[-1] * 2
    check_multiple(name, "rows", packed.shape[-2], layout.n_multiple, layout)
    check_multiple(name, "columns", k, layout.k_padding, layout)
    shape = (*leading(packed, -1), k // fmt.block)
    check_operand(scale_name, block_scale, name, packed, shape, layout.scale_dtypes)
    if not layout.has_factor:
        check_global_scale(global_name, global_scale, name, packed, fmt)
        return
    check(global_scale is not None, lambda: f"{global_name} is missing; layout '{layout.name}' needs one")
    assert global_scale is not None
    check_factor(global_name, global_scale, name, packed)


def check_weight(
    name: str,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_global_scale: torch.Tensor | None,
    format: str,
    layout: str,
    grouped: bool,
) -> Weight:
    """Checks a weight operand: b [G, N, K/2] if grouped, else [N, K/2]."""
    fmt = check_format(format)
    order = check_layout(layout)
    check_holds(order, fmt)
    check_dtype(name, b, fmt.packed_dtypes)
    check_dim(name, b, 3 if grouped else 2)
    check_scales(f"{name}_scale", b_scale, f"{name}_global_scale", b_global_scale, name, b, fmt, order)
    groups = b.shape[0] if grouped else 1
    return Weight(groups, b.shape[-2], b.shape[-1] * 2, fmt, order, b_scale.dtype)


# --- activations ---


def check_a_dtype(name: str, a: torch.Tensor, layout: Layout, among: Dtypes) -> None:
    """Checks that the layout's kernels read this dtype, one of `among`. Layouts plain and tile16 read all."""
    if len(layout.a_dtypes) == 0:
        return
    allowed = common(layout.a_dtypes, among)
    hint = f" (from quantize_fp8 with layout='{layout.a_layout}')" if allowed == FLOAT8 else ""
    check(
        a.dtype in allowed,
        lambda: (
            f"{name} has dtype {dtype_name(a.dtype)}; "
            f"layout '{layout.name}' reads {dtype_names(allowed)}{hint}"
        ),
    )


def check_columns(name: str, columns: int, padded: bool, b_name: str, b: Weight) -> None:
    """Checks that K equals the weight's. `padded`: `columns` includes the weight's padding already."""
    multiple = b.layout.k_padding
    note = f" (padded to a multiple of {multiple})" if multiple > 1 else ""
    check_multiple(name, "columns", columns, b.layout.k_multiple, b.layout)
    k = columns if padded else b.layout.padded(columns)
    check(
        k == b.k,
        lambda: f"{name} has {columns} columns; {b_name} has K = {b.k}{note}, and they must be equal",
    )


def check_a_scale(a: torch.Tensor, a_scale: torch.Tensor | None, shape: Shape) -> None:
    """Checks the float32 scales of int8 or fp8 activations."""
    check(a_scale is not None, lambda: f"a_scale is missing; {dtype_name(a.dtype)} activations need one")
    assert a_scale is not None
    check_operand("a_scale", a_scale, "a", a, shape, FLOAT32)


def check_no_a_global_scale(a_global_scale: torch.Tensor | None) -> None:
    check(
        a_global_scale is None or a_global_scale.numel() == 0,
        lambda: "a_global_scale was given; only nvfp4 activations have one",
    )


def check_a_packed(
    a: torch.Tensor, a_scale: torch.Tensor | None, a_global_scale: torch.Tensor | None, fmt: Format
) -> None:
    """Checks packed activations [..., K/2] and their block scales.

    nvfp4 also has global scales: one for all rows, one a group, or one a row.
    """
    check(a_scale is not None, lambda: f"a_scale is missing; {fmt.name} activations need one")
    assert a_scale is not None
    check_block_scale("a_scale", a_scale, "a", a, fmt)
    if not fmt.has_global_scale:
        check_no_a_global_scale(a_global_scale)
        return
    check(a_global_scale is not None, lambda: f"a_global_scale is missing; {fmt.name} activations need one")
    assert a_global_scale is not None
    check_dtype("a_global_scale", a_global_scale, FLOAT32)
    check_device("a_global_scale", a_global_scale, "a", a)
    dim = a_global_scale.dim()
    most = a.dim() - 1
    check(dim <= most, lambda: f"a_global_scale has {dim} dimensions; it must have at most {most}")
    check_shape("a_global_scale", a_global_scale, leading(a, dim))


def check_a(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    a_global_scale: torch.Tensor | None,
    a_format: str,
    b: torch.Tensor,
    w: Weight,
    dim: int,
) -> None:
    """Checks activations [..., K] of one of these kinds:

    float32, bfloat16, float16: no scales.
    int8: a_scale float32 [..., ceil(K/32)].
    float8_e4m3fn: a_scale float32 [...], one a row.
    packed e2m1 [..., K/2]: a_scale [..., ceil(K/block)] and a_global_scale as `a_format` says.
    """
    check_dtype("a", a, ACTIVATION)
    check_a_dtype("a", a, w.layout, ACTIVATION)
    check_dim("a", a, dim)
    check_device("a", a, "b", b)
    if a.dtype in PACKED:
        check_name("a_format", a_format, FP4_NAMES, "for packed a ")
        check_columns("a", a.shape[-1] * 2, False, "b", w)
        check_a_packed(a, a_scale, a_global_scale, FORMATS[a_format])
        return
    check(
        a_format == "",
        lambda: f"a_format is '{a_format}'; only packed a has one, for others it must be ''",
    )
    # quantize_fp8 pads its rows itself where the layout asks for it.
    check_columns("a", a.shape[-1], a.dtype == torch.float8_e4m3fn, "b", w)
    check_no_a_global_scale(a_global_scale)
    if a.dtype == torch.int8:
        check_a_scale(a, a_scale, (*leading(a, -1), (w.k + INT8_BLOCK - 1) // INT8_BLOCK))
    elif a.dtype == torch.float8_e4m3fn:
        check_a_scale(a, a_scale, leading(a, -1))
    else:
        check(a_scale is None, lambda: f"a_scale was given; {dtype_name(a.dtype)} activations have none")


def resolve_out_dtype(a: torch.Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """Returns the output dtype: `out_dtype` if given, else that of floating activations, else bfloat16."""
    if out_dtype is None:
        return a.dtype if a.dtype in FLOATING else torch.bfloat16
    check(
        out_dtype in FLOATING,
        lambda: f"out_dtype is {dtype_name(out_dtype)}; it must be {dtype_names(FLOATING)}",
    )
    return out_dtype
