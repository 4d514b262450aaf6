"""Traces single calls of a graph. Writes are taken out, some functions are replaced by others that can be
traced, and regions of autocast are closed if a trace fails.

AOTAutograd's functional tensors take writes out. `torch.func.functionalize` cannot be used: in some composite
operators, such as a linear layer with a bias, it turns symbolic sizes into numbers.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from ...meta.torch_internals import (
    FakeTensor,
    FunctionalTensor,
    FunctionalTensorMode,
    einsum_in_order,
    enter_autocast,
    exit_autocast,
    functional_value,
    functorch_depth,
    has_new_shape,
    has_new_values,
    leave_functorch_levels,
    without_functionalization,
    without_modes,
)
from ..graph.traced_nodes import called, example, memory, since, writes_to
from ..refusal import Kind, Refusal, refuse

aten = torch.ops.aten


@contextlib.contextmanager
def functional_tensors(inputs: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield the inputs with each tensor replaced by a functional tensor. A trace of operators on these has no
    writes."""
    with without_functionalization(), FunctionalTensorMode():
        with disable_proxy_modes_tracing():
            wrapped = [
                FunctionalTensor.to_functional(a) if isinstance(a, torch.Tensor) else a for a in inputs
            ]
        yield wrapped


def current(t: Any) -> Any:
    """Return the current value of a functional tensor."""
    return functional_value(t) if isinstance(t, FunctionalTensor) else t


def is_written(t: Any) -> bool:
    return isinstance(t, FunctionalTensor) and has_new_values(t)


def is_reshaped(t: Any) -> bool:
    """Return whether the shape or strides of an input were changed in place."""
    return isinstance(t, FunctionalTensor) and has_new_shape(t)


def storage(t: torch.Tensor) -> int:
    """Return a key for a tensor's memory. Views of each other have equal keys."""
    return memory(t.elem if isinstance(t, FunctionalTensor) else t)


def inline_constants(gm: fx.GraphModule) -> None:
    """Replace constants (`torch.tensor([...])` in the model), which became attributes. Inductor expects none
    in Dynamo's graphs.

    An empty DynamicCache starts with such a constant, so every call of a transformers model that fills a
    cache has one.
    """
    attributes = list(gm.graph.find_nodes(op="get_attr"))
    for node in attributes:
        value = getattr(gm, node.target)
        if not isinstance(value, torch.Tensor):
            continue
        for user in list(node.users):
            if user.target is not aten.lift_fresh_copy.default or isinstance(value, FakeTensor):
                refuse(Kind.ATTRIBUTE, None, node.target)
            with without_modes():  # copies a constant from a GPU; a fake copy has no values
                number = values = value.tolist()
            # A single number becomes a `full`, which Inductor puts into the kernels that read it.
            while isinstance(number, list) and len(number) == 1:
                number = number[0]
            fills = isinstance(number, (bool, int, float))
            with gm.graph.inserting_before(user):
                new = gm.graph.call_function(
                    aten.full.default if fills else torch.tensor,
                    (list(value.shape), number) if fills else (values,),
                    {"dtype": value.dtype, "device": value.device},
                )
            new.meta.update(user.meta)
            user.replace_all_uses_with(new)
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)
        delattr(gm, node.target)
    if attributes:
        gm.recompile()


_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
_VIEWS = ("narrow", "select")


def as_written(node: fx.Node) -> Any:
    """Return the function by which a call is traced. It is `node.target` if the call is a method or needs no
    other function.

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
    # The dimensions are numbers, or the operands are in a list.
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
    """Compute x[index] as torch does. Indices that are a single number are applied before all others."""
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


class OpenRegions:
    """The regions of autocast that the calls of a graph have entered so far.

    They must be closed when a trace fails inside of them. Otherwise later traces would run in these regions,
    such as the trace of the whole graph, or Inductor's own trace.
    """

    def __init__(self) -> None:
        self._autocasts: dict[Any, int] = {}
        """The levels of torch.func at the entry of each, in the order of the entries."""

    def ran(self, function: Any, args: Any, result: Any) -> None:
        """Note a call of the graph that has run."""
        if function is enter_autocast:
            self._autocasts[result] = functorch_depth()
        elif function is exit_autocast:
            del self._autocasts[args[0]]

    @contextlib.contextmanager
    def ended(self) -> Iterator[None]:
        """Close the regions that are still open at the end, and leave the levels of torch.func, in the
        reverse order of their entries. This is a context manager."""
        depth = functorch_depth()
        try:
            yield
        finally:
            while self._autocasts:
                region, at = self._autocasts.popitem()
                leave_functorch_levels(at)
                exit_autocast(region)
            leave_functorch_levels(depth)
