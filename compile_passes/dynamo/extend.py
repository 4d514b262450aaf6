"""Extends Dynamo to capture loops over experts. Everything that it compiled before still compiles."""

from __future__ import annotations

import dis
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from . import (
    api,
    buckets,
    class_counts,
    hit_experts,
    known_values,
    left_frames,
    left_out,
    limits,
    members,
    nested,
    open_counts,
    row_counts,
)
from .api import Unsupported
from .branches import JUMPS, answering_first
from .rules import Rule, around, is_ours, while_tracing

if TYPE_CHECKING:
    from .api import Function, OutputGraph

CAPTURE = {"capture_dynamic_output_shape_ops": True}
"""`nonzero` and boolean masks have data-dependent sizes."""


def captures(method: Function) -> Function:
    """For `trace_frame`: turn CAPTURE on where the function is traced for a backend of ours."""

    def trace_frame(*args: object, **kwargs: object) -> object:
        if not any(map(is_ours, (*args, *kwargs.values()))):
            return method(*args, **kwargs)
        with api.config.patch(CAPTURE):
            return method(*args, **kwargs)

    return trace_frame


def without_cache(method: Function) -> Function:
    """For `OutputGraph.create_proxy`, which adds a node: turn torch's cache of fake results off at the first
    data-dependent size.

    In a loop over experts, nearly every call has a new size. Its cache entry is created, checked by computing
    the result again, and never used. With 128 experts this took over a third of Dynamo's time.
    """

    def create_proxy(self: OutputGraph, *args: object, **kwargs: object) -> object:
        mode = self.tracing_context.fake_mode
        if mode is not None and mode.cache_enabled and mode.shape_env.size_like:
            mode.cache_enabled = False
        return method(self, *args, **kwargs)

    return create_proxy


def breaks_the_graph(method: Function) -> Function:
    """Break the graph at `if len(rows):`, and when a list of data-dependent length is converted. With
    CAPTURE, Dynamo would fail there."""

    def call(*args: object, **kwargs: object) -> object:
        try:
            return method(*args, **kwargs)
        except GuardOnDataDependentSymNode:
            raise Unsupported("Python asks for a size that only the data knows") from None

    return call


class Need(Enum):
    """The reasons for patches: what Dynamo does without the patch, and the change to torch that would make it
    unnecessary.

    All hold for torch 2.11 to 2.15.
    """

    def __init__(self, without: str, upstream: str) -> None:
        self.without, self.upstream = without, upstream

    CAPTURE = (
        "it breaks the graph at nonzero() and at boolean masks, or leaves the function to Python",
        "a setting of Dynamo's for one backend",
    )
    BREAKS = (
        "with CAPTURE it fails where Python asks for a size that only the data knows",
        "turn GuardOnDataDependentSymNode into a graph break in jumps and in tolist()",
    )
    EMPTY_ROWS = (
        "it breaks the graph at `if len(rows):`, though what that skips does nothing without rows",
        "capture a branch on an unbacked size if both ways are proved equal",
    )
    LOOPS = (
        "it breaks the graph at a loop over a tensor, whose number of rounds only the data knows",
        "the same, for a loop with a known largest number of rounds",
    )
    NUMBERS = (
        "it fails at numbers that Python takes out of counts, or forgets that they add up to a known size",
        "unbacked integers for tolist(), item() and numpy() of integers, with the sum of a bincount known",
    )
    KNOWN_VALUES = (
        "it asks the data for elements of tensors whose values it has traced itself",
        "fold constants in tensors of integers that are made of Python's numbers",
    )
    MEMBERS = (
        "it answers `e in ids` with False if ids are numbers that it has as symbols",
        "compare a number with symbols, too",
    )
    CLASSES = (
        "it breaks the graph at one_hot(ids, n) where n is a tensor",
        "one_hot with an unbacked number of classes",
    )
    FAKE_CACHE = (
        "it keeps results for fake tensors with sizes that only the data knows, and never finds them again",
        "leave operators with unbacked sizes out of the cache of fake results",
    )
    LEFT_FOR_GOOD = (
        "once it left a function to Python, for one mode or argument, it never looks at that function again",
        "leave a function only under the guards that were read up to there",
    )
    CALLS = (
        "it does not tell a backend when a call ended in which the backend saw no graph with the experts",
        "a hook of backends at the end of each call of what was compiled",
    )
    LIMITS = (
        "it leaves a function to Python, and all that the function calls, and tells no backend",
        "a hook of the backend where recompile_limit is reached",
    )
    BUCKETS = (
        "it cuts the graph of a module in DDP for gradients, even if nothing asks for them",
        "cut no graph without gradients",
    )
    NESTED = (
        "it drops the backend of a compiled module that another compiled module calls, without a word",
        "a hook of the backend that is dropped, or a warning",
    )


