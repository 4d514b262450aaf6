"""What every operator of csrc/schema.cpp does on CUDA where no native kernel does it: by Triton's kernels,
and conversions to and from the native layouts.

Functions have their operators' names; `fp4_ops/cuda.py` registers them.

Arguments are checked by meta/checks.py, as the fakes do. What only the data could show (bad offsets or
ids) is clamped on the device.
"""

from __future__ import annotations

from functools import partial

import torch

from ..meta import checks
from ..sm90 import int4
from ..sm90 import library as sm90_library
from ..sm90 import rows as sm90_rows
from . import ops
from .activations import moe_quantized, rows_of
from .launch import NoTile
from .scaled import ops as scaled
from .scaled import support
from .tiles import device_of

SM90, MMA_BF16, SM90_INT4 = "sm90", "mma_bf16", "sm90_int4"


def quantize(x, format, global_scale=None):
    fmt = checks.check_format(format)
    checks.check_quantize(x, global_scale, fmt)
    return ops.quantize_matrix(x, fmt, global_scale)


def dequantize(packed, block_scale, global_scale, format, dtype, *, layout="plain"):
    fmt, _ = checks.check_dequantize(packed, block_scale, global_scale, format, dtype, layout)
    if layout == SM90_INT4:
        packed, block_scale, global_scale = int4.unpack(packed, block_scale, global_scale, fmt)
        return ops.dequantize(packed, block_scale, global_scale, fmt, dtype)
    ops.refuse_layout("dequantize", layout)
    return ops.dequantize(packed, block_scale, global_scale, fmt, dtype)


def quantize_int8(x):
    checks.check_quantize_int8(x)
    return ops.quantize_int8(x)


def prepack(packed, block_scale, global_scale, format, layout):
    """`plain` is a copy; `tile16` is for CPUs; native ones are made there if no kernel here makes them."""
    fmt, _ = checks.check_prepack(packed, block_scale, global_scale, format, layout)
    if layout == SM90_INT4:
        return int4.prepack(packed, block_scale, fmt)
    if layout in sm90_library.packs(packed.device.index):
        return sm90_rows.prepack(packed, block_scale, global_scale, fmt, layout == MMA_BF16)
    if layout in (SM90, MMA_BF16):
        return ops.on_cpu(torch.ops.fp4.prepack, packed, block_scale, global_scale, format, layout)
    ops.refuse_layout("prepack", layout)
    return ops.copy_weight(packed, block_scale, global_scale)


def unpack(packed, block_scale, global_scale, format, layout):
    """From any layout, by way of the CPU but for `sm90_int4`."""
    fmt, _ = checks.check_unpack(packed, block_scale, global_scale, format, layout)
    if layout == "plain":
        return ops.copy_weight(packed, block_scale, global_scale)
    if layout == SM90_INT4:
        return int4.unpack(packed, block_scale, global_scale, fmt)
    return ops.on_cpu(torch.ops.fp4.unpack, packed, block_scale, global_scale, format, layout)


def quantize_fp8(x, *, layout="plain"):
    order = checks.check_quantize_fp8(x, layout)
    if layout == SM90 and sm90_library.available(x.device.index):
        return sm90_rows.quantize_fp8_rows(x)
    return ops.quantize_fp8(x, order)


def or_else(w: ops.Weight, a_format: str, fp4, other):
    """fp4(), by the kernels that multiply FP4 rows as they are, where they take the weight; else other()."""
    device = device_of(w.codes.device)
    if w.k and support.takes(w.fmt, a_format, device):
        try:
            return fp4()
        except NoTile as error:
            support.no_tile(error, a_format, device)
    return other()


def product(prepare, a, m: int, w: ops.Weight, dtype: torch.dtype, *args, **kwargs):
    """out [m, w.n] of activations (a, a_scale, a_global_scale, a_format)."""
    values, scale, global_scale, a_format = a

    def fp4():
        rows = scaled.rows_of(values, scale, global_scale, w.fmt)
        return scaled.product(prepare, rows, m, w, dtype, *args, **kwargs)

    def other():
        x, factor = rows_of(*a)
        return ops.run_product(prepare, x, m, w, dtype, *args, a_factor=factor, **kwargs)

    return or_else(w, a_format, fp4, other)


def mm(
    a, b, b_scale, b_global_scale, a_scale=None, bias=None, a_global_scale=None, *,
    format, layout="plain", a_format="", out_dtype=None,
):  # fmt: skip
    w = checks.check_mm(
        a, b, b_scale, b_global_scale, format, layout, a_scale, bias, a_global_scale, a_format
    )
    dtype = checks.resolve_out_dtype(a, out_dtype)
    ops.refuse_layout("mm", layout)
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
    dtype = checks.resolve_out_dtype(a, out_dtype)
    ops.refuse_layout("grouped_mm", layout)
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
    dtype = checks.resolve_out_dtype(a, out_dtype)
    ops.refuse_layout("grouped_mm_masked", layout)
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
    dtype = checks.resolve_out_dtype(a, out_dtype)
    ops.refuse_layout("indexed_mm", layout)
    ops.refuse_int8("indexed_mm", a.dtype)
    wt = ops.weight(b, b_scale, b_global_scale, bias, w)
    if w.groups == 0:
        return a.new_zeros((a.shape[0], w.n), dtype=dtype)
    given = a, a_scale, a_global_scale, a_format
    return product(ops.prepare_indexed, given, a.shape[0], wt, dtype, expert_ids, w.groups, tail=True)


