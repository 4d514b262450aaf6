"""Joins slices again: terms over the parts of a dimension become one term over the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .terms import (
    Add,
    Affine,
    Apply,
    Axis,
    Mean,
    Mix,
    Mul,
    Ref,
    Sum,
    Term,
    free_axes,
    some_chosen,
)


def joined(terms: Sequence[Term], axes: Sequence[Axis]) -> tuple[Axis, Term] | None:
    """Return (whole, term) where term i, over axes[i], is the next part of `term` over `whole`.

    None if the terms differ in more than their part.
    """
    sizes = [a.size for a in axes]
    if some_chosen(axes) or not all(isinstance(s, int) for s in sizes):
        return None
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    whole = Axis(sum(sizes))
    try:
        return whole, _Joined(list(axes), starts, whole).of(list(terms))
    except (_Differ, RecursionError):  # no expert has terms that deep
        return None


class _Differ(Exception):
    """The terms are not parts of one term."""


class _Joined:
    def __init__(self, axes: list[Axis], starts: list[int], whole: Axis) -> None:
        self._axes, self._starts, self._whole = axes, starts, whole
        self._done: dict[tuple[Term, ...], Any] = {}
        """Maps parts to the term that they are parts of, and the axes of sums in the terms to that of the
        whole."""

    def of(self, terms: list[Any]) -> Any:
        """Return the term that these are parts of."""
        if not all(isinstance(t, Term) for t in terms):
            return self._same(terms)
        if tuple(terms) not in self._done:
            self._done[tuple(terms)] = self._read(terms)
        return self._done[tuple(terms)]

    def _read(self, terms: list[Any]) -> Any:
        first = terms[0]
        places = [_place(t, a) for t, a in zip(terms, self._axes)]
        known = [p for p in places if p is not None]
        if len(known) == len(terms):
            if [p - known[0] for p in known] != self._starts:
                raise _Differ
            return Affine(self._whole, known[0], 1)
        if known:
            raise _Differ
        if all(t is first for t in terms) and not free_axes(first) & {*self._axes}:
            return first
        if not all(type(t) is type(first) for t in terms):
            raise _Differ
        if isinstance(first, Ref):
            self._same([t.node for t in terms])
            return Ref(first.node, self._each([t.index for t in terms]))
        if isinstance(first, Affine):
            self._same([(t.start, t.step) for t in terms])
            return Affine(self.of([t.base for t in terms]), first.start, first.step)
        if isinstance(first, Mix):
            self._same([tuple(map(str, t.sizes)) for t in terms])
            return Mix(self._each([t.parts for t in terms]), first.sizes)
        if isinstance(first, Apply):
            self._same([(t.op, t._fields[2]) for t in terms])
            return Apply(first.op, self._each([t.args for t in terms]), first._fields[2])
        if isinstance(first, Mul):
            return Mul(*self._each([t.args for t in terms]))
        if isinstance(first, Add):
            return Add(self._each([t.args for t in terms]))
        if isinstance(first, (Sum, Mean)):
            self._same([tuple(str(a.size) for a in t.axes) for t in terms])
            each = list(zip(*(t.axes for t in terms)))
            own = [a[0] if all(b is a[0] for b in a) else Axis(a[0].size) for a in each]
            self._done |= dict(zip(each, own))
            return type(first)(own, self.of([t.body for t in terms]))
        raise _Differ

    def _each(self, lists: list[tuple[Any, ...]]) -> list[Any]:
        self._same([len(parts) for parts in lists])
        return [self.of(list(column)) for column in zip(*lists)]

    @staticmethod
    def _same(values: list[Any]) -> Any:
        if any(v != values[0] for v in values[1:]):
            raise _Differ
        return values[0]


def _place(term: Any, axis: Axis) -> int | None:
    """Return the start of a coordinate that runs over `axis`."""
    if term is axis:
        return 0
    if isinstance(term, Affine) and term.base is axis and term.step == 1:
        return term.start
    return None
