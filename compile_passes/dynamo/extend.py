"""Extends Dynamo so that it captures loops over experts. Whatever it compiled before still compiles."""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_unbacked_symbols

from ..graph.traced_nodes import example
from . import (
    api,
    class_counts,
    fake_results,
    hit_experts,
    known_values,
    left_frames,
    left_out,
    open_counts,
    row_counts,
    row_lists,
)
from .api import Unsupported
from .branches import JUMPS, answering_first
from .rules import Rule, around, while_tracing

CAPTURE = {"capture_dynamic_output_shape_ops": True}
"""`nonzero` and boolean masks have sizes that only the data knows."""


def breaks_the_graph(method: Callable[..., Any]) -> Callable[..., Any]:
    """For every backend. With CAPTURE Dynamo fails, instead of breaking its graph, at `if len(rows):` and in
    the conversion of a list whose length only the data knows."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except GuardOnDataDependentSymNode:
            raise Unsupported("Python asks for a size that only the data knows") from None

    return call


def allow_scalars(gm: fx.GraphModule) -> None:
    """Whoever traces a graph with numbers of rows in it again may do so."""
    context = TracingContext.try_get()
    mode = context.fake_mode if context is not None else None
    if mode is not None and any(free_unbacked_symbols(example(n)) for n in _items(gm)):
        mode.allow_scalar_outputs = True


def _items(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="call_method", target="item"))


_OPCODES: list[tuple[tuple[str, ...], Rule]] = [
    (tuple(JUMPS), answering_first),
    (tuple(JUMPS), row_counts.asks_for_numbers),
    (("GET_ITER",), hit_experts.over_experts),
    (("FOR_ITER",), hit_experts.one_expert),
    (("FOR_ITER",), open_counts.one_expert),
    (("BINARY_SUBSCR",), row_counts.subscripts),
    (("BINARY_SUBSCR",), known_values.subscripts),
    (("BINARY_SLICE",), row_counts.slices),
    (("STORE_SUBSCR", "STORE_SLICE"), row_counts.stores),
    (("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC"), known_values.formats),
]
_METHODS: list[tuple[tuple[str, ...], Rule]] = [
    (("tolist",), row_counts.as_numbers),
    (("tolist",), hit_experts.as_list),
    (("tolist",), row_lists.as_index),
    (("tolist",), open_counts.as_list),
    (("numpy",), row_counts.as_array),
    (("numpy",), open_counts.as_array),
    (("item", "__int__", "__index__"), known_values.numbers),
    (("item",), row_counts.as_number),
]
"""Methods of Dynamo's variables of tensors."""

_Way = Callable[[Rule, Callable[..., Any]], Callable[..., Any]]
"""How a rule and one of Dynamo's functions become one."""


def _for_all(rule: Rule, method: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(method)(rule(method))


_of_opcode = functools.partial(while_tracing, output_of=lambda tx, inst: tx.output)
_of_variable = functools.partial(while_tracing, output_of=lambda v, tx: tx.output)
_of_output = functools.partial(while_tracing, output_of=lambda output, *_: output)


def extend_dynamo() -> None:
    """For graphs of backends with `sees_through_branches`."""
    for name in JUMPS:
        _hook_opcode(name, breaks_the_graph, _for_all)
    for names, rule in _OPCODES:
        for name in names:
            _hook_opcode(name, rule, _of_opcode)
    _hook_method(api.TensorVariable, "tolist", breaks_the_graph, _for_all)
    for names, rule in _METHODS:
        for name in names:
            _hook_method(api.TensorVariable, name, rule, _of_variable)
    for name in ("nb_int_impl", "nb_index_impl"):
        _hook_attribute(api.TensorVariable, name, known_values.numbers, _of_variable)
    _hook_attribute(api.BuiltinVariable, "call_index", known_values.index_of, _of_variable)
    _hook_attribute(api.BuiltinVariable, "call_max", class_counts.at_least, _of_variable)
    _hook_attribute(api.NumpyNdarrayVariable, "call_method", open_counts.of_array, _of_variable)
    _hook_attribute(api.TorchInGraphFunctionVariable, "call_function", class_counts.one_hot, _of_variable)
    _hook_attribute(api.OutputGraph, "create_proxy", fake_results.without_cache, _of_output)
    _hook_attribute(api.OptimizeContext, "__call__", left_out.watch_calls, around)
    _hook_attribute(api.convert_frame, "compile_frame", left_frames.guarded, around)
    _hook_attribute(api.convert_frame, "trace_frame", left_frames.traced, around)
    _hook_attribute(api.convert_frame.DynamoOutput, "build_guards", left_frames.guards_built, around)


def _wrapped(method: Any, rule: Rule, way: _Way) -> Any:
    """None if the rule is in it already."""
    known = getattr(method, "_fp4", ())
    if rule in known:
        return None
    wrapped = way(rule, method)
    wrapped._fp4 = (*known, rule)  # type: ignore[attr-defined]
    return wrapped


def _hook_attribute(cls: Any, name: str, rule: Rule, way: _Way) -> None:
    method = getattr(cls, name, None)
    if method is not None and (wrapped := _wrapped(method, rule, way)):
        setattr(cls, name, wrapped)


def _hook_method(cls: Any, name: str, rule: Rule, way: _Way) -> None:
    """A method of what a variable of Dynamo's stands for."""
    table = getattr(cls, "tp_methods", {})  # torch 2.15 looks methods up in there
    if name not in table:
        _hook_attribute(cls, f"method_{name}", rule, way)
    elif wrapped := _wrapped(table[name].handler, rule, way):
        table[name] = replace(table[name], handler=wrapped)


def _hook_opcode(name: str, rule: Rule, way: _Way) -> None:
    classes = [api.symbolic_convert.InstructionTranslatorBase]
    for cls in classes:
        classes += cls.__subclasses__()
        method = cls.dispatch_table[dis.opmap[name]] if name in dis.opmap else None
        if method is not None and (wrapped := _wrapped(method, rule, way)):
            cls.dispatch_table[dis.opmap[name]] = wrapped


def capture_loops() -> None:
    """For the whole process: Dynamo reads these before it calls a backend, and has none for a single one.

    What is set belongs to this thread, or this context; so the defaults change, too. Workers of a pool, and a
    server's tasks, read those.
    """
    entries = getattr(api.config, "_config", {})
    for name, value in CAPTURE.items():
        setattr(api.config, name, value)
        if name in entries:
            entries[name].default = value
    extend_dynamo()
