"""Operators on native layouts that are written in Python: conversions, and products along K."""

from __future__ import annotations

import torch

from ...meta import checks, operand_checks
from ...meta.formats import FORMATS
from ...meta.layouts import LAYOUTS, same_bytes
from .. import anywhere
from . import int4, library, rows


def dequantize(packed, block_scale, global_scale, format, dtype, *, layout="plain"):
    fmt, _ = checks.check_dequantize(packed, block_scale, global_scale, format, dtype, layout)
    if not same_bytes(layout, int4.LAYOUT.name):
        return anywhere.dequantize(packed, block_scale, global_scale, format, dtype, layout=layout)
    codes, scales, _ = int4.unpack(packed, block_scale, global_scale, fmt)
    return torch.ops.fp4.dequantize(codes, scales, None, format, dtype)


def prepack(packed, block_scale, global_scale, format, layout):
    """Packs a weight with this GPU's kernel, or on the CPU if the GPU has none."""
    fmt, _ = checks.check_prepack(packed, block_scale, global_scale, format, layout)
    if same_bytes(layout, int4.LAYOUT.name):
        return int4.prepack(packed, block_scale, fmt)
    if LAYOUTS[layout].order in library.packs(packed.device.index):
        return rows.prepack(packed, block_scale, global_scale, fmt, same_bytes(layout, "mma_bf16"))
    return anywhere.prepack(packed, block_scale, global_scale, format, layout)


def unpack(packed, block_scale, global_scale, format, layout):
    fmt, _ = checks.check_unpack(packed, block_scale, global_scale, format, layout)
    if same_bytes(layout, int4.LAYOUT.name):
        return int4.unpack(packed, block_scale, global_scale, fmt)
    return anywhere.unpack(packed, block_scale, global_scale, format, layout)


def quantize_fp8(x, *, layout="plain"):
    order = checks.check_quantize_fp8(x, layout)
    if library.available(x.device.index):
        return rows.quantize_fp8_rows(x)
    return anywhere.fp8_rows(x, order)


def _exact_rows(a, a_scale, a_global_scale, a_format):
    """Converts packed rows to bfloat16 values and a float32 factor for each row, without rounding. A factor
    of None means 1 for all rows.
    """
    fmt = FORMATS[a_format]
    ones = a.new_ones(a.shape[:-2], dtype=torch.float32) if fmt.has_global_scale else None
    values = torch.ops.fp4.dequantize(a, a_scale, ones, a_format, torch.bfloat16)
    if not fmt.has_global_scale:
        return values, None
    lead = a.shape[:-1]  # there is one factor for all rows, one for each group, or one for each row
    each = a_global_scale.reshape(*a_global_scale.shape, *[1] * (len(lead) - a_global_scale.dim()))
    return values, each.expand(lead).reshape(-1).contiguous()


def grouped_mm_k(
    a, b, b_scale, b_global_scale, offs, a_scale=None, a_global_scale=None, *,
    format, layout="plain", a_format="", out_dtype=None,
):  # fmt: skip
    """Computes one dense product. Its rows are copies of `a`, one for each group, with zeros outside the
    group's columns.

    It multiplies each group by all of K, so it is correct for every size but fast only for few rows. Groups
    along K occur in training, where weights are not in 4 bits.
    """
    checks.check_grouped_mm_k(
        a, b, b_scale, b_global_scale, offs, format, layout, a_scale, a_global_scale, a_format
    )
    dtype = operand_checks.resolve_out_dtype(a, out_dtype)
    values, scale = _exact_rows(a, a_scale, a_global_scale, a_format) if a_format else (a, a_scale)
    weight, options = (b, b_scale, b_global_scale), {"format": format, "layout": layout}
    groups, (m, k) = offs.numel(), values.shape
    column = torch.arange(k, device=values.device)
    fp8 = values.dtype == torch.float8_e4m3fn
    if fp8:  # the layout's order: [block t, word 2s + q] becomes [word, block]
        column = column.view(-1, 4, 4, 4).transpose(1, 2).reshape(-1)
        values = values.view(torch.uint8)  # so that torch.where takes them; the byte 0 is the value 0
    ends = offs.clamp(0, k).cummax(0).values[:, None] if groups else offs[:, None]
    begins = torch.nn.functional.pad(ends[:-1], (0, 0, 1, 0))[:groups]
    mine = (column >= begins) & (column < ends)
    masked = torch.where(mine[:, None], values, 0).reshape(groups * m, k)
    scale = scale.repeat(groups) if scale is not None else None
    if fp8:
        out = torch.ops.fp4.mm(masked.view(torch.float8_e4m3fn), *weight, scale, out_dtype=dtype, **options)
    elif scale is None:
        out = torch.ops.fp4.mm(masked, *weight, out_dtype=dtype, **options)
    else:
        out = torch.ops.fp4.mm(masked, *weight, out_dtype=torch.float32, **options) * scale[:, None]
    return out.to(dtype).view(groups, m, out.shape[1])
