"""Makes a graph correct for any strides of the tensors inside it.

A trace chooses operators for the strides that it sees: `reshape` becomes `view` where a view is possible,
and `contiguous` is left out where the tensor is contiguous. Inductor traces the graph again and decomposes
operators, and a decomposition may lay its result out in another way. `cat` of an empty tensor and a
transposed one is an example: torch's kernel returns a contiguous tensor, Inductor's decomposition keeps the
strides of the transposed one. Operators that replace others may differ, too.

The strides of inputs and of their views do not change, so views of inputs remain views.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...meta.torch_internals import HigherOrderOperator, OpOverload
from .nodes import aten, is_tensor, operand, value

_VIEWS = (aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)
_BITS = (aten.view.dtype, aten.view_as_complex.default)
"""Operators that reinterpret the last dimension, which must have stride 1."""
_BY_STRIDES = (
    aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default,
)  # fmt: skip
"""Operators whose arguments are strides of the memory; the tensor's own strides have no effect."""
_NEED_LAYOUTS = ("_grouped_mm", "_scaled_mm", "_scaled_grouped_mm", "_int_mm", "_weight_int4pack_mm")
"""aten's operators whose kernels refuse some strides."""
_ANY_LAYOUT = ("aten", "prim", "prims", "fp4", "_c10d_functional")
"""Namespaces of operators that take tensors with any strides, except those above."""


def allow_any_strides(gm: fx.GraphModule) -> None:
    """Rewrite what depends on strides that another trace may not have. Nested graphs are rewritten, too."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            _Graph(module.graph, inputs_are_real=module is gm).run()
            module.recompile()


class _Graph:
    def __init__(self, graph: fx.Graph, inputs_are_real: bool) -> None:
        self._graph = graph
        self._known: set[fx.Node] = set(graph.find_nodes(op="placeholder")) if inputs_are_real else set()
        """Inputs and their views. Their strides are those of the user's tensors."""
        self._dense: dict[fx.Node, fx.Node] = {}
        """Maps tensors to their contiguous copies."""
        self._restored: set[fx.Node] = set()
        """Tensors that have been given the strides of the trace."""

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node.op == "output":
                self._make_contiguous(node, _was_contiguous)
            if node.op != "call_function":
                continue
            if _is_view(node) and node.args and node.args[0] in self._known:
                self._known.add(node)
            elif node.target in _VIEWS:
                node.target, node.args = aten.reshape.default, node.args[:2]
            elif node.target in _BITS:
                self._make_contiguous(node, is_tensor)
            elif node.target in _BY_STRIDES:
                self._restore_strides(operand(node))
            elif _needs_layouts(node.target):
                self._make_contiguous(node, _was_contiguous)

    def _make_contiguous(self, node: fx.Node, which: Callable[[fx.Node], bool]) -> None:
        """Make operands of `node` contiguous. This costs nothing if they already are."""

        def change(x: fx.Node) -> fx.Node:
            if x in self._known or not which(x):
                return x
            if x not in self._dense:
                with self._graph.inserting_before(node):
                    self._dense[x] = self._call(x, aten.contiguous.default, x)
            return self._dense[x]

        node.args = fx.node.map_arg(node.args, change)
        node.kwargs = fx.node.map_arg(node.kwargs, change)

    def _restore_strides(self, x: fx.Node) -> None:
        """Give `x` the strides that the trace saw, for all nodes that read it, because one of them reads its
        memory directly."""
        while isinstance(x.args[0] if x.args else None, fx.Node) and _is_view(x):
            x = operand(x)
        order = _order(x) if is_tensor(x) and x not in self._known else None
        if order is None or x in self._restored:
            return
        back = [order.index(d) for d in range(len(order))]
        moved, users = order != sorted(order), list(x.users)
        with self._graph.inserting_after(x):
            last = self._call(x, aten.permute.default, x, order) if moved else x
        with self._graph.inserting_after(last):
            dense = last = self._call(x, aten.contiguous.default, last)
        if moved:
            with self._graph.inserting_after(dense):
                last = self._call(x, aten.permute.default, dense, back)
        for user in users:
            user.replace_input_with(x, last)
        self._restored.add(x)

    def _call(self, like: fx.Node, target: Any, *args: Any) -> fx.Node:
        new = self._graph.call_function(target, args)
        new.meta.update({k: like.meta[k] for k in ("stack_trace", "nn_module_stack") if k in like.meta})
        return new


def _is_view(node: fx.Node) -> bool:
    """Return whether the first result shares the memory of the first argument."""
    if node.target is operator.getitem:  # a part of what `split` or `unbind` returns
        return True
    schema = getattr(node.target, "_schema", None)
    returns = list(schema.returns) if schema is not None else []
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns[:1])


def _needs_layouts(target: Any) -> bool:
    if isinstance(target, OpOverload):
        name = target._schema.name.split("::")[1]
        return target.namespace not in _ANY_LAYOUT or name in _NEED_LAYOUTS
    return isinstance(target, HigherOrderOperator)


def _was_contiguous(node: fx.Node) -> bool:
    return _order(node) == list(range(value(node).dim())) if is_tensor(node) else False


def _order(node: fx.Node) -> list[int] | None:
    """Return the dimensions from the outermost to the innermost in memory. None if the memory has gaps or
    elements share it."""
    x = value(node)
    if x.layout is not torch.strided:
        return None
    left, expected = list(range(x.dim())), 1
    order: list[int] = []
    while left:
        fits = (d for d in reversed(left) if _is(x.shape[d], 1) or _is(x.stride(d), expected))
        inner = next(fits, None)
        if inner is None:
            return None
        left.remove(inner)
        order.insert(0, inner)
        expected = expected if _is(x.shape[inner], 1) else expected * x.shape[inner]
    return order


def _is(size: Any, number: Any) -> bool:
    return statically_known_true(size == number)
