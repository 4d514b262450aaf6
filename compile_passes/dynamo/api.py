"""The parts of `torch._dynamo` that this package uses. No other file imports it.

Versions of torch differ in what Dynamo has, and where. A name of `_PLACES` is looked up when it is first
used. If torch lacks it, only the rule that uses it fails (rules.py).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch._dynamo import config
from torch._dynamo.bytecode_analysis import HASFREE, HASLOCAL, JUMP_OPCODES, TERMINAL_OPCODES
from torch._dynamo.exc import (
    BackendCompilerFailed,
    RestartAnalysis,
    SkipFrame,
    UnspecializeRestartAnalysis,
    Unsupported,
    UserError,
)
from torch._dynamo.source import AttrSource, ConstDictKeySource
from torch._dynamo.utils import (
    counters,
    dynamo_timed,
    get_compilation_metrics,
    get_debug_dir,
    graph_break_reasons,
)

if TYPE_CHECKING:
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable, SerializableCallable

__all__ = [
    "HASFREE", "HASLOCAL", "JUMP_OPCODES", "TERMINAL_OPCODES", "AttrSource", "BackendCompilerFailed",
    "BundledAOTAutogradSerializableCallable", "ConstDictKeySource", "RestartAnalysis", "SerializableCallable",
    "SkipFrame", "UnspecializeRestartAnalysis", "Unsupported", "UserError", "config", "counters",
    "dynamo_timed", "get_compilation_metrics", "get_debug_dir", "graph_break_reasons",
]  # fmt: skip

_PLACES = {
    "variables": (
        "BuiltinVariable", "ConstantVariable", "ListVariable", "NNModuleVariable", "TensorVariable",
        "TorchInGraphFunctionVariable", "TupleVariable", "UnspecializedNNModuleVariable",
    ),
    "variables.base": (
        "AttributeMutation", "AttributeMutationExisting", "ValueMutationExisting", "ValueMutationNew",
        "VariableTracker",
    ),
    "variables.builder": ("wrap_fx_proxy",),
    "variables.lazy": ("LazyVariableTracker",),
    "variables.lists": ("SliceVariable",),
    "variables.tensor": ("NumpyNdarrayVariable", "SymNodeVariable"),
    "aot_compile_types": ("BundledAOTAutogradSerializableCallable", "SerializableCallable"),
    "convert_frame": ("DynamoOutput",),
    "eval_frame": ("OptimizeContext",),
    "output_graph": ("DynamoTracerOutput", "OutputGraph"),
    "": ("convert_frame", "eval_frame", "symbolic_convert"),
}  # fmt: skip
"""Names by the module of torch._dynamo that has them."""


def __getattr__(name: str) -> Any:
    place = next((place for place, names in _PLACES.items() if name in names), None)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(importlib.import_module(f"torch._dynamo.{place}".rstrip(".")), name)
    except ImportError as error:
        raise AttributeError(f"this torch has no torch._dynamo.{place}.{name}") from error
    globals()[name] = found
    return found
