"""The parts of `torch._dynamo` that this package uses. No other file imports it.

Dynamo's contents and their places differ between versions of torch. A name of `_PLACES` is looked up when it
is first used. If torch lacks it, only the rule that uses it fails (rules.py).

For type checkers, this file declares the parts of Dynamo's classes that the rules use, because their types
differ between versions of torch.
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
    from collections.abc import Callable, Iterable, Sequence
    from dataclasses import Field
    from types import CodeType, ModuleType
    from typing import ClassVar, Protocol, TypeAlias

    import torch
    from torch import fx
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable, SerializableCallable
    from torch._dynamo.output_graph import GraphCompileReason

    from ...meta.torch_internals import FakeTensorMode

    Function: TypeAlias = Callable[..., Any]
    """One of Dynamo's functions, which a rule takes and replaces."""
    Method: TypeAlias = Callable[..., "Variable"]
    """A method of a variable. Its first two arguments are the variable and the tracer."""
    Handler: TypeAlias = Callable[["Tracer", "Instruction"], None]
    """A function that Dynamo calls for an instruction."""

    class ExceptionEntry(Protocol):
        target: Instruction

    class Instruction(Protocol):
        opcode: int
        opname: str
        arg: int
        argval: Any
        offset: int
        target: Instruction
        exn_tab_entry: ExceptionEntry | None

    class Proxy(fx.Proxy):
        """A node with Python's operators, which fx.Proxy has at run time only."""

        def __add__(self, other: object) -> Proxy: ...
        def __sub__(self, other: object) -> Proxy: ...
        def __lt__(self, other: object) -> Proxy: ...
        def __ge__(self, other: object) -> Proxy: ...
        def __eq__(self, other: object) -> Proxy: ...  # type: ignore[override]
        def __getitem__(self, index: object) -> Proxy: ...
        def all(self) -> Proxy: ...
        def item(self) -> Proxy: ...
        def long(self) -> Proxy: ...

    class Source:
        base: Source
        name: str | Callable[[], str]  # a method in older torch

    class Mutation: ...

    class ValueMutationNew(Mutation): ...

    class ValueMutationExisting(Mutation): ...

    class AttributeMutation(Mutation): ...

    class AttributeMutationExisting(AttributeMutation): ...

    class Variable:
        source: Source | None
        mutation_type: Mutation | None

        def as_proxy(self) -> Proxy: ...
        def as_python_constant(self) -> Any: ...
        def call_function(
            self, tx: Tracer, args: Sequence[Variable], kwargs: dict[str, Variable]
        ) -> Variable: ...
        def call_method(
            self, tx: Tracer, name: str, args: Sequence[Variable], kwargs: dict[str, Variable]
        ) -> Variable: ...
        def is_python_constant(self) -> bool: ...
        def python_type(self) -> type: ...
        def realize(self) -> Variable: ...
        def var_getattr(self, tx: Tracer, name: str) -> Variable: ...
        @staticmethod
        def visit(f: Callable[[Variable], None], values: object) -> None: ...

    VariableTracker = Variable

    class LazyVariableTracker(Variable): ...

    class NNModuleVariable(Variable): ...

    class UnspecializedNNModuleVariable(Variable): ...

    class NumpyNdarrayVariable(Variable): ...

    class TensorVariable(Variable): ...

    class SymNodeVariable(Variable):
        sym_num: torch.SymInt | torch.SymBool | torch.SymFloat

    class ConstantVariable(Variable):
        @staticmethod
        def create(value: object) -> Variable: ...

    class BuiltinVariable(Variable):
        def __init__(self, fn: Callable[..., object]) -> None: ...

    class TorchInGraphFunctionVariable(Variable):
        value: Callable[..., object]

        def __init__(self, value: Callable[..., object]) -> None: ...

    class BaseListVariable(Variable):
        items: list[Variable]

    class TupleVariable(BaseListVariable):
        def __init__(self, items: list[Variable]) -> None: ...

    class ListVariable(BaseListVariable):
        def __init__(self, items: list[Variable], mutation_type: Mutation | None = None) -> None: ...

    class SliceVariable(BaseListVariable):
        def __init__(self, items: list[Variable], tx: None = None) -> None: ...

    class SideEffects:
        id_to_variable: dict[int, Variable]
        store_attr_mutations: dict[Variable, dict[str, Variable]]
        tensor_hooks: dict[int, object]
        save_for_backward: list[object]

        def is_modified(self, v: Variable) -> bool: ...

    class Guard(Protocol):
        originating_source: Source

        def create_fn_name(self) -> str: ...

    class OutputGraph:
        compiler_fn: Any
        export: bool
        global_scope: dict[str, object]
        local_scope: dict[str, object]
        current_tracer: fx.proxy.TracerBase
        fake_mode: FakeTensorMode
        graph: fx.Graph
        guards: Iterable[Guard]
        root_tx: Tracer
        shape_env: Any
        side_effects: SideEffects
        tracing_context: Any

        def create_proxy(self, op: str, target: object, args: object, kwargs: object) -> Proxy: ...

    class SpeculationLog:
        def clear(self) -> None: ...

    class Tracer:
        """A translator of instructions, `tx` in Dynamo's own code."""

        block_stack: list[object]
        debug_locals: list[object]
        error_on_graph_break: bool
        export: bool
        f_code: CodeType
        f_globals: dict[str, object]
        indexof: dict[Instruction, int]
        instruction_pointer: int
        instructions: list[Instruction]
        is_tracing_resume_prologue: bool
        lineno: int
        one_graph: bool
        output: OutputGraph
        parent: Tracer | None
        speculation_log: SpeculationLog
        stack: list[Variable]
        step: Callable[[], bool]
        symbolic_globals: dict[str, Variable]
        symbolic_locals: dict[str, Variable]

        def cell_and_freevars(self) -> Sequence[str]: ...
        def jump(self, inst: Instruction) -> None: ...
        def pop(self) -> Variable: ...
        def popn(self, n: int) -> list[Variable]: ...
        def push(self, v: Variable) -> None: ...

    class DynamoTracerOutput:
        output_graph: OutputGraph | None

        def __init__(self, tracer: Tracer) -> None: ...

    class DynamoOutput:
        tracer_output: DynamoTracerOutput
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

        def __init__(self, **fields: object) -> None: ...
        def build_guards(self, code: CodeType) -> object: ...

    class OptimizeContext:
        callback: object
        enter_exit_hooks: list[Callable[[], Callable[[], None]]]

    class DDPOptimizer:
        backend_compile_fn: object
        bucket_bytes_cap: int
        first_bucket_cap: int

    class FrameAction:
        DEFAULT: FrameAction
        RUN_ONLY: FrameAction

    class FrameExecStrategy:
        def __init__(self, function: FrameAction, all_that_it_calls: FrameAction) -> None: ...

    def wrap_fx_proxy(tx: Tracer, proxy: object) -> Any: ...

    convert_frame: ModuleType
    eval_frame: ModuleType
    symbolic_convert: Any

