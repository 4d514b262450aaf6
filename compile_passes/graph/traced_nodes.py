"""Reads the nodes that Dynamo has traced so far: where their elements come from, and which nodes write to
them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...meta.torch_internals import (
    OpOverload,
    below_functorch,
    enter_inference_mode,
    exit_inference_mode,
    pytree,
    set_grad_enabled,
)
from .nodes import integer


def called(node: fx.Node) -> str:
    """Return the name of the function or method that a node calls. `a == b` is `eq`; Dynamo of torch 2.11 has
    `a.__eq__(b)`."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return "eq" if name == "__eq__" else name


def example(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def asks_for_gradients(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Return whether a call reads, where gradients are on, a tensor that requires them.

    A model may turn them off or on itself, as with `@torch.no_grad()` on its `forward`. If it turns them on
    under inference_mode, there are none: torch compiles as if under no_grad then, but tensors that were made
    in that mode show it.
    """
    on = torch.is_grad_enabled()
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if not any(x.requires_grad for x in tensors):
        return False
    if not on and any(x.is_inference() for x in tensors):
        return False
    before: dict[Any, bool] = {}
    for node in gm.graph.nodes:
        if node.target is set_grad_enabled:
            on = bool(node.args[0])
        elif node.target is enter_inference_mode:
            before[node] = on
            on = on or not node.args[0]  # torch compiles no graph that enters it
        elif node.target is exit_inference_mode:
            on = before[node.args[0]]
        elif on and node.op not in ("placeholder", "output"):
            values = pytree.tree_leaves([n.meta.get("example_value") for n in node.all_input_nodes])
            if any(isinstance(x, Tensor) and x.requires_grad for x in values):
                return True
    return False


def memory(x: Tensor) -> int:
    """Return a key for a tensor's memory. Views of each other have equal keys."""
    return below_functorch(x).untyped_storage()._cdata


def named(node: Any, functions: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a call of one of `functions`. Empty for another function, or with arguments
    outside `names`."""
    if (
        not isinstance(node, fx.Node)
        or called(node).strip("_") not in functions
        or len(node.args) > len(names)
    ):
        return {}
    named = dict(zip(names, node.args)) | node.kwargs
    return named if named.keys() <= set(names) else {}


SAME_ELEMENTS = (
    "permute", "transpose", "contiguous", "clone", "to", "long", "int", "view", "reshape", "flatten",
    "squeeze",
)  # fmt: skip


def same_elements(node: fx.Node) -> list[fx.Node]:
    """Return `node` and the nodes with the same elements, in another order or shape."""
    chain = [node]
    while called(chain[-1]) in SAME_ELEMENTS and chain[-1].args and isinstance(chain[-1].args[0], fx.Node):
        chain.append(chain[-1].args[0])
    return chain


def some_elements(node: fx.Node) -> list[fx.Node]:
    """Return `node` and the nodes that its elements come from. `node` may have only some of their
    elements."""
    chain = same_elements(node)
    while (part := named(chain[-1], ("getitem",), ("input", "item"))) and _is_basic(part["item"]):
        if not isinstance(example(part["input"]), Tensor):  # one of several results
            break
        chain += same_elements(part["input"])
    return chain


def _is_basic(index: Any) -> bool:
    """Return whether an index has only numbers and slices, so that it neither depends on data nor computes
    anything."""
    items = index if isinstance(index, tuple) else (index,)
    return all(i is None or i is Ellipsis or isinstance(i, int | slice) for i in items)


def along(node: fx.Node, dim: int, sums: bool = False) -> list[tuple[fx.Node, int]]:
    """Return `node` and the nodes that its elements come from, each with the dimension that is `dim` of
    `node`.

    A cast of integers or booleans is followed if it keeps 0 and makes no other value 0. sums: include nodes
    that are summed over other dimensions.
    """
    steps = [(node, dim % example(node).dim())]
    while (before := _before(*steps[-1]) or (_summed(*steps[-1]) if sums else None)) is not None:
        steps.append(before)
    return steps


def _summed(node: fx.Node, dim: int) -> tuple[fx.Node, int] | None:
    summed = named(node, ("sum", "any"), ("input", "dim", "keepdim"))
    of, dims = summed.get("input"), summed.get("dim")
    if not isinstance(of, fx.Node) or dims is None or summed.get("keepdim"):
        return None
    return of, kept(example(of).dim(), dims)[dim]


def kept(rank: int, dims: Any) -> list[int]:
    """Return the dimensions that remain after a sum over `dims`."""
    gone = {d % rank for d in (dims if isinstance(dims, tuple | list) else (dims,))}
    return [d for d in range(rank) if d not in gone]


def _before(node: fx.Node, dim: int) -> tuple[fx.Node, int] | None:
    name = called(node)
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None
    before = node.args[0]
    x, now = example(before), example(node)
    if not isinstance(x, Tensor) or not isinstance(now, Tensor):
        return None
    if name == "permute":
        dims = pytree.tree_leaves(node.args[1:])
        return (before, dims[dim] % x.dim()) if len(dims) == x.dim() and not node.kwargs else None
    if name in ("transpose", "swapaxes") and len(node.args) == 3:
        swapped = [integer(node, i) % x.dim() for i in (1, 2)]
        return before, swapped[1 - swapped.index(dim)] if dim in swapped else dim
    if name in ("t", "T", "mT"):
        return before, {x.dim() - 1: x.dim() - 2, x.dim() - 2: x.dim() - 1}.get(dim, dim)
    if name in ("contiguous", "clone", "detach", "bool", "long", "int", "to") and x.dim() == now.dim():
        # A count of 256 becomes 0 in 8 bits, and 0.5 becomes 0 as an integer.
        narrow = now.dtype != x.dtype and now.dtype not in (torch.bool, torch.int32, torch.int64)
        exact = not x.dtype.is_floating_point and not narrow
        return (before, dim) if exact or now.dtype == x.dtype else None
    if name in ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze") and now.dtype == x.dtype:
        size, after = now.shape[dim], math.prod(now.shape[dim + 1 :])
        for d in range(x.dim()):
            same = statically_known_true(math.prod(x.shape[d + 1 :]) == after)
            if same and isinstance(size, int) and size != 1 and statically_known_true(x.shape[d] == size):
                return before, d
    return None


_IN_PLACE = re.compile(
    r"setitem|\w*[^_]_|_*i(add|sub|mul|truediv|floordiv|mod|pow|or|and|xor|lshift|rshift)_*"
)


def writes_to(chain: Sequence[fx.Node], nodes: Iterable[fx.Node]) -> bool:
    """Return whether any of `nodes` writes to memory of `chain`."""
    own = {memory(example(n)) for n in chain if isinstance(example(n), Tensor)}

    def writes(node: fx.Node) -> bool:
        to = [node.kwargs.get("out")]
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            to += [*node.args, *node.kwargs.values()]
        elif _IN_PLACE.fullmatch(called(node)):
            to += [node.args[0] if node.args else None]
        found = [example(n) for n in pytree.tree_leaves(to) if isinstance(n, fx.Node)]
        return any(isinstance(x, Tensor) and memory(x) in own for x in found)

    return any(map(writes, nodes))


def since(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that were traced after `node`."""
    while (node := node.next).op != "root":
        yield node
