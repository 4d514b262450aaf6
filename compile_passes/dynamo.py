"""What Dynamo needs so that it captures loops over experts, and nothing that it compiled before fails."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.exc import Unsupported
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from .branches import see_through_branches

CAPTURE = {"capture_dynamic_output_shape_ops": True}
"""`nonzero` and boolean masks have sizes that only the data knows."""


def _breaks_the_graph(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def tolist(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except GuardOnDataDependentSymNode:
            raise Unsupported("Tensor.tolist() of as many numbers as only the data knows") from None

    tolist._fp4 = True  # type: ignore[attr-defined]
    return tolist


def _break_at_tolist() -> None:
    """`torch.bincount(ids).tolist()` breaks the graph, as it does without CAPTURE.

    With it Dynamo captures the bincount, and then fails in the conversion of a list whose length is unknown
    instead of leaving the graph there: a model that compiles under Inductor would not under this backend.
    """
    from torch._dynamo.variables.tensor import TensorVariable

    method = getattr(TensorVariable, "method_tolist", None)
    if method is not None and not hasattr(method, "_fp4"):
        TensorVariable.method_tolist = _breaks_the_graph(method)


def extend_dynamo() -> None:
    _break_at_tolist()
    see_through_branches()


def capture_loops() -> None:
    """For the whole process: Dynamo reads these before it calls a backend, and has none for a single one."""
    for name, value in CAPTURE.items():
        setattr(torch._dynamo.config, name, value)
    extend_dynamo()
