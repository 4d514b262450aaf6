"""Traces Dynamo's graph to a functional aten graph in which `silu`, `_softmax` and `_grouped_mm` are not
decomposed.

Inductor decomposes while it traces, so an FFN is hard to find in its graphs. Here Dynamo's graph is
interpreted again under its own fake tensors, without decompositions. Inductor gets the result as if Dynamo
had produced it. Dynamo's graph itself never changes.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts

from ...meta.dtensors import split_over_processes
from ...meta.torch_internals import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    FunctionalTensor,
    TracingContext,
    detect_fake_mode,
    disable_fake_tensor_cache,
    enable_python_dispatcher,
    pytree,
)
from ..naming import source_name
from ..refusal import Kind, Refused, refuse
from ..weights.facts import Stored
from ..weights.given import copied
from ..weights.specs import Prequantized, is_subclass, prequantized, stand_in
from .calls import (
    OpenRegions,
    as_written,
    current,
    functional_tensors,
    inline_constants,
    is_reshaped,
    is_written,
    needs_a_number,
    storage,
)
from .copier import CannotCopy, Copier

aten = torch.ops.aten
log = logging.getLogger("fp4_ops")


def fake_inputs(fake_mode: FakeTensorMode, inputs: Sequence[Any]) -> list[Any]:
    """Return the fake tensors that Dynamo used for these inputs. They have the same symbols, so nothing is
    guarded or recompiled again."""
    context = TracingContext.try_get()
    known = context.tensor_to_context if context is not None else {}

    def convert(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if is_subclass(x):  # an ordinary tensor stands in for a 4-bit one
            with fake_mode:
                return stand_in(x)
        if isinstance(x, FakeTensor):
            return x if x.fake_mode is fake_mode else fake_mode.from_tensor(x)
        symbolic = known.get(x)
        source = symbolic.tensor_source if symbolic is not None else None
        return fake_mode.from_tensor(x, symbolic_context=symbolic, source=source, trace=symbolic is None)

    return [convert(x) for x in inputs]


class Captured(NamedTuple):
    """A functional graph, and the mode of its fake tensors."""

    gm: fx.GraphModule
    fake_mode: FakeTensorMode
    stored: dict[fx.Node, Stored]
    """Inputs that are 4-bit tensors. In the graph, an ordinary tensor stands in for each of them."""


def capture(gm: fx.GraphModule, inputs: Sequence[Any]) -> Captured:
    """Trace `gm`. Writes to inputs become a `copy_` epilogue, which Inductor's AOTAutograd understands.

    Raises Refused if the graph must stay as it is."""
    if any(True for _ in gm.parameters()) or any(True for _ in gm.buffers()):
        refuse(Kind.ATTRIBUTES, None)
    ways = [_prequantized(x) for x in inputs]

    context = TracingContext.try_get()
    fake_mode = (context.fake_mode if context is not None else None) or detect_fake_mode(inputs)
    if fake_mode is None:
        fake_mode = FakeTensorMode()
    fakes = fake_inputs(fake_mode, inputs)
    # This run must not reuse fake outputs that Dynamo's own run memoised.
    fake_mode.epoch += 1

    flat = without_regions(gm)
    if any(way is not None for way in ways):
        flat = _with_stand_ins(flat, fakes)
    constants = _expert_constants(flat)
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_mode)
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(torch.no_grad())
        traced = _by_calls(flat, fakes, fake_mode, constants) or _whole(flat, fakes, constants)
    _restore_dynamo_metadata(gm, traced)
    named = zip(_placeholders(traced), ways, strict=True)
    return Captured(traced, fake_mode, {n: Stored(way, (n,)) for n, way in named if way is not None})


def _prequantized(x: Any) -> Prequantized | None:
    if not is_subclass(x):
        return None
    way = prequantized(x)
    if spread := split_over_processes(x):
        refuse(Kind.SPREAD, None, spread)
    if way is None:
        refuse(Kind.SUBCLASS, None, type(x).__name__)
    return way


def _with_stand_ins(gm: fx.GraphModule, fakes: list[Any]) -> fx.GraphModule:
    """Copy Dynamo's graph with the ordinary tensors among `fakes` in place of its 4-bit inputs.

    Products with these are ordinary, too. Each call can then be traced alone, and attention stays one
    operator.
    """
    graph = copied(gm.graph)
    for node, fake in zip(graph.find_nodes(op="placeholder"), fakes, strict=True):
        if is_subclass(node.meta.get("example_value")):
            node.meta["example_value"] = fake
    return fx.GraphModule(gm, graph)


def _by_calls(
    gm: fx.GraphModule, fakes: list[Any], fake_mode: FakeTensorMode, constants: dict[fx.Node, float]
) -> fx.GraphModule | None:
    try:
        # Each call is traced once, so the cache would never be used.
        with disable_fake_tensor_cache(fake_mode):
            return Copier(gm, fakes, fake_mode, constants).run()
    except Exception as reason:  # the graph can still be traced as a whole
        log.debug("the graph is traced as a whole: %s", reason, exc_info=not isinstance(reason, CannotCopy))
        fake_mode.epoch += 1
        return None


def _whole(gm: fx.GraphModule, fakes: list[Any], constants: dict[fx.Node, float]) -> fx.GraphModule:
    interpreter = _Interpreter(gm, constants)
    run = _functional(interpreter.run)
    with fx.traceback.preserve_node_meta(), interpreter.regions.ended():
        traced = make_fx(run, decomposition_table={})(*fakes)
    inline_constants(traced)
    return traced


def _placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="placeholder"))


def mutated_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Return the placeholders that the graph writes to."""
    writes = graph.find_nodes(op="call_function", target=aten.copy_.default)
    return {n.args[0] for n in writes if isinstance(n.args[0], fx.Node) and n.args[0].op == "placeholder"}


