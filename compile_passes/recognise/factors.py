"""Reads the factors of an expert's output in the sum over experts: masks, routing weights, norms.

`in_general` renames one branch's expert and choice to E and J, so that the branches of a block are equal
terms.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any, overload

from torch import fx

from ..graph.nodes import aten, shape, static_int
from ..index.reader import same
from ..index.terms import (
    Add,
    Affine,
    AnyOf,
    Apply,
    Axis,
    Composite,
    Const,
    Mean,
    Mix,
    Mul,
    Ref,
    Sum,
    Term,
    affine,
    flatten,
    free_axes,
    is_eq,
    substitute,
    transform,
    walk,
)
from ..refusal import Kind, need

N, K, E, J = Axis(0, "n"), Axis(0, "k"), Axis(0, "e"), Axis(0, "j")
"""In matched terms: row and column of a weight, expert, and a token's choice."""
OUT = Axis(0, "out")
"""The expert's output, in terms for what is applied to it before it is weighted."""


def indices(ref: Ref) -> Iterator[Term]:
    """Yield the coordinates of an element, including those inside a composed coordinate."""
    for i in ref.index:
        if isinstance(i, Mix):
            yield from i.parts
        else:
            yield affine(i)[0]


def indexed_size(ref: Ref, ids: Ref) -> int | None:
    for d, i in enumerate(ref.index):
        if i is ids:
            return static_int(shape(ref.node)[d])
        if isinstance(i, Mix) and i.parts[0] is ids:
            return static_int(i.sizes[0])
    return None


def eq(ids: Ref | Axis, e: int) -> Term:
    return Apply(aten.eq, (ids, Const(e)))


def coordinate_after(first: Term, second: Term, e: int) -> Term | None:
    """Return the coordinate of expert e, given those of experts 0 and 1. None if they do not determine it."""
    if first is second:
        return first
    if isinstance(first, Const) and isinstance(second, Const):
        return Const(first.value + e * (second.value - first.value))
    (base, start, step), (other, further, by) = affine(first), affine(second)
    if base is other and step == by:
        return Affine(base, start + e * (further - start), step)
    return None


def is_implied(condition: Term, ids: Term | None, e: int) -> bool:
    """Return whether a condition on `ids` always holds if the id is e: [ids < 8] does for expert 3."""
    if not isinstance(condition, Apply) or condition.op not in _COMPARISONS or condition.args[0] is not ids:
        return False
    other = condition.args[1]
    return isinstance(other, Const) and _COMPARISONS[condition.op](e, other.value)


_COMPARISONS = {
    aten.lt: operator.lt, aten.le: operator.le, aten.gt: operator.gt, aten.ge: operator.ge,
    aten.ne: operator.ne,
}  # fmt: skip


def split_after(
    core: Term, of: Term, weight: fx.Node, factors: tuple[Term, ...], hidden: Axis, site: fx.Node
) -> tuple[Term, tuple[Term, ...]]:
    """Split a row of an expert's output into the function that is applied to it, and the other factors.

    `core` is the output of the product with `weight`, and `of` the function of it in the model. Factors that
    scale the row element by element, or by a mean over it, become part of the function. The function is a
    term over OUT and the hidden axis.
    """

    def at(t: Term) -> Term | None:
        if t is core:
            return OUT
        if isinstance(t, Mean) and len(t.axes) == 1 and same(t.axes[0].size, hidden.size):
            return Mean((hidden,), go(substitute(t.body, {t.axes[0]: hidden})))
        return None if isinstance(t, (Apply, Mul, Add)) else t

    def go(t: Term) -> Term:
        return transform(t, at, with_refs=False)

    after = go(of)
    need(free_axes(after) <= {OUT, hidden}, Kind.BECOMES, site, after)
    rest = []
    wide = {t for t in factors if isinstance(t, Mul) and free_axes(go(t)) & {OUT, hidden}}
    for f in [p for t in factors for p in (flatten(t, Mul) if t in wide else [t])]:
        row = go(f)
        axes = free_axes(row)
        own = OUT in axes or any(isinstance(t, Ref) and t.node is weight for t in walk(f))
        if own or hidden in axes:
            need(axes <= {OUT, hidden}, Kind.SCALED_BY, site, row)
            after = Mul(after, row)
        else:
            rest.append(f)
    return after, tuple(rest)


def looked_up(term: Term, ids: Ref | None) -> Ref | None:
    """Find a part of a tensor in a term, such as `scale[task]`, that one number selects instead of a row's
    id."""
    for t in walk(term):
        if isinstance(t, Ref):
            *rest, last = t.index or (None,)
            if isinstance(last, Ref) and all(isinstance(i, Const) for i in rest):
                continue  # one number
            by = [i for i in t.index if isinstance(i, Ref) and i is not ids and not free_axes(i)]
            if by and not any(r is ids for i in by for r in walk(i)):
                return t
    return None


def open_sums(axes: tuple[Axis, ...], factors: tuple[Term, ...]) -> tuple[tuple[Axis, ...], tuple[Term, ...]]:
    """Open a factor that sums over j of w[t, j] * [ids[t, j] == e]: its factors are then summed with the
    rest."""
    out: list[Term] = []
    masked = any(is_eq(p) for f in factors for p in flatten(f, Mul))
    for f in factors:
        inside = flatten(f.body, Mul) if isinstance(f, Sum) else []
        if not (axes or masked) and isinstance(f, Sum) and any(map(is_eq, inside)):
            axes = f.axes
            out.extend(parts(f.body))
        else:
            out.append(f)
    return axes, tuple(out)


