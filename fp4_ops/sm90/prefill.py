"""Launches csrc/sm90/prefill_*.cu: grouped products with many rows an expert, bound by tensor cores."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from .decode import Routing, Weight
from .library import DTYPE_CODES, address, call, library, stream

MODES = {Routing.DENSE: 0, Routing.OFFS: 1, Routing.MASKED: 2}
CHOOSE = -1
"""Lets the launcher take a candidate from the sizes."""


def run(
    x: Tensor,
    x_scale: Tensor | None,
    w: Weight,
    route: Tensor | None,
    routing: Routing,
    rows: int,
    out: Tensor,
    *,
    ordered: bool = False,
    config: int = CHOOSE,
) -> None:
    """x [M, ...] sorted by expert; out [M, n], rows of no expert as zeros.

    x e4m3 [M, kp] in the layout's order with x_scale [M]: weights are folded into e4m3. With 16 bits the
    weights are exact: `ordered`, x fp16 [M, kp] with x_scale as rows.to_half makes them, or x bf16 or fp16
    [M, k] in plain order, rows of whole 16 bytes, with x_scale or without (ones). `rows`: M, or the rows of
    each group where masked. `config`: the index of a candidate.
    """
    weights = address(w.codes), address(w.scales), address(w.global_scale), address(w.bias)
    bias_code = DTYPE_CODES[w.bias.dtype] if w.bias is not None else 0
    result = address(route), address(out), DTYPE_CODES[out.dtype], MODES[routing], w.groups, rows, w.n
    if ordered or x.dtype == torch.float8_e4m3fn:
        call(
            "fp4_sm90_prefill_half" if ordered else "fp4_sm90_prefill_w4a8", address(x), address(x_scale),
            *weights, bias_code, *result, w.kp, config, stream(),
        )  # fmt: skip
    else:
        call(
            "fp4_sm90_prefill_w4a16", address(x), DTYPE_CODES[x.dtype], address(x_scale), *weights, bias_code,
            *result, x.shape[-1], w.kp, config, stream(),
        )  # fmt: skip


@functools.cache
def candidates() -> list[str]:
    """What `config` of `run` counts, in words."""
    loaded = library()
    assert loaded is not None
    name = loaded.fp4_sm90_prefill_w4a8_config_name
    name.restype = ctypes.c_char_p
    return [name(i).decode() for i in range(loaded.fp4_sm90_prefill_w4a8_configs())]


def choose(routing: Routing, groups: int, rows: int, n: int, kp: int, sms: int) -> int:
    """The candidate that CHOOSE takes on a GPU of `sms` multiprocessors."""
    loaded = library()
    assert loaded is not None
    return loaded.fp4_sm90_prefill_w4a8_choose(MODES[routing], groups, rows, n, kp, sms)