def hopper_grouped_mm_k(a, b, offs, dtype, options):
    """One dense product of a copy of `a` for each group, zeros outside the group's columns.

    It multiplies each group by all of K: right for every size, fast only for few rows. Groups along K come up
    in training, where weights are not in 4 bits. `a`: (a, a_scale, a_global_scale, a_format).
    """
    values, scale, _, a_format = a
    if a_format:  # exact in bfloat16 but for a factor of each row
        values, scale = rows_of(*a)
    groups, (m, k) = offs.numel(), values.shape
    column = torch.arange(k, device=values.device)
    fp8 = values.dtype == torch.float8_e4m3fn
    if fp8:  # the layout's order: block t, word 2s + q -> word, block
        column = column.view(-1, 4, 4, 4).transpose(1, 2).reshape(-1)
        values = values.view(torch.uint8)  # zero is the byte zero
    ends = offs.clamp(0, k).cummax(0).values[:, None] if groups else offs[:, None]
    begins = torch.nn.functional.pad(ends[:-1], (0, 0, 1, 0))[:groups]
    mine = (column >= begins) & (column < ends)
    masked = torch.where(mine[:, None], values, 0).reshape(groups * m, k)
    scale = scale.repeat(groups) if scale is not None else None
    if fp8:
        out = torch.ops.fp4.mm(masked.view(torch.float8_e4m3fn), *b, scale, out_dtype=dtype, **options)
    elif scale is None:
        out = torch.ops.fp4.mm(masked, *b, out_dtype=dtype, **options)
    else:
        out = torch.ops.fp4.mm(masked, *b, out_dtype=torch.float32, **options) * scale[:, None]
    return out.to(dtype).view(groups, m, out.shape[1])


def grouped_mm_k(
    a, b, b_scale, b_global_scale, offs, a_scale=None, a_global_scale=None, *,
    format, layout="plain", a_format="", out_dtype=None,
):  # fmt: skip
    w = checks.check_grouped_mm_k(
        a, b, b_scale, b_global_scale, offs, format, layout, a_scale, a_global_scale, a_format
    )
    if w.layout.native:
        given, packed = (a, a_scale, a_global_scale, a_format), (b, b_scale, b_global_scale)
        dtype = checks.resolve_out_dtype(a, out_dtype)
        return hopper_grouped_mm_k(given, packed, offs, dtype, {"format": format, "layout": layout})
    ops.refuse_layout("grouped_mm_k", layout)
    ops.refuse_int8("grouped_mm_k", a.dtype)
    wt = ops.weight(b, b_scale, b_global_scale, None, w)
    dtype = checks.resolve_out_dtype(a, out_dtype)

    def other():
        x, factor = rows_of(a, a_scale, a_global_scale, a_format)
        return ops.grouped_mm_k(x, wt, offs, dtype, factor)

    def fp4():
        return scaled.grouped_mm_k(scaled.rows_of(a, a_scale, a_global_scale, wt.fmt), wt, offs, dtype)

    return or_else(wt, a_format, fp4, other)


def moe(
    x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale,
    w13_bias=None, w2_bias=None, *, format, layout="plain", activation="silu", a_format="none",
    out_dtype=None,
):  # fmt: skip
    up, down = checks.check_moe(
        x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale,
        format, layout, activation, a_format, w13_bias, w2_bias,
    )  # fmt: skip
    out_dtype = checks.resolve_out_dtype(x, out_dtype)
    ops.refuse_layout("moe", layout)
    if a_format == "int8":
        raise RuntimeError("fp4::moe: a_format is 'int8', which runs on CPU only; on CUDA it can be 'fp8'")
    run = ops.moe if a_format in ("none", "auto") else partial(moe_quantized, a_format=a_format)
    w_up = ops.weight(w13, w13_scale, w13_global_scale, w13_bias, up)
    w_down = ops.weight(w2, w2_scale, w2_global_scale, w2_bias, down)
    arguments = x, topk_ids, topk_weights, w_up, w_down, activation, out_dtype
    return or_else(w_up, a_format, lambda: scaled.moe(*arguments), lambda: run(*arguments))


def offs_to_m_indices(offs, m):
    checks.check_offs_to_m_indices(offs, m)
    # A row's expert is how many ends are at or before it; the running maximum keeps bad offsets in order.
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
    return ops.copy_groups(a, offs, a.shape[0], max_m, to_masked=True)


def from_masked(a, masked_m, m):
    checks.check_from_masked(a, masked_m, m)
    return ops.copy_groups(a, masked_m, m, a.shape[1], to_masked=False)
