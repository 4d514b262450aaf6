"""int4 weights with group scales for csrc/sm90/prefill_int4.cu: the order of their bytes, and the launch.

Not reached by any operator yet: layout sm90 holds nvfp4 and mxfp4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..meta.layouts import LAYOUTS
from .decode import Routing
from .library import DTYPE_CODES, address, call, stream
from .prefill import CHOOSE, MODES

LAYOUT = LAYOUTS["sm90"]
GROUPS = (128, 64)
"""An instruction's 32 K are half of each of four blocks of 16, so smaller groups would meet inside it."""


class Int4Weight(NamedTuple):
    """A weight [groups, n, kp]: value = code * scale of its `group` of k."""

    codes: Tensor
    """uint8 [groups, n, kp / 2]: layout sm90; low three bits of a code as magnitude, its top bit as sign."""
    scales: Tensor
    """float32 [groups, n / 16, kp / 128, 128 / group, 8, 2]: the rows of a tile in pairs."""
    group: int
    bias: Tensor | None
    groups: int
    n: int
    kp: int


def pack(packed: Tensor, block_scale: Tensor, group: int, bias: Tensor | None = None) -> Int4Weight:
    """packed uint8 [G, N, K/2] (two's complement, lower k in the low nibble), block_scale bf16 or float32
    [G, N, ceil(K / group)]; N a multiple of 64, K of 16."""
    groups, n, half = packed.shape
    k, kp = 2 * half, LAYOUT.padded(2 * half)
    none = torch.zeros((groups, n, k // 16), dtype=torch.float8_e4m3fn, device=packed.device)
    ones = torch.ones(groups, device=packed.device)
    codes = torch.ops.fp4.prepack(packed, none, ones, "nvfp4", "sm90")[0]
    scales = F.pad(block_scale.float(), (0, kp // group - block_scale.shape[-1]))
    scales = (
        scales.view(groups, n // 16, 8, 2, kp // 128, 128 // group).permute(0, 1, 4, 5, 2, 3).contiguous()
    )
    return Int4Weight(codes, scales, group, bias, groups, n, kp)


def run(
    x: Tensor, x_scale: Tensor, w: Int4Weight, route: Tensor | None, routing: Routing, rows: int, out: Tensor,
    *, config: int = CHOOSE,
) -> None:  # fmt: skip
    """As prefill.run: x e4m3 [M, kp] in the layout's order, sorted by expert. Codes are exact in e4m3."""
    call(
        "fp4_sm90_prefill_int4", address(x), address(x_scale), address(w.codes), address(w.scales), w.group,
        address(w.bias), DTYPE_CODES[w.bias.dtype] if w.bias is not None else 0, address(route), address(out),
        DTYPE_CODES[out.dtype], MODES[routing], w.groups, rows, w.n, w.kp, config, stream(),
    )  # fmt: skip
