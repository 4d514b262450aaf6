"""Rewrites a router's `topk` on a GPU, and in a decoding step on a CPU, for which Inductor would call torch's
own topk.

torch's topk runs two kernels, one that selects and one that sorts, and no other work is fused into them. When
one token is decoded on an H200, both together take as long as one of the layer's expert products (9 us, 128
experts).

On Hopper, `topk` becomes fp4::top_experts, with the softmax before it and what is computed from its values.
Each warp of the kernel computes one row. On other GPUs, `topk` becomes k rounds. Each round finds the largest
of the remaining values. The rounds reduce over the same rows as the softmax, so Inductor fuses both into one
Triton kernel. On an H100 this kernel takes 30 us for 64 rows of 128 experts. (Inductor can also generate a
sort of whole rows. That takes twice the instructions and one more kernel.)

In a decoding step on a CPU, `topk` becomes fp4::top_experts, too: one call instead of two functions of
Inductor's and torch's topk between them.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from ...backends.hopper.trust import top_experts_kernel
from ...runtime import native
from ..graph.dead_code import erase_unused
from ..graph.nodes import (
    FLOATING,
    arguments,
    aten,
    integer,
    is_float_cast,
    is_op,
    item,
    operand,
    shape,
    static_int,
    value,
)

fp4 = torch.ops.fp4

DEVICES = ("cuda",)
STEP_ROWS = 4
"""The most rows of a decoding step on a CPU, as for the linear layers (step/linears.py)."""
MAX_ROW = 512
"""For longer rows, torch's own radix selection runs."""
MAX_K = 16
"""Each of the k rounds adds three nodes to the graph."""


def write_topk(graph: fx.Graph, on_cpu: bool = False) -> list[str]:
    """Rewrites every `topk` that qualifies, and returns a text about each. on_cpu: steps on a CPU, too.

    The values are the same as topk's, with NaN first. Among equal values the lowest index comes first; topk
    itself promises no order.
    """
    done: Counter[tuple[int, int, bool]] = Counter()
    for node in graph.find_nodes(op="call_function", target=aten.topk.default):
        x, k = node.args[:2]
        if not _qualifies(node) or not (value(x).device.type in DEVICES or (on_cpu and _is_step_on_cpu(x))):
            continue
        e = shape(x)[-1]
        by_kernel = value(x).device.type not in DEVICES or has_kernel(value(x).device)
        if by_kernel:
            _write_top_experts(graph, node)
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


# --- as rounds ---


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
    if value(x).dtype not in FLOATING or not shape(x):
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


def _is_step_on_cpu(x: fx.Node) -> bool:
    """True for few rows of bfloat16 logits, or of their softmax. A symbolic number counts as many."""
    logits = _logits(x) or x
    if value(x).device.type != "cpu" or value(logits).dtype != torch.bfloat16:
        return False
    sizes = [static_int(n) or STEP_ROWS + 1 for n in shape(x)[:-1]]
    return prod(sizes) <= STEP_ROWS


def _rounds(graph: fx.Graph, x: fx.Node, k: int, e: int) -> tuple[fx.Node, fx.Node]:
    """Return (values, indices). Scores are mapped to distinct integers with the same order; among equal
    scores, the lower index has the larger integer."""

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
    """Map the bits of float32 to int32 values with the same order. For negative numbers, larger bits mean a
    smaller number.

    The function is its own inverse.
    """
    flipped = call(aten.bitwise_xor.Scalar, bits, _INT_MAX)
    return call(aten.where.self, call(aten.lt.Scalar, bits, 0), flipped, bits)


# --- by the kernel ---


def has_kernel(device: torch.device) -> bool:
    """True for a Hopper GPU on which the kernel passed the check of its first use."""
    return native.is_hopper(device) and top_experts_kernel(device.index or 0)


@dataclass(frozen=True)
class _Weights:
    """Use of the values that topk returns. `node` is the last operation that the operator does."""

    node: fx.Node
    softmax: bool
    normalize: bool


def _write_top_experts(graph: fx.Graph, topk: fx.Node) -> None:
    """Replaces one `topk` along the last dimension."""
    a = arguments(topk)
    x, k = a["self"], a["k"]
    logits = _logits(x)
    values = next((user for user in topk.users if integer(user, 1) == 0), None)
    last = None if values is None else _weights(values, softmax=logits is not None)
    options: dict[str, Any] = {"softmax": logits is not None, "out_dtype": value(x).dtype}
    if last is not None:
        options = {"softmax": last.softmax, "normalize": last.normalize, "out_dtype": value(last.node).dtype}
    with graph.inserting_before(topk):
        out = graph.call_function(fp4.top_experts.default, (x if logits is None else logits, k), options)
        made = [graph.call_function(operator.getitem, (out, i)) for i in range(2)]
    replaced = [(last.node, made[0])] if last is not None else []
    replaced += [(user, made[1]) for user in topk.users if integer(user, 1) == 1]
    for old, new in replaced:
        new.meta.update(old.meta)
        old.replace_all_uses_with(new)


def _logits(x: fx.Node) -> fx.Node | None:
    """Returns the logits if x is their softmax in float32 along the last dimension; else None."""
    if not is_op(x, aten._softmax) or value(x).dtype != torch.float32 or not _is_last(x, integer(x, 1)):
        return None
    logits = operand(x)
    return operand(logits) if is_float_cast(logits) else logits


def _is_last(node: fx.Node, dim: Any) -> bool:
    return dim in (-1, len(shape(node)) - 1)


def _weights(values: fx.Node, softmax: bool) -> _Weights:
    """Reads the operations after topk. `softmax`: topk chose from a softmax."""
    found = _Weights(values, softmax, False)
    users = list(values.users)
    if value(values).dtype == torch.float32 and (quotient := _normalized(values)) is not None:
        found = _Weights(quotient, softmax, True)
    elif not softmax and len(users) == 1:
        chosen = users[0]
        if is_float_cast(chosen) and value(chosen).dtype == torch.float32 and len(chosen.users) == 1:
            chosen = next(iter(chosen.users))
        if is_op(chosen, aten._softmax) and _is_last(chosen, integer(chosen, 1)):
            # The softmax of the chosen logits is that of all, divided by the sum of the chosen.
            found = _Weights(chosen, True, True)
    users = list(found.node.users)
    if value(found.node).dtype == torch.float32 and len(users) == 1 and is_float_cast(users[0]):
        found = _Weights(users[0], found.softmax, found.normalize)
    return found


def _normalized(values: fx.Node) -> fx.Node | None:
    """Returns values / values.sum(-1, keepdim=True) if nothing else reads the values; else None."""
    total = next((user for user in values.users if is_op(user, aten.sum)), None)
    if total is None or len(values.users) != 2 or len(total.users) != 1:
        return None
    quotient = next(iter(total.users))
    a = arguments(total)
    dims: list[int] = list(a.get("dim") or [])
    if len(dims) != 1 or not _is_last(values, dims[0]) or not a.get("keepdim"):
        return None
    if a.get("dtype") not in (None, torch.float32) or not is_op(quotient, aten.div):
        return None
    of = arguments(quotient)
    exact = of.get("rounding_mode") is None and (of["self"], of["other"]) == (values, total)
    return quotient if exact else None
