"""Represents conditions as terms: comparisons are 0 or 1, and so are products of comparisons."""

from __future__ import annotations

from typing import Any, TypeGuard

from torch import fx

from ...meta.torch_internals import OpOverload
from ..graph.nodes import aten
from .axes import Opaque
from .terms import AnyOf, Apply, Mul, Sum, Term, flatten

INDICATOR = (aten.eq, aten.ne, aten.ge, aten.gt, aten.le, aten.lt)


def indicator(node: fx.Node, a: Term, b: Term) -> Apply:
    assert isinstance(node.target, OpOverload)
    return Apply(node.target.overloadpacket, (a, b))


def is_indicator(term: Term) -> bool:
    """Return whether a term is built from comparisons and so is 0 or 1 (or a count of them)."""
    todo = [term]
    while todo:
        t = todo.pop()
        if isinstance(t, (Sum, AnyOf)):
            todo.append(t.body)
        elif isinstance(t, Mul):
            todo += t.args
        elif not (isinstance(t, Apply) and t.op in INDICATOR):
            return False
    return True


def is_boolean(term: Term) -> bool:
    """Return whether an indicator is never more than 1."""
    return all(is_indicator(f) and not isinstance(f, Sum) for f in flatten(term, Mul))


def as_boolean(term: Term) -> Term:
    """Return the indicator that a count is not zero."""
    if isinstance(term, Sum) and is_boolean(term.body):
        return AnyOf(term.axes, term.body)
    if not is_boolean(term):
        raise Opaque
    return term


def opposite(term: Term) -> Term:
    """Return the indicator that another one is 0. For a NaN neither `<` nor `>=` holds, so these have no
    opposite."""
    by = {aten.eq: aten.ne, aten.ne: aten.eq}
    if not isinstance(term, Apply) or term.op not in by:
        raise Opaque
    return Apply(by[term.op], term.args)


def is_eq(term: Any) -> TypeGuard[Apply]:
    return isinstance(term, Apply) and term.op is aten.eq