class Patch(NamedTuple):
    """A rule for opcodes, for methods of tensor variables, or for attributes of the object that `owner`
    names in api.py."""

    owner: str
    names: Sequence[str]
    rule: Rule
    need: Need


_OPCODE, _METHOD = "opcode", "tensor method"
_TENSOR, _BUILTIN, _FRAMES = "TensorVariable", "BuiltinVariable", "convert_frame"
_FORMATS = ("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC")
PATCHES = (
    Patch(_OPCODE, JUMPS, breaks_the_graph, Need.BREAKS),
    Patch(_OPCODE, JUMPS, answering_first, Need.EMPTY_ROWS),
    Patch(_OPCODE, JUMPS, row_counts.asks_for_numbers, Need.NUMBERS),
    Patch(_OPCODE, ("GET_ITER",), hit_experts.over_experts, Need.LOOPS),
    Patch(_OPCODE, ("FOR_ITER",), hit_experts.one_expert, Need.LOOPS),
    Patch(_OPCODE, ("FOR_ITER",), open_counts.one_expert, Need.LOOPS),
    Patch(_OPCODE, ("BINARY_SUBSCR",), row_counts.subscripts, Need.NUMBERS),
    Patch(_OPCODE, ("BINARY_SUBSCR",), known_values.subscripts, Need.KNOWN_VALUES),
    Patch(_OPCODE, ("BINARY_SLICE",), row_counts.slices, Need.NUMBERS),
    Patch(_OPCODE, ("STORE_SUBSCR", "STORE_SLICE"), row_counts.stores, Need.NUMBERS),
    Patch(_OPCODE, ("CONTAINS_OP",), breaks_the_graph, Need.BREAKS),
    Patch(_OPCODE, ("CONTAINS_OP",), members.contains, Need.MEMBERS),
    Patch(_OPCODE, _FORMATS, known_values.formats, Need.KNOWN_VALUES),
    Patch(_METHOD, ("tolist",), breaks_the_graph, Need.BREAKS),
    Patch(_METHOD, ("tolist",), row_counts.as_numbers, Need.NUMBERS),
    Patch(_METHOD, ("tolist",), hit_experts.as_list, Need.LOOPS),
    Patch(_METHOD, ("tolist",), row_counts.as_index, Need.NUMBERS),
    Patch(_METHOD, ("tolist",), open_counts.as_list, Need.NUMBERS),
    Patch(_METHOD, ("numpy",), row_counts.as_array, Need.NUMBERS),
    Patch(_METHOD, ("numpy",), open_counts.as_array, Need.NUMBERS),
    Patch(_METHOD, ("item", "__int__", "__index__"), known_values.numbers, Need.KNOWN_VALUES),
    Patch(_METHOD, ("item",), row_counts.as_number, Need.NUMBERS),
    Patch(_TENSOR, ("nb_int_impl", "nb_index_impl"), known_values.numbers, Need.KNOWN_VALUES),
    Patch(_BUILTIN, ("call_index",), known_values.index_of, Need.KNOWN_VALUES),
    Patch(_BUILTIN, ("call_max",), class_counts.at_least, Need.CLASSES),
    Patch("NumpyNdarrayVariable", ("call_method",), open_counts.of_array, Need.NUMBERS),
    Patch("TorchInGraphFunctionVariable", ("call_function",), class_counts.one_hot, Need.CLASSES),
    Patch("OutputGraph", ("create_proxy",), without_cache, Need.FAKE_CACHE),
    Patch("OptimizeContext", ("__call__",), left_out.watch_calls, Need.CALLS),
    Patch(_FRAMES, ("_compile",), limits.noticed, Need.LIMITS),
    Patch("OptimizeContext", ("__call__",), nested.note_compiled, Need.NESTED),
    Patch("OutputGraph", ("call_user_compiler",), nested.another_backend, Need.NESTED),
    Patch("DDPOptimizer", ("compile_fn",), buckets.in_one_bucket, Need.BUCKETS),
    Patch(_FRAMES, ("compile_frame",), left_frames.guarded, Need.LEFT_FOR_GOOD),
    Patch(_FRAMES, ("trace_frame",), left_frames.traced, Need.LEFT_FOR_GOOD),
    Patch(_FRAMES, ("trace_frame",), captures, Need.CAPTURE),
    Patch("DynamoOutput", ("build_guards",), left_frames.guards_built, Need.LEFT_FOR_GOOD),
)
"""All patches of Dynamo, in order. For the same part, a later rule runs before the earlier ones."""

