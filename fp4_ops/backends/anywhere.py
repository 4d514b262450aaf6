"""Operators for any device. They run if no backend of the device has the operator.

They use torch's own operators, or compute on the CPU. An operator that uses the CPU waits for the device, so
it cannot be part of a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..meta import checks, operand_checks, slot_checks
from ..meta.formats import FORMATS
from ..meta.layouts import Layout

FP8_MAX = 448.0


def _by_cpu(name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls the CPU's operator and moves the results to the device of the first argument."""
    device = args[0].device
    cpu = [a.cpu() if isinstance(a, Tensor) else a for a in args]
    made = getattr(torch.ops.fp4, name)(*cpu, **kwargs)
    return tuple(t.to(device) for t in made) if isinstance(made, tuple) else made.to(device)


def _copy(packed: Tensor, block_scale: Tensor, global_scale: Tensor | None) -> tuple[Tensor, ...]:
    """Copies a weight, because no output of an operator may share memory with an input."""
    if global_scale is None:
        global_scale = packed.new_empty(0, dtype=torch.float32)
    given = packed.view(torch.uint8), block_scale, global_scale
    return tuple(t.clone(memory_format=torch.contiguous_format) for t in given)


def moe_slots(
    x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale,
    w13_bias, w2_bias, slots, state, *, format, layout="plain", activation="silu", a_format="none",
    out_dtype=None,
):  # fmt: skip
    """Runs the experts from where they are stored. Does not use the slots."""
    weights = w13, w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale, w13_bias, w2_bias
    experts = checks.check_moe(
        x, topk_ids, topk_weights, *weights[:6], format, layout, activation, a_format, w13_bias, w2_bias
    )
    slot_checks.check_slots(experts, weights, slots, state, x)
    return torch.ops.fp4.moe(
        x, topk_ids, topk_weights, *weights, format=format, layout=layout, activation=activation,
        a_format=a_format, out_dtype=out_dtype,
    )  # fmt: skip


def quantize(x, format, global_scale=None):
    checks.check_quantize(x, global_scale, operand_checks.check_format(format))
    return _by_cpu("quantize", x, format, global_scale)


def dequantize(packed, block_scale, global_scale, format, dtype, *, layout="plain"):
    checks.check_dequantize(packed, block_scale, global_scale, format, dtype, layout)
    if layout == "plain":
        return _by_cpu("dequantize", packed, block_scale, global_scale, format, dtype)
    fmt = FORMATS[format]
    *operands, factor = unpack(packed, block_scale, global_scale, format, layout)
    given = factor if fmt.has_global_scale else None
    return torch.ops.fp4.dequantize(*operands, given, format, dtype)


def quantize_int8(x):
    checks.check_quantize_int8(x)
    return _by_cpu("quantize_int8", x)


def quantize_fp8(x, *, layout="plain"):
    return fp8_rows(x, checks.check_quantize_fp8(x, layout))


