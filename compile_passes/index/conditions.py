"""Reads conditions into terms that are 0 or 1: comparisons, products of comparisons, and masked values."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...meta.torch_internals import OpOverload
from ..graph.nodes import (
    aten,
    is_op,
    is_tensor,
    operand,
    value,
)
from .reader import Opaque, Reader, dims_of, reads
from .terms import (
    Add,
    AnyOf,
    Apply,
    Composite,
    Const,
    Mul,
    Ref,
    Sum,
    Term,
    Value,
    flatten,
)

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


# --- rules ---


def number(reader: Reader, x: Any) -> Term:
    """Read a number: a constant, or a number that the graph computes, as an element of its node
    without an index."""
    if isinstance(x, fx.Node) and isinstance(x.meta.get("val"), (torch.SymFloat, torch.SymInt)):
        return Ref(reader.scalars.setdefault(reader.canon.number(x), x), ())
    if not isinstance(x, (int, float)):
        raise Opaque
    return Const(x)


@reads(*INDICATOR)
def _compare(reader: Reader, node: fx.Node, level: int) -> Value:
    """Read comparisons of ids with experts, or of routing weights with zero, as indicators: 0 or 1."""
    a, b = operand(node), node.args[1]
    if is_tensor(b):
        values = reader.broadcast([_compared(reader, a), _compared(reader, b)])
        of = [v.term for v in values]
        if isinstance(of[0], Const) and is_op(node, aten.eq):
            of.reverse()
        return Value(dims_of(values), indicator(node, *of))
    v = reader.value(a, 0)
    if is_op(node, aten.gt, aten.ne) and b == 0 and is_indicator(v.term):
        return Value(v.dims, as_boolean(v.term))
    if is_op(node, aten.eq) and b == 0 and is_boolean(v.term):
        return Value(v.dims, opposite(v.term))
    v = _compared(reader, a)
    return Value(v.dims, indicator(node, v.term, number(reader, b)))


def _compared(reader: Reader, node: fx.Node) -> Value:
    """Read an operand of a comparison. Its values are ids, not conditions, even if they are 0 and 1."""
    v = reader.value(node, 0)
    return reader.opaque(node) if isinstance(v.term, Composite) else v


@reads(aten.logical_and, aten.bitwise_and)
def _and(reader: Reader, node: fx.Node, level: int) -> Value:
    """Read the conjunction of two conditions."""
    if value(node).dtype != torch.bool or not all(is_tensor(n) for n in node.args[:2]):
        raise Opaque
    a, b = reader.broadcast([reader.value(operand(node, i), 0) for i in (0, 1)])
    if not (is_boolean(a.term) and is_boolean(b.term)):
        raise Opaque
    return Value(dims_of([a, b]), Mul(a.term, b.term))


@reads(aten.logical_not, aten.bitwise_not)
def _not(reader: Reader, node: fx.Node, level: int) -> Value:
    v = reader.value(operand(node), 0)
    if value(node).dtype != torch.bool or not is_boolean(v.term):
        raise Opaque
    return Value(v.dims, opposite(v.term))


@reads(aten.eye)
def _eye(reader: Reader, node: fx.Node, level: int) -> Value:
    """Read an identity matrix: row i is 1 in column i."""
    own = reader.opaque(node)
    if len(own.axes) != 2:
        raise Opaque
    return Value(own.dims, Apply(aten.eq, own.axes))


@reads(aten.where)
def _where(reader: Reader, node: fx.Node, level: int) -> Value:
    """Read where(mask, a, 0) and where(mask, 0, a): a times an indicator."""
    mask, a, other = node.args
    if not is_tensor(mask):
        raise Opaque
    for kept, zero, wanted in ((a, other, True), (other, a, False)):
        if is_tensor(kept) and is_zero(reader, zero):
            return masked(reader, node, reader.value(mask, 0), reader.value(kept, level), wanted)
    if level < 2 or not (is_tensor(a) and is_tensor(other)):
        raise Opaque
    return _added_where(reader, node, reader.value(mask, 0), *(reader.addend(node, n, 2) for n in (a, other)))


def _added_where(reader: Reader, node: fx.Node, mask: Value, a: Value, b: Value) -> Value:
    """Read where(mask, x + y, x) and where(mask, x, x + y): x, plus y times an indicator."""
    mask, a, b = values = reader.broadcast([mask, a, b])
    dims, more, less = dims_of(values), flatten(a.term, Add), flatten(b.term, Add)
    wanted = len(more) > len(less)
    if not wanted:
        more, less = less, more
    before = set(less)
    added = [t for t in more if t not in before]
    if len(less) + len(added) != len(more) or not is_boolean(mask.term):
        raise Opaque
    by = mask.term if wanted else opposite(mask.term)
    return Value(dims, Add([*less, *(Mul(by, t) for t in added)], reader.ref(node, dims)))


def is_zero(reader: Reader, x: Any) -> bool:
    return reader.value(x, 0).term is Const(0.0) if is_tensor(x) else type(x) in (int, float) and x == 0


def masked(reader: Reader, node: fx.Node, mask: Value, of: Value, wanted: bool) -> Value:
    """Return `of` where the mask has the value `wanted`, else 0."""
    mask, of = reader.broadcast([mask, of])
    if not (is_indicator(mask.term) if wanted else is_boolean(mask.term)):
        raise Opaque
    dims = dims_of([mask, of])
    return Value(dims, Mul(mask.term if wanted else opposite(mask.term), of.term, reader.ref(node, dims)))
