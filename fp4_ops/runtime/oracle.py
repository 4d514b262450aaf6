"""Compares operators with exact results: products and expert blocks of random data, in float64.

Weights and activations are dequantised exactly, by the tables of meta/, and multiplied in float64. The error
is the norm of the difference over the norm of the exact result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..meta.formats import ACTIVATIONS, ELEMENTS, FORMATS, FP4_FORMATS, INT8_BLOCK
from ..meta.gates import apply_gate
from ..meta.layouts import LAYOUTS

F64 = torch.float64
G, N, K, M = 5, 192, 128, 37
"""Sizes: experts, columns, inner size, rows. The fourth expert gets no row."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTISED = ("int8", "fp8", *FP4_FORMATS)
PRODUCTS = ("mm", "grouped_mm", "grouped_mm_masked", "indexed_mm", "grouped_mm_k")


class KnownWeight(NamedTuple):
    packed: Tensor
    scale: Tensor
    global_scale: Tensor | None
    exact: Tensor
    """Values that the kernel multiplies, float64."""


@dataclass(frozen=True)
class Case:
    operator: str
    format: str
    layout: str
    kind: str
    """Kind of activations: a dtype, or how they are quantised. For `moe` this is `a_format`."""
    activation: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.operator, self.format, self.layout, self.kind, self.activation)))


def dequantize(packed: Tensor, scale: Tensor, global_scale: Tensor | None, format: str) -> Tensor:
    """Returns code x block scale x global scale, exactly."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    values = torch.tensor(ELEMENTS[FORMATS[format].element], dtype=F64, device=packed.device)[codes.long()]
    # Some devices cannot convert e8m0 to float64.
    steps = scale.float().to(F64).repeat_interleave(FORMATS[format].block, -1)[..., : values.shape[-1]]
    values = values * steps
    if global_scale is None or global_scale.numel() == 0:
        return values
    factor = global_scale.to(F64)
    return values * factor.reshape(*factor.shape, *(1,) * (values.dim() - factor.dim()))


def quantised(x: Tensor, kind: str, layout: str) -> tuple[dict[str, Any], Tensor]:
    """Returns an operator's arguments for activations of a kind, and their exact values."""
    fp4 = torch.ops.fp4
    if kind in DTYPES:
        a = x.to(DTYPES[kind])
        return {"a": a}, a.to(F64)
    if kind == "int8":
        codes, scale = fp4.quantize_int8(x)
        return {"a": codes, "a_scale": scale}, codes.to(F64) * scale.to(F64).repeat_interleave(INT8_BLOCK, -1)
    if kind == "fp8":
        plain, scale = fp4.quantize_fp8(x)
        codes, _ = fp4.quantize_fp8(x, layout=LAYOUTS[layout].a_layout)
        return {"a": codes, "a_scale": scale}, plain.to(F64) * scale.to(F64)[..., None]
    packed, scale, global_scale = fp4.quantize(x, kind)
    given = global_scale if FORMATS[kind].has_global_scale else None
    return (
        {"a": packed, "a_scale": scale, "a_global_scale": given, "a_format": kind},
        dequantize(packed, scale, given, kind),
    )


def folds(layout: str, kind: str) -> bool:
    """True if only kernels run that round weight x scale to e4m3.

    These are Hopper's for fp8 rows, where any number of rows runs by prefill.
    """
    row = LAYOUTS[layout]
    return row.native and kind in ("fp8", "auto") and (row.batch_invariant or row.order == "sm90_int4")


def folded(exact: Tensor, factor: Tensor, layout: str) -> Tensor:
    """Returns a weight's values after the rounding that `folds` describes. `factor` is the factor of the
    prepacked matrix."""
    int4 = LAYOUTS[layout].order == "sm90_int4"
    unit = factor.to(F64)[..., None, None] * (1 if int4 else 8)
    up = 1 if int4 else 1 + 2**-20  # half-way between two e4m3 numbers, take the larger one
    return (exact / unit * up).float().to(torch.float8_e4m3fn).to(F64) * unit


