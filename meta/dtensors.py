"""Refuses DTensors, which are split over processes. The error names the argument.

torch calls a class's `__torch_dispatch__` before any kernel. Before that it looks for a rule that the
operator has for the class, so this module registers one for every schema of csrc/schema.cpp. It finds the
class by its name, because importing DTensor takes half a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from .fakes import OPERATORS
from .torch_internals import GenericTorchDispatchRuleHolder, dispatch_rules


def split_over_processes(tensor: Any) -> str:
    """Describes a DTensor in words; returns "" for any other value. Does not import the DTensor class."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None or not isinstance(tensor, torch.Tensor):
        return ""
    placements = ", ".join(map(str, getattr(tensor, "placements", ())))
    size = mesh.size()
    return f"a DTensor, placed {placements} on {size} process{'es' * (size != 1)}"


def refuse_dtensors(what: str, arguments: Iterable[tuple[str, Any]]) -> None:
    """Raises RuntimeError for the first argument that is a DTensor. arguments: (name, value)."""
    for name, value in arguments:
        if words := split_over_processes(value):
            raise RuntimeError(
                f"{what}: {name} is {words}; it must be a plain tensor. Pass {name}.to_local(), the part "
                f"that this process holds, or {name}.full_tensor(), the whole (docs/deployment.md, Several "
                "processes)"
            )


def _is_dtensor(cls: type) -> bool:
    return any(c.__name__ == "DTensor" and c.__module__.startswith("torch.distributed") for c in cls.__mro__)


class _Rules(GenericTorchDispatchRuleHolder):
    """Rules of an operator, by tensor class. A DTensor gets `_refuse`."""

    def find(self, torch_dispatch_class: type) -> Callable[..., Any] | None:
        if _is_dtensor(torch_dispatch_class):
            return _refuse
        return super().find(torch_dispatch_class)


def _refuse(cls: type, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    names = (argument.name for argument in op._schema.arguments)
    given = [*zip(names, args), *(kwargs or {}).items()]
    each = [(name, x) for name, value in given for x in (value if isinstance(value, list) else [value])]
    refuse_dtensors(op._schema.name, each)
    raise AssertionError(f"{op}: none of its arguments is a DTensor")


for _name in OPERATORS:
    dispatch_rules.find(f"fp4::{_name}").torch_dispatch_rules = _Rules(f"fp4::{_name}")
