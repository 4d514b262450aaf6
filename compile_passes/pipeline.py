"""The backend. Its steps: check for gradients -> capture -> recognise and rewrite -> Inductor -> swap weights
at run time."""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations
from math import prod
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..meta.formats import SMALLEST_SIDE
from ..meta.layouts import preferred_layout
from ..meta.torch_internals import TracingContext, is_precompiling
from . import advice
from .dynamo import buckets, left_out
from .dynamo.api import RestartAnalysis, SkipFrame
from .graph.repeat import Undo, undo_of
from .graph.traced_nodes import asks_for_gradients, called, example
from .naming import input_name, short_path
from .options import Options, inductor_patches
from .passes import PassLog, Rewritten, fp4_calls, rewrite
from .recognise.written_decoding import BYTES, TABLE
from .refusal import Refused
from .report import Frame, Site
from .trace.capture import capture
from .weights.facts import Facts, Stays, in_one_precision
from .weights.given import Given, gathered, given, is_flat
from .weights.runtime import Swap, runtime
from .weights.specs import is_subclass

log = logging.getLogger("fp4_ops")

Compile = Callable[..., Any]
"""(gm, example_inputs, *, config_patches) -> callable; Inductor's compile_fx unless a test replaces it."""


OWN = ("aten", "prims", "fp4")
"""Namespaces of operators whose fakes are tested against what they return."""


def analyse(source: Given, options: Options) -> tuple[Rewritten | None, Frame]:
    """Rewrites a graph of Dynamo's and reports on it. The graph itself never changes."""
    gm, inputs = source.gm, source.inputs
    _allow_scalars(gm)
    frame = Frame(_frame_name())
    passes = PassLog(frame.name, frame.passes)
    if asks_for_gradients(gm, inputs):
        frame.sites = _own_calls(gm)
        if not frame.sites or _leaves_experts(gm, inputs):
            frame.note = "left to Inductor, because gradients may be asked for and 4-bit weights have none"
            frame.change = advice.NO_GRADIENTS if torch.is_grad_enabled() else advice.OWN_GRADIENTS
        return None, frame
    if not options.outside and not _has_expert_weights(gm, inputs):
        frame.sites = fp4_calls(gm.graph)
        arguments = _experts_as_arguments(gm, inputs)
        if arguments:
            frame.note = (
                f"left to Inductor: what look like experts' weights are arguments, {', '.join(arguments)}"
            )
            frame.change = advice.PARAMETER
        return None, frame
    for device in {x.device.type for x in inputs if isinstance(x, torch.nn.Parameter)}:
        # A device without a layout, or one that cannot take the activation, is the user's error.
        any_layout = preferred_layout(
            device, a_format=options.wanted, batch_invariant=options.batch_invariant
        )
        options.a_format(device, any_layout)
    try:
        _guard_equal_lengths(gm)
        rewritten, frame.sites, frame.unrouted = in_one_precision(
            lambda each, stay: _rewritten(gm, inputs, options, each, stay, passes)
        )
        frame.also = rewritten.also if rewritten is not None else []
    except Refused as why:
        frame.note, frame.change = f"left to Inductor: {why.refusal.reason}", why.refusal.change
        return None, frame
    except Exception as error:  # these passes must not break a model that Inductor can compile
        log.debug("the passes failed", exc_info=True)
        failed = f"pass {passes.current}" if passes.current else "the passes"
        frame.note = f"left to Inductor, {failed} failed: {type(error).__name__}: {error}"
        frame.change = advice.STACK_DEPTH if isinstance(error, RecursionError) else str(advice.FAULT)
        return None, frame
    return rewritten, frame


def _rewritten(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: Options,
    each: Stays,
    stay: Stays,
    passes: PassLog,
) -> tuple[Rewritten | None, list[Site], list[Site]]:
    with passes.timed("capture", gm.graph) as made:
        traced, fake_mode, stored = capture(gm, inputs)
        made.append(traced.graph)
    facts = Facts({n for n, x in _pairs(traced, inputs) if _is_fixed(n, x)}, stored=stored)
    from_shards = gathered(x for x in inputs if isinstance(x, torch.nn.Parameter))
    for i, (node, x) in enumerate(_pairs(traced, inputs)):
        fixed = node in facts.fixed
        if id(x) in from_shards or (fixed and is_flat(getattr(node, "_dynamo_source", None))):
            facts.gathered[node] = from_shards.get(id(x), "FSDP")
        if fixed and x.numel() <= TABLE:
            facts.constants[node] = x.detach()
        facts.note_stays(i, node, each, stay)
    return rewrite(traced, facts, options, fake_mode, passes)


