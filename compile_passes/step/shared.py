"""Makes what several operators of a step read one tensor: the mask, and the angles of rotary position
embeddings.

For an operator that is not its own, Inductor computes each operand again if it can be computed element by
element. A step of 48 layers then computes the mask 48 times, each time by a kernel between two of ours.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from ...meta import torch_internals
from ..graph.nodes import aten, is_op, is_pointwise, is_tensor, static_int, value

fp4 = torch.ops.fp4

READERS = (fp4.attention.default, fp4.update_cache.default, fp4.cached_attention.default)


def write_shared(graph: fx.Graph) -> list[str]:
    """Rewrites operands of several operators. Returns a sentence that says how many."""
    readers: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        for x in node.all_input_nodes if node.target in READERS else ():
            readers[x].append(node)
    done = 0
    for x, users in readers.items():
        strides = _strides(x) if len(users) > 1 and _is_computed_again(x) else None
        if strides is not None:
            _write(graph, x, strides, users)
            done += 1
    what = "operands of several operators are computed once"
    return [f"decoding step ({done}x): {what}"] if done else []


def _is_computed_again(x: fx.Node) -> bool:
    return is_op(x, aten._to_copy, aten.cat) or (x.op == "call_function" and is_pointwise(x))


def _strides(x: fx.Node) -> list[int] | None:
    found: list[Any] = [static_int(n) for n in value(x).stride()] if is_tensor(x) else [None]
    return None if None in found else found


def _write(graph: fx.Graph, x: fx.Node, strides: list[int], users: list[fx.Node]) -> None:
    with graph.inserting_after(x):
        one = graph.call_function(torch_internals.force_stride_order, (x, strides))
    one.meta.update(x.meta)
    for user in users:
        user.replace_input_with(x, one)
