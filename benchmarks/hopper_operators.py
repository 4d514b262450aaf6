"""Calls the operators on Hopper's layouts, with weights as fp4_ops.backends.launchers holds them, and asks
the planner."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4_ops.backends.launchers.library import multiprocessors
from fp4_ops.dev import planner
from fp4_ops.dev.product import Int4Weight, NativeWeight, Routing

FORMATS = {16: "nvfp4", 32: "mxfp4"}
INT4_FORMATS = {128: "int4", 64: "int4_g64", 32: "int4_g32"}


def _packed(w: NativeWeight | Int4Weight) -> tuple[Tensor, Tensor, Tensor]:
    return w.codes, w.scales, w.factor if isinstance(w, Int4Weight) else w.global_scale


def _options(w: NativeWeight | Int4Weight) -> dict[str, Any]:
    format = INT4_FORMATS[w.group] if isinstance(w, Int4Weight) else FORMATS[w.block]
    return {"format": format, "layout": w.layout.name}


def mm(a: Tensor, a_scale: Tensor | None, w: NativeWeight | Int4Weight, dtype: torch.dtype) -> Tensor:
    """Multiplies by the first matrix of a weight [groups, n, kp]."""
    one = [t[0] for t in _packed(w)]
    return torch.ops.fp4.mm(a, *one, a_scale, out_dtype=dtype, **_options(w))


def grouped_mm(
    a: Tensor, a_scale: Tensor | None, w: NativeWeight | Int4Weight, offs: Tensor, dtype: torch.dtype
) -> Tensor:
    return torch.ops.fp4.grouped_mm(a, *_packed(w), offs, a_scale, w.bias, out_dtype=dtype, **_options(w))


def moe(
    x: Tensor, ids: Tensor, scores: Tensor, up: NativeWeight, down: NativeWeight, activation: str,
    a_format: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return torch.ops.fp4.moe(
        x, ids, scores, *_packed(up), *_packed(down), activation=activation, a_format=a_format,
        out_dtype=dtype, **_options(up),
    )  # fmt: skip


def _product(w: NativeWeight, routing: Routing, rows: int) -> planner.Product:
    return planner.Product(routing, w.groups, rows, w.n, w.kp, w.block)


def decodes(a: Tensor, w: NativeWeight, routing: Routing, rows: int) -> bool:
    """Returns whether decode or gemv multiplies these rows, and not prefill."""
    kernel = "w4a8" if a.dtype == torch.float8_e4m3fn else "bf16" if w.bf16 else "half"
    plan = planner.plan(_product(w, routing, rows), kernel, multiprocessors(a.device.index))
    return plan.family.name != "prefill"


def block_decodes(
    up: NativeWeight, down: NativeWeight, pairs: int, a_format: str, device: torch.device
) -> bool:
    """Returns the same for a block with `pairs` (token, expert) pairs."""
    products = [_product(w, Routing.OFFS, pairs) for w in (up, down)]
    return bool(planner.block_plan(*products, 1, a_format, multiprocessors(device.index), bf16=up.bf16).few)
