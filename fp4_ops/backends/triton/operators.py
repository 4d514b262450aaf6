"""Implements the operators of csrc/schema.cpp with Triton's kernels, for weights in layout plain.

Functions have their operators' names; `fp4_ops/backends/operators.py` finds them here.

meta/checks.py checks the arguments, as for the fakes. Bad offsets or ids, which only the data could show, are
clamped on the device.
"""

from __future__ import annotations

from functools import partial

import torch

from ...meta import checks, operand_checks
from . import ops
from .activations import moe_quantized, rows_of
from .launch import NoTile
from .scaled import native as cuda
from .scaled import ops as scaled
from .scaled import support
from .tiles import device_of


def quantize(x, format, global_scale=None):
    fmt = operand_checks.check_format(format)
    checks.check_quantize(x, global_scale, fmt)
    return ops.quantize_matrix(x, fmt, global_scale)


def dequantize(packed, block_scale, global_scale, format, dtype, *, layout="plain"):
    fmt, _ = checks.check_dequantize(packed, block_scale, global_scale, format, dtype, layout)
    return ops.dequantize(packed, block_scale, global_scale, fmt, dtype)


def quantize_int8(x):
    checks.check_quantize_int8(x)
    return ops.quantize_int8(x)


def quantize_fp8(x, *, layout="plain"):
    order = checks.check_quantize_fp8(x, layout)
    return ops.quantize_fp8(x, order)


def or_else(w: ops.WeightArgs, a_format: str, fp4, other, native: bool = False):
    """Calls fp4() if the kernels that multiply such rows directly take the weight; else other().

    `native`: the CUDA kernels take it.
    """
    device = device_of(w.codes.device)
    if w.k and (native or support.takes(w.fmt, a_format, device)):
        try:
            return fp4()
        except NoTile as error:
            support.no_tile(error, a_format, device)
    return other()


def product(prepare, a, m: int, w: ops.WeightArgs, dtype: torch.dtype, *args, **kwargs):
    """Returns out [m, w.n] for activations a = (a, a_scale, a_global_scale, a_format)."""
    values, scale, global_scale, a_format = a
    fp8 = values.dtype == torch.float8_e4m3fn
    kind = "fp8" if fp8 else a_format

    def fp4():
        rows = scaled.fp8_rows(values, scale) if fp8 else scaled.rows_of(values, scale, global_scale)
        return scaled.product(prepare, rows, m, w, dtype, *args, **kwargs)

    def other():
        x, factor = rows_of(*a)
        return ops.run_product(prepare, x, m, w, dtype, *args, a_factor=factor, **kwargs)

    return or_else(w, kind, fp4, other, cuda.takes(w, kind, m))


def mm(
    a, b, b_scale, b_global_scale, a_scale=None, bias=None, a_global_scale=None, *,
    format, layout="plain", a_format="", out_dtype=None,
):  # fmt: skip
    w = checks.check_mm(
        a, b, b_scale, b_global_scale, format, layout, a_scale, bias, a_global_scale, a_format
    )
    dtype = operand_checks.resolve_out_dtype(a, out_dtype)
    ops.refuse_int8("mm", a.dtype)
    wt = ops.weight(b, b_scale, b_global_scale, bias, w)
    return product(ops.prepare_dense, (a, a_scale, a_global_scale, a_format), a.shape[0], wt, dtype)


def grouped_mm(
    a, b, b_scale, b_global_scale, offs, a_scale=None, bias=None, a_global_scale=None, *,
    format, layout="plain", a_format="", out_dtype=None,
):  # fmt: skip
    w = checks.check_grouped_mm(
        a, b, b_scale, b_global_scale, offs, format, layout, a_scale, bias, a_global_scale, a_format
    )
    dtype = operand_checks.resolve_out_dtype(a, out_dtype)
    ops.refuse_int8("grouped_mm", a.dtype)
    wt = ops.weight(b, b_scale, b_global_scale, bias, w)
    if w.groups == 0:
        return a.new_zeros((a.shape[0], w.n), dtype=dtype)
    return product(ops.prepare_grouped, (a, a_scale, a_global_scale, a_format), a.shape[0], wt, dtype, offs)


