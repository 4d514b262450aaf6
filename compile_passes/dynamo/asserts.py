"""Lets Dynamo capture `assert torch.isfinite(x).all(), f"{name} is not finite"`.

Dynamo writes an assertion about a tensor into the graph if its message is a constant. It breaks the graph if
the message is computed, which separates routers from their experts. It also breaks the graph at `assert not
x.isnan().any()` and, from Python 3.12 on, at the last statement of a loop, because the jump there goes to the
code that raises the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...meta.torch_internals import assert_async
from . import api

if TYPE_CHECKING:
    from .api import Instruction, Tracer


def into_the_graph(tx: Tracer, jump: Instruction) -> bool:
    """Return whether `jump` only decides if an AssertionError is raised. If so, the graph asserts its
    condition now."""
    condition = tx.stack[-1]
    if (
        type(condition) is not api.TensorVariable
        or condition.as_proxy().node.meta["example_value"].numel() != 1
    ):
        return False
    jumps_if = "IF_TRUE" in jump.opname
    jumps_to_raise = (raising := _raising(tx.instructions[tx.indexof[jump.target] :])) is not None
    if not jumps_to_raise:
        raising = _raising(tx.instructions[tx.instruction_pointer :])
    if raising is None:
        return False
    holds_if = jumps_if is not jumps_to_raise
    if (
        holds_if
        and not jumps_to_raise
        and not any(n.startswith(("BUILD_STRING", "FORMAT_")) for n in raising)
    ):
        return False  # Dynamo does it
    asserted = condition if holds_if else condition.call_method(tx, "logical_not", [], {})
    place = f"{tx.f_code.co_filename}:{tx.lineno}"
    tx.output.create_proxy(
        "call_function", assert_async, (asserted.as_proxy(), f"the assertion failed at {place}"), {}
    )
    tx.pop()
    if not jumps_to_raise:
        tx.jump(jump)
    return True


def _raising(following: Sequence[Instruction]) -> list[str] | None:
    """Return the names of the instructions up to the raise, if they only raise an AssertionError."""
    names: list[str] = []
    for inst in following:
        names.append(inst.opname)
        if names[0] != "LOAD_ASSERTION_ERROR" or "JUMP" in inst.opname:
            return None
        if inst.opname == "RAISE_VARARGS":
            return names
    return None
