"""Checks the arguments of every operator, for fake kernels, Python kernels and C++ kernels.

setup.py translates this file to C++ (build/operator_checks.h). So the functions here use only what
csrc/generate/operator_checks.py can translate: conditions of check_parts.py, sizes, dtypes, rows of tables.
Each operator's check returns the values that its fake and its kernels need next.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .check_parts import (
    Dtypes,
    Shape,
    check,
    check_activation,
    check_device,
    check_dtype,
    check_name,
    check_shape,
    common,
    dtype_name,
    dtype_names,
    leading,
)
from .formats import A_FORMAT_NAMES, FORMAT_NAMES, FORMATS, FP4_NAMES, INT8_BLOCK, Format
from .layouts import A_LAYOUTS, LAYOUT_NAMES, LAYOUTS, Layout

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
FLOATING_OR_DOUBLE = (*FLOATING, torch.float64)
PACKED = (torch.uint8, torch.float4_e2m1fn_x2)
INDEX = (torch.int32, torch.int64)
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


# --- one check for each operator ---


def check_quantize(x: torch.Tensor, global_scale: torch.Tensor | None, fmt: Format) -> None:
    """Checks x [..., K] with an even K. A global_scale must be float32 of shape x.shape[:-2]."""
    check_dtype("x", x, FLOATING)
    check_not_scalar("x", x)
    check(x.shape[-1] % 2 == 0, lambda: f"x has K = {x.shape[-1]} (last dimension); it must be even")
    if global_scale is not None:
        check_global_scale("global_scale", global_scale, "x", x, fmt)


def check_quantize_int8(x: torch.Tensor) -> None:
    check_dtype("x", x, FLOATING)
    check_not_scalar("x", x)


def check_quantize_fp8(x: torch.Tensor, layout: str) -> Layout:
    check_name("layout", layout, A_LAYOUTS)
    check_quantize_int8(x)
    return LAYOUTS[layout]


def check_dequantize(
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    format: str,
    dtype: torch.dtype,
    layout: str,
) -> Stored:
    fmt = check_format(format)
    order = check_layout(layout)
    check(
        dtype in FLOATING_OR_DOUBLE,
        lambda: f"dtype is {dtype_name(dtype)}; it must be {dtype_names(FLOATING_OR_DOUBLE)}",
    )
    check_holds(order, fmt)
    check_dtype("packed", packed, fmt.packed_dtypes)
    if order.scale_dtype is None:
        check_not_scalar("packed", packed)
    else:
        check_matrices(packed)
    check_scales("block_scale", block_scale, "global_scale", global_scale, "packed", packed, fmt, order)
    return Stored(fmt, order)


def check_stored(
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    format: str,
    layout: str,
    stored: str,
) -> Stored:
    """Checks a weight that is in layout `stored` and whose format `layout` can hold."""
    fmt = check_format(format)
    order = check_layout(layout)
    check_holds(order, fmt)
    check_dtype("packed", packed, fmt.packed_dtypes)
    check_matrices(packed)
    check_scales(
        "block_scale", block_scale, "global_scale", global_scale, "packed", packed, fmt, LAYOUTS[stored]
    )
    return Stored(fmt, order)


def check_prepack(
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    format: str,
    layout: str,
) -> Stored:
    """Checks a plain weight that `layout` can hold."""
    checked = check_stored(packed, block_scale, global_scale, format, layout, "plain")
    check_multiple("packed", "rows", packed.shape[-2], checked.layout.n_multiple, checked.layout)
    check_multiple("packed", "columns", packed.shape[-1] * 2, checked.layout.k_multiple, checked.layout)
    return checked


def check_unpack(
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    format: str,
    layout: str,
) -> Stored:
    """Checks a weight that is in `layout`."""
    return check_stored(packed, block_scale, global_scale, format, layout, layout)


def check_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_global_scale: torch.Tensor | None,
    format: str,
    layout: str,
    a_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    a_global_scale: torch.Tensor | None,
    a_format: str,
) -> Weight:
    w = check_weight("b", b, b_scale, b_global_scale, format, layout, False)
    check_a(a, a_scale, a_global_scale, a_format, b, w, 2)
    check_bias("bias", bias, "b", b, (w.n,))
    return w


def check_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_global_scale: torch.Tensor | None,
    offs: torch.Tensor,
    format: str,
    layout: str,
    a_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    a_global_scale: torch.Tensor | None,
    a_format: str,
) -> Weight:
    w = check_weight("b", b, b_scale, b_global_scale, format, layout, True)
    check_a(a, a_scale, a_global_scale, a_format, b, w, 2)
    check_operand("offs", offs, "b", b, (w.groups,), INT32)
    check_bias("bias", bias, "b", b, (w.groups, w.n))
    return w


def check_grouped_mm_masked(
    a: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_global_scale: torch.Tensor | None,
    masked_m: torch.Tensor,
    format: str,
    layout: str,
    a_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    a_global_scale: torch.Tensor | None,
    a_format: str,
) -> Weight:
    w = check_weight("b", b, b_scale, b_global_scale, format, layout, True)
    check_a(a, a_scale, a_global_scale, a_format, b, w, 3)
    check(
        a.shape[0] == w.groups,
        lambda: f"a has {a.shape[0]} groups; b has {w.groups}, and they must be equal",
    )
    check_operand("masked_m", masked_m, "b", b, (w.groups,), INT32)
    check_bias("bias", bias, "b", b, (w.groups, w.n))
    return w


def check_indexed_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_global_scale: torch.Tensor | None,
    expert_ids: torch.Tensor,
    format: str,
    layout: str,
    a_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    a_global_scale: torch.Tensor | None,
    a_format: str,
) -> Weight:
    w = check_weight("b", b, b_scale, b_global_scale, format, layout, True)
    check_a(a, a_scale, a_global_scale, a_format, b, w, 2)
    check_operand("expert_ids", expert_ids, "b", b, (a.shape[0],), INDEX)
    check_bias("bias", bias, "b", b, (w.groups, w.n))
    return w


def check_grouped_mm_k(
    a: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_global_scale: torch.Tensor | None,
    offs: torch.Tensor,
    format: str,
    layout: str,
    a_scale: torch.Tensor | None,
    a_global_scale: torch.Tensor | None,
    a_format: str,
) -> Weight:
    """Checks a [M, T] and b [N, T/2]. `offs` is int32 [G]: the end of each group within T."""
    w = check_weight("b", b, b_scale, b_global_scale, format, layout, False)
    check_a(a, a_scale, a_global_scale, a_format, b, w, 2)
    check_offsets("offs", offs)
    check_device("offs", offs, "a", a)
    return w


def check_moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_global_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_global_scale: torch.Tensor | None,
    format: str,
    layout: str,
    activation: str,
    a_format: str,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
) -> Experts:
    """Checks x [T, H], topk_ids and topk_weights [T, top_k], w13 and w2 [E, H, I/2].

    w13 is [E, 2 I, H/2], or [E, I, H/2] if the activation has no gate.
    """
    up = check_weight("w13", w13, w13_scale, w13_global_scale, format, layout, True)
    down = check_weight("w2", w2, w2_scale, w2_global_scale, format, layout, True)
    act = check_activation(activation)
    check_name("a_format", a_format, A_FORMAT_NAMES)
    if len(up.layout.a_formats) > 0:
        when = f"with layout '{layout}' "
        check_name("a_format", a_format, up.layout.a_formats, when, "; layout 'plain' takes others")
    check_dtype("x", x, FLOATING)
    if up.layout.leaves(a_format):
        check_a_dtype("x", x, up.layout, FLOATING)
    check_dim("x", x, 2)
    check_device("x", x, "w13", w13)
    check_device("w2", w2, "w13", w13)
    check_columns("x", x.shape[1], False, "w13", up)
    check_dim("topk_ids", topk_ids, 2)
    check_operand("topk_ids", topk_ids, "w13", w13, (x.shape[0], topk_ids.shape[1]), INDEX)
    check_operand("topk_weights", topk_weights, "w13", w13, (x.shape[0], topk_ids.shape[1]), FLOATING)
    wanted = "twice that (gate and up)" if act.gated else f"as many ('{activation}' has no gate)"
    check(
        up.n % act.parts == 0 and up.layout.padded(up.n // act.parts) == down.k,
        lambda: f"w13 has {up.n} rows; w2 has K = {down.k}, and w13 must have {wanted}",
    )
    check(
        up.groups == down.groups,
        lambda: f"w2 has {down.groups} experts; w13 has {up.groups}, and they must be equal",
    )
    check_bias("w13_bias", w13_bias, "w13", w13, (up.groups, up.n))
    check_bias("w2_bias", w2_bias, "w13", w13, (down.groups, down.n))
    return Experts(up, down)


def check_moe_input_grads(
    grad: torch.Tensor,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_global_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_global_scale: torch.Tensor | None,
    format: str,
    layout: str,
    activation: str,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
) -> None:
    """Checks the arguments of `check_moe` and grad [T, H], whatever the activations' quantisation."""
    order = check_layout(layout)
    # No kernel reads x here, so any format that the layout takes will do.
    any_format = "nvfp4" if len(order.a_formats) == 0 or "nvfp4" in order.a_formats else "fp8"
    experts = check_moe(
        x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale,
        format, layout, activation, any_format, w13_bias, w2_bias,
    )  # fmt: skip
    check_operand("grad", grad, "x", x, (x.shape[0], experts.down.n), FLOATING)


