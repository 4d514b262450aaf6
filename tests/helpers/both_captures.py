"""Defines a backend that captures graphs in both ways: from copies of traced calls, and as one trace."""

from __future__ import annotations

import collections
import operator
from typing import Any

import pytest
import torch

from fp4_ops.compile_passes.dynamo.extend import extend_dynamo
from fp4_ops.compile_passes.trace import capture as module
from fp4_ops.compile_passes.trace.copier import Copier


class Both:
    """A backend that captures both ways, and at run time compares them with the graph itself."""

    sees_through_branches = True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        extend_dynamo()
        self.monkeypatch = monkeypatch
        self.copied: list[bool] = []
        self.captured: dict[bool, torch.fx.GraphModule] = {}
        self.runs = 0

    def capture(self, gm: torch.fx.GraphModule, inputs: list[Any], whole: bool = False) -> module.Captured:
        by_calls = module._by_calls

        def run(*args: Any) -> Any:
            found = None if whole else by_calls(*args)
            if not whole:
                self.copied.append(found is not None)
            return found

        with self.monkeypatch.context() as patch:
            patch.setattr(module, "_by_calls", run)
            # Copies keep attention whole (test_attention.py); traces cannot.
            patch.setattr(Copier, "_attention", lambda *_: None)
            captured = module.capture(gm, inputs)
        traced = captured.gm
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(traced.graph, {}))
        graph.eliminate_dead_code()
        graph.lint()
        self.captured[whole] = torch.fx.GraphModule(traced, graph)
        return captured

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.capture(gm, inputs)
        return self.compared(gm, inputs)

    def compared(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Compare with the graph that was captured last."""
        self.capture(gm, inputs, whole=True)
        copied, whole = self.captured[False], self.captured[True]
        assert _operators(copied) == _operators(whole)

        def compare(*args: Any) -> Any:
            results = []
            for graph in (copied, whole, gm):
                # One clone for each memory, so that views of each other remain views.
                again = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(0)
                    results.append(([*graph(*again)], again))
            for result in results[1:]:
                for x, y in zip(results[0][0] + results[0][1], result[0] + result[1], strict=True):
                    if isinstance(x, torch.Tensor):
                        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
                    else:
                        assert x == y
            self.runs += 1
            return gm(*args)

        return compare


def _is_view(node: torch.fx.Node) -> bool:
    """Return whether a node is a view. After writes, views are made again, and some of these are not
    needed."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(a.alias_info is not None for a in schema.arguments)


def _operators(gm: torch.fx.GraphModule) -> collections.Counter:
    """Count operators on tensors, with the sizes of their results.

    Views do not count. `getitem` does not count either: it takes one of several results, and may be repeated.
    """
    return collections.Counter(
        (str(n.target), tuple(map(str, v.shape)), tuple(map(str, v.stride())))
        for n in gm.graph.nodes
        if n.op == "call_function"
        and isinstance(v := n.meta.get("val"), torch.Tensor)
        and n.target is not operator.getitem
        and not _is_view(n)
    )
