"""What Dynamo needs so that it captures loops over experts, and nothing that it compiled before fails."""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..graph.traced_nodes import example
from . import (
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
from .branches import JUMPS, Handler, answering_first

CAPTURE = {"capture_dynamic_output_shape_ops": True}
"""`nonzero` and boolean masks have sizes that only the data knows."""


def allow_scalars(gm: fx.GraphModule) -> None:
    """Whoever traces a graph with numbers of rows in it again may do so."""
    context = TracingContext.try_get()
    mode = context.fake_mode if context is not None else None
    if mode is not None and any(free_unbacked_symbols(example(n)) for n in _items(gm)):
        mode.allow_scalar_outputs = True


def _items(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="call_method", target="item"))


_OPCODES: list[tuple[tuple[str, ...], Callable[[Handler], Handler]]] = [
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
_METHODS: list[tuple[tuple[str, ...], Callable[[Any], Any]]] = [
    (("tolist",), row_counts.as_numbers),
    (("tolist",), hit_experts.as_list),
    (("tolist",), row_lists.as_index),
    (("tolist",), open_counts.as_list),
    (("numpy",), row_counts.as_array),
    (("numpy",), open_counts.as_array),
    (("item", "__int__", "__index__"), known_values.numbers),
    (("item",), row_counts.as_number),
]
"""Of Dynamo's variables of tensors."""


def extend_dynamo() -> None:
    """For graphs of backends with `sees_through_branches`."""
    from torch._dynamo import convert_frame
    from torch._dynamo.eval_frame import OptimizeContext
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.variables import BuiltinVariable, TorchInGraphFunctionVariable
    from torch._dynamo.variables.tensor import NumpyNdarrayVariable, TensorVariable

    for names, wrapper in _OPCODES:
        for name in names:
            _hook_opcode(name, wrapper)
    table = getattr(TensorVariable, "tp_methods", {})  # torch 2.15 looks methods up in there
    for names, wrapper in _METHODS:
        for name in names:
            if name in table and (wrapped := _wrapped(table[name].handler, wrapper)):
                table[name] = replace(table[name], handler=wrapped)
            elif name not in table:
                _hook_attribute(TensorVariable, f"method_{name}", wrapper)
    for name in ("nb_int_impl", "nb_index_impl"):
        _hook_attribute(TensorVariable, name, known_values.numbers)
    _hook_attribute(BuiltinVariable, "call_index", known_values.index_of)
    _hook_attribute(OptimizeContext, "__call__", left_out.watch_calls)
    _hook_attribute(convert_frame, "compile_frame", left_frames.guarded)
    _hook_attribute(convert_frame, "trace_frame", left_frames.traced)
    _hook_attribute(OutputGraph, "create_proxy", fake_results.without_cache)
    _hook_attribute(BuiltinVariable, "call_max", class_counts.at_least)
    _hook_attribute(NumpyNdarrayVariable, "call_method", open_counts.of_array)
    _hook_attribute(TorchInGraphFunctionVariable, "call_function", class_counts.one_hot)


def _wrapped(method: Any, wrapper: Callable[[Any], Any]) -> Any:
    """None if it is wrapped already."""
    known = getattr(method, "_fp4", ())
    if wrapper in known:
        return None
    wrapped = functools.wraps(method)(wrapper(method))
    wrapped._fp4 = (*known, wrapper)  # type: ignore[attr-defined]
    return wrapped


def _hook_attribute(cls: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    method = getattr(cls, name, None)
    if method is not None and (wrapped := _wrapped(method, wrapper)):
        setattr(cls, name, wrapped)


def _hook_opcode(name: str, wrapper: Callable[[Handler], Handler]) -> None:
    from torch._dynamo import symbolic_convert

    classes = [symbolic_convert.InstructionTranslatorBase]
    for cls in classes:
        classes += cls.__subclasses__()
        method = cls.dispatch_table[dis.opmap[name]] if name in dis.opmap else None
        if method is not None and (wrapped := _wrapped(method, wrapper)):
            cls.dispatch_table[dis.opmap[name]] = wrapped


def capture_loops() -> None:
    """For the whole process: Dynamo reads these before it calls a backend, and has none for a single one.

    What is set belongs to this thread, or this context; so the defaults change, too. Workers of a pool, and a
    server's tasks, read those.
    """
    entries = getattr(torch._dynamo.config, "_config", {})
    for name, value in CAPTURE.items():
        setattr(torch._dynamo.config, name, value)
        if name in entries:
            entries[name].default = value
    extend_dynamo()
