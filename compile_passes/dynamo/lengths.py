"""Prepares a graph that Dynamo captured: its numbers from tensors, and its lengths. After a graph break, ids,
weights and rows may each have a length of their own.

If Dynamo breaks the graph between a router and its experts, the rest of the function is a graph that reads
ids [s1, k], weights [s2, k] and rows [s0, H]. Nothing in it says that the lengths are equal, so no proof
would hold. They are equal in this call. A guard makes that a fact, and Dynamo compiles again for a call where
it is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import prod
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ...meta.torch_internals import TracingContext
from ..graph.traced_nodes import called, example


def allow_scalars(gm: fx.GraphModule) -> None:
    """Let later tracers of a graph with row counts read numbers from tensors, too."""
    context = TracingContext.try_get()
    mode = context.fake_mode if context is not None else None
    items = gm.graph.find_nodes(op="call_method", target="item")
    if mode is not None and any(free_unbacked_symbols(example(n)) for n in items):
        mode.allow_scalar_outputs = True


def guard_equal_lengths(gm: fx.GraphModule) -> None:
    """Guard that inputs have equally many rows, where they have in this call."""
    inputs = [
        _rows(example(n))
        for n in gm.graph.find_nodes(op="placeholder")
        if isinstance(example(n), torch.Tensor) and not any(called(user) == "embedding" for user in n.users)
    ]
    inputs = [sizes for sizes in inputs if any(isinstance(size, torch.SymInt) for size in sizes)]
    for a, b in combinations(inputs, 2):
        for i, j in zip(a, b) if len(a) == len(b) else [(prod(a), prod(b))]:
            if str(i) != str(j) and _now(i) is not None and _now(i) == _now(j):
                bool(i == j)  # adds the guard


def _rows(x: torch.Tensor) -> Sequence[Any]:
    """Return the sizes that count rows: [T] of one number a row, [T] of [T, H], [B, T] of [B, T, H]."""
    return x.shape[: max(x.dim() - 1, 1)] if x.dim() <= 3 else ()


def _now(size: Any) -> Any:
    """Return what a size is in this call, or None if only the data say."""
    if not isinstance(size, torch.SymInt):
        return size
    return size.node.hint if size.node.has_hint() else None
