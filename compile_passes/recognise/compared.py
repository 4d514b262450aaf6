"""Compares two experts of one block in everything that they must have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..index.terms import Ref, Term
from ..refusal import Kind

if TYPE_CHECKING:
    from .branches import Branch


def in_common(a: Branch, b: Branch) -> Iterator[tuple[Any, ...]]:
    """Yield for each property whether both branches share it, the kind of refusal if not, and its facts."""
    shapes = [tuple((w.n, w.k) for w in (*x.up, x.down)) for x in (a, b)]
    biases = [[x is None for x in (*branch.up_bias, branch.down_bias, branch.gain)] for branch in (a, b)]
    yield a.x is b.x, Kind.INPUTS_DIFFER, a.x, b.x
    yield a.scales == b.scales, Kind.SCALES_DIFFER
    yield a.act == b.act, Kind.ACTIVATIONS_DIFFER
    yield shapes[0] == shapes[1], Kind.SHAPES_DIFFER, *shapes
    yield a.ids is b.ids and a.masked is b.masked, Kind.IDS_DIFFER
    yield a.sums_choices == b.sums_choices and a.k == b.k, Kind.CHOICES_DIFFER
    yield a.chosen == b.chosen, Kind.CONDITIONS_DIFFER, a.chosen, b.chosen
    if a.factors != b.factors:
        by_id = next((f for f in (*a.factors, *b.factors) if _looks_up_a_row(f)), None)
        if by_id is not None:
            yield False, Kind.WEIGHTED_BY_ROW, by_id
        yield False, Kind.WEIGHTED_DIFFERENTLY, a.factors, b.factors
    yield a.after is b.after, Kind.AFTER_DIFFERS, a.after, b.after
    yield biases[0] == biases[1], Kind.BIASES_DIFFER
    yield (a.choice is None) == (b.choice is None), Kind.OTHER_CHOICES


def _looks_up_a_row(factor: Term) -> bool:
    """Return whether a factor is like scores[ids, j]: an id is used where the token should be."""
    return isinstance(factor, Ref) and len(factor.index) > 1 and isinstance(factor.index[0], Ref)