def check_linears(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    weights: int,
    biases: int,
    keep_norm: bool,
) -> None:
    """Checks what all products share; `check_linear` checks each. `weights`, `biases`: their numbers."""
    check_dtype("x", x, FLOATING)
    check_not_scalar("x", x)
    check(weights >= 1, lambda: "weights is empty; it must have 1 or more tensors")
    check(
        biases == weights,
        lambda: f"biases has {biases} entries; weights has {weights}, and they must be equal",
    )
    check(
        residual is None or weights == 1,
        lambda: f"residual was given; weights has {weights} tensors, and a residual needs exactly 1",
    )
    check(
        not keep_norm or norm_weight is not None,
        lambda: "keep_norm is True; it needs norm_weight",
    )
    if norm_weight is not None:
        check_like("norm_weight", norm_weight, "x", x)
        check_shape("norm_weight", norm_weight, (x.shape[-1],))


def check_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> None:
    """Checks one product of `linears`: x [..., K], weight [N, K], bias [N], residual [..., N]."""
    check_like("weights", weight, "x", x)
    check_dim("weights", weight, 2)
    check(
        weight.shape[1] == x.shape[-1],
        lambda: f"weights has {weight.shape[1]} columns; x has {x.shape[-1]}, and they must be equal",
    )
    if bias is not None:
        check_like("biases", bias, "x", x)
        check_shape("biases", bias, (weight.shape[0],))
    if residual is not None:
        check_like("residual", residual, "x", x)
        check_shape("residual", residual, (*leading(x, -1), weight.shape[0]))


