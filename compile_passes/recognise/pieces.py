"""Finds the pieces of a mixture of experts in a term: linear products, and down products, whose input is
computed from other products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple, TypeGuard

from ..graph.nodes import value
from ..index.reader import Reader
from ..index.terms import (
    Add,
    Apply,
    Axis,
    Choose,
    Const,
    Mul,
    Ref,
    Sum,
    Term,
    flatten,
    free_axes,
    substitute,
    walk,
)
from .activations import UP, bare
from .branches import Linear
from .factors import eq, has_masks, indices, parts


class Apart(NamedTuple):
    """A sum over experts: their axes, the factors of their outputs, and the down product."""

    experts: tuple[Axis, ...]
    factors: tuple[Term, ...]
    down: Sum


class Pieces:
    """Answers questions about terms, each once for a term."""

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
        if len(weights) > 1:  # others are vectors, or rows of a parameter: `embedding(tokens)`
            weights = [w for w in weights if _outputs(w, inner)]
            own = [_outputs(w, inner) for w in weights]
            # A mask of the weight has the weight's outputs.
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
            # The dimension of experts must come before the inner one; otherwise the two could be exchanged.
            if lin is not None and all(_is_before(a, inner, lin.weight) for a in term.axes if a is not inner):
                rest = tuple(self._routing(f) for f in factors if f not in own)
                return Apart(tuple(a for a in term.axes if a is not inner), rest, core)
        return None

    def _routing(self, factor: Term) -> Term:
        """Return a factor of the hidden values in the form in which factors of the outputs are read."""
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
        while todo:  # the axes and factors around a term
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
                    # Options are chosen by a row's id or its place. Option e is an expert's output for the
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
    """True for a matrix: a parameter of several dimensions, or a vector that a view gave two."""
    return value(weight.node).dim() >= 2 or len(free_axes(weight)) > 1


def _outputs(weight: Ref, inner: Axis) -> set[Term]:
    """Return the axes of a product's output that a factor has. `rows[tokens]` has none but `inner`."""
    return {i for i in indices(weight) if isinstance(i, Axis) and i is not inner}


def _is_before(axis: Axis, other: Axis, weight: Ref) -> bool:
    """Return whether a weight has this dimension, and has it before the other."""
    return axis in weight.index and weight.index.index(axis) < weight.index.index(other)


def _parts(term: Term) -> tuple[Term, ...]:
    """Return the parts of a sum, a product or a choice that may contain products."""
    if isinstance(term, Choose):
        return term.options
    if isinstance(term, Sum):
        return (term.body,)
    return term.args if isinstance(term, (Mul, Add)) else ()
