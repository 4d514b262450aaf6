"""A router's `topk` as operators that Inductor generates code for, on a GPU.

Inductor calls torch's own topk: a kernel that selects and one that sorts, with nothing fused to either.
Decoding one token on an H200 they take as long as one of the layer's expert products (9 us, 128 experts).
Written as rounds, each the largest of what is left, it is reductions over the rows that softmax reduces: one
Triton kernel for both. (Sorting whole rows, which Inductor generates too, is twice the instructions and one
more kernel.) Hopper GPUs have a kernel for it (top_experts.py).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx

from ..graph.dead_code import erase_unused
from ..graph.nodes import FLOATING, arguments, aten, integer, item, shape, static_int, value
from . import top_experts

DEVICES = ("cuda",)
MAX_ROW = 512
"""Longer rows are for torch's own radix selection."""
MAX_K = 16
"""Each of the k rounds adds three nodes to the graph."""


def write_topk(graph: fx.Graph) -> list[str]:
    """Rewrites every `topk` that qualifies; says in words what was done.

    The values are those of topk, NaN first; of equal ones the lowest index comes first, where topk promises
    no order.
    """
    done: Counter[tuple[int, int, bool]] = Counter()
    for node in graph.find_nodes(op="call_function", target=aten.topk.default):
        if not _qualifies(node):
            continue
        x, k = node.args[:2]
        e, by_kernel = shape(x)[-1], top_experts.runs(value(x).device)
        if by_kernel:
            top_experts.write_top_experts(graph, node)
        else:
            _write_rounds(graph, node)
        done[k, e, by_kernel] += 1
    if done:
        erase_unused(graph)
    return [f"{n} topk of {k} in {e} became {_WORDS[by_kernel]}" for (k, e, by_kernel), n in done.items()]


_TIES = "(of equal scores the lowest index comes first)"
_WORDS = {
    True: f"fp4::top_experts, with the softmax before them and the division after {_TIES}",
    False: f"rounds of a maximum, which Inductor fuses with the router around them {_TIES}",
}


def _write_rounds(graph: fx.Graph, node: fx.Node) -> None:
    a = arguments(node)
    with graph.inserting_before(node):
        results = _rounds(graph, a["self"], a["k"], shape(a["self"])[-1])
    for user in list(node.users):
        new = results[integer(user, 1)]
        new.meta.update(user.meta)
        user.replace_all_uses_with(new)
        graph.erase_node(user)
    graph.erase_node(node)


def _qualifies(node: fx.Node) -> bool:
    a = arguments(node)
    x, k = a["self"], static_int(a["k"])
    if value(x).device.type not in DEVICES or value(x).dtype not in FLOATING or not shape(x):
        return False
    e = static_int(shape(x)[-1])
    return (
        k is not None
        and e is not None
        and 1 <= k <= min(e, MAX_K)
        and e <= MAX_ROW
        and a["dim"] in (-1, len(shape(x)) - 1)
        and a["largest"]
        and all(item(user) is not None for user in node.users)
    )


def _rounds(graph: fx.Graph, x: fx.Node, k: int, e: int) -> tuple[fx.Node, fx.Node]:
    """(values, indices) by integers that order as (score, lower index first) does and are all different."""

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return graph.call_function(target, args, kwargs)

    def cast(x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return call(aten._to_copy.default, x, dtype=dtype)

    dtype, device = value(x).dtype, value(x).device
    x = cast(x, torch.float32)
    unsigned = call(aten.where.ScalarSelf, call(aten.eq.Scalar, x, 0.0), 0.0, x)  # -0.0 equals 0.0
    order = _flipped(call, call(aten.view.dtype, unsigned, torch.int32))
    order = call(aten.where.ScalarSelf, call(aten.isnan.default, x), _INT_MAX, order)
    high = call(aten.bitwise_left_shift.Tensor_Scalar, cast(order, torch.int64), 32)
    low = call(aten.arange.start_step, e - 1, -1, -1, dtype=torch.int64, device=device)
    keys = call(aten.bitwise_or.Tensor, high, low)
    best = [call(aten.amax.default, keys, [-1], True)]
    while len(best) < k:
        left = call(aten.where.ScalarOther, call(aten.lt.Tensor, keys, best[-1]), keys, _LONG_MIN)
        best.append(call(aten.amax.default, left, [-1], True))
    keys = call(aten.cat.default, best, -1)
    high = call(aten.bitwise_right_shift.Tensor_Scalar, keys, 32)
    values = call(aten.view.dtype, _flipped(call, cast(high, torch.int32)), torch.float32)
    low = call(aten.bitwise_and.Scalar, keys, _LOW)
    return cast(values, dtype), call(aten.rsub.Scalar, low, e - 1)


_INT_MAX, _LONG_MIN, _LOW = 2**31 - 1, -(2**63), 2**32 - 1


def _flipped(call: Any, bits: fx.Node) -> fx.Node:
    """float32 bits as int32 that order alike: the larger those of a negative number, the less it is.

    Its own inverse.
    """
    flipped = call(aten.bitwise_xor.Scalar, bits, _INT_MAX)
    return call(aten.where.self, call(aten.lt.Scalar, bits, 0), flipped, bits)
