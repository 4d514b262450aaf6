"""Compares two experts of one block, and says how they differ if they must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import advice
from ..index.terms import Ref, Term, described

if TYPE_CHECKING:
    from .branches import Branch


def in_common(a: Branch, b: Branch) -> list[tuple[bool, Callable[[], str], str]]:
    """For each: whether they have it, in words how they differ if not, what would help."""
    shapes = [[(w.n, w.k) for w in (*x.up, x.down)] for x in (a, b)]
    biases = [[x is None for x in (*branch.up_bias, branch.down_bias, branch.gain)] for branch in (a, b)]
    choices = a.sums_choices == b.sums_choices and a.k == b.k

    def differ(how: str, x: Any, y: Any) -> Callable[[], str]:
        return lambda: f"{how} ({described(x)}, and {described(y)})"

    by_id = next((f for f in (*a.factors, *b.factors) if _looks_up_a_row(f)), None)
    weighted = differ("are weighted differently", a.factors, b.factors)
    if by_id is not None:
        weighted = _plain(f"are weighted by {described(by_id)}: an expert's id looks up a token's row")

    return [
        (a.x is b.x, differ("read different inputs", a.x, b.x), advice.SAME_X),
        (a.scales == b.scales, _plain("scale their inputs differently"), advice.SCALE_BY_EXPERT),
        (a.act == b.act, _plain("have different activations"), advice.SAME_ACTIVATION),
        (
            shapes[0] == shapes[1],
            _plain(f"have different shapes ({shapes[0]} and {shapes[1]})"),
            advice.SAME_SHAPES,
        ),
        (a.ids is b.ids and a.masked is b.masked, _plain("are routed by different ids"), advice.SAME_IDS),
        (choices, _plain("serve a token's choices differently"), advice.SAME_CHOICES),
        (
            a.chosen == b.chosen,
            differ("take rows on different conditions", a.chosen, b.chosen),
            advice.CONDITION,
        ),
        (
            a.factors == b.factors,
            weighted,
            advice.WEIGHT_BY_EXPERT if by_id is None else advice.ROW_BY_TOKEN,
        ),
        (
            a.after is b.after,
            differ("change their outputs differently", a.after, b.after),
            advice.SAME_AFTER,
        ),
        (biases[0] == biases[1], _plain("differ in biases or gains"), advice.ALL_BIASES),
        (
            (a.choice is None) == (b.choice is None),
            _plain("serve different choices"),
            advice.SAME_CHOICES,
        ),
    ]


def _plain(how: str) -> Callable[[], str]:
    return lambda: how


def _looks_up_a_row(factor: Term) -> bool:
    """scores[ids, j]: an id where the token should be."""
    return isinstance(factor, Ref) and len(factor.index) > 1 and isinstance(factor.index[0], Ref)