def random_weight(
    shape: tuple[int, ...], format: str, layout: str, device: str, kind: str = "none"
) -> KnownWeight:
    """Returns a random weight that is quantised by `fp4::quantize`, then prepacked, for `kind` of rows."""
    w = torch.randn(shape, device=device) / shape[-1] ** 0.5
    packed, scale, global_scale = torch.ops.fp4.quantize(w, format)
    given = global_scale if FORMATS[format].has_global_scale else None
    exact = dequantize(packed, scale, given, format)
    if layout != "plain":
        packed, scale, global_scale = torch.ops.fp4.prepack(packed, scale, given, format, layout)
        given = global_scale if global_scale.numel() or LAYOUTS[layout].has_factor else None
    if folds(layout, kind):
        exact = folded(exact, global_scale, layout)
    return KnownWeight(packed, scale, given, exact)


def product(case: Case, device: str) -> tuple[Tensor, Tensor]:
    """Returns the operator's result and the exact one."""
    groups = () if case.operator in ("mm", "grouped_mm_k") else (G,)
    w = random_weight((*groups, N, K), case.format, case.layout, device, case.kind)
    rows = (G, M, K) if case.operator == "grouped_mm_masked" else (M, K)
    given, x = quantised(torch.randn(rows, device=device), case.kind, case.layout)
    a = given.pop("a")
    ends = torch.tensor([9, 10, 26, 26, M - 2], dtype=torch.int32, device=device)
    ids = torch.searchsorted(ends, torch.arange(M, dtype=torch.int32, device=device), right=True)
    valid = ids < G
    options = {"format": case.format, "layout": case.layout, **given}
    call = getattr(torch.ops.fp4, case.operator)
    operands = a, w.packed, w.scale, w.global_scale
    if case.operator == "mm":
        return call(*operands, **options), x @ w.exact.T
    if case.operator == "grouped_mm_k":
        block = max(FORMATS[case.format].block, 32)
        ends = torch.tensor([block, block, K], dtype=torch.int32, device=device)
        parts = [slice(0, block), slice(block, block), slice(block, K)]
        return call(*operands, ends, **options), torch.stack([x[:, p] @ w.exact[:, p].T for p in parts])
    if case.operator == "grouped_mm_masked":
        count = torch.tensor([9, 1, 16, 0, M], dtype=torch.int32, device=device)
        there = torch.arange(M, device=device) < count[:, None]
        return call(*operands, count, **options), (x @ w.exact.mT) * there[..., None]
    want = torch.einsum("mk,mnk->mn", x, w.exact[ids.clamp(max=G - 1)]) * valid[:, None]
    if case.operator == "indexed_mm":
        return call(*operands, torch.where(valid, ids, -1), **options), want
    return call(*operands, ends, **options), want


def block(case: Case, device: str) -> tuple[Tensor, Tensor]:
    act = ACTIVATIONS[case.activation]
    inner, top_k = N, 3
    w13 = random_weight((G, act.parts * inner, K), case.format, case.layout, device, case.kind)
    w2 = random_weight((G, K, inner), case.format, case.layout, device, case.kind)
    kind = "fp8" if folds(case.layout, case.kind) else case.kind
    x = torch.randn(M, K, device=device, dtype=torch.bfloat16)
    ids = torch.rand(M, G - 1, device=device).topk(top_k).indices  # the last expert gets no row
    weights = torch.rand(M, top_k, device=device)
    got = torch.ops.fp4.moe(
        x, ids, weights, *w13[:3], *w2[:3], format=case.format, layout=case.layout,
        activation=case.activation, a_format=case.kind, out_dtype=torch.float32,
    )  # fmt: skip

    def as_read(rows: Tensor) -> Tensor:
        """Rounds rows as the operator reads them. In FP4 every row has its own global scale."""
        if kind not in QUANTISED:
            return rows.to(F64)
        return quantised(rows.float()[:, None], kind, "plain")[1][:, 0]

    want = torch.zeros(M, K, dtype=F64, device=device)
    first = as_read(x)
    for j in range(top_k):
        h = apply_gate(torch.einsum("mk,mnk->mn", first, w13.exact[ids[:, j]]), act)
        y = torch.einsum("mk,mnk->mn", as_read(h), w2.exact[ids[:, j]])
        want += weights[:, j, None].to(F64) * y
    return got, want


def relative_error(got: Tensor, want: Tensor) -> float:
    """Returns norm(got - want) / norm(want).

    It is infinite for NaN, and for nonzero `got` if `want` is zero.
    """
    error, norm = (got.to(F64) - want.to(F64)).norm().item(), want.to(F64).norm().item()
    if norm == 0 or math.isnan(error):
        return 0.0 if error == 0 else math.inf
    return error / norm
