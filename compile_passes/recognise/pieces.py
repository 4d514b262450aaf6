"""Finds the pieces of a mixture of experts in a term. The pieces are linear products; down products, whose
input is computed from other products; and the factors of an expert's output, such as masks, routing weights
and norms.

`in_general` renames one branch's expert and choice to E and J, so that the branches of a block are equal
terms.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeGuard, overload

from torch import fx

from ..graph.nodes import aten, shape, static_int, value
from ..index.reader import Reader, same
from ..index.terms import (
    Add,
    AnyOf,
    Apply,
    Axis,
    Choose,
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
from .block import UP, Linear, bare

N, K, E, J = Axis(0, "n"), Axis(0, "k"), Axis(0, "e"), Axis(0, "j")
"""Axes of matched terms: row and column of a weight, the expert, and the choice of a token."""
OUT = Axis(0, "out")
"""Stands for the expert's output in the function that is applied to it before it is weighted."""


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


def is_implied(condition: Term, ids: Term | None, e: int) -> bool:
    """Return whether a condition on `ids` always holds if the id is e. An example is [ids < 8] for expert
    3."""
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
    """Find a part of a tensor, such as `scale[task]`, that a single number selects and not the ids of the
    rows."""
    for t in walk(term):
        if isinstance(t, Ref):
            *rest, last = t.index or (None,)
            if isinstance(last, Ref) and all(isinstance(i, Const) for i in rest):
                continue  # the index is one number
            by = [i for i in t.index if isinstance(i, Ref) and i is not ids and not free_axes(i)]
            if by and not any(r is ids for i in by for r in walk(i)):
                return t
    return None


def open_sums(axes: tuple[Axis, ...], factors: tuple[Term, ...]) -> tuple[tuple[Axis, ...], tuple[Term, ...]]:
    """Open a factor that is a sum over j of w[t, j] * [ids[t, j] == e]: add j to the outer axes, and return
    the factors of the sum."""
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
    """Return the factors of an expert's output. Only masks that select the expert remain masks.

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

    masks: also replace parts that contain masks, because these masks do not select the expert.
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
    token has, because weights of a sequence are the same for all of its tokens."""
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
        for spare in (False, True):
            of_slice = [_along(i, s, e, place, spare) for i, s in zip(t.index, shape(t.node))]
            if any(i is not None for i in of_slice):
                break
        if sum(i is not None for i in of_slice) != 1:
            return t
        return Ref(t.node, [i if new is None else new for i, new in zip(t.index, of_slice)])

    return transform(term, at)


def _along(i: Term, size: Any, e: int, place: Axis, spare: bool = False) -> Term | None:
    """Return a coordinate inside slice e, with e replaced by `place`. None if the coordinate is not inside a
    slice.

    spare: the slices leave rows over, such as one at the end for tokens beyond a capacity.
    """
    if isinstance(i, Const) and i.value == e and same(size, place.size) and not same(size, 1):
        return place
    base, start, step = affine(i)
    parts, sizes = (
        (base.parts, base.sizes) if isinstance(base, Mix) else ((base,), (getattr(base, "size", 0),))
    )
    rows = math.prod(sizes)
    if spare:
        left = spare_rows(size, (place.size, *sizes)) if not same(rows, 0) else 0
        fits = bool(left) and step == 1 and same(start, e * rows)
        return Mix((place, *parts), (place.size, *sizes)) if fits else None
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


def spare_rows(size: Any, sizes: Sequence[Any]) -> int:
    """Return how many rows of a dimension come after slices of these sizes."""
    return max(static_int(size - math.prod(sizes)) or 0, 0)


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


# --- pieces ---


class Apart(NamedTuple):
    """A sum over experts: the axes over experts, the factors of the outputs, and the down product."""

    experts: tuple[Axis, ...]
    factors: tuple[Term, ...]
    down: Sum