def parts(term: Term) -> list[Term]:
    """Return the operands of nested products. A product with a mask that the graph computes stays whole."""
    out, todo = [], [term]
    while todo:
        t = todo.pop()
        if isinstance(t, Mul) and (t.ref is None or not any(map(is_eq, flatten(t, Mul)))):
            todo.extend(reversed(t.args))
        else:
            out.append(t)
    return out


def without_other_masks(factors: tuple[Term, ...]) -> tuple[Term, ...]:
    """Return the factors of an expert's output with only those masks that say whose output it is.

    If a factor has a mask that compares other values than the ids of the other factors, such as the process
    that holds an expert, the factor becomes an ordinary number.
    """
    ids = {compared for f in factors if not isinstance(f, Mul) for compared in _compared(f)}
    out: list[Term] = []
    for f in factors:
        inside = flatten(f, Mul)
        other = ids and ids.isdisjoint(compared for p in inside for compared in _compared(p))
        out += [f.ref] if isinstance(f, Mul) and f.ref is not None and other else inside
    return tuple(out)


def _compared(mask: Term) -> list[Any]:
    """Return the tensor whose elements a mask compares, or the axis whose positions it compares."""
    inside = mask.body if isinstance(mask, AnyOf) else mask
    if not is_eq(inside):
        return []
    return [inside.args[0].node if isinstance(inside.args[0], Ref) else inside.args[0]]


def demote(term: Term, masks: bool = False) -> Term:
    """Replace computed parts of a term by elements of the nodes that compute them. Routing need not be read
    further.

    masks: also replace parts with masks in them, because the masks do not say whose output the part scales.
    """

    def at(t: Term) -> Term | None:
        if isinstance(t, Composite) and t.ref is not None and (masks or not has_masks(t)):
            return t.ref
        return None if isinstance(t, (Apply, Mul)) else t

    return transform(term, at)


def has_masks(term: Term) -> bool:
    """Return whether a term distinguishes experts by a mask."""
    return any(is_eq(t) for t in walk(term))


def product_ref(factors: tuple[Term, ...]) -> Ref | None:
    if len(factors) != 1:
        return None
    found = demote(factors[0])
    return found if isinstance(found, Ref) else None


def expert_column(terms: tuple[Term, ...], tokens: tuple[Axis, ...]) -> int | None:
    """Return e of C[t, e], a matrix over all experts that weights their outputs. t may have fewer axes than a
    token has: weights of a sequence hold for all of its tokens."""
    refs = [t for t in terms if isinstance(t, Ref)]
    whole = [t for t in refs if set(tokens) <= free_axes(t)]
    for chosen in (whole, [t for t in refs if set(tokens) & free_axes(t)], refs):
        columns = {
            i.value
            for t in chosen
            for i, s in zip(t.index, shape(t.node))
            if isinstance(i, Const) and not same(s, 1)
        }
        if columns:
            return columns.pop() if len(columns) == 1 else None
    return None


def fixed_choice(ids: Ref | None) -> int | None:
    """Return j of a mask ids[t, j] == e that has a single choice j."""
    if ids is None or len(ids.index) < 2 or not isinstance(ids.index[-1], Const):
        return None
    return None if same(shape(ids.node)[-1], 1) else ids.index[-1].value


@overload
def along(term: Ref, e: int, place: Axis) -> Ref: ...
@overload
def along(term: Term, e: int, place: Axis) -> Term: ...
def along(term: Term, e: int, place: Axis) -> Term:
    """Generalise a term from slice e of a buffer to the slice of any expert: replace e by `place`."""

    def at(t: Term) -> Term | None:
        if not isinstance(t, Ref):
            return None if isinstance(t, (Apply, Mul)) else t
        of_slice = [_along(i, s, e, place) for i, s in zip(t.index, shape(t.node))]
        if sum(i is not None for i in of_slice) != 1:
            return t
        return Ref(t.node, [i if new is None else new for i, new in zip(t.index, of_slice)])

    return transform(term, at)


def _along(i: Term, size: Any, e: int, place: Axis) -> Term | None:
    """Return a coordinate inside slice e with `place` in place of e. None if it is not inside a slice."""
    if isinstance(i, Const) and i.value == e and same(size, place.size) and not same(size, 1):
        return place
    base, start, step = affine(i)
    parts, sizes = (
        (base.parts, base.sizes) if isinstance(base, Mix) else ((base,), (getattr(base, "size", 0),))
    )
    rows = math.prod(sizes)
    if same(size, place.size * rows) and not same(size, rows) and isinstance(place.size, int):
        if step == 1 and same(start, e * rows):  # the rows of one expert follow those of another
            return Mix((place, *parts), (place.size, *sizes))
        if (start, step) == (e, place.size):  # the rows of the experts alternate
            return Mix((*parts, place), (*sizes, place.size))
    if isinstance(i, Mix):
        at = [d for d, (p, s) in enumerate(zip(i.parts, i.sizes)) if _along(p, s, e, place) is place]
        if len(at) == 1:
            return Mix((*i.parts[: at[0]], place, *i.parts[at[0] + 1 :]), i.sizes)
    return None


def in_general(term: Term, e: int, choice: int | None) -> Term:
    """Return `term` with this branch's expert and choice renamed to E and J, so that branches are equal
    terms."""

    def at(t: Term) -> Term | None:
        if not isinstance(t, Ref):
            return None if isinstance(t, (Apply, Mul)) else t
        index = list(t.index)
        fixed = [d for d, i in enumerate(index) if isinstance(i, Const) and not same(shape(t.node)[d], 1)]
        for d in fixed:
            if choice is not None and d == len(index) - 1 and index[d].value == choice:  # type: ignore[attr-defined]
                index[d] = J
            elif index[d].value == e:  # type: ignore[attr-defined]
                index[d] = E
        return Ref(t.node, index)

    return transform(term, at)
