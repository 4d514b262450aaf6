"""The values of rows that no expert's output overwrites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from ..index.indicators import is_eq
from ..index.terms import Const, Mul, NoneOf, Ref, Term, flatten, free_axes, walk
from ..refusal import Kind, need
from .factors import J, demote, fixed_choice, in_general, is_implied


def kept_row(
    row: tuple[Term, ...], written: list[Any], m: Any, has_experts: Callable[[fx.Node], bool]
) -> tuple[Term, ...]:
    """Return the factors and the row that is kept where no expert overwrites it."""
    none = [f for f in row if isinstance(f, NoneOf)]
    factors = tuple(demote(f) for f in row if not isinstance(f, NoneOf))
    own = len(none) == 1 and m.k == 1 and m.common.place is None and not m.wraps
    others = own and sorted(map(repr, map(_written_by, none[0].masks))) == sorted(map(repr, written))
    need(others, Kind.OTHER_KEPT, m.root)
    for f in factors:
        known = free_axes(f) <= {*m.tokens, m.hidden}
        read = [t.node for t in walk(f) if isinstance(t, Ref)]
        need(known and not any(map(has_experts, read)), Kind.KEPT_APART, m.root, f)
    return factors


def _written_by(mask: Term) -> tuple[Any, ...]:
    """Return (expert, ids, choice, further conditions) of the rows that a mask selects, as in a Branch."""
    factors = flatten(mask, Mul)
    ids, expert = next((f.args for f in factors if is_eq(f)), (None, None))  # type: ignore[attr-defined]
    if not (isinstance(ids, Ref) and isinstance(expert, Const)):
        return ()
    e, choice = int(expert.value), fixed_choice(ids)
    at = ids if choice is None else Ref(ids.node, (*ids.index[:-1], J))
    further = [f for f in factors if not (is_eq(f) or is_implied(f, ids, e))]
    chosen = sorted((in_general(f, e, choice) for f in further), key=repr)
    return e, at, choice, tuple(chosen)