def _expert_constants(gm: fx.GraphModule) -> dict[fx.Node, float]:
    """Return Python floats that count as constants: floats beside expert weights (alpha, limit), in their
    module or the module above it.

    With `dynamic=True` Dynamo makes symbols of them, and the activation could not be recognised. Guards check
    them, so another value compiles again. All other floats stay symbols.
    """
    weights = [source_name(getattr(n, "_dynamo_source", None)) for n in _placeholders(gm) if _rank(n) == 3]
    holders = [f"{w.rpartition('._parameters[')[0]}." for w in weights if "._parameters[" in w]
    found = {}
    for node in gm.graph.find_nodes(op="call_method", target="item"):
        symbol = node.meta.get("example_value")
        module = source_name(getattr(getattr(node.args[0], "_dynamo_source", None), "base", None))
        beside = module and any(w.startswith(f"{module}.") for w in weights)
        if isinstance(symbol, torch.SymFloat) and (beside or module.startswith(tuple(holders))):
            found[node] = float(symbol)
    return found


def _rank(node: fx.Node) -> int:
    example = node.meta.get("example_value")
    return example.dim() if isinstance(example, torch.Tensor) else 0


class _Interpreter(PropagateUnbackedSymInts):
    """Runs Dynamo's graph with some known nodes."""

    def __init__(self, gm: fx.GraphModule, constants: dict[fx.Node, float]) -> None:
        super().__init__(gm)
        self._constants = constants
        self._target: Any = None
        self.regions = OpenRegions()

    def run_node(self, n: fx.Node) -> Any:
        if n in self._constants:
            return self._constants[n]
        self._target = as_written(n)
        try:
            return super().run_node(n)
        except DataDependentOutputException:
            raise Refused(needs_a_number(n)) from None

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(self._target, args, kwargs)
        self.regions.ran(self._target, args, result)
        return result