__all__ = [
    "HASFREE", "HASLOCAL", "JUMP_OPCODES", "TERMINAL_OPCODES", "AttrSource", "BackendCompilerFailed",
    "BundledAOTAutogradSerializableCallable", "ConstDictKeySource", "GraphCompileReason",
    "RestartAnalysis", "SerializableCallable", "SkipFrame", "UnspecializeRestartAnalysis",
    "Unsupported", "UserError", "config", "counters", "dynamo_timed", "get_compilation_metrics",
    "get_debug_dir", "graph_break_reasons",
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
    "backends.distributed": ("DDPOptimizer",),
    "aot_compile_types": ("BundledAOTAutogradSerializableCallable", "SerializableCallable"),
    "convert_frame": ("DynamoOutput",),
    "eval_frame": ("OptimizeContext",),
    "output_graph": ("DynamoTracerOutput", "OutputGraph"),
    "types": ("FrameAction", "FrameExecStrategy"),
    "": ("convert_frame", "eval_frame", "symbolic_convert"),
}  # fmt: skip
"""Maps each module of torch._dynamo to the names that are taken from it."""


def __getattr__(name: str) -> object:
    place = next((place for place, names in _PLACES.items() if name in names), None)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(importlib.import_module(f"torch._dynamo.{place}".rstrip(".")), name)
    except ImportError as error:
        raise AttributeError(f"this torch has no torch._dynamo.{place}.{name}") from error
    globals()[name] = found
    return found
