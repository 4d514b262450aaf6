"""Traces without writes, using AOTAutograd's functional tensors.

`torch.func.functionalize` does not serve: it turns symbolic sizes into numbers in some composite operators (a
linear layer with a bias).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from ...meta.torch_internals import (
    FakeTensor,
    FunctionalTensor,
    FunctionalTensorMode,
    functional_value,
    has_new_shape,
    has_new_values,
    without_functionalization,
)
from ..graph.traced_nodes import memory
from ..refusal import Kind, refuse

aten = torch.ops.aten


@contextlib.contextmanager
def functional_tensors(inputs: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield the inputs with functional tensors in place of tensors. Operators on these leave no writes in
    a trace."""
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
            # A single number becomes a `full`, which Inductor puts into the kernels that read it.
            number = value.tolist()
            while isinstance(number, list) and len(number) == 1:
                number = number[0]
            fills = isinstance(number, (bool, int, float))
            with gm.graph.inserting_before(user):
                new = gm.graph.call_function(
                    aten.full.default if fills else torch.tensor,
                    (list(value.shape), number) if fills else (value.tolist(),),
                    {"dtype": value.dtype, "device": value.device},
                )
            new.meta.update(user.meta)
            user.replace_all_uses_with(new)
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)
        delattr(gm, node.target)
    if attributes:
        gm.recompile()
