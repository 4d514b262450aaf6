"""Defines a backend of torch.compile that runs a single pass of compile_passes/step/, and then the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext

from fp4_ops.compile_passes.graph.repeat import Undo, undo_of
from fp4_ops.compile_passes.trace.copier import Copier


def copied(gm: fx.GraphModule, fakes: Sequence[Any], mode: Any) -> fx.GraphModule:
    """Copies Dynamo's graph like `capture`, but fails if the whole graph would have to be traced."""
    with torch.no_grad(), mode, enable_python_dispatcher():
        return Copier(gm, fakes, mode, {}).run()


class OnePass:
    """`said` is the result of the pass. `undone` says how a run is undone, before and after the pass."""

    graph: fx.Graph
    said: list[str]
    undone: tuple[Undo | None, Undo | None]

    def __init__(self, write: Callable[[fx.Graph], list[str]]) -> None:
        self._write = write

    def __call__(self, gm, inputs):
        context = TracingContext.try_get()
        assert context is not None and context.fake_mode is not None
        mode = context.fake_mode
        fakes = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
        made = copied(gm, fakes, mode)
        before = undo_of(made.graph, 0)
        self.said = self._write(made.graph)
        made.graph.eliminate_dead_code()
        made.graph.lint()
        made.recompile()
        self.graph, self.undone = made.graph, (before, undo_of(made.graph, 0))
        return made.forward

    def calls(self, target) -> list[fx.Node]:
        return list(self.graph.find_nodes(op="call_function", target=target))
