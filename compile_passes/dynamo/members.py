"""Answers `e in ids` where Dynamo has some of the ids as symbols, as in a loop over hit experts in Python.

Dynamo compares a number only with numbers, so it would find no symbol equal to it, and the function would
compute something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import api

if TYPE_CHECKING:
    from .api import Handler, Instruction, Tracer, Variable


def contains(method: Handler) -> Handler:
    """Compare the symbols of a list with a number, which guards on the answer."""

    def contains_op(tx: Tracer, inst: Instruction) -> None:
        found = _is_in(*tx.stack[-2:])
        if found is None:
            return method(tx, inst)
        tx.popn(2)
        tx.push(api.ConstantVariable.create(found is not bool(inst.argval)))

    return contains_op


def _is_in(number: Variable, items: Variable) -> bool | None:
    """Return whether a number is in a list or tuple with symbols. None if Dynamo's own answer is right."""
    number, items = number.realize(), items.realize()
    if not isinstance(items, (api.ListVariable, api.TupleVariable)) or not number.is_python_constant():
        return None
    value = number.as_python_constant()
    if not isinstance(value, (int, float)):
        return None
    members = [item.realize() for item in items.items]
    symbols = [m.sym_num for m in members if isinstance(m, api.SymNodeVariable)]
    if not symbols:
        return None
    known = any(m.is_python_constant() and m.as_python_constant() == value for m in members)
    return known or any(bool(symbol == value) for symbol in symbols)
