"""Returns arguments of a node with precise types, because fx has one type for all arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx


def operand(node: fx.Node, i: int = 0) -> fx.Node:
    """Return argument `i`, which is a node."""
    found = node.args[i]
    if not isinstance(found, fx.Node):
        raise TypeError(f"argument {i} of {node.name} is {found!r}, not a node")
    return found


def integer(node: fx.Node, i: int) -> int:
    """Return argument `i`, which is a constant number."""
    found = node.args[i]
    if not isinstance(found, int):
        raise TypeError(f"argument {i} of {node.name} is {found!r}, not an int")
    return found


def several(node: fx.Node, i: int) -> Sequence[Any]:
    """Return argument `i`, which is a list of numbers or nodes."""
    found = node.args[i]
    if not isinstance(found, (list, tuple)):
        raise TypeError(f"argument {i} of {node.name} is {found!r}, not a list")
    return found
