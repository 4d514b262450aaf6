"""Activations in index notation: the function between the gate/up products and the down product."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from torch import fx

from ...meta.formats import ACTIVATIONS, Activation, activation_name, known_activation
from ..graph.nodes import aten
from ..index.terms import (
    Add,
    Apply,
    Axis,
    Const,
    Mul,
    Term,
    described,
    flatten,
    free_axes,
    substitute,
    transform,
)
from ..refusal import Kind, need, words

GATE, UP = Axis(0, "gate"), Axis(0, "up")
"""In activation terms: the values of the two products. Only UP is used if there is no gate."""


@dataclass(frozen=True)
class Act:
    """h as a term over GATE and UP. `name` is the operators' activation that computes the same, if there is
    one."""

    name: str
    term: Term
    gated: bool


def read_activation(inputs: tuple[Term, ...], leaves: list[Term], site: fx.Node) -> tuple[Act, list[Term]]:
    """Return the activation that enters the down product (the product of `inputs`), and its products, gate
    first."""
    if len(leaves) == 1:
        term = _over(inputs, {leaves[0]: UP}, site)
        return Act("relu2" if _relu2(term) else "", term, False), leaves
    for order in (leaves, leaves[::-1]):
        term = _over(inputs, dict(zip(order, (GATE, UP))), site)
        if name := _name(term):
            return Act(name, term, True), order
    return Act("", _over(inputs, dict(zip(leaves, (GATE, UP))), site), True), leaves


def _over(inputs: tuple[Term, ...], names: dict[Term, Term], site: fx.Node) -> Term:
    term = reduce(Mul, [bare(substitute(t, names)) for t in inputs])
    need(free_axes(term) <= {GATE, UP}, Kind.MORE_IN_ACTIVATION, site)
    return term


def bare(term: Term) -> Term:
    """Return the term without the nodes that compute its parts, so that terms of different experts are
    equal."""
    return transform(term, lambda t: None, with_refs=False)


@dataclass(frozen=True)
class _Gated:
    """The numbers in function(GATE) * (UP + offset)."""

    function: str
    alpha: float
    limit: float | None
    """The upper limit of GATE."""
    up_offset: float
    up_limits: tuple[float | None, float | None]


def _gated(term: Term) -> _Gated | None:
    factors = flatten(term, Mul)
    ups = [f for f in factors if UP in free_axes(f)]
    gates = [f for f in factors if UP not in free_axes(f)]
    if len(ups) != 1 or not all(free_axes(f) == {GATE} for f in gates):
        return None
    offset, up = _offset(ups[0])
    up, low, high = _clamped(up)
    found = _gate(gates)
    return _Gated(*found, offset, (low, high)) if up is UP and found is not None else None


def _name(term: Term) -> str:
    """Return the operators' name of the activation f(GATE) * g(UP), or "" if there is none."""
    g = _gated(term)
    if g is None or g.up_limits != ((None, None) if g.limit is None else (-g.limit, g.limit)):
        return ""
    return name_of_gate(g.function, g.alpha, g.limit, g.up_offset)


@words.register
def in_words(act: Act) -> str:
    """Describe an activation as the model writes it, and by the numbers that the operators' activations
    have."""
    g = _gated(act.term) if act.gated else None
    if g is None:
        return described(act.term)
    numbers = f"{g.function} with alpha={g.alpha}, limit={g.limit}, up_offset={g.up_offset}"
    low, high = g.up_limits
    clamped = "" if (low, high) == (None, None) else f", up clamped at [{low}, {high}]"
    return f"{described(act.term)} ({numbers}{clamped})"


def name_of_gate(function: str, alpha: float, limit: float | None, up_offset: float) -> str:
    """Return the operators' name of a gated activation with these numbers, or "" if there is none."""
    if not all(n is None or isinstance(n, (int, float)) for n in (alpha, limit, up_offset)):
        return ""  # the graph computes it
    limit = None if limit is None else float(limit)
    made = [activation_name(Activation("", function, o, alpha, limit, up_offset)) for o in (False, True)]
    named = [name for name in made if name in ACTIVATIONS]  # names without a limit come first
    return next(iter((*named, *filter(None, made))), "")


def _relu2(term: Term) -> bool:
    """Return whether a term is relu(UP), squared."""
    if isinstance(term, Mul):
        return len(term.args) == 2 and all(_relu(t) for t in term.args)
    if not isinstance(term, Apply) or getattr(term.op, "overloadpacket", None) not in (aten.pow, aten.square):
        return False
    return _relu(term.args[0]) and term.args[1:] in ((), (2,), (2.0,))


def _relu(term: Any) -> bool:
    if isinstance(term, Apply) and term.op is aten.relu.default:
        return term.args[0] is UP
    base, low, high = _clamped(term)
    return base is UP and low == 0 and high is None


def same_function(name: str) -> list[str]:
    """Return the activations that are equal to this one, or differ only in the places of gate and up."""
    if not name:
        return []
    own = known_activation(name)
    if not own.gated:
        return [name]
    both = [activation_name(replace(own, interleaved=order)) for order in (False, True)]
    return [n for n in both if n is not None]


def _gate(factors: list[Term]) -> tuple[str, float, float | None] | None:
    """Return (kind, alpha, limit) of silu(GATE), gelu(GATE) or GATE * sigmoid(alpha * GATE), clamped or
    not."""
    if len(factors) == 1 and isinstance(factors[0], Apply):
        f = factors[0]
        base, low, high = _clamped(f.args[0])
        if base is not GATE or low is not None:
            return None
        if f.op is aten.silu.default:
            return "silu", 1.0, high
        if f.op is aten.gelu.default:
            approximate = f.kwargs.get("approximate", "none")
            return ("gelu" if approximate == "none" else "gelu_tanh"), 1.0, high
        return None
    if len(factors) != 2:
        return None
    for outer, s in (factors, factors[::-1]):
        if not (isinstance(s, Apply) and s.op is aten.sigmoid.default):
            continue
        inner, alpha = s.args[0], 1.0
        if isinstance(inner, Mul):
            numbers = [a for a in inner.args if isinstance(a, Const)]
            rest = [a for a in inner.args if not isinstance(a, Const)]
            if len(numbers) != 1:
                continue
            inner, alpha = rest[0], float(numbers[0].value)
        if inner is outer:
            base, low, high = _clamped(outer)
            if base is GATE and low is None:
                return "silu", alpha, high
    return None


def _offset(term: Term) -> tuple[float, Term]:
    if isinstance(term, Add) and len(term.args) == 2:
        for a, b in (term.args, term.args[::-1]):
            if isinstance(b, Const):
                return float(b.value), a
    return 0.0, term


def _clamped(term: Term) -> tuple[Term, float | None, float | None]:
    """Return (term, min, max) of a clamp with numbers. The limits are None if there is no clamp."""
    if isinstance(term, Apply) and getattr(term.op, "overloadpacket", None) in (
        aten.clamp,
        aten.clamp_max,
        aten.clamp_min,
    ):
        names = [a.name for a in term.op._schema.arguments]
        given = {**dict(zip(names, term.args)), **term.kwargs}
        return given["self"], given.get("min"), given.get("max")
    return term, None, None