def compile_graph(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: Options,
    compile_fx: Compile,
    tell: Callable[[Frame], None] | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's, with 4-bit experts where they were proved; `tell` gets the findings."""
    source = given(gm, inputs)
    rewritten, frame = analyse(source, options)
    if tell is not None:
        tell(frame)
    left_whole = bool(frame.note) and _looks_like_experts(source)
    _log(frame, left_whole)
    left_out.note(bool(frame.sites) or left_whole, source.inputs, options.strict)
    if options.strict and (left_whole or any(not site.rewritten for site in frame.sites)):
        raise RuntimeError(f"fp4: strict=True, but not all experts run in 4 bits. {frame}")

    def as_captured() -> Callable[..., Any]:
        if source.held:  # Inductor freezes what the graph holds
            return _or_uncompiled(gm, inputs, options, compile_fx)
        return source.adapt(_or_uncompiled(source.gm, source.inputs, options, compile_fx))

    if rewritten is None:
        return as_captured()
    examples = [*(source.inputs[i] for i in rewritten.keep), *rewritten.fakes]
    undo = undo_of(rewritten.gm.graph, len(rewritten.fakes))
    patches = {**_checks_of_sizes(rewritten.gm.graph), **inductor_patches(options)}
    if source.held:
        patches["freezing"] = False

    def as_rewritten() -> Callable[..., Any]:
        with torch.no_grad():  # an aten graph no longer has the model's own no_grad blocks
            compiled = compile_fx(rewritten.gm, examples, config_patches=patches)
        return source.adapt(_runtime(compiled, rewritten.keep, rewritten.swaps, undo))

    return compiled_or_as_captured(frame, as_rewritten, as_captured, options.strict)


def _checks_of_sizes(graph: fx.Graph) -> dict[str, Any]:
    """Returns the option that leaves out Inductor's checks of sizes, if all operators are torch's or ours.

    Guards have checked the inputs. The results of other libraries' operators are still checked, because their
    fakes may be wrong. In a decoding step on a CPU, the checks took 30 us a layer.
    """
    calls: list[Any] = [node.target for node in graph.nodes if node.op == "call_function"]
    own = all(getattr(t, "namespace", None) in OWN or t.__module__ == "_operator" for t in calls)
    return {"size_asserts": False} if own else {}


def _runtime(
    compiled: Callable[..., Any], keep: list[int], swaps: list[Swap], undo: Undo | None
) -> Callable[..., Any]:
    if is_precompiling():
        from .precompiled import Precompiled

        return Precompiled(compiled, keep, swaps, undo)
    return runtime(compiled, keep, swaps, undo)


def _or_uncompiled(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Options, compile_fx: Compile
) -> Callable[..., Any]:
    """Compile a graph with Inductor. If that fails, run the graph as it is where it has data-dependent sizes:
    a loop over experts reaches Inductor only because Dynamo captures it for this backend."""
    try:
        compiled: Callable[..., Any] = compile_fx(gm, inputs, config_patches=options.inductor)
        return compiled
    except Exception:
        if not any(free_unbacked_symbols(n.meta.get("example_value")) for n in gm.graph.nodes):
            raise
        log.warning("Inductor cannot compile %s, which runs uncompiled", _frame_name(), exc_info=True)
        return gm.forward


def _pairs(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[tuple[fx.Node, Any]]:
    return list(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))


def _is_fixed(node: fx.Node, x: Any) -> bool:
    """Return whether an input is a parameter, or a buffer that Dynamo found on a module. It is the same
    tensor at each call."""
    if not isinstance(x, torch.Tensor):
        return False
    static = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
    return isinstance(x, torch.nn.Parameter) or static is not None


def _has_expert_weights(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Return whether any weight could be one of experts: 3D, or a matrix in a graph that also routes."""
    weights = [x for n, x in _pairs(gm, inputs) if _is_fixed(n, x)]
    if any(map(is_subclass, weights)):
        return True
    if any(x.dim() >= 2 and x.dtype in BYTES for x in weights):
        return True
    weights = list(_floating_weights(gm, inputs).values())
    if any(x.dim() == 3 for x in weights):
        return True
    matrices = [x for x in weights if x.dim() == 2]
    # This includes nested graphs, such as those of torch.utils.checkpoint.
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)] if matrices else []
    return any(_routes(n) for graph in graphs for n in graph.nodes)


def _floating_weights(gm: fx.GraphModule, inputs: Sequence[Any]) -> dict[fx.Node, torch.Tensor]:
    weights = ((n, x) for n, x in _pairs(gm, inputs) if _is_fixed(n, x))
    return {n: x for n, x in weights if x.dtype.is_floating_point and x.dtype.itemsize > 1}


_LISTED = re.compile(r"experts?\[\d+\]")


def _leaves_experts(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Return whether a graph that calls fp4 operators has other experts, too: a stack of matrices, or
    matrices in a list of that name. Kernels of convolutions, tables and adapters have a smaller side."""
    for node, x in _floating_weights(gm, inputs).items():
        if x.dim() not in (2, 3) or min(x.shape[-2:]) < SMALLEST_SIDE:
            continue
        if len(x) > 1 if x.dim() == 3 else _LISTED.search(input_name(node)):
            return True
    return False


def _own_calls(gm: fx.GraphModule) -> list[Site]:
    """Return the fp4 operators that a model calls itself while gradients are on.

    A model that `prepare(model, trainable_inputs=True)` changed calls them in an autograd.Function, whose
    forward is a graph of its own.
    """
    graphs = [
        m.graph for name, m in gm.named_modules() if isinstance(m, fx.GraphModule) and "bwd" not in name
    ]
    return [site for graph in graphs for site in fp4_calls(graph)]


def _looks_like_experts(source: Given) -> bool:
    """Return whether a graph, or the graph that DDP cut it from, has weights that look like experts'. If DDP
    cut a graph into several such parts, only the first part is reported."""
    whole = buckets.whole()
    gm, inputs = (source.gm, source.inputs) if whole is None else (whole.graph, whole.inputs)
    found = _has_expert_weights(gm, inputs) or bool(_experts_as_arguments(gm, inputs))
    if whole is None:
        return found
    before, whole.is_told = whole.is_told, whole.is_told or found
    return found and not before


def _experts_as_arguments(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[str]:
    """Names of inputs that look like expert weights but are not parameters.

    Several matrices come in pairs [a, b] and [b, a], and the graph routes.
    """
    given = [
        (n, x)
        for n, x in _pairs(gm, inputs)
        if isinstance(x, torch.Tensor) and not _is_fixed(n, x) and x.is_floating_point() and x.dim() in (2, 3)
    ]
    shapes = Counter(tuple(x.shape) for _, x in given)
    experts = []
    for n, x in given:
        *e, rows, columns = x.shape
        count = min(shapes[tuple(x.shape)], shapes[(*e, columns, rows)]) * (e[0] if e else 1)
        if rows != columns and count > 1:
            experts.append(input_name(n))
    chooses = bool(experts) and any(called(n).split(".")[0] in _CHOOSES for n in gm.graph.nodes)
    return [*experts[:2], *(["..."] if len(experts) > 2 else [])] if chooses else []


_CHOOSES = ("topk", "argmax", "one_hot", "nonzero")


_ROUTING = ("topk", "softmax", "argmax", "one_hot", "sort", "argsort", "nonzero", "max", "scatter")


def _routes(node: fx.Node) -> bool:
    """Return whether a call may choose experts, or the rows of one expert, such as `ids == 3` where ids are
    an input."""
    if node.op not in ("call_function", "call_method"):
        return False
    if called(node) == "eq" and len(node.args) == 2 and any(isinstance(a, int) for a in node.args):
        of = [example(a) for a in node.args if isinstance(a, fx.Node)]
        return any(isinstance(x, torch.Tensor) and not x.dtype.is_floating_point for x in of)
    name = called(node).split(".")[0].rstrip("_")
    if name in _ROUTING or _weights_by_a_column(node, name):
        return True
    x = example(node)
    return isinstance(x, torch.Tensor) and bool(free_unbacked_symbols(x))  # x[scores[:, e] > 0.5]


def _weights_by_a_column(node: fx.Node, name: str) -> bool:
    """Return whether a node is like `scores[:, e, None] * y`. A router may end in another function than
    softmax (sigmoid, relu), or in none."""
    if name not in ("mul", "imul"):
        return False
    columns = [example(a) for a in node.all_input_nodes if called(a).split(".")[0] in _COLUMNS]
    return any(
        isinstance(x, torch.Tensor) and x.dtype.is_floating_point and x.dim() > 1 and x.shape[-1] == 1
        for x in columns
    )


_COLUMNS = ("getitem", "select", "narrow", "unsqueeze", "view", "reshape", "index_select")


# --- what Dynamo's graph says ---


def _allow_scalars(gm: fx.GraphModule) -> None:
    """Let later tracers of a graph with row counts read numbers from tensors, too."""
    context = TracingContext.try_get()
    mode = context.fake_mode if context is not None else None
    items = gm.graph.find_nodes(op="call_method", target="item")
    if mode is not None and any(free_unbacked_symbols(example(n)) for n in items):
        mode.allow_scalar_outputs = True


def _guard_equal_lengths(gm: fx.GraphModule) -> None:
    """Add a guard that inputs have the same number of rows, if they have in this call.

    If Dynamo breaks the graph between a router and its experts, the rest of the function is a graph that
    reads ids [s1, k], weights [s2, k] and rows [s0, H]. Nothing in it says that the lengths are equal, so no
    proof would hold. They are equal in this call. The guard makes this a fact for the compiled graph, and
    Dynamo compiles again for a call in which they differ.
    """
    inputs = [
        _rows(example(n))
        for n in gm.graph.find_nodes(op="placeholder")
        if isinstance(example(n), torch.Tensor) and not any(called(user) == "embedding" for user in n.users)
    ]
    inputs = [sizes for sizes in inputs if any(isinstance(size, torch.SymInt) for size in sizes)]
    for a, b in combinations(inputs, 2):
        for i, j in zip(a, b) if len(a) == len(b) else [(prod(a), prod(b))]:
            if str(i) != str(j) and _now(i) is not None and _now(i) == _now(j):
                bool(i == j)  # adds the guard


def _rows(x: torch.Tensor) -> Sequence[Any]:
    """Return the sizes that count rows: [T] for a tensor [T] or [T, H], and [B, T] for a tensor [B, T, H]."""
    return x.shape[: max(x.dim() - 1, 1)] if x.dim() <= 3 else ()


def _now(size: Any) -> Any:
    """Return the value of a size in this call, or None if it depends on the data."""
    if not isinstance(size, torch.SymInt):
        return size
    return size.node.hint if size.node.has_hint() else None


def _frame_name() -> str:
    context = TracingContext.try_get()
    codes = getattr(context, "traced_code", None)
    if not codes:
        return "(unnamed)"
    code = codes[0]
    return f"{code.co_name} ({short_path(code.co_filename)}:{code.co_firstlineno})"


def _log(frame: Frame, left_whole: bool) -> None:
    """Log a frame. left_whole: the whole graph was left to Inductor, and it looks like it has experts."""
    if left_whole or (frame.sites and not any(s.rewritten for s in frame.sites)):
        log.warning("%s", frame)
    elif frame.sites:
        log.info("%s", frame)
    else:
        log.debug("%s", frame)


# --- a rewritten graph that Inductor cannot compile ---

Compiled = Callable[..., Any]

_failures: dict[str, str] = {}
"""The error of each graph that was compiled as captured, by the graph's name."""


def compiled_or_as_captured(
    frame: Frame, rewritten: Callable[[], Compiled], as_captured: Callable[[], Compiled], strict: bool
) -> Compiled:
    """Compile the rewritten graph; if that fails, compile the captured graph and warn.

    Such a failure is a fault of this package, but the model must still run. A warning reports it once for
    each graph, and `fp4_ops.explain` reports it later. With option "strict" it is an error. If Inductor
    cannot compile the captured graph either, the user sees that error, as with backend="inductor".

    Raises RuntimeError if the rewritten graph fails and `strict` is set. The exceptions with which Dynamo
    starts over are passed on.
    """
    try:
        return rewritten()
    except (RestartAnalysis, SkipFrame):
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip().partition(_END)[0]}"
        if strict:
            raise RuntimeError(
                f"fp4: strict=True, but Inductor cannot compile graph {frame.name} with experts in 4 bits. "
                f"The error is {text}. {_REPORT}"
            ) from error
        log.debug("Inductor cannot compile the rewritten graph %s", frame.name, exc_info=True)
    compiled = as_captured()
    frame.not_compiled = text
    known = frame.name in _failures
    _failures[frame.name] = text
    if not known:
        warnings.warn(
            f"Inductor cannot compile graph {frame.name} with experts in 4 bits, so the graph runs as the "
            f"model has it, with its original weights. The error is {text}. {_REPORT}",
            stacklevel=2,
        )
    return compiled


_REPORT = (
    "This is a fault of fp4_ops. Please report it with the model and the traceback, which "
    "TORCH_LOGS=+fp4_ops prints."
)
_END = "\n\n"
"""The separator after the cause in torch's error messages. The user's stack and general advice follow it."""


def failure(name: str) -> str:
    """Return the error of the graph if it was compiled as captured in this process, else an empty string."""
    return _failures.get(name, "")


def forget_failures() -> None:
    _failures.clear()
