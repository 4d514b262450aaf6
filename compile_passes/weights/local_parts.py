"""Replaces DTensor parameters that a graph reads only by `to_local()` with this process's part.

torchtitan's experts, and others that run their own kernels, begin with `to_local()`. After the replacement
the graph has ordinary weights. Its exchange with the other processes (collectives) stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ...meta.dtensors import split_over_processes
from ...meta.torch_internals import TracingContext, is_precompiling
from .sharded import gathered


def see_through(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any], list[int]]:
    """Return a graph, its inputs, and the indices of inputs that are parts now. Unchanged if there are
    none."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    from_shards = gathered(x for x in inputs if isinstance(x, torch.nn.Parameter))
    parts = [
        i
        for i, (node, x) in enumerate(zip(placeholders, inputs, strict=True))
        if isinstance(x, torch.nn.Parameter) and split_over_processes(x) and id(x) not in from_shards
        if not (torch.is_grad_enabled() and x.requires_grad) and _is_read_locally(node, x)
    ]
    if not parts or is_precompiling():
        return gm, list(inputs), []
    gm = fx.GraphModule(gm, copied(gm.graph))
    nodes, given = gm.graph.find_nodes(op="placeholder"), list(inputs)
    context = TracingContext.try_get()
    known = context.tensor_to_context if context is not None else {}
    for i in parts:
        node, whole = nodes[i], given[i]
        given[i] = _local(whole)
        inner = getattr(known.get(whole), "inner_contexts", {}).get("_local_tensor")
        if inner is not None:  # as Dynamo made its fake tensor, with the same symbols
            known[given[i]] = inner
        if (example := node.meta.get("example_value")) is not None:
            node.meta["example_value"] = example._local_tensor
        node.type = torch.Tensor
        node.meta.setdefault("tensor_dict", {})["_dynamo_static_input_type"] = "unguarded"
        for use in list(node.users):
            use.replace_all_uses_with(node)
            gm.graph.erase_node(use)
    gm.recompile()
    return gm, given, parts


def copied(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    return new


def _local(x: Any) -> torch.Tensor:
    """The same tensor at every call."""
    return x._local_tensor  # type: ignore[no-any-return]


def _is_read_locally(node: fx.Node, x: Any) -> bool:
    """Return whether a DTensor is only used by `to_local()`, and this returns the very tensor that it
    holds."""
    reads = [_reads_locally(u) and u.args == (node,) for u in node.users]
    return bool(reads) and all(reads) and type(_local(x)) is torch.Tensor


def _reads_locally(node: fx.Node) -> bool:
    """Return whether a node is `to_local()`. Dynamo of torch 2.11 uses a function for it that knows its
    arguments."""
    if node.op == "call_method":
        return node.target == "to_local"
    return getattr(node.target, "__name__", "") == "prim_to_local"


def given_parts(call: Callable[..., Any], parts: list[int]) -> Callable[..., Any]:
    """Wrap `call` of a graph whose inputs at `parts` are parts, for callers that have DTensors there."""
    if not parts:
        return call

    def run(*args: Any) -> Any:
        given = list(args)
        for i in parts:
            given[i] = _local(given[i])
        return call(*given)

    return run
