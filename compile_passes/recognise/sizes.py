"""Refuses matrices that are too narrow: 4 bits would save little and cost accuracy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import fx

from ...meta.formats import SMALLEST_SIDE
from ..refusal import Kind, need
from ..weights.facts import Facts
from .branches import Matrix


class Sized(Protocol):
    """A matrix [n, k] of each expert."""

    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...


def need_wide(matrices: Iterable[Matrix], site: fx.Node, facts: Facts) -> None:
    """Refuse matrices with a side below SMALLEST_SIDE, such as adapters (LoRA)."""
    for m in matrices:
        need_wide_weight(m.ref.node, m, site, facts)


def need_wide_weight(weight: fx.Node, matrix: Sized, site: fx.Node, facts: Facts) -> None:
    """`need_wide` for one weight. A weight that the model holds in 4 bits may have any size."""
    wide = facts.in_4_bits(weight) or min(matrix.n, matrix.k) >= SMALLEST_SIDE
    need(wide, Kind.NARROW, site, weight, matrix.n, matrix.k)
