"""Conditions as terms: comparisons are 0 or 1, and products of such both."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import fx

from ..graph.nodes import aten
from .axes import Opaque
from .terms import AnyOf, Apply, Mul, Sum, Term

INDICATOR = (aten.eq, aten.ne, aten.ge, aten.gt, aten.le, aten.lt)


def indicator(node: fx.Node, a: Term, b: Term) -> Apply:
    assert isinstance(node.target, torch._ops.OpOverload)
    return Apply(node.target.overloadpacket, (a, b))


def is_indicator(term: Term) -> bool:
    """Whether a term is built from comparisons, and so is 0 or 1 (or a count of them)."""
    if isinstance(term, Apply):
        return term.op in INDICATOR
    if isinstance(term, (Sum, AnyOf)):
        return is_indicator(term.body)
    if isinstance(term, Mul):
        return all(map(is_indicator, term.args))
    return False


def is_boolean(term: Term) -> bool:
    """Whether an indicator is never more than 1."""
    if isinstance(term, Mul):
        return all(map(is_boolean, term.args))
    return is_indicator(term) and not isinstance(term, Sum)


def as_boolean(term: Term) -> Term:
    """Whether a count is not zero."""
    if isinstance(term, Sum) and is_boolean(term.body):
        return AnyOf(term.axes, term.body)
    if not is_boolean(term):
        raise Opaque
    return term


def opposite(term: Term) -> Term:
    """Whether an indicator is 0. Of `<` and `>=` neither holds for a NaN, so these have none."""
    by = {aten.eq: aten.ne, aten.ne: aten.eq}
    if not isinstance(term, Apply) or term.op not in by:
        raise Opaque
    return Apply(by[term.op], term.args)


def is_eq(term: Any) -> TypeGuard[Apply]:
    return isinstance(term, Apply) and term.op is aten.eq
