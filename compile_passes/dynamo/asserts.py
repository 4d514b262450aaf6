"""`assert torch.isfinite(x).all(), f"{name} is not finite"`, captured.

Dynamo writes an assertion about a tensor into the graph if its message is a constant, and breaks the graph at
one whose message is computed. That splits routers from their experts.
"""

from __future__ import annotations

from typing import Any

import torch


def into_the_graph(tx: Any, jump: Any) -> bool:
    """Whether `jump` only skipped the raising of an AssertionError; the graph asserts its condition now."""
    from torch._dynamo.variables.tensor import TensorVariable

    condition = tx.stack[-1]
    if type(condition) is not TensorVariable or "POP_JUMP" not in jump.opname or "IF_TRUE" not in jump.opname:
        return False
    raising = tx.instructions[tx.instruction_pointer : tx.indexof[jump.target]]
    names = [i.opname for i in raising]
    if not names or names[0] != "LOAD_ASSERTION_ERROR" or names[-1] != "RAISE_VARARGS":
        return False
    if not any(name.startswith(("BUILD_STRING", "FORMAT_")) for name in names) or any(
        "JUMP" in n for n in names
    ):
        return False
    if condition.as_proxy().node.meta["example_value"].numel() != 1:
        return False
    place = f"{tx.f_code.co_filename}:{tx.lineno}"
    tx.output.create_proxy(
        "call_function", torch._assert_async, (condition.as_proxy(), f"the assertion failed at {place}"), {}
    )
    tx.pop()
    tx.jump(jump)
    return True
