"""Writes a router's `topk` as fp4::top_experts, with the softmax before it and what becomes of the values.

Its kernel gives a row to each warp. On an H100, Inductor's kernel of topk.py takes 30 us for 64 rows of 128
experts.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...runtime import native
from ..graph.nodes import arguments, aten, integer, is_float_cast, is_op, operand, shape, value

fp4 = torch.ops.fp4


def runs(device: torch.device) -> bool:
    """True for a GPU that has the kernel."""
    return native.is_hopper(device)


@dataclass(frozen=True)
class _Weights:
    """Use of the values that topk returns. `node` is the last operation that the operator does."""

    node: fx.Node
    softmax: bool
    normalize: bool


def write_top_experts(graph: fx.Graph, topk: fx.Node) -> None:
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
