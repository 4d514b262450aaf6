"""The argument checks of every operator, shared by the fakes and the Triton kernels.

csrc/common/checks.h makes the same checks with the same words for the C++ kernels;
tests/test_bad_input.py holds the two against each other. All raise RuntimeError (`torch._check`), and the
message names the argument, what it was and what it must be. Token counts may be symbolic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .formats import (
    A_FORMATS,
    ACTIVATIONS,
    FORMATS,
    FP4_FORMATS,
    INT8_BLOCK,
    Activation,
    Format,
    find_activation,
)
from .layouts import A_LAYOUTS, LAYOUTS, Layout

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
PACKED = (torch.uint8, torch.float4_e2m1fn_x2)
INDEX = (torch.int32, torch.int64)
ACTIVATION = (*FLOATING, torch.int8, torch.float8_e4m3fn, *PACKED)


class Weight(NamedTuple):
    """The shape of a packed weight: `groups` is None for a single matrix, k is as its layout pads it."""

    groups: int | None
    n: int
    k: int
    layout: Layout = LAYOUTS["plain"]


def check(condition: bool | torch.SymBool, message: Callable[[], str]) -> None:
    """`torch._check`, whose microseconds are spent only where sizes are symbolic or the check fails."""
    if condition is not True:
        torch._check(condition, message)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def _shape(t: torch.Tensor) -> str:
    return "[" + ", ".join(str(s) for s in t.shape) + "]"


def check_dtype(name: str, t: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    check(
        t.dtype in allowed,
        lambda: f"{name} has dtype {str(t.dtype).removeprefix('torch.')}; it must be {_names(allowed)}",
    )


def check_dim(name: str, t: torch.Tensor, dim: int) -> None:
    check(t.dim() == dim, lambda: f"{name} has {t.dim()} dimensions; it must have {dim}")


def check_shape(name: str, t: torch.Tensor, shape: tuple[int, ...]) -> None:
    def message() -> str:
        return f"{name} has shape {_shape(t)}; it must be [{', '.join(map(str, shape))}]"

    check(t.dim() == len(shape), message)
    for got, want in zip(t.shape, shape):
        check(got == want, message)


def check_device(name: str, t: torch.Tensor, like_name: str, like: torch.Tensor) -> None:
    check(
        t.device == like.device,
        lambda: f"{name} is on {t.device} and {like_name} on {like.device}; they must be on one device",
    )


def check_format(format: str) -> Format:
    check(format in FORMATS, lambda: f"format is '{format}'; it must be one of: {', '.join(sorted(FORMATS))}")
    return FORMATS[format]


def check_layout(layout: str) -> Layout:
    check(layout in LAYOUTS, lambda: f"layout is '{layout}'; it must be one of: {', '.join(sorted(LAYOUTS))}")
    return LAYOUTS[layout]


def check_holds(layout: Layout, fmt: Format) -> None:
    check(
        fmt.name in layout.formats,
        lambda: (
            f"format is '{fmt.name}'; with layout '{layout.name}' it must be one of: "
            + ", ".join(sorted(layout.formats))
        ),
    )


def check_multiple(name: str, what: str, count: int, multiple: int, layout: Layout) -> None:
    check(
        count % multiple == 0,
        lambda: f"{name} has {count} {what}; layout '{layout.name}' needs a multiple of {multiple}",
    )


def check_block_scale(
    scale_name: str, scale: torch.Tensor, name: str, packed: torch.Tensor, fmt: Format
) -> None:
    """scale [..., ceil(K/block)] for packed [..., K/2]."""
    check_dtype(scale_name, scale, fmt.scale_dtypes)
    check_device(scale_name, scale, name, packed)
    check_shape(scale_name, scale, (*packed.shape[:-1], fmt.num_blocks(packed.shape[-1] * 2)))


def check_global_scale(
    scale_name: str, scale: torch.Tensor | None, name: str, packed: torch.Tensor, fmt: Format
) -> None:
    """scale float32 packed.shape[:-2], one factor a matrix, for the formats that have one."""
    if not fmt.has_global_scale:
        check(
            scale is None or scale.numel() == 0,
            lambda: f"{scale_name} was given; format {fmt.name} has no global scale",
        )
        return
    check(scale is not None, lambda: f"{scale_name} is missing; format {fmt.name} needs one")
    assert scale is not None
    check_factor(scale_name, scale, name, packed)


def check_factor(scale_name: str, scale: torch.Tensor, name: str, packed: torch.Tensor) -> None:
    """scale float32 packed.shape[:-2]: one factor a matrix."""
    check_dtype(scale_name, scale, (torch.float32,))
    check_device(scale_name, scale, name, packed)
    check_shape(scale_name, scale, tuple(packed.shape[:-2]))


def check_scales(
    prefix: str,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    name: str,
    packed: torch.Tensor,
    fmt: Format,
    layout: Layout,
) -> None:
    """The scales of packed [..., N, K/2] (K padded) in the form the layout gives them."""
    scale_name = f"{prefix}_scale" if prefix else "block_scale"
    global_name = f"{prefix}_global_scale" if prefix else "global_scale"
    if layout.scale_dtype is None:
        check_block_scale(scale_name, block_scale, name, packed, fmt)
        check_global_scale(global_name, global_scale, name, packed, fmt)
        return
    k = packed.shape[-1] * 2
    check_multiple(name, "rows", packed.shape[-2], layout.n_multiple, layout)
    check_multiple(name, "columns", k, layout.k_padding, layout)
    check_dtype(scale_name, block_scale, (layout.scale_dtype,))
    check_device(scale_name, block_scale, name, packed)
    check_shape(scale_name, block_scale, (*packed.shape[:-1], k // fmt.block))
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
    *,
    grouped: bool,
) -> Weight:
    """A weight operand: b [G, N, K/2] if grouped, else [N, K/2]."""
    fmt = check_format(format)
    order = check_layout(layout)
    check_holds(order, fmt)
    check_dtype(name, b, fmt.packed_dtypes)
    check_dim(name, b, 3 if grouped else 2)
    check_scales(name, b_scale, b_global_scale, name, b, fmt, order)
    return Weight(b.shape[0] if grouped else None, b.shape[-2], b.shape[-1] * 2, order)


def check_a_dtype(name: str, a: torch.Tensor, layout: Layout, among: tuple[torch.dtype, ...]) -> None:
    """The activations, of those `among`, that the kernels of a layout read; plain and tile16 take all."""
    if layout.a_dtypes is None:
        return
    allowed = tuple(d for d in layout.a_dtypes if d in among)
    hint = (
        f" (from quantize_fp8 with layout='{layout.a_layout}')" if allowed == (torch.float8_e4m3fn,) else ""
    )
    check(
        a.dtype in allowed,
        lambda: (
            f"{name} has dtype {str(a.dtype).removeprefix('torch.')}; "
            f"layout '{layout.name}' reads {_names(allowed)}{hint}"
        ),
    )


def check_columns(name: str, columns: int, b_name: str, b: Weight, *, padded: bool = False) -> None:
    """As many columns as the weight, `padded` already or to be padded as the weight is."""
    note = "" if b.layout.k_padding == 1 else f" (padded to a multiple of {b.layout.k_padding})"
    check_multiple(name, "columns", columns, b.layout.k_multiple, b.layout)
    k = columns if padded else b.layout.padded(columns)
    check(
        k == b.k,
        lambda: f"{name} has {columns} columns; {b_name} has K = {b.k}{note}, and they must be equal",
    )


def check_a_scale(a: torch.Tensor, a_scale: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    """The float32 scales of int8 or fp8 activations."""
    kind = "int8" if a.dtype == torch.int8 else "float8_e4m3fn"
    check(a_scale is not None, lambda: f"a_scale is missing; {kind} activations need one")
    assert a_scale is not None
    check_dtype("a_scale", a_scale, (torch.float32,))
    check_device("a_scale", a_scale, "a", a)
    check_shape("a_scale", a_scale, shape)


def check_a_packed(
    a: torch.Tensor, a_scale: torch.Tensor | None, a_global_scale: torch.Tensor | None, fmt: Format
) -> None:
    """Packed activations [..., K/2]: block scales, and for nvfp4 a factor for all, a group or a row."""
    check(a_scale is not None, lambda: f"a_scale is missing; {fmt.name} activations need one")
    assert a_scale is not None
    check_block_scale("a_scale", a_scale, "a", a, fmt)
    if not fmt.has_global_scale:
        check_no_a_global_scale(a_global_scale)
        return
    check(a_global_scale is not None, lambda: f"a_global_scale is missing; {fmt.name} activations need one")
    assert a_global_scale is not None
    check_dtype("a_global_scale", a_global_scale, (torch.float32,))
    check_device("a_global_scale", a_global_scale, "a", a)
    dim, most = a_global_scale.dim(), a.dim() - 1
    check(dim <= most, lambda: f"a_global_scale has {dim} dimensions; it must have at most {most}")
    check_shape("a_global_scale", a_global_scale, tuple(a.shape[:dim]))


def check_no_a_global_scale(a_global_scale: torch.Tensor | None) -> None:
    check(
        a_global_scale is None or a_global_scale.numel() == 0,
        lambda: "a_global_scale was given; only nvfp4 activations have one",
    )


def check_a(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    a_global_scale: torch.Tensor | None,
    a_format: str,
    b: torch.Tensor,
    w: Weight,
    *,
    dim: int = 2,
) -> None:
    """Activations [..., K] of one of these kinds:

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
        check(
            a_format in FP4_FORMATS,
            lambda: (
                f"a_format is '{a_format}'; for packed a it must be one of: {', '.join(sorted(FP4_FORMATS))}"
            ),
        )
        check_columns("a", a.shape[-1] * 2, "b", w)
        check_a_packed(a, a_scale, a_global_scale, FORMATS[a_format])
        return
    check(
        a_format == "", lambda: f"a_format is '{a_format}'; only packed a has one, for others it must be ''"
    )
    # quantize_fp8 pads its rows itself where the layout asks for it.
    check_columns("a", a.shape[-1], "b", w, padded=a.dtype == torch.float8_e4m3fn)
    check_no_a_global_scale(a_global_scale)
    if a.dtype == torch.int8:
        check_a_scale(a, a_scale, (*a.shape[:-1], (w.k + INT8_BLOCK - 1) // INT8_BLOCK))
    elif a.dtype == torch.float8_e4m3fn:
        check_a_scale(a, a_scale, tuple(a.shape[:-1]))
    else:
        check(a_scale is None, lambda: f"a_scale was given; {_names((a.dtype,))} activations have none")


def check_operand(
    name: str,
    t: torch.Tensor | None,
    like_name: str,
    like: torch.Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """A bias (float, one row of N for each expert; may be None), routing weights, offsets or expert ids."""
    if t is not None:
        check_dtype(name, t, dtypes)
        check_device(name, t, like_name, like)
        check_shape(name, t, shape)


def resolve_out_dtype(a: torch.Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """The output dtype: as asked, else that of floating activations, else bfloat16."""
    if out_dtype is None:
        return a.dtype if a.dtype in FLOATING else torch.bfloat16
    check(
        out_dtype in FLOATING,
        lambda: f"out_dtype is {str(out_dtype).removeprefix('torch.')}; it must be {_names(FLOATING)}",
    )
    return out_dtype


def check_activation(activation: str) -> Activation:
    found = find_activation(activation)
    name, brackets, _ = activation.partition("(")
    check(
        found is not None or (brackets != "" and name in ACTIVATIONS),
        lambda: f"activation is '{activation}'; it must be one of: {', '.join(sorted(ACTIVATIONS))}",
    )
    check(
        found is not None,
        lambda: (
            f"activation is '{activation}'; one with a gate may have brackets, and in them limit=L, "
            "L a positive number: what gate and up are clamped to"
        ),
    )
    assert found is not None
    return found


def check_a_format(a_format: str) -> None:
    check(
        a_format in A_FORMATS,
        lambda: f"a_format is '{a_format}'; it must be one of: {', '.join(sorted(A_FORMATS))}",
    )


# --- one check for each operator: returns what the fake and the kernels need next ---


def check_quantize(x: torch.Tensor, global_scale: torch.Tensor | None, fmt: Format) -> None:
    """x [..., K], K even; global_scale float32 x.shape[:-2], for formats that have one."""
    check_dtype("x", x, FLOATING)
    check(x.dim() >= 1, lambda: "x has 0 dimensions; it must have 1 or more")
    check(x.shape[-1] % 2 == 0, lambda: f"x has K = {x.shape[-1]} (last dimension); it must be even")
    if global_scale is not None:
        check_global_scale("global_scale", global_scale, "x", x, fmt)


def check_dequantize(packed, block_scale, global_scale, format, dtype, layout) -> Format:
    fmt = check_format(format)
    order = check_layout(layout)
    allowed = (*FLOATING, torch.float64)
    check(
        dtype in allowed,
        lambda: f"dtype is {str(dtype).removeprefix('torch.')}; it must be {_names(allowed)}",
    )
    check_holds(order, fmt)
    check_dtype("packed", packed, fmt.packed_dtypes)
    if order.scale_dtype is None:
        check(packed.dim() >= 1, lambda: "packed has 0 dimensions; it must have 1 or more")
    else:
        check_matrices(packed)
    check_scales("", block_scale, global_scale, "packed", packed, fmt, order)
    return fmt


def check_quantize_int8(x: torch.Tensor) -> None:
    check_dtype("x", x, FLOATING)
    check(x.dim() >= 1, lambda: "x has 0 dimensions; it must have 1 or more")


def check_quantize_fp8(x: torch.Tensor, layout: str) -> Layout:
    check(layout in A_LAYOUTS, lambda: f"layout is '{layout}'; it must be one of: {', '.join(A_LAYOUTS)}")
    check_quantize_int8(x)
    return LAYOUTS[layout]


def check_matrices(packed: torch.Tensor) -> None:
    check(packed.dim() in (2, 3), lambda: f"packed has {packed.dim()} dimensions; it must have 2 or 3")


def check_prepack(packed, block_scale, global_scale, format, layout) -> tuple[Format, Layout]:
    """A plain weight, that `layout` can hold."""
    fmt, order = _check_stored(packed, block_scale, global_scale, format, layout, "plain")
    check_multiple("packed", "rows", packed.shape[-2], order.n_multiple, order)
    check_multiple("packed", "columns", packed.shape[-1] * 2, order.k_multiple, order)
    return fmt, order


def check_unpack(packed, block_scale, global_scale, format, layout) -> tuple[Format, Layout]:
    """A weight in `layout`."""
    return _check_stored(packed, block_scale, global_scale, format, layout, layout)


def _check_stored(packed, block_scale, global_scale, format, layout, stored) -> tuple[Format, Layout]:
    fmt = check_format(format)
    order = check_layout(layout)
    check_holds(order, fmt)
    check_dtype("packed", packed, fmt.packed_dtypes)
    check_matrices(packed)
    check_scales("", block_scale, global_scale, "packed", packed, fmt, LAYOUTS[stored])
    return fmt, order


def check_count(name: str, count: int) -> None:
    check(count >= 0, lambda: f"{name} is {count}; it must be 0 or more")


def check_offsets(name: str, t: torch.Tensor, a: torch.Tensor | None = None) -> None:
    check_dtype(name, t, (torch.int32,))
    check_dim(name, t, 1)
    if a is not None:
        check_device(name, t, "a", a)


def check_mm(
    a, b, b_scale, b_global_scale, format, layout, a_scale, bias, a_global_scale, a_format
) -> Weight:
    w = check_weight("b", b, b_scale, b_global_scale, format, layout, grouped=False)
    check_a(a, a_scale, a_global_scale, a_format, b, w)
    check_operand("bias", bias, "b", b, (w.n,), FLOATING)
    return w


def check_grouped_mm(
    a, b, b_scale, b_global_scale, offs, format, layout, a_scale, bias, a_global_scale, a_format
) -> Weight:
    w = check_weight("b", b, b_scale, b_global_scale, format, layout, grouped=True)
    check_a(a, a_scale, a_global_scale, a_format, b, w)
    check_operand("offs", offs, "b", b, (w.groups,), (torch.int32,))
    check_operand("bias", bias, "b", b, (w.groups, w.n), FLOATING)
    return w


def check_grouped_mm_masked(
    a, b, b_scale, b_global_scale, masked_m, format, layout, a_scale, bias, a_global_scale, a_format
) -> Weight:
    w = check_weight("b", b, b_scale, b_global_scale, format, layout, grouped=True)
    check_a(a, a_scale, a_global_scale, a_format, b, w, dim=3)
    check(
        a.shape[0] == w.groups, lambda: f"a has {a.shape[0]} groups; b has {w.groups}, and they must be equal"
    )
    check_operand("masked_m", masked_m, "b", b, (w.groups,), (torch.int32,))
    check_operand("bias", bias, "b", b, (w.groups, w.n), FLOATING)
    return w


def check_indexed_mm(
    a, b, b_scale, b_global_scale, expert_ids, format, layout, a_scale, bias, a_global_scale, a_format
) -> Weight:
    w = check_weight("b", b, b_scale, b_global_scale, format, layout, grouped=True)
    check_a(a, a_scale, a_global_scale, a_format, b, w)
    check_operand("expert_ids", expert_ids, "b", b, (a.shape[0],), INDEX)
    check_operand("bias", bias, "b", b, (w.groups, w.n), FLOATING)
    return w


def check_grouped_mm_k(
    a, b, b_scale, b_global_scale, offs, format, layout, a_scale, a_global_scale, a_format
) -> Weight:
    """a [M, T], b [N, T/2]: offs int32 [G] are ends within T."""
    w = check_weight("b", b, b_scale, b_global_scale, format, layout, grouped=False)
    check_a(a, a_scale, a_global_scale, a_format, b, w)
    check_offsets("offs", offs, a)
    return w


def check_moe(
    x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale,
    format, layout, activation, a_format, w13_bias, w2_bias,
) -> tuple[Weight, Weight]:  # fmt: skip
    """x [T, H], topk_ids and topk_weights [T, top_k], w13 [E, 2 I, H/2] (without gate [E, I, H/2]),
    w2 [E, H, I/2]."""
    up = check_weight("w13", w13, w13_scale, w13_global_scale, format, layout, grouped=True)
    down = check_weight("w2", w2, w2_scale, w2_global_scale, format, layout, grouped=True)
    a_formats = up.layout.a_formats
    act = check_activation(activation)
    check_a_format(a_format)
    check(
        a_formats is None or a_format in a_formats,
        lambda: (
            f"a_format is '{a_format}'; with layout '{layout}' it must be one of: {', '.join(a_formats)}; "
            "layout 'plain' takes others"
        ),
    )
    check_dtype("x", x, FLOATING)
    if up.layout.leaves(a_format):
        check_a_dtype("x", x, up.layout, FLOATING)
    check_dim("x", x, 2)
    check_device("x", x, "w13", w13)
    check_device("w2", w2, "w13", w13)
    check_columns("x", x.shape[1], "w13", up)
    check_dim("topk_ids", topk_ids, 2)
    check_operand("topk_ids", topk_ids, "w13", w13, (x.shape[0], topk_ids.shape[1]), INDEX)
    check_operand("topk_weights", topk_weights, "w13", w13, (x.shape[0], topk_ids.shape[1]), FLOATING)
    check(
        up.n % act.parts == 0 and up.layout.padded(up.n // act.parts) == down.k,
        lambda: (
            f"w13 has {up.n} rows; w2 has K = {down.k}, and w13 must have "
            + ("twice that (gate and up)" if act.gated else f"as many ('{activation}' has no gate)")
        ),
    )
    check(
        up.groups == down.groups,
        lambda: f"w2 has {down.groups} experts; w13 has {up.groups}, and they must be equal",
    )
    check_operand("w13_bias", w13_bias, "w13", w13, (up.groups, up.n), FLOATING)
    check_operand("w2_bias", w2_bias, "w13", w13, (down.groups, down.n), FLOATING)
    return up, down


def check_moe_input_grads(
    grad, x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale,
    format, layout, activation, w13_bias, w2_bias,
) -> None:  # fmt: skip
    """As `check_moe`, and grad [T, H]. How activations were quantised does not matter here."""
    a_formats = check_layout(layout).a_formats
    any_dtype = "nvfp4" if a_formats is None or "nvfp4" in a_formats else "fp8"  # no kernel reads x
    _, down = check_moe(
        x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale,
        format, layout, activation, any_dtype, w13_bias, w2_bias,
    )  # fmt: skip
    check_operand("grad", grad, "x", x, (x.shape[0], down.n), FLOATING)
