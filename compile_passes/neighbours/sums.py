"""Writes sums over processes as `fp4::all_reduce`, whose kernels send data over NVLink.

With expert or tensor parallelism, each block ends in an all-reduce. It may come from DTensor's
redistribution, from transformers' hooks or from `torch.distributed.all_reduce`; all are the same nodes in a
graph. For a few tokens, NCCL's all-reduce takes 12 us. A kernel that writes into the other GPUs' memory takes
4 us (docs/several_gpus.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ...distributed import workspace
from ..graph.nodes import FLOATING, arguments, is_tensor, value


def write_sums(graph: fx.Graph) -> list[str]:
    """Rewrites every all-reduce that qualifies, and returns a text about it.

    All processes of the group make the same decision: they have the same graph, and all of them have the
    workspace.
    """
    done = 0
    for node in _all_reduces(graph):
        name = _group_with_workspace(node)
        if name is None:
            continue
        x = arguments(node)["input"]
        with graph.inserting_before(node):
            new = graph.call_function(torch.ops.fp4.all_reduce.default, (x,), {"group_name": name})
        new.meta = dict(node.meta)
        for wait in list(node.users):
            wait.replace_all_uses_with(new)
            graph.erase_node(wait)
        graph.erase_node(node)
        done += 1
    return [f"sums over processes ({done}x): by fp4::all_reduce, over NVLink"] if done else []


def _all_reduces(graph: fx.Graph) -> list[fx.Node]:
    operators = getattr(torch.ops, "_c10d_functional", None)  # torch may lack distributed
    found = getattr(operators, "all_reduce", None)
    return [] if found is None else list(graph.find_nodes(op="call_function", target=found.default))


def _group_with_workspace(node: fx.Node) -> str | None:
    """Return a group of the same processes whose workspace is large enough for the sum, or None."""
    a = arguments(node)
    x, group = a["input"], a["group_name"]
    if a["reduce_op"] != "sum" or not isinstance(group, str) or not is_tensor(x):
        return None
    wait = torch.ops._c10d_functional.wait_tensor.default
    if value(x).dtype not in FLOATING or any(user.target is not wait for user in node.users):
        return None
    found = workspace.of_same_ranks(group)
    if found is None:
        return None
    name, space = found
    size = _bytes(value(x))
    return name if size is not None and space.sums(size) else None


def _bytes(x: torch.Tensor) -> int | None:
    """Return the size in this call. With dynamic shapes other calls may be larger; if the workspace is too
    small for one, fp4::all_reduce calls NCCL."""
    if free_unbacked_symbols(x):
        return None
    numel: Any = x.numel()
    numel = numel.node.hint if isinstance(numel, torch.SymInt) else numel
    return None if numel is None else int(numel) * x.itemsize
