"""Reads RMSNorm from the operators that a model writes it with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..graph.nodes import (
    FLOATING,
    arguments,
    aten,
    is_float_cast,
    is_op,
    is_tensor,
    item,
    operand,
    same_shape,
    shape,
    value,
)


class NotRead(Exception):
    """Says why something that looks like a norm is not one that the operators compute."""


@dataclass(frozen=True)
class Norm:
    """RMSNorm: (x.float() * rsqrt(mean(x.float() ** 2) + eps)).to(x.dtype) * weight, along the last
    dimension. `in_float`: it is rounded after the weight, not before.
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    eps: float
    in_float: bool


def read_norm(node: fx.Node) -> Norm | None:
    """Return the norm that computes `node`, or None if `node` does not look like a norm. Raises NotRead for a
    norm that the operators do not compute.
    """
    product, in_float = node, False
    if is_float_cast(node) and any(_scaled(_uncast(a)) is not None for a in _factors(operand(node))):
        product, in_float = operand(node), True
    if (made := item(node)) is not None and is_op(made[0], aten.native_layer_norm) and made[1] == 0:
        raise NotRead("the norm subtracts the mean (LayerNorm)")
    if not is_op(product, aten.mul) or not is_tensor(product):
        return None
    for weight, scaled in _each_way(product):
        if not (is_tensor(weight) and is_tensor(scaled)):
            continue
        found, cast = _scaled(_uncast(scaled)), is_float_cast(scaled)
        if found is None:
            continue
        x, eps = found
        dtype = value(node).dtype
        weight = _uncast(weight) if in_float else weight
        if not same_shape(shape(weight), shape(node)[-1:]):
            raise NotRead("the norm's weight does not have one number for each element")
        if weight.op != "placeholder":
            raise NotRead("the norm's weight is computed in the graph (as 1 + w)")
        if dtype not in FLOATING or {value(x).dtype, value(weight).dtype} != {dtype}:
            raise NotRead("the norm's input, weight and result have different dtypes")
        if in_float:
            known = not cast and value(product).dtype == torch.float32
        else:
            known = value(scaled).dtype == dtype and (cast or dtype == torch.float32)
        if not known:
            raise NotRead("the norm is rounded at other places than the operators round")
        return Norm(node, x, weight, eps, in_float)
    return None


def _factors(node: fx.Node) -> tuple[Any, ...]:
    return node.args if is_op(node, aten.mul) else ()


def _each_way(node: fx.Node) -> list[tuple[Any, Any]]:
    """Returns the two factors of a product, in both orders."""
    a, b = node.args
    return [(a, b), (b, a)]


def _uncast(node: Any) -> Any:
    return operand(node) if is_float_cast(node) else node


def _scaled(node: Any) -> tuple[fx.Node, float] | None:
    """Reads (x, eps) from x.float() * rsqrt(mean(x.float() ** 2, -1, keepdim=True) + eps)."""
    if not is_op(node, aten.mul):
        return None
    for wide, inverse in _each_way(node):
        if not (is_tensor(wide) and is_op(inverse, aten.rsqrt) and value(wide).dtype == torch.float32):
            continue
        total = operand(inverse)
        if not is_op(total, aten.add):
            return None
        mean, eps = arguments(total)["self"], arguments(total)["other"]
        if not (isinstance(eps, float) and arguments(total).get("alpha", 1) == 1 and is_op(mean, aten.mean)):
            return None
        a = arguments(mean)
        last = len(shape(wide)) - 1
        if (
            [d % (last + 1) for d in a.get("dim") or ()] != [last]
            or not a["keepdim"]
            or a["dtype"] is not None
        ):
            return None
        if not _is_square(a["self"], wide):
            return None
        return _uncast(wide), eps
    return None


def _is_square(node: Any, x: fx.Node) -> bool:
    if is_op(node, aten.pow):
        return node.args[0] is x and node.args[1] in (2, 2.0)
    return is_op(node, aten.mul) and node.args[0] is x and node.args[1] is x