_Way: TypeAlias = "Callable[[Rule, Function], Function]"
"""A function that combines a rule with one of Dynamo's functions."""


def _way(owner: str, need: Need) -> _Way:
    """Return how rules of this owner's parts run: around tracing, or while our graphs are traced."""
    if need in _AROUND:
        return around
    output_of = _OUTPUT_OF.get(owner, lambda v, tx: tx.output)
    return functools.partial(while_tracing, output_of=output_of, always=need is Need.BREAKS)


_OUTPUT_OF: dict[str, Callable[..., OutputGraph]] = {
    _OPCODE: lambda tx, inst: tx.output,
    "OutputGraph": lambda output, *_: output,
}
_AROUND = (Need.CALLS, Need.LIMITS, Need.LEFT_FOR_GOOD, Need.CAPTURE, Need.NESTED, Need.BUCKETS)
"""Needs of rules that run before or after tracing."""


def hide_version_checks() -> None:
    """Hides a warning of Dynamo about functions with a cache, where transformers' experts compare versions.

    Any backend shows it. Nothing can be incorrect there, because versions do not change.
    """
    at = r"(?s)Dynamo detected a call to a `functools\.lru_cache`-wrapped function at 'moe\.py:.*is_torch_"
    warnings.filterwarnings("ignore", message=at)


def extend_dynamo() -> None:
    """Apply PATCHES in the whole process. They act only on graphs of backends with `sees_through_branches`.
    For all others, Dynamo and its settings are unchanged.

    For the warning of nested.py, graphs of other backends are inspected but not changed.
    """
    hide_version_checks()
    for owner, names, rule, need in PATCHES:
        way = _way(owner, need)
        for name in names:
            if owner == _OPCODE:
                _hook_opcode(name, rule, way)
            elif owner == _METHOD:
                _hook_method(api.TensorVariable, name, rule, way)
            else:
                _hook_attribute(getattr(api, owner, None), name, rule, way)


def _wrapped(method: Function, rule: Rule, way: _Way) -> Function | None:
    """Return the wrapped method, or None if it already has the rule."""
    known = getattr(method, "_fp4", ())
    if rule in known:
        return None
    wrapped = way(rule, method)
    wrapped._fp4 = (*known, rule)  # type: ignore[attr-defined]
    return wrapped


def _hook_attribute(cls: object, name: str, rule: Rule, way: _Way) -> None:
    """Wrap what a class or module of Dynamo's has under this name, if this torch has both."""
    method = getattr(cls, name, None)
    if method is not None and (wrapped := _wrapped(method, rule, way)):
        setattr(cls, name, wrapped)


def _hook_method(cls: type, name: str, rule: Rule, way: _Way) -> None:
    """Wrap a method of the class behind one of Dynamo's variables."""
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
