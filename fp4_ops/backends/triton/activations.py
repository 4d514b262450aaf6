"""Converts quantised activations to bfloat16 rows and a float32 factor for each row. The product's epilogue
multiplies by the factor.

This rounds nothing, because bfloat16 holds every e4m3 code, and every e2m1 code times its block scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...meta.formats import FORMATS, Activation, known_activation
from . import ops
from .gemm import activate, curve


class ScaledRows(NamedTuple):
    """Rows a[r, k] = values[r, k] * factor[r]. values is [..., K]; factor is float32 [rows], or None for
    ones.
    """

    values: torch.Tensor
    factor: torch.Tensor | None


def rows_of(
    a: torch.Tensor, a_scale: torch.Tensor | None, a_global_scale: torch.Tensor | None, a_format: str
) -> ScaledRows:
    """Converts the activations of a product. They were checked (meta.checks.check_a), and they are not
    int8.
    """
    if a_format:
        return _packed_rows(a, a_scale, a_global_scale, a_format)
    if a.dtype == torch.float8_e4m3fn:
        assert a_scale is not None
        return ScaledRows(a.to(torch.bfloat16), a_scale.reshape(-1).contiguous())
    return ScaledRows(a, None)


def _packed_rows(packed, block_scale, factor, format: str) -> ScaledRows:
    fmt = FORMATS[format]
    ones = packed.new_ones(packed.shape[:-2], dtype=torch.float32) if fmt.has_global_scale else None
    values = ops.dequantize(packed, block_scale, ones, fmt, torch.bfloat16)
    if not fmt.has_global_scale:
        return ScaledRows(values, None)
    lead = packed.shape[:-1]  # there is one factor for all, one for each group, or one for each row
    each = factor.reshape(*factor.shape, *[1] * (len(lead) - factor.dim())).expand(lead)
    return ScaledRows(values, each.reshape(-1).contiguous())


def quantized_rows(x: torch.Tensor, a_format: str) -> ScaledRows:
    """Quantises each row of x [rows, K] by itself, as `fp4::moe` does. A row with a NaN or infinity becomes
    NaN.
    """
    if a_format == "fp8":
        codes, scale = ops.quantize_fp8(x)
        return ScaledRows(codes.to(torch.bfloat16), scale)
    fmt = FORMATS[a_format]
    packed, block_scale, factor = ops.quantize_rows(x, fmt)
    block_scale = block_scale[:, : fmt.num_blocks(x.shape[1])]
    ones = torch.ones((), dtype=torch.float32, device=x.device)
    return ScaledRows(ops.dequantize(packed, block_scale, ones, fmt, torch.bfloat16), factor)


@triton.jit
def gate_kernel(
    y_ptr, h_ptr, n, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes h [rows, n], the activation of y [rows, PARTS * n]. Each program handles one row and BLOCK
    columns."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = y_ptr + row * PARTS * n
    if PARTS == 1:
        h = curve(tl.load(y + i, mask=i < n, other=0.0), ACT, ALPHA, GATE_CAP)
    else:
        gate = tl.load(y + (2 * i if INTERLEAVED else i), mask=i < n, other=0.0)
        up = tl.load(y + (2 * i + 1 if INTERLEAVED else i + n), mask=i < n, other=0.0)
        h = activate(gate, up, ACT, ALPHA, LIMIT, UP_OFFSET, GATE_CAP, UP_CAP)
    tl.store(h_ptr + row * n + i, h, mask=i < n)


def gated(y: torch.Tensor, n: int, act: Activation) -> torch.Tensor:
    """Applies `act` to the first product's float32 rows y [rows, parts * n]. Returns [rows, n]."""
    h = y.new_empty((y.shape[0], n))
    block = min(1024, triton.next_power_of_2(n))
    gate_cap, up_cap = act.caps or (None, None)
    gate_kernel[(y.shape[0], triton.cdiv(n, block))](
        y, h, n, PARTS=act.parts, INTERLEAVED=act.interleaved, ACT=act.function, ALPHA=act.alpha,
        LIMIT=act.limit, UP_OFFSET=act.up_offset, GATE_CAP=gate_cap, UP_CAP=up_cap, BLOCK=block,
    )  # fmt: skip
    return h


def moe_quantized(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor,
    up: ops.WeightArgs, down: ops.WeightArgs,
    activation: str, out_dtype: torch.dtype, *, a_format: str,
) -> torch.Tensor:  # fmt: skip
    """Does what ops.moe does, but quantises x and the hidden state. The hidden state is float32 in memory,
    because the steps are not fused.
    """
    tokens, top_k = topk_ids.shape
    out = torch.zeros((tokens, down.n), dtype=out_dtype, device=x.device)
    if out.numel() == 0 or top_k == 0 or up.groups == 0 or down.k == 0:
        return out
    topk_ids = topk_ids.contiguous()
    ids = topk_ids.view(-1)

    def product(a: ScaledRows, w: ops.WeightArgs) -> torch.Tensor:
        return ops.run_product(
            ops.prepare_indexed, a.values, ids.numel(), w, torch.float32, ids, w.groups,
            tail=True, a_factor=a.factor,
        )  # fmt: skip

    values, factor = quantized_rows(x, a_format)
    assert factor is not None
    y = product(ScaledRows(values.repeat_interleave(top_k, 0), factor.repeat_interleave(top_k)), up)
    h = gated(y, down.k, known_activation(activation))
    y = product(quantized_rows(h, a_format), down._replace(bias=None))
    ops.combine(y, topk_ids, topk_weights, down, out)
    return out
