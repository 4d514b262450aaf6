"""Computes a rank's share of a block with spread experts: `fp4::moe` with the experts of this rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..meta import operand_checks


class Parts(NamedTuple):
    """Results of a rank's experts."""

    y: Tensor
    summed: bool
    """True if `y` is [T, H], the weighted sum of each token's experts; False if it has a row for each pair.
    """
    places: Tensor | None = None
    """Row of each (token, slot), int32, if `y` has a row for each pair. None: rows are in the order of
    the pairs."""


@dataclass(frozen=True)
class Local:
    """The experts of this rank. Ids of other ranks' experts are outside of [0, len(own))."""

    experts: operand_checks.Experts
    num_experts: int
    """Number of experts of all ranks."""
    own: range
    operands: tuple[Tensor | None, ...]
    """w13, its scales and factors, w2, its scales and factors, and both biases."""
    options: dict[str, str]
    a_format: str

    def sums(self, x: Tensor, ids: Tensor, weights: Tensor, pairs: int, dtype: torch.dtype) -> Tensor:
        """Returns the weighted sums [T, H] of the experts here.

        `pairs` counts (token, expert) of all ranks.
        """
        out: Tensor = torch.ops.fp4.moe(
            x, ids, weights, *self.operands, **self.options,
            a_format=self.chosen(pairs, x.device), out_dtype=dtype,
        )  # fmt: skip
        return out

    def parts(
        self, x: Tensor, ready: tuple[Tensor, Tensor] | None, ids: Tensor, weights: Tensor, pairs: int,
        dtype: torch.dtype, ranks: int,
    ) -> Parts:  # fmt: skip
        """Returns the results of the experts here.

        ready: rows in fp8 and their factors, if `sends_fp8`. Then x is not read.
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
        """True if the rows become fp8 anyway, so they can be sent as fp8. All ranks get the same answer.

        here: number of (token, slot) pairs that come to a rank.
        """
        order = self.experts.up.layout
        if not order.native or x.dtype == torch.float32 or self.num_experts % ranks:
            return False
        if self.operands[-1] is not None or self.chosen(pairs, x.device) != "fp8":
            return False
        return not self._takes_few(len(self.own), here, "fp8", x.device, expected=-(-here // ranks))

    def chosen(self, pairs: int, device: torch.device) -> str:
        """Returns the `a_format` that "auto" means on Hopper. It does not depend on the number of ranks."""
        order = self.experts.up.layout
        if self.a_format != "auto" or not order.native or "none" not in order.a_formats:
            return self.a_format
        return "none" if self._takes_few(self.num_experts, pairs, "auto", device) else "fp8"

    def _takes_few(
        self, experts: int, rows: int, a_format: str, device: torch.device, *, expected: int = 0
    ) -> bool:
        from ..backends.launchers.library import multiprocessors
        from ..runtime import native

        up, down = self.experts
        sizes = (up.n, up.k), (down.n, down.k)
        sms = multiprocessors(device.index)
        order = up.layout
        alone = order.order == "sm90_int4" or order.batch_invariant
        return native.takes_few(
            experts, rows, up.format.block, *sizes, a_format, sms, prefill_alone=alone, expected=expected
        )
