"""int4 weights with group scales, layout sm90_int4: its bytes in torch operators, and the launch of
csrc/sm90/prefill_int4.cu, the one kernel for every number of rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..meta.formats import Format
from ..meta.layouts import LAYOUTS, Layout
from .decode import Routing
from .library import DTYPE_CODES, address, call, stream
from .prefill import CHOOSE, MODES

LAYOUT = LAYOUTS["sm90_int4"]


class Int4Weight(NamedTuple):
    """A weight in layout sm90_int4: [groups, n, kp], value = code * scale of its `group` of k."""

    codes: Tensor
    scales: Tensor
    group: int
    bias: Tensor | None
    groups: int
    n: int
    kp: int

    @property
    def layout(self) -> Layout:
        return LAYOUT

    def decodes(self, rows: int, blocks: int) -> bool:
        """Never: prefill's kernel is fast for few rows, too."""
        return False


def prepack(packed: Tensor, block_scale: Tensor, fmt: Format) -> tuple[Tensor, Tensor, Tensor]:
    """A plain weight [..., N, K/2] into the layout; the same bytes as the CPU's `fp4::prepack` makes."""
    *lead, n, half = packed.shape
    kp = LAYOUT.padded(2 * half)
    # The codes of layout sm90, whatever they stand for.
    no_scale = packed.new_zeros((*lead, n, half // 8), dtype=torch.uint8).view(torch.float8_e4m3fn)
    no_factor = packed.new_ones(lead, dtype=torch.float32)
    codes = torch.ops.fp4.prepack(packed, no_scale, no_factor, "nvfp4", "sm90")[0]
    scales = F.pad(block_scale.float(), (0, kp // fmt.block - block_scale.shape[-1]))
    scales = scales.view(*lead, n // 16, 16, kp // fmt.block).transpose(-1, -2)
    return codes, scales.reshape(*lead, n, kp // fmt.block), no_factor.new_empty(0)


def unpack(packed: Tensor, block_scale: Tensor, fmt: Format) -> tuple[Tensor, Tensor, Tensor]:
    """The plain weight [..., N, Kp/2], its scales float32."""
    *lead, n, half = packed.shape
    tiles, steps = n // 16, half // 32
    # Lane 4g + t of a tile and a step of 64 k: rows 2g and 2g + 1, each with words 0 and 1 of block t.
    words = packed.contiguous().view(torch.int32).view(*lead, tiles, steps, 8, 4, 2, 2)
    # Word s: its codes 4q + i, q < 2, i < 4. See csrc/cpu/sm90_layout.h.
    codes = [
        ((words >> (16 * q + 4 * i) & 7) | (words >> (8 * i + (7, 3)[q]) & 1) << 3).to(torch.uint8)
        for q in range(2)
        for i in range(4)
    ]
    pairs = torch.stack([low | high << 4 for low, high in zip(codes[::2], codes[1::2])], -1)
    d = len(lead)  # -> tile, g, row, step, t, word, pair
    plain = pairs.permute(*range(d), d, d + 2, d + 4, d + 1, d + 3, d + 5, d + 6).reshape(*lead, n, half)
    blocks = 2 * half // fmt.block
    scales = block_scale.reshape(*lead, tiles, blocks, 16).transpose(-1, -2).reshape(*lead, n, blocks)
    return plain, scales.clone(memory_format=torch.contiguous_format), scales.new_empty(0)


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