def fp8_rows(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Quantises x [..., K] to e4m3 codes in the order of a layout, and float32 scales."""
    k = x.shape[-1]
    values = x.float()
    largest = values.abs().amax(-1) if k else values.new_zeros(x.shape[:-1])
    scale = largest / torch.full_like(largest, FP8_MAX)
    codes = torch.where(scale[..., None] > 0, values / scale[..., None], 0).clamp(-FP8_MAX, FP8_MAX)
    codes = F.pad(codes.to(torch.float8_e4m3fn).view(torch.uint8), (0, layout.padded(k) - k))
    if layout.native:  # [block t, word 2s + q] becomes [word, block]
        codes = codes.unflatten(-1, (layout.padded(k) // 64, 4, 4, 4)).transpose(-2, -3).flatten(-4)
    return codes.view(torch.float8_e4m3fn), scale


def prepack(packed, block_scale, global_scale, format, layout):
    """Packs a weight on the CPU. For layout `plain`, copies it."""
    checks.check_prepack(packed, block_scale, global_scale, format, layout)
    if layout == "plain":
        return _copy(packed, block_scale, global_scale)
    return _by_cpu("prepack", packed, block_scale, global_scale, format, layout)


def unpack(packed, block_scale, global_scale, format, layout):
    """Unpacks a weight from any layout."""
    checks.check_unpack(packed, block_scale, global_scale, format, layout)
    if layout == "plain":
        return _copy(packed, block_scale, global_scale)
    return _by_cpu("unpack", packed, block_scale, global_scale, format, layout)


def offs_to_m_indices(offs, m):
    checks.check_offs_to_m_indices(offs, m)
    # A row's expert is the number of ends at or before it. The running maximum puts bad offsets in order.
    ends = offs.cummax(0).values if offs.numel() else offs
    rows = torch.arange(m, dtype=torch.int32, device=offs.device)
    ids = torch.searchsorted(ends, rows, right=True, out_int32=True)
    return torch.where(ids < offs.shape[0], ids, -1)


def m_indices_to_offs(m_indices, num_groups):
    checks.check_m_indices_to_offs(m_indices, num_groups)
    groups = torch.arange(num_groups, dtype=torch.int32, device=m_indices.device)
    valid = (m_indices >= 0) & (m_indices < num_groups)
    ids = torch.where(valid, m_indices, num_groups).sort().values
    return torch.searchsorted(ids, groups, right=True, out_int32=True)


def to_masked(a, offs, max_m):
    checks.check_to_masked(a, offs, max_m)
    return _by_cpu("to_masked", a, offs, max_m)


def from_masked(a, masked_m, m):
    checks.check_from_masked(a, masked_m, m)
    return _by_cpu("from_masked", a, masked_m, m)


def _normed(x: Tensor, weight: Tensor, eps: float, in_float: bool = False) -> Tensor:
    values = x.float()
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * values).to(x.dtype) if in_float else weight * values.to(x.dtype)


def linears(
    x, weights, biases, norm_weight, eps, residual, addend=None, weight_scales=None, *, early=False,
    keep_norm=False, norm_in_float=False,
):  # fmt: skip
    """Multiplies x by each weight, with the operators that a model uses. An addend is added to x first. If
    norm_weight is given, the rows are normed then. Weights in fp8 are rounded to x's dtype.
    """
    checks.check_linears(
        x, norm_weight, residual, addend, len(weights), len(biases), keep_norm, norm_in_float,
        len(weight_scales or []),
    )  # fmt: skip
    for weight, bias, scale in zip(weights, biases, weight_scales or [None] * len(weights)):
        checks.check_linear(x, weight, bias, residual, scale)
    if weight_scales:
        weights = [(w.float() * scale[:, None]).to(x.dtype) for w, scale in zip(weights, weight_scales)]
    x = x if addend is None else x + addend
    rows = x if norm_weight is None else _normed(x, norm_weight, eps, norm_in_float)
    made = [F.linear(rows, weight, bias).contiguous() for weight, bias in zip(weights, biases)]
    if residual is not None:
        made = [residual + y for y in made]
    kept = [rows] if keep_norm else []
    return [*made, *(y.contiguous() for y in (kept if addend is None else [*kept, x]))]


def fp8_linear(x, weight, weight_scale, bias=None):
    """Calls `linears` with one weight."""
    checks.check_fp8_linear(x, weight, weight_scale, bias)
    return torch.ops.fp4.linears(x, [weight], [bias], None, 0.0, None, None, [weight_scale])[0]


def packed_linears(
    a, b, b_scale, b_global_scale, bias, *, format, layout="plain", a_format="none", out_dtype=None
):
    """Multiplies a by each weight with `mm`. With a_format "int8", a is quantised once."""
    checks.check_packed_linears(a, len(b), len(b_scale), len(b_global_scale), len(bias), a_format)
    if a_format == "int8" and a.device.type != "cpu":
        raise RuntimeError(
            f"fp4::packed_linears: a_format is 'int8'; int8 activations run on CPU only. On {a.device.type} "
            "it must be 'none'"
        )
    dtype = operand_checks.resolve_out_dtype(a, out_dtype)
    rows, scale = torch.ops.fp4.quantize_int8(a) if a_format == "int8" else (a, None)
    return [
        torch.ops.fp4.mm(rows, *weight, scale, added, format=format, layout=layout, out_dtype=dtype)
        for *weight, added in zip(b, b_scale, b_global_scale, bias)
    ]


def update_cache(q, k, v, cos, sin, q_norm, k_norm, eps, keys, values, start):
    """Rotates the heads of q and k, with the operators that a model uses, and writes k and v to a cache. If a
    norm's weight is given, the heads are normed first. Returns q.
    """
    checks.check_update_cache(q, k, v, cos, sin, q_norm, k_norm, keys, values, start)

    def rotated(x, norm_weight):
        if norm_weight is not None:
            x = _normed(x, norm_weight, eps)
        low, high = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(2) + torch.cat((-high, low), -1) * sin.unsqueeze(2)

    places = torch.arange(q.shape[1], device=q.device) + start
    keys.index_copy_(2, places, rotated(k, k_norm).transpose(1, 2))
    values.index_copy_(2, places, v.transpose(1, 2))
    return rotated(q, q_norm).clone(memory_format=torch.contiguous_format)


def attention(q, keys, values, mask, scale, sinks=None):
    """Attention of the heads of q [B, S, H, D] over a cache: by torch's own operator, or in float32 if the
    heads have sinks.
    """
    checks.check_attention(q, keys, values, mask, sinks)
    if sinks is not None:
        return _attention_with_sinks(q, keys, values, mask, scale, sinks)
    # torch's kernels for GPUs read 16 bytes at a time, wherever a tensor begins.
    q, keys, values = (x if x.data_ptr() % 16 == 0 else x.clone() for x in (q, keys, values))
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, attn_mask=mask, scale=scale, enable_gqa=q.shape[2] != keys.shape[1]
    )
    return out.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def _attention_with_sinks(q, keys, values, mask, scale, sinks):
    times = q.shape[2] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(times, 1) for x in (keys, values))
    logits = q.float().transpose(1, 2) @ keys.transpose(2, 3) * scale
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    sinks = sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
    out = (weights @ values).transpose(1, 2)
    return out.to(q.dtype, memory_format=torch.contiguous_format, copy=True)


def cached_attention(
    q, k, v, cos, sin, q_norm, k_norm, eps, keys, values, start, mask, scale, sinks=None
):  # fmt: skip
    """Attention of one token of each sequence, over a cache that it is written to first."""
    checks.check_cached_attention(q, k, v, cos, sin, q_norm, k_norm, keys, values, start, mask, sinks)
    rotated = torch.ops.fp4.update_cache(q, k, v, cos, sin, q_norm, k_norm, eps, keys, values, start)
    return torch.ops.fp4.attention(rotated, keys, values, mask, scale, sinks)


def top_experts(logits, k, *, softmax=False, normalize=False, out_dtype=None):
    """Chooses the k largest logits of each row, of equal ones the lowest index first."""
    dtype = checks.check_top_experts(logits, k, out_dtype)
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    ids = ids.clone(memory_format=torch.contiguous_format)
    scores = logits.float().softmax(-1) if softmax else logits.float()
    weights = scores.gather(-1, ids)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(dtype, memory_format=torch.contiguous_format, copy=True), ids


def router(
    x, weight, bias, norm_weight, eps, addend, k, *, softmax=False, normalize=False, early=False,
    keep_norm=False, norm_in_float=False, out_dtype=None,
):  # fmt: skip
    """Calls `linears`, then `top_experts` for its result."""
    checks.check_router(x, weight, bias, norm_weight, addend, k, keep_norm, norm_in_float, out_dtype)
    logits, *kept = torch.ops.fp4.linears(
        x, [weight], [bias], norm_weight, eps, None, addend, early=early, keep_norm=keep_norm,
        norm_in_float=norm_in_float,
    )  # fmt: skip
    chosen = torch.ops.fp4.top_experts(logits, k, softmax=softmax, normalize=normalize, out_dtype=out_dtype)
    return [logits, *chosen, *kept]
