"""Arguments of a node with their types, where fx has one type for all that an argument may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx


def operand(node: fx.Node, i: int = 0) -> fx.Node:
    """Argument `i`, which is what another node computes."""
    found = node.args[i]
    if not isinstance(found, fx.Node):
        raise TypeError(f"argument {i} of {node.name} is {found!r}, not a node")
    return found


def integer(node: fx.Node, i: int) -> int:
    """Argument `i`, which is a number that the graph does not compute."""
    found = node.args[i]
    if not isinstance(found, int):
        raise TypeError(f"argument {i} of {node.name} is {found!r}, not an int")
    return found


def several(node: fx.Node, i: int) -> Sequence[Any]:
    """Argument `i`, which is a list: of numbers, or of what other nodes compute."""
    found = node.args[i]
    if not isinstance(found, (list, tuple)):
        raise TypeError(f"argument {i} of {node.name} is {found!r}, not a list")
    return found
