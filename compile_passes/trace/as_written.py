"""Chooses, for calls of Dynamo's graph, functions that compute the same but trace better."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ...meta.torch_internals import einsum_in_order
from ..graph.traced_nodes import called, example, memory, since, writes_to
from ..refusal import Kind, Refusal

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
_VIEWS = ("narrow", "select")


def as_written(node: fx.Node) -> Any:
    """Return the function by which a call is traced; `node.target` if it is a method or needs no other.

    `torch.einsum` of three operands is traced as two products from left to right, even if the package
    opt_einsum is installed. That package chooses the order by sizes. A factor of an expert's result could
    then become a factor of its activations. `w[i]`, where i is a tensor without dimensions, is traced as a
    row of `w[i.reshape(1)]`, because for `w[i]` torch would ask for the number i.
    """
    if node.target is torch.functional.einsum:
        return _from_left_to_right
    if node.target is operator.getitem and _is_by_a_tensor(node) and _may_be_a_copy(node):
        return _one_by_one
    return node.target


def needs_a_number(node: fx.Node) -> Refusal:
    """Return why a call cannot be traced without the data."""
    name = called(node)
    kinds = {"setitem": Kind.WRITTEN_AT_DATA, "getitem": Kind.PART_AT_DATA}
    if name in kinds:
        return Refusal(kinds[name], node, (node,))
    return Refusal(Kind.VIEW_AT_DATA if name in _VIEWS else Kind.NUMBER_FROM_DATA, node, (name, node))


def _from_left_to_right(*args: Any) -> torch.Tensor:
    # Dimensions are given as numbers, or operands in a list.
    if not isinstance(args[0], str) or len(args) < 3:
        return torch.functional.einsum(*args)
    return einsum_in_order(args[0], args[1:])


def _is_one(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() == 0 and x.dtype in _INTEGERS


def _items(index: Any) -> list[Any]:
    return list(index) if isinstance(index, tuple) else [index]


def _is_by_a_tensor(node: fx.Node) -> bool:
    of = [example(i) for i in _items(node.args[1]) if isinstance(i, fx.Node)]
    return isinstance(example(node.args[0]), torch.Tensor) and any(map(_is_one, of))  # type: ignore[arg-type]


def _may_be_a_copy(node: fx.Node) -> bool:
    """Return whether a copy may replace a part of a tensor without a visible difference."""
    x, own = node.args[0], example(node)
    (output,) = node.graph.find_nodes(op="output")
    returned = [example(n) for n in output.all_input_nodes]
    out = any(isinstance(o, torch.Tensor) and memory(o) == memory(own) for o in returned)
    return not out and not writes_to([node, x], since(node))  # type: ignore[list-item]


def _one_by_one(x: torch.Tensor, index: Any) -> torch.Tensor:
    """Compute x[index] as torch does: indices that are one number come before all others."""
    items = _items(index)
    taken = [i for i in items if i is not None and i is not Ellipsis]
    used = sum(i.dim() if isinstance(i, torch.Tensor) and i.dtype == torch.bool else 1 for i in taken)
    dim, rest = 0, []
    missing = x.dim() - used
    for i in items:
        if _is_one(i):
            x = x[(*[slice(None)] * dim, i.reshape(1))].squeeze(dim)
            continue
        if i is Ellipsis:
            dim += missing
        elif i is not None:
            dim += i.dim() if isinstance(i, torch.Tensor) and i.dtype == torch.bool else 1
        rest.append(i)
    return operator.getitem(x, tuple(rest)) if rest else x