def check_update_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: torch.Tensor,
) -> None:
    check_dtype("q", q, FLOATING)
    check_dim("q", q, 4)
    check(q.shape[3] % 2 == 0, lambda: f"q has heads of size {q.shape[3]}; it must be a multiple of 2")
    check_like("k", k, "q", q)
    check_dim("k", k, 4)
    check_shape("k", k, (q.shape[0], q.shape[1], k.shape[2], q.shape[3]))
    check_like("v", v, "q", q)
    check_dim("v", v, 4)
    check_shape("v", v, (q.shape[0], q.shape[1], k.shape[2], v.shape[3]))
    check_like("cos", cos, "q", q)
    check_dim("cos", cos, 3)
    check(
        cos.shape[0] == 1 or cos.shape[0] == q.shape[0],
        lambda: f"cos has {cos.shape[0]} sequences; it must have 1 or {q.shape[0]}, as many as q",
    )
    check_shape("cos", cos, (cos.shape[0], q.shape[1], q.shape[3]))
    check_like("sin", sin, "q", q)
    check_shape("sin", sin, (cos.shape[0], q.shape[1], q.shape[3]))
    if q_norm is not None:
        check_like("q_norm", q_norm, "q", q)
        check_shape("q_norm", q_norm, (q.shape[3],))
    if k_norm is not None:
        check_like("k_norm", k_norm, "q", q)
        check_shape("k_norm", k_norm, (q.shape[3],))
    check_like("keys", keys, "q", q)
    check_dim("keys", keys, 4)
    check_shape("keys", keys, (q.shape[0], k.shape[2], keys.shape[2], q.shape[3]))
    check_like("values", values, "q", q)
    check_dim("values", values, 4)
    check_shape("values", values, (q.shape[0], k.shape[2], keys.shape[2], v.shape[3]))
    check(
        q.shape[1] <= keys.shape[2],
        lambda: f"q has {q.shape[1]} tokens; keys has room for {keys.shape[2]}",
    )
    check_device("start", start, "q", q)
    check_dtype("start", start, INDEX)
    check_dim("start", start, 0)


def check_top_experts(logits: torch.Tensor, k: int, out_dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of the weights."""
    check_dtype("logits", logits, FLOATING)
    check_not_scalar("logits", logits)
    check(
        k >= 1 and k <= logits.shape[-1],
        lambda: f"k is {k}; it must be between 1 and the number of experts, {logits.shape[-1]}",
    )
    return resolve_out_dtype(logits, out_dtype)


def check_offs_to_m_indices(offs: torch.Tensor, m: int) -> None:
    check_offsets("offs", offs)
    check_count("m", m)


def check_m_indices_to_offs(m_indices: torch.Tensor, num_groups: int) -> None:
    check_offsets("m_indices", m_indices)
    check_count("num_groups", num_groups)


def check_to_masked(a: torch.Tensor, offs: torch.Tensor, max_m: int) -> None:
    check_dim("a", a, 2)
    check_offsets("offs", offs)
    check_device("offs", offs, "a", a)
    check_count("max_m", max_m)


def check_from_masked(a: torch.Tensor, masked_m: torch.Tensor, m: int) -> None:
    check_dim("a", a, 3)
    check_offsets("masked_m", masked_m)
    check_device("masked_m", masked_m, "a", a)
    check_shape("masked_m", masked_m, (a.shape[0],))
    check_count("m", m)
