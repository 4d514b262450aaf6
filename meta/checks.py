"""Checks the arguments of every operator, for fake kernels, Python kernels and C++ kernels.

There is one function for each operator; operand_checks.py has what they share. setup.py translates both
files to C++ (build/operator_checks.h). Each check returns the values that the operator's fake and its kernels
need next.
"""

from __future__ import annotations

import torch

from .check_parts import (
    check,
    check_activation,
    check_device,
    check_dtype,
    check_name,
    check_shape,
    dtype_name,
    dtype_names,
    leading,
)
from .formats import A_FORMAT_NAMES, Format
from .layouts import A_LAYOUTS, LAYOUTS, Layout
from .operand_checks import (
    BOOLEAN,
    FLOAT8,
    FLOAT32,
    FLOATING,
    FLOATING_OR_DOUBLE,
    INDEX,
    INT32,
    Experts,
    Stored,
    Weight,
    check_a,
    check_a_dtype,
    check_bias,
    check_columns,
    check_count,
    check_dim,
    check_format,
    check_global_scale,
    check_holds,
    check_layout,
    check_like,
    check_matrices,
    check_multiple,
    check_not_scalar,
    check_offsets,
    check_operand,
    check_scales,
    check_weight,
    resolve_out_dtype,
)


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
    addend: torch.Tensor | None,
    weights: int,
    biases: int,
    keep_norm: bool,
    norm_in_float: bool,
    weight_scales: int,
) -> None:
    """Checks what all products share; `check_linear` checks each. `weights`, `biases`, `weight_scales`: their
    numbers, 0 scales without weights in fp8."""
    check_dtype("x", x, FLOATING)
    check_not_scalar("x", x)
    check(weights >= 1, lambda: "weights is empty; it must have 1 or more tensors")
    check(
        biases == weights,
        lambda: f"biases has {biases} entries; weights has {weights}, and they must be equal",
    )
    check(
        weight_scales == 0 or weight_scales == weights,
        lambda: f"weight_scales has {weight_scales} entries; weights has {weights}, and they must be equal",
    )
    check(
        residual is None or weights == 1,
        lambda: f"residual was given; weights has {weights} tensors, and a residual needs exactly 1",
    )
    check(
        not keep_norm or norm_weight is not None,
        lambda: "keep_norm is True; it needs norm_weight",
    )
    check(
        not norm_in_float or norm_weight is not None,
        lambda: "norm_in_float is True; it needs norm_weight",
    )
    if norm_weight is not None:
        check_like("norm_weight", norm_weight, "x", x)
        check_shape("norm_weight", norm_weight, (x.shape[-1],))
    if addend is not None:
        check_like("addend", addend, "x", x)
        check_shape("addend", addend, (*leading(x, -1), x.shape[-1]))


def check_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
) -> None:
    """Checks one product of `linears`: x [..., K], weight [N, K], bias [N], residual [..., N], weight_scale
    [N] of a weight in fp8."""
    if weight_scale is None:
        check_like("weights", weight, "x", x)
    if weight_scale is not None:
        check_dtype("weights", weight, FLOAT8)
        check_device("weights", weight, "x", x)
        check_dtype("weight_scales", weight_scale, FLOAT32)
        check_device("weight_scales", weight_scale, "x", x)
    check_dim("weights", weight, 2)
    check(
        weight.shape[1] == x.shape[-1],
        lambda: f"weights has {weight.shape[1]} columns; x has {x.shape[-1]}, and they must be equal",
    )
    if weight_scale is not None:
        check_shape("weight_scales", weight_scale, (weight.shape[0],))
    if bias is not None:
        check_like("biases", bias, "x", x)
        check_shape("biases", bias, (weight.shape[0],))
    if residual is not None:
        check_like("residual", residual, "x", x)
        check_shape("residual", residual, (*leading(x, -1), weight.shape[0]))


