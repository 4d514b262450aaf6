"""What Dynamo needs so that it captures loops over experts, and nothing that it compiled before fails."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import Unsupported
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    free_unbacked_symbols,
    is_concrete_int,
)

from .branches import chosen_from, named, see_through_branches, wanted
from .without_rows import called, example, same_elements

CAPTURE = {"capture_dynamic_output_shape_ops": True}
"""`nonzero` and boolean masks have sizes that only the data knows."""


def _tolist(method: Callable[..., Any]) -> Callable[..., Any]:
    """`tolist()` of how many rows each expert has is captured, for `rows.split(counts)`; any other is not.

    With CAPTURE Dynamo captures `torch.bincount(ids)`, and then fails in the conversion of a list whose
    length is unknown instead of breaking the graph: a model that compiles under Inductor would not under this
    backend.
    """

    @functools.wraps(method)
    def tolist(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        mode, counts = tx.output.fake_mode, wanted(tx.output) and _are_counts(self.as_proxy().node)
        allowed = mode.allow_scalar_outputs
        mode.allow_scalar_outputs = allowed or counts
        try:
            return method(self, tx, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            raise Unsupported("Tensor.tolist() of as many numbers as only the data knows") from None
        finally:
            mode.allow_scalar_outputs = allowed

    tolist._fp4 = True  # type: ignore[attr-defined]
    return tolist


def _are_counts(node: fx.Node) -> bool:
    """Whether a tensor looks like the number of rows of each expert; whether it is one is proved later."""
    while called(node) == "cpu":
        node = node.args[0]
    source = same_elements(node)[-1]
    binned = named(source, ("bincount",), ("input", "weights", "minlength"))
    if binned:
        experts = chosen_from(binned["input"])
        if experts is not None and experts == binned.get("minlength"):
            torch._check(example(source).shape[0] == experts)  # no id is larger
    shape = example(source).shape
    marked = named(source, ("sum",), ("input", "dim")).get("input")
    counts = binned or (marked is not None and called(same_elements(marked)[-1]) in _MARKS)
    return bool(counts) and len(shape) == 1 and is_concrete_int(shape[0])


_MARKS = ("one_hot", "scatter", "scatter_")


def allow_scalars(gm: fx.GraphModule) -> None:
    """Whoever traces a graph with such numbers again may do so."""
    context = TracingContext.try_get()
    mode = context.fake_mode if context is not None else None
    if mode is not None and any(free_unbacked_symbols(example(n)) for n in _items(gm)):
        mode.allow_scalar_outputs = True


def _items(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="call_method", target="item"))


def _extend_tolist() -> None:
    from torch._dynamo.variables.tensor import TensorVariable

    table = getattr(TensorVariable, "tp_methods", {})  # torch 2.15 looks methods up in here
    entry = table.get("tolist")
    method = getattr(TensorVariable, "method_tolist", None) if entry is None else entry.handler
    if method is None or hasattr(method, "_fp4"):
        return
    if entry is None:
        TensorVariable.method_tolist = _tolist(method)
    else:
        table["tolist"] = replace(entry, handler=_tolist(method))


def extend_dynamo() -> None:
    _extend_tolist()
    see_through_branches()


def capture_loops() -> None:
    """For the whole process: Dynamo reads these before it calls a backend, and has none for a single one."""
    for name, value in CAPTURE.items():
        setattr(torch._dynamo.config, name, value)
    extend_dynamo()
