"""Registers one fake kernel for each schema of csrc/schema.cpp, in the same order.

A fake kernel checks its arguments, then returns tensors of the right shape and dtype. All outputs are
contiguous. `fp4_ops` imports this module after it loads the schemas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import register_fake

from . import checks, group_checks, operand_checks, slot_checks
from .formats import INT8_BLOCK
from .layouts import LAYOUTS, packed_spec

OPERATORS: list[str] = []
"""Names of all operators that have a fake kernel."""


def _fake(function: Callable[..., Any]) -> Callable[..., Any]:
    OPERATORS.append(function.__name__)
    return register_fake(f"fp4::{function.__name__}")(function)


@_fake
def quantize(x, format, global_scale=None):
    fmt = operand_checks.check_format(format)
    checks.check_quantize(x, global_scale, fmt)
    k = x.shape[-1]
    return (
        x.new_empty((*x.shape[:-1], k // 2), dtype=torch.uint8),
        x.new_empty((*x.shape[:-1], fmt.num_blocks(k)), dtype=fmt.scale_dtype),
        x.new_empty(x.shape[:-2] if fmt.has_global_scale else (0,), dtype=torch.float32),
    )


@_fake
def dequantize(packed, block_scale, global_scale, format, dtype, *, layout="plain"):
    checks.check_dequantize(packed, block_scale, global_scale, format, dtype, layout)
    return packed.new_empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=dtype)


@_fake
def quantize_int8(x):
    checks.check_quantize_int8(x)
    blocks = (x.shape[-1] + INT8_BLOCK - 1) // INT8_BLOCK
    return (
        x.new_empty(x.shape, dtype=torch.int8),
        x.new_empty((*x.shape[:-1], blocks), dtype=torch.float32),
    )


@_fake
def quantize_fp8(x, *, layout="plain"):
    order = checks.check_quantize_fp8(x, layout)
    return (
        x.new_empty((*x.shape[:-1], order.padded(x.shape[-1])), dtype=torch.float8_e4m3fn),
        x.new_empty(x.shape[:-1], dtype=torch.float32),
    )


def _weight(packed, block_scale, fmt, order):
    """Returns empty tensors for a weight in layout `order`. A missing global scale has no elements."""
    *lead, n, half = packed.shape
    # A layout with scale dtypes of its own unpacks to the dtype that `quantize` makes.
    own = block_scale.dtype if block_scale.dtype in fmt.scale_dtypes else None
    spec = packed_spec(fmt, order, tuple(lead), n, half * 2, own)
    if len(spec) == 2:
        spec.append(((0,), torch.float32))
    return tuple(packed.new_empty(shape, dtype=dtype) for shape, dtype in spec)


@_fake
def prepack(packed, block_scale, global_scale, format, layout):
    fmt, order = checks.check_prepack(packed, block_scale, global_scale, format, layout)
    return _weight(packed, block_scale, fmt, order)


@_fake
def unpack(packed, block_scale, global_scale, format, layout):
    fmt, _ = checks.check_unpack(packed, block_scale, global_scale, format, layout)
    return _weight(packed, block_scale, fmt, LAYOUTS["plain"])


@_fake
def mm(
    a, b, b_scale, b_global_scale, a_scale=None, bias=None, a_global_scale=None, *,
    format, layout="plain", a_format="", out_dtype=None,
):  # fmt: skip
    w = checks.check_mm(
        a, b, b_scale, b_global_scale, format, layout, a_scale, bias, a_global_scale, a_format
    )
    return a.new_empty((a.shape[0], w.n), dtype=operand_checks.resolve_out_dtype(a, out_dtype))


@_fake
def packed_linears(
    a, b, b_scale, b_global_scale, bias, *, format, layout="plain", a_format="none", out_dtype=None
):
    checks.check_packed_linears(a, len(b), len(b_scale), len(b_global_scale), len(bias), a_format)
    made = []
    for weight, scale, factor, added in zip(b, b_scale, b_global_scale, bias):
        w = checks.check_mm(a, weight, scale, factor, format, layout, None, added, None, "")
        checks.check_same_scales(b_scale[0], scale)
        made.append(a.new_empty((a.shape[0], w.n), dtype=operand_checks.resolve_out_dtype(a, out_dtype)))
    return made


@_fake
def grouped_mm(
    a, b, b_scale, b_global_scale, offs, a_scale=None, bias=None, a_global_scale=None, *,
    format, layout="plain", a_format="", out_dtype=None,
):  # fmt: skip
    w = checks.check_grouped_mm(
        a, b, b_scale, b_global_scale, offs, format, layout, a_scale, bias, a_global_scale, a_format
    )
    return a.new_empty((a.shape[0], w.n), dtype=operand_checks.resolve_out_dtype(a, out_dtype))


@_fake
def grouped_mm_masked(
    a, b, b_scale, b_global_scale, masked_m, a_scale=None, bias=None, a_global_scale=None, *,
    format, layout="plain", a_format="", out_dtype=None,
):  # fmt: skip
    w = checks.check_grouped_mm_masked(
        a, b, b_scale, b_global_scale, masked_m, format, layout, a_scale, bias, a_global_scale, a_format
    )
    return a.new_empty((a.shape[0], a.shape[1], w.n), dtype=operand_checks.resolve_out_dtype(a, out_dtype))


@_fake
def indexed_mm(
    a, b, b_scale, b_global_scale, expert_ids, a_scale=None, bias=None, a_global_scale=None, *,
    format, layout="plain", a_format="", out_dtype=None,
):  # fmt: skip
    w = checks.check_indexed_mm(
        a, b, b_scale, b_global_scale, expert_ids, format, layout, a_scale, bias, a_global_scale, a_format
    )
    return a.new_empty((a.shape[0], w.n), dtype=operand_checks.resolve_out_dtype(a, out_dtype))


@_fake
def grouped_mm_k(
    a, b, b_scale, b_global_scale, offs, a_scale=None, a_global_scale=None, *,
    format, layout="plain", a_format="", out_dtype=None,
):  # fmt: skip
    w = checks.check_grouped_mm_k(
        a, b, b_scale, b_global_scale, offs, format, layout, a_scale, a_global_scale, a_format
    )
    return a.new_empty((offs.shape[0], a.shape[0], w.n), dtype=operand_checks.resolve_out_dtype(a, out_dtype))


@_fake
def moe(
    x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale,
    w13_bias=None, w2_bias=None, *, format, layout="plain", activation="silu", a_format="none",
    out_dtype=None,
):  # fmt: skip
    _, down = checks.check_moe(
        x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale,
        format, layout, activation, a_format, w13_bias, w2_bias,
    )  # fmt: skip
    return x.new_empty((x.shape[0], down.n), dtype=operand_checks.resolve_out_dtype(x, out_dtype))


@_fake
def moe_slots(
    x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale,
    w13_bias, w2_bias, slots, state, *, format, layout="plain", activation="silu", a_format="none",
    out_dtype=None,
):  # fmt: skip
    weights = w13, w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale, w13_bias, w2_bias
    experts = checks.check_moe(
        x, topk_ids, topk_weights, *weights[:6], format, layout, activation, a_format, w13_bias, w2_bias
    )
    slot_checks.check_slots(experts, weights, slots, state, x)
    return x.new_empty((x.shape[0], experts.down.n), dtype=operand_checks.resolve_out_dtype(x, out_dtype))


@_fake
def moe_input_grads(
    grad, x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale,
    w13_bias=None, w2_bias=None, *, format, layout="plain", activation="silu",
):  # fmt: skip
    checks.check_moe_input_grads(
        grad, x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale,
        format, layout, activation, w13_bias, w2_bias,
    )  # fmt: skip
    return x.new_empty(x.shape), topk_weights.new_empty(topk_weights.shape)


@_fake
def linears(
    x, weights, biases, norm_weight, eps, residual, addend=None, weight_scales=None, *, early=False,
    keep_norm=False, norm_in_float=False,
):  # fmt: skip
    checks.check_linears(
        x, norm_weight, residual, addend, len(weights), len(biases), keep_norm, norm_in_float,
        len(weight_scales or []),
    )  # fmt: skip
    for weight, bias, scale in zip(weights, biases, weight_scales or [None] * len(weights)):
        checks.check_linear(x, weight, bias, residual, scale)
    made = [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]
    return [*made, *(x.new_empty(x.shape) for _ in range(keep_norm + (addend is not None)))]


@_fake
def fp8_linear(x, weight, weight_scale, bias=None):
    checks.check_fp8_linear(x, weight, weight_scale, bias)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@_fake
def update_cache(q, k, v, cos, sin, q_norm, k_norm, eps, keys, values, start):
    checks.check_update_cache(q, k, v, cos, sin, q_norm, k_norm, keys, values, start)
    return q.new_empty(q.shape)


@_fake
def attention(q, keys, values, mask, scale, sinks=None):
    checks.check_attention(q, keys, values, mask, sinks)
    return q.new_empty((*q.shape[:3], values.shape[3]))


@_fake
def cached_attention(
    q, k, v, cos, sin, q_norm, k_norm, eps, keys, values, start, mask, scale, sinks=None
):  # fmt: skip
    checks.check_cached_attention(q, k, v, cos, sin, q_norm, k_norm, keys, values, start, mask, sinks)
    return q.new_empty((*q.shape[:3], values.shape[3]))


@_fake
def top_experts(logits, k, *, softmax=False, normalize=False, out_dtype=None):
    dtype = checks.check_top_experts(logits, k, out_dtype)
    shape = (*logits.shape[:-1], k)
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


@_fake
def router(
    x, weight, bias, norm_weight, eps, addend, k, *, softmax=False, normalize=False, early=False,
    keep_norm=False, norm_in_float=False, out_dtype=None,
):  # fmt: skip
    dtype = checks.check_router(x, weight, bias, norm_weight, addend, k, keep_norm, norm_in_float, out_dtype)
    lead = x.shape[:-1]
    made = [x.new_empty((*lead, weight.shape[0])), x.new_empty((*lead, k), dtype=dtype)]
    made.append(x.new_empty((*lead, k), dtype=torch.int64))
    return [*made, *(x.new_empty(x.shape) for _ in range(keep_norm + (addend is not None)))]


@_fake
def moe_ep(
    x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale,
    w13_bias=None, w2_bias=None, *, num_experts, tokens, group_name, max_tokens=None, format,
    layout="plain", activation="silu", a_format="none", out_dtype=None,
):  # fmt: skip
    _, down = group_checks.check_moe_ep(
        x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale,
        format, layout, activation, a_format, w13_bias, w2_bias, num_experts, tokens, max_tokens,
    )  # fmt: skip
    return x.new_empty((x.shape[0], down.n), dtype=operand_checks.resolve_out_dtype(x, out_dtype))


@_fake
def all_reduce(x, *, group_name):
    group_checks.check_all_reduce(x)
    return x.new_empty(x.shape)


@_fake
def offs_to_m_indices(offs, m):
    checks.check_offs_to_m_indices(offs, m)
    return offs.new_empty((m,))


@_fake
def m_indices_to_offs(m_indices, num_groups):
    checks.check_m_indices_to_offs(m_indices, num_groups)
    return m_indices.new_empty((num_groups,))


@_fake
def to_masked(a, offs, max_m):
    checks.check_to_masked(a, offs, max_m)
    return a.new_empty((offs.shape[0], max_m, a.shape[1])), offs.new_empty(offs.shape)


@_fake
def from_masked(a, masked_m, m):
    checks.check_from_masked(a, masked_m, m)
    return a.new_empty((m, a.shape[2])), masked_m.new_empty(masked_m.shape)
