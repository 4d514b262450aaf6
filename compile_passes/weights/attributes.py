"""Turns parameters that a graph holds as attributes into inputs. Under Inductor's `freezing` a graph holds
them so.

An input can be packed, and packed again when it changes. A rewritten graph is then not frozen. A graph in
which nothing is rewritten goes to Inductor as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ...meta.torch_internals import is_precompiling
from .local_parts import copied


def as_inputs(
    gm: fx.GraphModule, inputs: Sequence[Any]
) -> tuple[fx.GraphModule, list[Any], list[torch.Tensor]]:
    """Return a graph without such attributes, its inputs, and the former attributes, which are its last
    inputs."""
    held: dict[str, torch.Tensor] = {**dict(gm.named_parameters(recurse=False))}
    held |= dict(gm.named_buffers(recurse=False))
    if not any(isinstance(x, torch.nn.Parameter) for x in held.values()) or is_precompiling():
        return gm, list(inputs), []
    graph, sources = copied(gm.graph), getattr(gm, "_param_name_to_source", None) or {}
    last = graph.find_nodes(op="placeholder")[-1:] or None
    found: dict[str, fx.Node] = {}
    for node in list(graph.find_nodes(op="get_attr")):
        name = str(node.target)
        if name not in held:
            continue
        if name not in found:
            with graph.inserting_after(last[0] if last else graph._root):
                new = graph.placeholder(name)
            new.meta, new.type = {**node.meta, "tensor_dict": dict(_STATIC)}, type(held[name])
            new._dynamo_source = sources.get(name)  # type: ignore[attr-defined]
            found[name], last = new, [new]
        node.replace_all_uses_with(found[name])
        graph.erase_node(node)
    made = fx.GraphModule(gm, graph)
    made.meta.update(gm.meta)
    tensors = [held[name] for name in found]
    return made, [*inputs, *tensors], tensors


_STATIC = {"_dynamo_static_input_type": "unguarded"}


def with_held(call: Callable[..., Any], held: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Wrap `call` to pass `held` as the last inputs, for which the caller has no arguments."""
    return (lambda *args: call(*args, *held)) if held else call