def check_fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Checks x [..., K], weight [N, K] in fp8, weight_scale [N], bias [N]."""
    check_dtype("x", x, FLOATING)
    check_not_scalar("x", x)
    check_dtype("weight", weight, FLOAT8)
    check_device("weight", weight, "x", x)
    check_dim("weight", weight, 2)
    check(
        weight.shape[1] == x.shape[-1],
        lambda: f"weight has {weight.shape[1]} columns; x has {x.shape[-1]}, and they must be equal",
    )
    check_dtype("weight_scale", weight_scale, FLOAT32)
    check_device("weight_scale", weight_scale, "x", x)
    check_shape("weight_scale", weight_scale, (weight.shape[0],))
    if bias is not None:
        check_like("bias", bias, "x", x)
        check_shape("bias", bias, (weight.shape[0],))


def check_packed_linears(
    a: torch.Tensor, b: int, b_scale: int, b_global_scale: int, bias: int, a_format: str
) -> None:
    """Checks what all products share; `check_mm` checks each. The other arguments are lengths of lists."""
    check_dtype("a", a, FLOATING)
    check(b >= 1, lambda: "b is empty; it must have 1 or more tensors")
    check(
        b_scale == b,
        lambda: f"b_scale has {b_scale} entries; b has {b}, and they must be equal",
    )
    check(
        b_global_scale == b,
        lambda: f"b_global_scale has {b_global_scale} entries; b has {b}, and they must be equal",
    )
    check(bias == b, lambda: f"bias has {bias} entries; b has {b}, and they must be equal")
    check(
        a_format == "none" or a_format == "int8",
        lambda: f"a_format is '{a_format}'; it must be 'none' or 'int8'",
    )


def check_same_scales(first: torch.Tensor, b_scale: torch.Tensor) -> None:
    """Checks one of the block scales of `packed_linears` against the first."""
    check(
        b_scale.dtype == first.dtype,
        lambda: (
            f"b_scale has {dtype_name(b_scale.dtype)} and {dtype_name(first.dtype)}; all must be the same"
        ),
    )


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


def check_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    check_dtype("q", q, FLOATING)
    check_dim("q", q, 4)
    check_like("keys", keys, "q", q)
    check_dim("keys", keys, 4)
    check_shape("keys", keys, (q.shape[0], keys.shape[1], keys.shape[2], q.shape[3]))
    check(
        keys.shape[1] >= 1 and q.shape[2] % keys.shape[1] == 0,
        lambda: f"q has {q.shape[2]} heads; it must have a multiple of {keys.shape[1]}, as many as keys has",
    )
    check_like("values", values, "q", q)
    check_dim("values", values, 4)
    check_shape("values", values, (q.shape[0], keys.shape[1], keys.shape[2], values.shape[3]))
    if mask is not None:
        check_device("mask", mask, "q", q)
        check_dtype("mask", mask, BOOLEAN)
        check_dim("mask", mask, 4)
        check(
            mask.shape[0] == 1 or mask.shape[0] == q.shape[0],
            lambda: f"mask has {mask.shape[0]} sequences; it must have 1 or {q.shape[0]}, as many as q",
        )
        check_shape("mask", mask, (mask.shape[0], 1, q.shape[1], keys.shape[2]))
    if sinks is not None:
        check_like("sinks", sinks, "q", q)
        check_shape("sinks", sinks, (q.shape[2],))


def check_cached_attention(
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
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    check_update_cache(q, k, v, cos, sin, q_norm, k_norm, keys, values, start)
    check(q.shape[1] == 1, lambda: f"q has {q.shape[1]} tokens; it must have 1")
    check_attention(q, keys, values, mask, sinks)


def check_top_experts(logits: torch.Tensor, k: int, out_dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of the weights."""
    check_dtype("logits", logits, FLOATING)
    check_not_scalar("logits", logits)
    check(
        k >= 1 and k <= logits.shape[-1],
        lambda: f"k is {k}; it must be between 1 and the number of experts, {logits.shape[-1]}",
    )
    return resolve_out_dtype(logits, out_dtype)


def check_router(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    addend: torch.Tensor | None,
    k: int,
    keep_norm: bool,
    norm_in_float: bool,
    out_dtype: torch.dtype | None,
) -> torch.dtype:
    """Returns the dtype of the weights."""
    check_linears(x, norm_weight, None, addend, 1, 1, keep_norm, norm_in_float, 0)
    check_linear(x, weight, bias, None, None)
    check(
        k >= 1 and k <= weight.shape[0],
        lambda: f"k is {k}; it must be between 1 and the number of experts, {weight.shape[0]}",
    )
    return resolve_out_dtype(x, out_dtype)


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