class Pieces:
    """Finds pieces in terms, and remembers the answer for each term."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._linear: dict[Term, Linear | None] = {}
        self._is_down: dict[Term, bool] = {}
        self._has_down: dict[Term, bool] = {}
        self._inside: dict[Term, Term | None] = {}
        self._apart: dict[Term, Apart | None] = {}

    def linear(self, term: Term) -> Linear | None:
        if term not in self._linear:
            self._linear[term] = self._read_linear(term)
        return self._linear[term]

    def _read_linear(self, term: Term) -> Linear | None:
        bias = None
        if isinstance(term, Add) and len(term.args) == 2:
            for product, other in (term.args, term.args[::-1]):
                if isinstance(product, Sum) and isinstance(other, Ref) and self.reader.is_weight(other.node):
                    term, bias = product, other
                    break
        if not isinstance(term, Sum) or len(term.axes) != 1:
            return None
        (inner,) = term.axes
        factors = flatten(term.body, Mul)
        weights = [f for f in factors if isinstance(f, Ref) and self.reader.is_weight(f.node)]
        weights = [w for w in weights if inner in free_axes(w) and _is_matrix(w)]
        if len(weights) > 1:  # the others are vectors, or rows such as `embedding(tokens)`
            weights = [w for w in weights if _outputs(w, inner)]
            own = [_outputs(w, inner) for w in weights]
            # A mask of the weight has the weight's output axes.
            if all(own[-1].isdisjoint(axes) for axes in own[:-1]):
                weights = weights[-1:]  # the rows of x come first
        if len(weights) != 1:
            return None
        rest = tuple(f for f in factors if f is not weights[0])
        return Linear(weights[0], inner, rest, bias) if rest else None

    def leaves(self, terms: tuple[Term, ...]) -> list[Term]:
        """Return the innermost products below pointwise operators, each once."""
        found: list[Term] = []
        todo = list(reversed(terms))
        while todo:
            t = todo.pop()
            if self.linear(t) is not None:
                if t not in found:
                    found.append(t)
            elif isinstance(t, (Apply, Mul, Add)):
                todo.extend(a for a in reversed(t.args) if isinstance(a, Term))
        return found

    def is_down(self, term: Term) -> bool:
        """Return whether a term is a product whose input is computed only from products."""
        if term not in self._is_down:
            lin = self.linear(term)
            inputs = self.without_gains(lin)[0] if lin is not None else ()
            leaves = self.leaves(inputs)
            rest = [bare(substitute(t, dict.fromkeys(leaves, UP))) for t in inputs] if leaves else []
            others = [t for r in rest for t in walk(r) if isinstance(t, (Ref, Sum))]
            self._is_down[term] = bool(leaves) and not others
        return self._is_down[term]

    def apart(self, term: Term) -> Apart | None:
        """Split a sum over experts and their inner dimension into a sum over experts of down products."""
        if term not in self._apart:
            self._apart[term] = self._take_apart(term)
        return self._apart[term]

    def _take_apart(self, term: Term) -> Apart | None:
        if not isinstance(term, Sum) or len(term.axes) < 2:
            return None
        factors = flatten(term.body, Mul)
        for inner in reversed(term.axes):
            own = tuple(f for f in factors if inner in free_axes(f))
            core = Sum((inner,), reduce(Mul, own))
            lin = self.linear(core) if self.is_down(core) else None
            # The dimension over experts must come before the inner one; otherwise the two could be confused.
            if lin is not None and all(_is_before(a, inner, lin.weight) for a in term.axes if a is not inner):
                rest = tuple(self._routing(f) for f in factors if f not in own)
                return Apart(tuple(a for a in term.axes if a is not inner), rest, core)
        return None

    def _routing(self, factor: Term) -> Term:
        """Convert a factor of the hidden values to the form that a factor of the output has."""
        if isinstance(factor, Ref):
            read = self.reader.value(factor.node, 2)
            if len(read.dims) == len(factor.index) and all(len(dim) <= 1 for dim in read.dims):
                at = {axis: i for dim, i in zip(read.dims, factor.index) for axis in dim}
                return substitute(read.term, at)
        return factor

    def without_gains(self, lin: Linear) -> tuple[tuple[Term, ...], tuple[Ref, ...]]:
        """Return the operands of a product without the weight vectors that scale them, and these vectors."""

        def is_gain(t: Term) -> TypeGuard[Ref]:
            """Return whether t is a vector along the summed axis that belongs to the expert of the weight."""
            if not (isinstance(t, Ref) and self.reader.is_weight(t.node) and lin.inner in t.index):
                return False
            others = [i for i in t.index if i is not lin.inner and not isinstance(i, Const)]
            return all(i in lin.weight.index for i in others)

        gains = tuple(t for t in lin.input if is_gain(t))
        return tuple(t for t in lin.input if t not in gains), gains

    def inside(self, term: Term) -> Term | None:
        """Return the down product of which a term is an elementwise function, as in tanh(down)."""
        if term not in self._inside:
            self._inside[term] = self._find_inside(term)
        return self._inside[term]

    def _find_inside(self, term: Term) -> Term | None:
        if self.is_down(term):
            return term
        if not isinstance(term, Apply):
            return None
        downs: set[Term] = set()
        seen: set[Term] = {term}
        todo = [a for a in term.args if isinstance(a, Term)]
        while todo and len(downs) < 2:
            t = todo.pop()
            if t in seen:
                continue
            seen.add(t)
            if self.is_down(t):
                downs.add(t)
            elif isinstance(t, (Apply, Mul, Add)):
                todo += [a for a in t.args if isinstance(a, Term)]
            elif not isinstance(t, Const) and not (isinstance(t, Ref) and self.reader.is_weight(t.node)):
                return None
        return downs.pop() if len(downs) == 1 else None

    def has_down(self, term: Term) -> bool:
        known, begun = self._has_down, [term]
        while begun:
            t = begun[-1]
            if t not in known:
                own = self.inside(t) is not None or self.apart(t) is not None
                first = None if own else next((p for p in _parts(t) if known.get(p) is not False), None)
                if first is not None and first not in known:
                    begun.append(first)
                    continue
                known[t] = own or first is not None
            begun.pop()
        return known[term]

    def has_experts(self, term: Term) -> bool:
        return any(map(self.is_down, walk(term)))

    def _tells_apart(self, stacked: Choose) -> bool:
        return any(self.has_down(t) or has_masks(t) for t in stacked.options)

    def _written_out(self, term: Sum) -> list[Term]:
        """Return the addends of a sum over stacked tensors, if it has experts or masks among them."""
        for factor in flatten(term.body, Mul):
            if isinstance(factor, Choose) and factor.index in term.axes and self._tells_apart(factor):
                rest = tuple(a for a in term.axes if a is not factor.index)
                options = range(len(factor.options))
                return [Sum(rest, substitute(term.body, {factor.index: Const(i)})) for i in options]
        return []

    def expand(self, term: Term) -> Iterator[tuple[tuple[Axis, ...], tuple[Term, ...], Term | None]]:
        """Yield the addends of a term as (summed axes, factors, the down product or a function of it, or
        None)."""
        todo: list[tuple[tuple[Axis, ...], tuple[Term, ...], Term]] = [((), (), term)]
        while todo:  # a term, with the axes and factors around it
            axes, factors, t = todo.pop()
            if not self.has_down(t):
                yield axes, (t, *factors), None
            elif self.inside(t) is not None:
                yield axes, factors, t
            elif (apart := self.apart(t)) is not None:
                yield (*axes, *apart.experts), (*apart.factors, *factors), apart.down
            elif isinstance(t, Add):
                todo += [(axes, factors, a) for a in t.args][::-1]
            elif isinstance(t, Choose):
                at = t.index
                if isinstance(at, (Ref, Axis)):
                    # A row's id or its position chooses an option. Option e is an expert's output for the
                    # rows whose id is e.
                    todo += [(axes, (eq(at, e), *factors), o) for e, o in enumerate(t.options)][::-1]
                else:
                    yield axes, (t, *factors), None
            elif isinstance(t, Sum):
                addends = [(axes, factors, a) for a in self._written_out(t)]
                todo += addends[::-1] or [((*axes, *t.axes), factors, t.body)]
            else:
                assert isinstance(t, Mul)
                a, b = t.args if self.has_down(t.args[0]) else t.args[::-1]
                todo.append((axes, (*parts(b), *factors), a))


def _is_matrix(weight: Ref) -> bool:
    """Return whether a weight is a matrix: a parameter of several dimensions, or a vector that a view made
    two-dimensional."""
    return value(weight.node).dim() >= 2 or len(free_axes(weight)) > 1


def _outputs(weight: Ref, inner: Axis) -> set[Term]:
    """Return the axes of a weight other than `inner`, which are axes of the product's output. `rows[tokens]`
    has none."""
    return {i for i in indices(weight) if isinstance(i, Axis) and i is not inner}


def _is_before(axis: Axis, other: Axis, weight: Ref) -> bool:
    """Return whether a weight is indexed by `axis` in a dimension before that of `other`."""
    return axis in weight.index and weight.index.index(axis) < weight.index.index(other)


def _parts(term: Term) -> tuple[Term, ...]:
    """Return the parts of a sum, a product or a choice that may contain products."""
    if isinstance(term, Choose):
        return term.options
    if isinstance(term, Sum):
        return (term.body,)
    return term.args if isinstance(term, (Mul, Add)) else ()
