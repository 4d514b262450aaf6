"""Refuses matrices that are too narrow: 4 bits would save little and cost accuracy."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from ...meta.formats import SMALLEST_SIDE
from ..refusal import Kind, need
from ..weights.facts import Facts
from .branches import Matrix


def need_wide(matrices: Iterable[Matrix], site: fx.Node, facts: Facts) -> None:
    """Refuse matrices with a side below SMALLEST_SIDE, such as adapters (LoRA).

    Weights that the model holds in 4 bits may have any size."""
    for m in matrices:
        wide = facts.in_4_bits(m.ref.node) or min(m.n, m.k) >= SMALLEST_SIDE
        need(wide, Kind.NARROW, site, m.ref.node, m.n, m.k)
