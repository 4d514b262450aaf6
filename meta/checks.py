"""The argument checks of every operator, shared by the fakes and the Triton kernels.

csrc/common/checks.h makes the same checks with the same words for the C++ kernels;
tests/test_bad_input.py holds the two against each other. All raise RuntimeError (`torch._check`), and the
message names the argument, what it was and what it must be. Token counts may be symbolic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .formats import A_FORMATS, ACTIVATIONS, FORMATS, INT8_BLOCK, Format
from .layouts import LAYOUTS

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
PACKED = (torch.uint8, torch.float4_e2m1fn_x2)
INDEX = (torch.int32, torch.int64)


class Weight(NamedTuple):
    """The logical shape of a packed weight: `groups` is None for a single matrix."""

    groups: int | None
    n: int
    k: int


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def _shape(t: torch.Tensor) -> str:
    return "[" + ", ".join(str(s) for s in t.shape) + "]"


def check_dtype(name: str, t: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    torch._check(
        t.dtype in allowed,
        lambda: f"{name} has dtype {str(t.dtype).removeprefix('torch.')}; it must be {_names(allowed)}",
    )


def check_dim(name: str, t: torch.Tensor, dim: int) -> None:
    torch._check(t.dim() == dim, lambda: f"{name} has {t.dim()} dimensions; it must have {dim}")


def check_shape(name: str, t: torch.Tensor, shape: tuple[int, ...]) -> None:
    text = "[" + ", ".join(str(s) for s in shape) + "]"
    torch._check(t.dim() == len(shape), lambda: f"{name} has shape {_shape(t)}; it must be {text}")
    for got, want in zip(t.shape, shape):
        torch._check(got == want, lambda: f"{name} has shape {_shape(t)}; it must be {text}")


def check_device(name: str, t: torch.Tensor, like_name: str, like: torch.Tensor) -> None:
    torch._check(
        t.device.type == like.device.type and t.device.index == like.device.index,
        lambda: f"{name} is on {t.device} and {like_name} on {like.device}; they must be on one device",
    )


def check_format(format: str) -> Format:
    torch._check(
        format in FORMATS, lambda: f"format is '{format}'; it must be one of: {', '.join(sorted(FORMATS))}"
    )
    return FORMATS[format]


def check_layout(layout: str) -> None:
    torch._check(
        layout in LAYOUTS, lambda: f"layout is '{layout}'; it must be one of: {', '.join(sorted(LAYOUTS))}"
    )


def check_block_scale(
    scale_name: str, scale: torch.Tensor, name: str, packed: torch.Tensor, fmt: Format
) -> None:
    """scale [..., ceil(K/block)] for packed [..., K/2]."""
    check_dtype(scale_name, scale, (fmt.scale_dtype,))
    check_device(scale_name, scale, name, packed)
    check_shape(scale_name, scale, (*packed.shape[:-1], fmt.num_blocks(packed.shape[-1] * 2)))


def check_global_scale(
    scale_name: str, scale: torch.Tensor | None, name: str, packed: torch.Tensor, fmt: Format
) -> None:
    """scale float32 packed.shape[:-2], one factor a matrix, for the formats that have one."""
    if not fmt.has_global_scale:
        torch._check(
            scale is None or scale.numel() == 0,
            lambda: f"{scale_name} was given; format {fmt.name} has no global scale",
        )
        return
    torch._check(scale is not None, lambda: f"{scale_name} is missing; format {fmt.name} needs one")
    assert scale is not None
    check_dtype(scale_name, scale, (torch.float32,))
    check_device(scale_name, scale, name, packed)
    check_shape(scale_name, scale, tuple(packed.shape[:-2]))


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
    check_layout(layout)
    check_dtype(name, b, PACKED)
    check_dim(name, b, 3 if grouped else 2)
    check_block_scale(f"{name}_scale", b_scale, name, b, fmt)
    check_global_scale(f"{name}_global_scale", b_global_scale, name, b, fmt)
    return Weight(b.shape[0] if grouped else None, b.shape[-2], b.shape[-1] * 2)


def check_a(
    a: torch.Tensor, a_scale: torch.Tensor | None, b: torch.Tensor, k: int, *, dim: int = 2, name: str = "a"
) -> None:
    """Activations [..., K]: floating without a scale, or int8 with a_scale float32 [..., ceil(K/32)]."""
    check_dtype(name, a, (*FLOATING, torch.int8))
    check_dim(name, a, dim)
    check_device(name, a, "b", b)
    torch._check(
        a.shape[-1] == k, lambda: f"{name} has {a.shape[-1]} columns; b has K = {k}, and they must be equal"
    )
    if a.dtype == torch.int8:
        torch._check(a_scale is not None, lambda: f"{name}_scale is missing; int8 activations need one")
        assert a_scale is not None
        check_dtype(f"{name}_scale", a_scale, (torch.float32,))
        check_device(f"{name}_scale", a_scale, name, a)
        check_shape(f"{name}_scale", a_scale, (*a.shape[:-1], (k + INT8_BLOCK - 1) // INT8_BLOCK))
    else:
        torch._check(a_scale is None, lambda: f"{name}_scale was given; only int8 activations have one")


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
    torch._check(
        out_dtype in FLOATING,
        lambda: f"out_dtype is {str(out_dtype).removeprefix('torch.')}; it must be {_names(FLOATING)}",
    )
    return out_dtype


def check_activation(activation: str) -> None:
    torch._check(
        activation in ACTIVATIONS,
        lambda: f"activation is '{activation}'; it must be one of: {', '.join(sorted(ACTIVATIONS))}",
    )


def check_a_format(a_format: str) -> None:
    torch._check(
        a_format in A_FORMATS,
        lambda: f"a_format is '{a_format}'; it must be one of: {', '.join(sorted(A_FORMATS))}",
    )


# --- one check for each operator: returns what the fake and the kernels need next ---


def check_quantize(x: torch.Tensor, global_scale: torch.Tensor | None, fmt: Format) -> None:
    """x [..., K], K even; global_scale float32 x.shape[:-2], for formats that have one."""
    check_dtype("x", x, FLOATING)
    torch._check(x.dim() >= 1, lambda: "x has 0 dimensions; it must have 1 or more")
    torch._check(x.shape[-1] % 2 == 0, lambda: f"x has K = {x.shape[-1]} (last dimension); it must be even")
    if global_scale is not None:
        check_global_scale("global_scale", global_scale, "x", x, fmt)


def check_dequantize(packed, block_scale, global_scale, format, dtype, layout) -> Format:
    fmt = check_format(format)
    check_layout(layout)
    allowed = (*FLOATING, torch.float64)
    torch._check(
        dtype in allowed,
        lambda: f"dtype is {str(dtype).removeprefix('torch.')}; it must be {_names(allowed)}",
    )
    check_dtype("packed", packed, PACKED)
    torch._check(packed.dim() >= 1, lambda: "packed has 0 dimensions; it must have 1 or more")
    check_block_scale("block_scale", block_scale, "packed", packed, fmt)
    check_global_scale("global_scale", global_scale, "packed", packed, fmt)
    return fmt


def check_quantize_int8(x: torch.Tensor) -> None:
    check_dtype("x", x, FLOATING)
    torch._check(x.dim() >= 1, lambda: "x has 0 dimensions; it must have 1 or more")


def check_prepack(packed, block_scale, format, layout) -> Format:
    fmt = check_format(format)
    check_layout(layout)
    check_dtype("packed", packed, PACKED)
    torch._check(packed.dim() in (2, 3), lambda: f"packed has {packed.dim()} dimensions; it must have 2 or 3")
    check_block_scale("block_scale", block_scale, "packed", packed, fmt)
    return fmt


def check_count(name: str, count: int) -> None:
    torch._check(count >= 0, lambda: f"{name} is {count}; it must be 0 or more")


def check_offsets(name: str, t: torch.Tensor, a: torch.Tensor | None = None) -> None:
    check_dtype(name, t, (torch.int32,))
    check_dim(name, t, 1)
    if a is not None:
        check_device(name, t, "a", a)


def check_mm(a, b, b_scale, b_global_scale, format, layout, a_scale, bias) -> Weight:
    w = check_weight("b", b, b_scale, b_global_scale, format, layout, grouped=False)
    check_a(a, a_scale, b, w.k)
    check_operand("bias", bias, "b", b, (w.n,), FLOATING)
    return w


def check_grouped_mm(a, b, b_scale, b_global_scale, offs, format, layout, a_scale, bias) -> Weight:
    w = check_weight("b", b, b_scale, b_global_scale, format, layout, grouped=True)
    check_a(a, a_scale, b, w.k)
    check_operand("offs", offs, "b", b, (w.groups,), (torch.int32,))
    check_operand("bias", bias, "b", b, (w.groups, w.n), FLOATING)
    return w


def check_grouped_mm_masked(a, b, b_scale, b_global_scale, masked_m, format, layout, a_scale, bias) -> Weight:
    w = check_weight("b", b, b_scale, b_global_scale, format, layout, grouped=True)
    check_a(a, a_scale, b, w.k, dim=3)
    torch._check(
        a.shape[0] == w.groups, lambda: f"a has {a.shape[0]} groups; b has {w.groups}, and they must be equal"
    )
    check_operand("masked_m", masked_m, "b", b, (w.groups,), (torch.int32,))
    check_operand("bias", bias, "b", b, (w.groups, w.n), FLOATING)
    return w


def check_indexed_mm(a, b, b_scale, b_global_scale, expert_ids, format, layout, a_scale, bias) -> Weight:
    w = check_weight("b", b, b_scale, b_global_scale, format, layout, grouped=True)
    check_a(a, a_scale, b, w.k)
    check_operand("expert_ids", expert_ids, "b", b, (a.shape[0],), INDEX)
    check_operand("bias", bias, "b", b, (w.groups, w.n), FLOATING)
    return w


def check_moe(
    x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale,
    format, layout, activation, a_format, w13_bias, w2_bias,
) -> tuple[Weight, Weight]:  # fmt: skip
    """x [T, H], topk_ids and topk_weights [T, top_k], w13 [E, 2 I, H/2], w2 [E, H, I/2]."""
    up = check_weight("w13", w13, w13_scale, w13_global_scale, format, layout, grouped=True)
    down = check_weight("w2", w2, w2_scale, w2_global_scale, format, layout, grouped=True)
    check_activation(activation)
    check_a_format(a_format)
    check_dtype("x", x, FLOATING)
    check_dim("x", x, 2)
    check_device("x", x, "w13", w13)
    check_device("w2", w2, "w13", w13)
    torch._check(
        x.shape[1] == up.k, lambda: f"x has {x.shape[1]} columns; w13 has K = {up.k}, and they must be equal"
    )
    check_dim("topk_ids", topk_ids, 2)
    check_operand("topk_ids", topk_ids, "w13", w13, (x.shape[0], topk_ids.shape[1]), INDEX)
    check_operand("topk_weights", topk_weights, "w13", w13, (x.shape[0], topk_ids.shape[1]), FLOATING)
    torch._check(
        up.n == 2 * down.k,
        lambda: f"w13 has {up.n} rows; w2 has K = {down.k}, and w13 must have twice that (gate and up)",
    )
    torch._check(
        up.groups == down.groups,
        lambda: f"w2 has {down.groups} experts; w13 has {up.groups}, and they must be equal",
    )
    check_operand("w13_bias", w13_bias, "w13", w13, (up.groups, up.n), FLOATING)
    check_operand("w2_bias", w2_bias, "w13", w13, (down.groups, down.n), FLOATING)
    return up, down
