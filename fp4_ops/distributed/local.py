"""What a rank computes of a block whose experts are spread: `fp4::moe` with its own experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..meta import checks


class Parts(NamedTuple):
    """What a rank's experts make of tokens."""

    y: Tensor
    summed: bool
    """Whether it is [T, H], the weighted sums of each token's experts; else rows of experts."""
    places: Tensor | None = None
    """Of rows of experts: int32, which one each (token, slot) has; None: they are in that order."""


@dataclass(frozen=True)
class Local:
    """The experts of this rank; ids of others are outside [0, len(own))."""

    experts: checks.Experts
    num_experts: int
    """Of all ranks."""
    own: range
    operands: tuple[Tensor | None, ...]
    """w13, its scales and factors, w2, its scales and factors, and both biases."""
    options: dict[str, str]
    a_format: str

    def sums(self, x: Tensor, ids: Tensor, weights: Tensor, pairs: int, dtype: torch.dtype) -> Tensor:
        """[T, H] of the experts here. pairs: of tokens and experts, of all ranks."""
        out: Tensor = torch.ops.fp4.moe(
            x, ids, weights, *self.operands, **self.options,
            a_format=self.chosen(pairs, x.device), out_dtype=dtype,
        )  # fmt: skip
        return out

    def parts(
        self, x: Tensor, ready: tuple[Tensor, Tensor] | None, ids: Tensor, weights: Tensor, pairs: int,
        dtype: torch.dtype, ranks: int,
    ) -> Parts:  # fmt: skip
        """Of the experts here.

        ready: rows in fp8 and their factors, where `sends_fp8`; then x is not read.
        """
        *weight_operands, w13_bias, w2_bias = self.operands
        if not self.experts.up.layout.native or w2_bias is not None or dtype == torch.float32:
            return Parts(self.sums(x, ids, weights, pairs, dtype), summed=True)
        values, factor = ready or (None, None)
        y, order = torch.ops.fp4_parts.moe_parts(
            x, values, factor, ids, weights, *weight_operands, w13_bias, **self.options,
            a_format=self.chosen(pairs, x.device), out_dtype=dtype, ranks=ranks,
        )  # fmt: skip
        if not order.numel():
            return Parts(y, summed=y.dtype == dtype)
        start = len(self.own) + ids.numel()
        return Parts(y, summed=False, places=order[start : start + ids.numel()])

    def sends_fp8(self, x: Tensor, ranks: int, pairs: int, here: int) -> bool:
        """Whether the rows become fp8 anyway, so that they can go so. The same answer on all ranks.

        here: the (token, slot)s that come to a rank.
        """
        order = self.experts.up.layout
        if not order.native or x.dtype == torch.float32 or self.num_experts % ranks:
            return False
        if self.operands[-1] is not None or self.chosen(pairs, x.device) != "fp8":
            return False
        int4 = order.name == "sm90_int4"
        return not self._takes_few(
            len(self.own), here, "fp8", x.device, int4=int4, expected=-(-here // ranks)
        )

    def chosen(self, pairs: int, device: torch.device) -> str:
        """What "auto" is on Hopper for all experts and all rows: the number of ranks does not change it."""
        order = self.experts.up.layout
        if self.a_format != "auto" or not order.native or "none" not in order.a_formats:
            return self.a_format
        return "none" if self._takes_few(self.num_experts, pairs, "auto", device) else "fp8"

    def _takes_few(
        self, experts: int, rows: int, a_format: str, device: torch.device, *, int4: bool = False,
        expected: int = 0,
    ) -> bool:  # fmt: skip
        from .. import native
        from ..backends.launchers.library import multiprocessors

        up, down = self.experts
        sizes = (up.n, up.k), (down.n, down.k)
        sms = multiprocessors(device.index)
        return native.takes_few(
            experts, rows, up.format.block, *sizes, a_format, sms, int4=int4, expected=expected
        )