def _functional(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `run` so that its trace has no writes inside. Values that are written to an input are copied there
    at the end."""

    def inner(*args: Any) -> Any:
        with functional_tensors(args) as wrapped:
            outputs = run(*wrapped)
            flat, spec = pytree.tree_flatten(outputs)
            inputs = [(a, w) for a, w in zip(args, wrapped) if isinstance(w, FunctionalTensor)]
            themselves = [_written_input(o, inputs) for o in flat]
            _check_aliases(inputs, [o for o, same in zip(flat, themselves) if same is None])
            flat = [current(o) if same is None else same for o, same in zip(flat, themselves)]
            writes = [(a, current(w)) for a, w in inputs if is_written(w)]
        for target, new in writes:
            target.copy_(new)
        return pytree.tree_unflatten(flat, spec)

    return inner


def _written_input(output: Any, inputs: list[tuple[torch.Tensor, FunctionalTensor]]) -> torch.Tensor | None:
    """Return the input that an output is identical to. `self.load += counts` makes the buffer an output."""

    def layout(t: torch.Tensor) -> tuple[Any, ...]:
        return storage(t), tuple(t.shape), t.stride(), t.storage_offset(), t.dtype

    if not isinstance(output, FunctionalTensor):
        return None
    return next((a for a, w in inputs if is_written(w) and layout(output) == layout(w)), None)


def _check_aliases(inputs: list[tuple[torch.Tensor, FunctionalTensor]], outputs: list[Any]) -> None:
    """Refuse a second view of a mutated input, which would be separate memory once the graph is
    functional."""
    if any(is_reshaped(w) for _, w in inputs):
        refuse(Kind.RESIZED, None)
    written = [(storage(a), storage(w)) for a, w in inputs if is_written(w)]
    memory = {m for m, _ in written}
    if len(written) < sum(storage(a) in memory for a, _ in inputs):
        refuse(Kind.INPUTS_SHARE, None)
    results = [storage(o) for o in outputs if isinstance(o, FunctionalTensor)]
    if any(memory in results for _, memory in written):
        refuse(Kind.OUTPUT_SHARES, None)


def _restore_dynamo_metadata(gm: fx.GraphModule, traced: fx.GraphModule) -> None:
    """Restore what AOTAutograd reads from Dynamo's graph: sources, and inputs with fixed addresses."""
    for old, new in zip(_placeholders(gm), _placeholders(traced), strict=True):
        new._dynamo_source = getattr(old, "_dynamo_source", None)
        if "tensor_dict" in old.meta:
            new.meta["tensor_dict"] = dict(old.meta["tensor_dict"])
    if hasattr(gm, "_param_name_to_source"):
        traced.__dict__["_param_name_to_source"] = {}
    # Constants (`torch.tensor(2.0)` in the model) are traced as buffers, but AOTAutograd expects a source for
    # each.
    for name, constant in list(traced.named_buffers(recurse=False)):
        delattr(traced, name)
        setattr(traced, name, constant)
    traced.meta.update(gm.meta)


def without_regions(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy Dynamo's graph with regions in place of their calls. Returns `gm` itself if it has no regions.

    Dynamo keeps what a model marks with `torch.compiler.nested_compile_region` as a graph of its own, which
    `invoke_subgraph` calls. Experts in a region can only be read together with the code around it, and each
    call has its own weights. Tracing the call itself would leave its aten operators in torch's cache of
    regions, where Inductor expects decomposed operators.
    """
    if not any(_is_region(n) for n in gm.graph.nodes):
        return gm
    made = fx.GraphModule(gm, fx.Graph())
    made.graph.output(_put(made, gm, None))
    made.graph.lint()
    made.recompile()
    made.meta.update(gm.meta)
    return made


def _put(made: fx.GraphModule, gm: fx.GraphModule, given: list[Any] | None) -> Any:
    """Append what `gm` computes to `made`, and return its results. given: its inputs, if it is a region."""
    held: dict[fx.Node, Any] = {}
    inputs = iter(given or ())

    def current(x: Any) -> Any:
        return fx.node.map_arg(x, held.__getitem__)

    for node in gm.graph.nodes:
        if node.op == "output":
            break
        if node.op == "placeholder" and given is not None:
            held[node] = next(inputs)
        elif _is_region(node):
            region, _, *operands = node.args
            held[node] = _put(made, getattr(gm, region.target), list(current(operands)))
        elif node.target is operator.getitem and isinstance(of := held.get(node.args[0]), tuple | list):
            held[node] = of[node.args[1]]
        elif node.op == "get_attr":
            held[node] = made.graph.get_attr(_attribute(made, gm, node.target))
            held[node].meta = dict(node.meta)
        else:
            held[node] = made.graph.node_copy(node, held.__getitem__)
            if hasattr(node, "_dynamo_source"):
                held[node]._dynamo_source = node._dynamo_source
    return current(node.args[0])


def _is_region(node: fx.Node) -> bool:
    return node.target is torch.ops.higher_order.invoke_subgraph


def _attribute(made: fx.GraphModule, gm: fx.GraphModule, name: str) -> str:
    """Return the name in `made` of an attribute of `gm`."""
    value: Any = gm
    for part in name.split("."):
        value = getattr(value, part)
    new, n = name.replace(".", "_"), 0
    while getattr(made, new, value) is not value:
        new, n = f"{name.replace('.', '_')}_{n}", n + 1
    setattr(made, new, value)
    return new
