"""DTensors, which are split over processes: no operator takes them, and each says so and names the argument.

torch asks a class's `__torch_dispatch__` before any kernel of ours, but before that for a rule that the
operator has for the class. The rule here is found by the class's name: importing DTensor takes half a second,
which only those who have DTensors should pay.

Importing this registers it for every schema of csrc/schema.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch._library.simple_registry import GenericTorchDispatchRuleHolder, singleton

from .fakes import OPERATORS


def split_over_processes(tensor: Any) -> str:
    """What a DTensor is, in words; "" for any other value. By its attributes: torch imports DTensor late."""
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
                f"that this process holds, or {name}.full_tensor(), all of it (docs/deployment.md, Several "
                "processes)"
            )


def _is_dtensor(cls: type) -> bool:
    return any(c.__name__ == "DTensor" and c.__module__.startswith("torch.distributed") for c in cls.__mro__)


class _Rules(GenericTorchDispatchRuleHolder):
    """An operator's rules, by the class that would be asked otherwise."""

    def find(self, torch_dispatch_class: type) -> Callable[..., Any] | None:
        if _is_dtensor(torch_dispatch_class):
            return _refuse
        return super().find(torch_dispatch_class)


def _refuse(cls: type, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    names = (argument.name for argument in op._schema.arguments)
    refuse_dtensors(op._schema.name, [*zip(names, args), *(kwargs or {}).items()])
    raise AssertionError(f"{op}: none of its arguments is a DTensor")


for _name in OPERATORS:
    singleton.find(f"fp4::{_name}").torch_dispatch_rules = _Rules(f"fp4::{_name}")
