"""What Dynamo needs so that it captures loops over experts, and nothing that it compiled before fails."""

from __future__ import annotations

import torch
from torch import fx
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from .branches import see_through_branches
from .counts import see_counts
from .without_rows import example

CAPTURE = {"capture_dynamic_output_shape_ops": True}
"""`nonzero` and boolean masks have sizes that only the data knows."""


def allow_scalars(gm: fx.GraphModule) -> None:
    """Whoever traces a graph with numbers of rows in it again may do so."""
    context = TracingContext.try_get()
    mode = context.fake_mode if context is not None else None
    if mode is not None and any(free_unbacked_symbols(example(n)) for n in _items(gm)):
        mode.allow_scalar_outputs = True


def _items(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="call_method", target="item"))


def extend_dynamo() -> None:
    see_counts()
    see_through_branches()


def capture_loops() -> None:
    """For the whole process: Dynamo reads these before it calls a backend, and has none for a single one.

    What is set belongs to this thread, or this context; so the defaults change, too. Workers of a pool, and a
    server's tasks, read those.
    """
    entries = getattr(torch._dynamo.config, "_config", {})
    for name, value in CAPTURE.items():
        setattr(torch._dynamo.config, name, value)
        if name in entries:
            entries[name].default = value
    extend_dynamo()