def grouped_mm_masked(
    a, b, b_scale, b_global_scale, masked_m, a_scale=None, bias=None, a_global_scale=None, *,
    format, layout="plain", a_format="", out_dtype=None,
):  # fmt: skip
    w = checks.check_grouped_mm_masked(
        a, b, b_scale, b_global_scale, masked_m, format, layout, a_scale, bias, a_global_scale, a_format
    )
    dtype = operand_checks.resolve_out_dtype(a, out_dtype)
    ops.refuse_int8("grouped_mm_masked", a.dtype)
    wt = ops.weight(b, b_scale, b_global_scale, bias, w)
    groups, max_m, _ = a.shape
    given = a, a_scale, a_global_scale, a_format
    out = product(ops.prepare_masked, given, groups * max_m, wt, dtype, masked_m)
    return out.view(groups, max_m, w.n)


def indexed_mm(
    a, b, b_scale, b_global_scale, expert_ids, a_scale=None, bias=None, a_global_scale=None, *,
    format, layout="plain", a_format="", out_dtype=None,
):  # fmt: skip
    w = checks.check_indexed_mm(
        a, b, b_scale, b_global_scale, expert_ids, format, layout, a_scale, bias, a_global_scale, a_format
    )
    dtype = operand_checks.resolve_out_dtype(a, out_dtype)
    ops.refuse_int8("indexed_mm", a.dtype)
    wt = ops.weight(b, b_scale, b_global_scale, bias, w)
    if w.groups == 0:
        return a.new_zeros((a.shape[0], w.n), dtype=dtype)
    given = a, a_scale, a_global_scale, a_format
    return product(ops.prepare_indexed, given, a.shape[0], wt, dtype, expert_ids, w.groups, tail=True)


def grouped_mm_k(
    a, b, b_scale, b_global_scale, offs, a_scale=None, a_global_scale=None, *,
    format, layout="plain", a_format="", out_dtype=None,
):  # fmt: skip
    w = checks.check_grouped_mm_k(
        a, b, b_scale, b_global_scale, offs, format, layout, a_scale, a_global_scale, a_format
    )
    ops.refuse_int8("grouped_mm_k", a.dtype)
    wt = ops.weight(b, b_scale, b_global_scale, None, w)
    dtype = operand_checks.resolve_out_dtype(a, out_dtype)

    def other():
        x, factor = rows_of(a, a_scale, a_global_scale, a_format)
        return ops.grouped_mm_k(x, wt, offs, dtype, factor)

    def fp4():
        return scaled.grouped_mm_k(scaled.rows_of(a, a_scale, a_global_scale), wt, offs, dtype)

    return or_else(wt, a_format, fp4, other, cuda.takes_along_k(wt, a_format))


def moe(
    x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale,
    w13_bias=None, w2_bias=None, *, format, layout="plain", activation="silu", a_format="none",
    out_dtype=None,
):  # fmt: skip
    up, down = checks.check_moe(
        x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale,
        format, layout, activation, a_format, w13_bias, w2_bias,
    )  # fmt: skip
    out_dtype = operand_checks.resolve_out_dtype(x, out_dtype)
    if a_format == "int8":
        raise RuntimeError(
            f"fp4::moe: a_format is 'int8', and layout is {layout!r}; on CUDA int8 needs layout 'mma_bf16' "
            "and a GPU of compute capability 8.0 or later that is no Hopper GPU. Use a_format 'fp8'"
        )
    run = ops.moe if a_format in ("none", "auto") else partial(moe_quantized, a_format=a_format)
    w_up = ops.weight(w13, w13_scale, w13_global_scale, w13_bias, up)
    w_down = ops.weight(w2, w2_scale, w2_global_scale, w2_bias, down)
    arguments = x, topk_ids, topk_weights, w_up, w_down, activation, out_dtype
    rows = topk_ids.numel()
    native = cuda.takes(w_up, a_format, rows) and cuda.takes(w_down, a_format, rows)
    return or_else(w_up, a_format, lambda: scaled.moe(*arguments, a_format), lambda: run(*arguments), native)


def to_masked(a, offs, max_m):
    checks.check_to_masked(a, offs, max_m)
    return ops.copy_groups(a, offs, a.shape[0], max_m, to_masked=True)


def from_masked(a, masked_m, m):
    checks.check_from_masked(a, masked_m, m)
    return ops.copy_groups(a, masked_m, m, a.shape[1], to_masked=False)
