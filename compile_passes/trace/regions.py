"""Inlines the regions that a model marks with `torch.compiler.nested_compile_region`.

Dynamo keeps such a region as a graph of its own, which `invoke_subgraph` calls. Experts in a region can only
be read together with the code around it, and each call has its own weights. Tracing the call itself would
leave its aten operators in torch's cache of regions, where Inductor expects decomposed operators.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx


def without_regions(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy Dynamo's graph with regions in place of their calls. Returns `gm` itself if it has no regions."""
    if not any(_is_region(n) for n in gm.graph.nodes):
        return gm
    made = fx.GraphModule(gm, fx.Graph())
    made.graph.output(_put(made, gm, None))
    made.graph.lint()
    made.recompile()
    made.meta.update(gm.meta)
    return made


def _put(made: fx.GraphModule, gm: fx.GraphModule, given: list[Any] | None) -> Any:
    """Append what `gm` computes to `made`, and return its results. given: its inputs, if it is a region."""
    held: dict[fx.Node, Any] = {}
    inputs = iter(given or ())

    def current(x: Any) -> Any:
        return fx.node.map_arg(x, held.__getitem__)

    for node in gm.graph.nodes:
        if node.op == "output":
            break
        if node.op == "placeholder" and given is not None:
            held[node] = next(inputs)
        elif _is_region(node):
            region, _, *operands = node.args
            held[node] = _put(made, getattr(gm, region.target), list(current(operands)))
        elif node.target is operator.getitem and isinstance(of := held.get(node.args[0]), tuple | list):
            held[node] = of[node.args[1]]
        elif node.op == "get_attr":
            held[node] = made.graph.get_attr(_attribute(made, gm, node.target))
            held[node].meta = dict(node.meta)
        else:
            held[node] = made.graph.node_copy(node, held.__getitem__)
            if hasattr(node, "_dynamo_source"):
                held[node]._dynamo_source = node._dynamo_source
    return current(node.args[0])


def _is_region(node: fx.Node) -> bool:
    return node.target is torch.ops.higher_order.invoke_subgraph


def _attribute(made: fx.GraphModule, gm: fx.GraphModule, name: str) -> str:
    """Return the name in `made` of an attribute of `gm`."""
    value: Any = gm
    for part in name.split("."):
        value = getattr(value, part)
    new, n = name.replace(".", "_"), 0
    while getattr(made, new, value) is not value:
        new, n = f"{name.replace('.', '_')}_{n}", n + 1
    setattr(made, new, value)
    return new
