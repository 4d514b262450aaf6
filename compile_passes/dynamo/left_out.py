"""Finds experts that are in no graph: warns once, after a call of a compiled model, or raises with "strict".

A backend sees one graph at a time. If Dynamo leaves a loop over experts to Python, no graph has experts, and
there is nothing to report. So this module inspects the model after its call. A warning names parameters that
look like experts: several of one shape, an up/down pair, and `expert` in the path or a router beside them. It
is given only if none of them runs in 4 bits and no graph of the call reported anything. In addition, a graph
must have had the experts as inputs, or Dynamo must have broken or skipped a graph in that call.

If experts of another layer ran in 4 bits, those of this layer may be idle: an early exit, an unused head.
The warning then needs a sign that the call reached them. A sign is one of their weights in a graph, a
function that Dynamo looked at with their layer among its arguments, or a layer with `torch.compiler.disable`.
Beyond Dynamo's limit of recompilations there are no signs, and the warning says that they may be idle.

A later call is inspected if Dynamo compiled something for it, because decoding may have a branch of its own.
The warning then names experts that did not run in 4 bits in that call.
"""

from __future__ import annotations

import gc
import itertools
import logging
import re
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...meta.text import first_line, some_of
from ...meta.torch_internals import is_traceable_wrapper_subclass
from ..naming import TORCH, short_path
from ..weights.packed import packed_ids
from ..weights.runtime import Calls, packed_since
from . import api
from .api import counters, graph_break_reasons
from .rules import around, within

if TYPE_CHECKING:
    from .api import Function, GraphCompileReason, OptimizeContext

log = logging.getLogger("fp4_ops")

CHANGE = (
    "fp4_ops.explain(model, *inputs) says which line keeps them out and what to write instead; "
    "fp4_ops.prepare(model) needs no graph, where the experts are of transformers' kind"
)
_RAISE = (
    "set torch._dynamo.config.recompile_limit to a larger number before the first call; "
    "after torch._dynamo.reset(), fp4_ops.explain(model, *inputs) says which number is enough"
)
"""The advice if Dynamo compiled a function too often."""
_EXPERTS = re.compile(r"expert", re.IGNORECASE)
_SHARED = re.compile(r"shared", re.IGNORECASE)
_NAMED_ROUTER = re.compile(r"router|gating", re.IGNORECASE)
"""Names of routers. No name of the gate inside an expert's FFN matches."""
_ROUTER = re.compile(r"router|gate|gating|switch|route", re.IGNORECASE)


# --- parameters that look like experts ---


def expert_parameters(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Map the name of each module with experts to their matrices. Empty for a dense or a prepared model."""
    found = {}
    for name, module in model.named_modules():
        for path, experts in ((name, [module]), *_lists(name, module)):
            named = bool(_EXPERTS.search(path))
            called = _called_experts(module) if path == name else []
            weights = (_stacked(module) or called) if path == name else _of_each(experts, named)
            named = named or bool(called)
            if not weights or _SHARED.search(path):
                continue
            count = weights[0].shape[0] if path == name else len(experts)
            if named or _has_router(model, path, module, count):
                found[path or type(model).__name__] = weights
    return found


def _lists(name: str, module: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    for child, values in module.named_children():
        if isinstance(values, (nn.ModuleList, nn.ModuleDict)):
            each = list(values.values() if isinstance(values, nn.ModuleDict) else values)
            yield f"{name}.{child}" if name else child, each


def matrices_of(module: nn.Module, recurse: bool, *dims: int) -> list[nn.Parameter]:
    """Return the floating parameters of a module that have one of these numbers of dimensions."""
    return [
        p
        for p in module.parameters(recurse=recurse)
        if p.dim() in dims
        and p.is_floating_point()
        and p.itemsize > 1
        and not is_traceable_wrapper_subclass(p)
    ]


def _undone(weights: Sequence[nn.Parameter]) -> bool:
    """Return whether two of these matrices look like up and down: one maps H to I (or 2 I, with gate and up
    in one matrix), and the other maps I back to H."""

    def back(a: Sequence[int], b: Sequence[int]) -> bool:
        return (a[1] == b[0] and a[0] in (b[1], 2 * b[1])) or (a[0] == b[1] and a[1] in (b[0], 2 * b[0]))

    return any(back(a.shape[-2:], b.shape[-2:]) for a, b in itertools.permutations(weights, 2))


def _stacked(module: nn.Module) -> list[nn.Parameter]:
    weights = matrices_of(module, False, 3)
    same = [w for w in weights if w.shape[0] == weights[0].shape[0] > 1]
    return same if len(same) > 1 and _undone(same) else []


def _called_experts(module: nn.Module) -> list[nn.Parameter]:
    """Return the stacks of matrices that a module itself calls experts, of any shape: `v_experts` [E, N, K].

    Routers such as `expert_gating` do not count.
    """
    own = {n: p for n, p in module.named_parameters(recurse=False) if not _NAMED_ROUTER.search(n)}
    names = {id(p) for n, p in own.items() if _EXPERTS.search(n) and not _SHARED.search(n)}
    return [w for w in matrices_of(module, False, 3) if id(w) in names and w.shape[0] > 1]


def _of_each(experts: list[nn.Module], named: bool) -> list[nn.Parameter]:
    """Return the matrices of each expert. named: they are called experts, so they may have any number of
    layers or convolutions."""
    own = [matrices_of(e, True, *((2, 3, 4, 5) if named else (2,))) for e in experts]
    shapes = {tuple(tuple(w.shape) for w in weights) for weights in own}
    alike = len(own) > 1 and len(shapes) == 1 and len({type(e) for e in experts}) == 1
    ffn = alike and 2 <= len(own[0]) <= 4 and _undone(own[0])
    return [w for weights in own for w in weights] if ffn or (named and alike) else []


def _has_router(model: nn.Module, path: str, module: nn.Module, count: int) -> bool:
    """Return whether a matrix with a row for each expert stands beside them. A bias does not count,
    because it may have a row for each head."""
    parent = path.rpartition(".")[0]
    for holder in (module, model.get_submodule(parent)):
        for name, p in holder.named_parameters():
            if name.count(".") > 1 or name.endswith("bias"):
                continue
            if p.dim() == 2 and count in p.shape and _ROUTER.search(name):
                return True
    return False


# --- calls ---


class Watch:
    """Watches the calls of one compiled callable. Calls for which Dynamo compiles something are inspected."""

    def __init__(self, context: OptimizeContext, model: nn.Module, strict: bool) -> None:
        self._context, self.strict = context, strict
        self.model = weakref.ref(model)
        self.first = True
        self.hook = around(lambda _: self._enter, lambda: _nothing)
        """The hook that Dynamo calls before each call. Dynamo calls the function that it returns after the
        call."""

    def _enter(self) -> Callable[[], None]:
        """Begin a call. Inspecting the model may take long, so later calls inspect it only at their end,
        if something was compiled."""
        if torch.compiler.is_compiling() or (self.first and _waits(self.model())):
            return _nothing
        call = _Call(self)
        _stack().append(call)
        return call.exit

    def close(self) -> None:
        """Stop watching after the warning."""
        if self.hook in self._context.enter_exit_hooks:
            self._context.enter_exit_hooks.remove(self.hook)


class _Call:
    """One watched call, with the findings in its graphs."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._frames, self._known, self._number = _frames(), known_breaks(), Calls.begin()
        self.silent = False
        self.inputs: set[int] = set()
        self.reported: set[int] = set()
        """Inputs of graphs in which the backend found experts."""
        self.left: list[str] = []
        """Why functions of this call run in Python."""
        self.given: set[int] = set()
        """Modules among the arguments of functions that Dynamo looked at in this call."""
        self.stopped: set[int] = set()
        """The same for functions that Dynamo has compiled too often."""
        self.limits: list[str] = []
        """Messages about the limits that these functions reached."""

    @property
    def model(self) -> nn.Module | None:
        return self._watch.model()

    def note(self, reported: bool, inputs: Sequence[object], strict: bool) -> None:
        """Note one graph of this call. reported: the backend found experts in it, and said so."""
        self._watch.strict = self._watch.strict or strict
        parameters = {id(x) for x in inputs if isinstance(x, nn.Parameter)}
        self.silent = self.silent or reported
        self.inputs |= parameters
        self.reported |= parameters if reported else set()

    def exit(self) -> None:
        """End the call. Warn about experts that are in none of its graphs, or raise RuntimeError with
        "strict"."""
        stack = _stack()
        if self in stack:
            del stack[stack.index(self) :]
        if sys.exc_info()[1] is not None:
            return
        if _frames()[0] == self._frames[0] and not (self._watch.first and _limits):
            return
        text = around(lambda _: self._text, lambda: None)()
        if text is not None and self._watch.strict:
            raise RuntimeError(f"fp4: strict=True, but not all experts run in 4 bits. {text}")
        if text is not None:
            self._watch.close()
            log.warning("%s", text)

    def _text(self) -> str | None:
        """Return the warning about experts that are in no graph of the call, or None."""
        watch, broken, (total, captured) = self._watch, breaks_since(self._known), _frames()
        model, first, watch.first = watch.model(), watch.first, False
        if total == self._frames[0]:
            self.limits = _limits_of(model)  # Dynamo no longer looks at these functions
            if not self.limits:
                return None
        in_python = bool(broken or self.limits) or total - self._frames[0] > captured - self._frames[1]
        reported = self.silent and not watch.strict
        if model is None or (reported and not in_python) or (not first and _waits(model)):
            return None
        found = expert_parameters(model)
        if not found and first and not self.silent:
            return _told_apart(model)
        every = [w for weights in found.values() for w in weights]
        done = packed_ids(every) if first else packed_since(self._number)
        left = {
            name: weights
            for name, weights in found.items()
            if not any(id(w) in done for w in weights)
            and (in_python or any(id(w) in self.inputs for w in weights))
        }
        if reported:  # those of its graph have been named
            left = {n: weights for n, weights in left.items() if self.reported.isdisjoint(map(id, weights))}
        if len(left) < len(found) and not watch.strict:
            ran = found.keys() - left.keys()
            left = {n: w for n, w in left.items() if in_python and self._is_sure(model, n, w, ran)}
        if not left:
            return None
        if not watch.strict:
            _not_told(model, left)
        breaks = [*map(described, broken), *self.left]
        idle = not any(self._came_to(model, n, w) for n, w in left.items())
        return _told(left, breaks, len(found), "" if first else " in this call", self.limits, idle=idle)

    def _came_to(self, model: nn.Module, name: str, weights: Sequence[nn.Parameter]) -> bool:
        """Return whether the call certainly reached these experts, or the module that has them."""
        modules = dict(model.named_modules())
        holders = {id(modules.get(n, model)) for n in (name, name.rpartition(".")[0])}
        return not (
            holders.isdisjoint(self.given | self.stopped) and self.inputs.isdisjoint(map(id, weights))
        )

    def _is_sure(self, model: nn.Module, name: str, weights: Sequence[nn.Parameter], ran: Set[str]) -> bool:
        """Return whether the warning names these experts although others, `ran`, ran in 4 bits."""
        around_them = [
            module
            for path, module in model.named_modules()
            if path and _is_within(name, path) and not any(_is_within(other, path) for other in ran)
        ]
        if any(id(m) in self.stopped for m in around_them):
            return True
        if _kind(name) not in map(_kind, ran):
            return False
        return (
            bool(self.limits)
            or not self.inputs.isdisjoint(map(id, weights))
            or any(id(m) in self.given or _is_disabled(m) for m in around_them)
        )


# --- experts that are compiled one by one ---

_alone: dict[object, weakref.WeakSet[nn.Module]] = {}
"""Feed-forward modules that were compiled each by itself, by their class and sizes."""


def _told_apart(model: nn.Module) -> str | None:
    """Return the warning about a compiled module that is one of several experts, or None.

    A graph of one expert does not show which rows are whose. That it is an expert only shows in the module
    that has all of them. Nothing leads from an expert to that module, so all of Python's objects are
    searched, but rarely: when the 2nd, 4th, 8th, ... module of one class and size is compiled.
    """
    own = matrices_of(model, True, 2)
    if not 2 <= len(own) <= 4 or not _undone(own):
        return None
    kind = (type(model), *(tuple(w.shape) for w in own))
    alone = _alone.setdefault(kind, weakref.WeakSet())
    alone.add(model)
    if len(alone) < 2 or len(alone).bit_count() != 1:
        return None
    for holder in _holders(alone):
        here = {id(p) for m in alone for p in m.parameters()}
        left = {n: w for n, w in expert_parameters(holder).items() if not here.isdisjoint(map(id, w))}
        if left and _not_told(holder, left):
            return _told(left, [_APART], len(left), change=_TOGETHER)
    return None


def _holders(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules that hold these in a ModuleList or a ModuleDict."""
    every = [x for x in gc.get_objects() if issubclass(type(x), nn.Module) and "_modules" in vars(x)]
    wanted = set(map(id, modules))
    wanted |= {id(x) for x in every if id(vars(x)["_modules"].get("_orig_mod")) in wanted}
    lists = {
        id(x)
        for x in every
        if isinstance(x, (nn.ModuleList, nn.ModuleDict)) and not wanted.isdisjoint(map(id, x.children()))
    }
    yield from (x for x in every if not lists.isdisjoint(map(id, vars(x)["_modules"].values())))


_APART = "each of them is compiled by itself, and no graph has their router"
_TOGETHER = (
    "compile the module that chooses among these experts, or the whole model, not each expert by itself: "
    "then ids or scores in the graph show which rows are whose; fp4_ops.prepare(model) needs no graph, where "
    "the experts are of transformers' kind"
)


def _kind(name: str) -> str:
    """Return what the names of experts in all layers of a model have in common. If those of one layer run,
    one expects those of all layers to run. Shapes do not tell: a head for training may have the same."""
    return re.sub(r"\d+", "#", name.replace("_orig_mod.", ""))


def _is_within(name: str, path: str) -> bool:
    return f"{name}.".startswith(f"{path}.")


def _is_disabled(module: nn.Module) -> bool:
    """Return whether `torch.compiler.disable` wraps the module or its forward."""
    wrapped = (module, getattr(module, "forward", None))
    return any(getattr(x, "_torchdynamo_disable", False) for x in wrapped)


def has_experts(x: object) -> bool:
    return isinstance(x, nn.Module) and bool(expert_parameters(x))


_told_of: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules with experts that a warning has already named."""


def _not_told(model: nn.Module, names: Iterable[str]) -> bool:
    """Return whether no warning has named these yet, and mark them as named."""
    modules = dict(model.named_modules())
    holders = {modules.get(name, model) for name in names}
    new = holders.isdisjoint(_told_of)
    _told_of.update(holders)
    return new


def note_left(given: Iterable[object], error: BaseException) -> None:
    """Note that a function with these arguments runs in Python. A watched call reports it at its end.
    Without one it is reported here, but only if the experts belong to the module itself."""
    cause = error.__cause__ or error
    stack = innermost(getattr(cause, "real_stack", ()))
    why = reason_of(str(cause) or str(error) or type(error).__name__)
    why += f", {place(stack)}" if stack is not None else ""
    for call in _stack():
        call.left.append(why)
    for module in given:
        if not isinstance(module, nn.Module) or _stack() or _waits(module):
            continue
        found = {name: w for name, w in expert_parameters(module).items() if "." not in name}
        if found and _not_told(module, found):
            log.warning("%s", _told(found, [why], 0))


def note_other(inputs: Sequence[object], backend: str) -> None:
    """Note that a graph with these inputs is compiled with another backend within a watched call."""
    for call in _stack():
        call.inputs |= {id(x) for x in inputs if isinstance(x, nn.Parameter)}
        call.left.append(f'a module in it is compiled with backend="{backend}"')


_limits: dict[str, weakref.WeakSet[type]] = {}
"""Texts about functions that Dynamo has compiled too often, with the user's classes of modules that these
functions are for. Dynamo does not look at these functions again until torch._dynamo.reset()."""


def forget_limits() -> None:
    _limits.clear()


def note_given(modules: Iterable[nn.Module]) -> None:
    """Note that Dynamo looks at a function with these modules among its arguments."""
    ids = set(map(id, modules))
    for call in _stack():
        call.given |= ids


def note_limit(limit: str, most: int, function: str, modules: Sequence[nn.Module]) -> None:
    """Note that Dynamo leaves a function with these modules to Python because of this limit."""
    told = (
        f"Dynamo has compiled {function} {most} times, each time for other modules or inputs, and stops at "
        f"torch._dynamo.config.{limit} ({most}): the rest, and all that it calls, runs in Python"
    )
    models = [call.model for call in _stack()]
    classes = _limits.setdefault(told, weakref.WeakSet())
    classes.update(type(m) for m in (*modules, *models) if m is not None and not _is_of_torch(type(m)))
    for call in _stack():
        call.limits.append(told)
        call.stopped |= set(map(id, modules))


def _limits_of(model: nn.Module | None) -> list[str]:
    """Return the texts about functions that are for modules of this model's classes."""
    classes = set(map(type, model.modules())) if model is not None else set()
    return [told for told, seen in _limits.items() if not classes.isdisjoint(seen)]


def _is_of_torch(cls: type) -> bool:
    """Return whether unrelated models, too, have modules of this class."""
    return cls.__module__.partition(".")[0] == "torch"


def _told(
    left: dict[str, list[nn.Parameter]],
    breaks: Sequence[str],
    all_of_them: int,
    when: str = "",
    limits: Sequence[str] = (),
    change: str = CHANGE,
    idle: bool = False,
) -> str:
    """Return the warning. idle: nothing shows that the experts were called."""
    names = [f"{name} ({len(weights)} parameters of {weights[0].dtype})" for name, weights in left.items()]
    nothing = f"nothing was rewritten{when}, yet"
    what = nothing if len(left) == all_of_them else "in no graph that was rewritten:"
    lines = [f"{what} these parameters look like experts: {some_of(names)}"]
    if idle:
        lines[0] += ". They run in Python, or were not called"
    cause = "graph break" if change is CHANGE else "cause"
    lines += [f"  cause: {why}" for why in dict.fromkeys(limits[:2])]
    lines += [f"  {cause}: {why}" for why in dict.fromkeys(breaks[:4])]
    lines += [f"  change: {what}" for what in ((_RAISE, change) if limits else (change,))]
    return "\n".join(lines)


_local = threading.local()


def _stack() -> list[_Call]:
    if not hasattr(_local, "stack"):
        _local.stack = []
    return _local.stack


def note(reported: bool, inputs: Sequence[object], strict: bool) -> None:
    """Note one graph in all watched calls. reported: the backend found experts in it, and said so."""
    for call in _stack():
        call.note(reported, inputs, strict)


def _frames() -> tuple[int, int]:
    return counters["frames"]["total"], counters["frames"]["ok"]


def _waits(model: nn.Module | None) -> bool:
    """Return whether nothing can be concluded from this call."""
    stance = getattr(getattr(api.eval_frame, "_stance", None), "stance", "default")
    loads = getattr(api.config, "caching_precompile", False)
    if model is None or stance != "default" or loads:
        return True
    return torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())


def _nothing() -> None:
    pass


# --- Dynamo ---


def watch_calls(method: Function) -> Function:
    """For OptimizeContext.__call__, which wraps what is compiled."""

    def call(self: OptimizeContext, fn: object) -> object:
        compiled = method(self, fn)
        backend, options = backend_of(self.callback)
        model = _model_of(fn)
        hooks = getattr(self, "enter_exit_hooks", None)
        ours = getattr(backend, "sees_through_branches", False) and getattr(backend, "watched", True)
        if ours and model is not None and hooks is not None:
            hooks.append(Watch(self, model, options.get("strict") is True).hook)
        return compiled

    return call


def backend_of(callback: object) -> tuple[object, dict[str, object]]:
    """Return the backend itself, and its options, from Dynamo's callback or its wrapper of a backend."""
    _, *inner = within(callback)
    given = [options for b in inner if (options := getattr(b, "kwargs", {}).get("options"))]
    return [callback, *inner][-1], dict(given[-1]) if given else {}


WHOLE = ("forward", "__call__", "_call_impl", "_wrapped_call_impl")


def _model_of(fn: object) -> nn.Module | None:
    """Return the module that a call runs as a whole. A method of it may run only a part."""
    if isinstance(fn, nn.Module):
        return None  # its method is wrapped, too
    owner = getattr(fn, "__self__", None)
    return owner if isinstance(owner, nn.Module) and getattr(fn, "__name__", "") in WHOLE else None


_SIZE = "data-dependent expression"
"""In Dynamo's reason: Python asks for a number that only the data knows."""


def known_breaks() -> int:
    """Return the number of reasons that Dynamo has so far, for `breaks_since`."""
    return len(graph_break_reasons)


def breaks_since(known: int) -> list[GraphCompileReason]:
    """Return Dynamo's reasons after the first `known`; all of them if it has forgotten those."""
    since = known if known <= len(graph_break_reasons) else 0
    return [b for b in graph_break_reasons[since:] if b.reason != "step_unsupported"]


def described(broken: GraphCompileReason) -> str:
    """Return the reason and the user's line."""
    frame = innermost(broken.user_stack)
    return reason_of(broken.reason) if frame is None else f"{reason_of(broken.reason)}, {place(frame)}"


def place(frame: traceback.FrameSummary) -> str:
    code = f": {frame.line.strip()}" if frame.line else ""
    return f"at {short_path(frame.filename)}:{frame.lineno} in {frame.name}{code}"


def reason_of(text: str) -> str:
    if about_a_number(text):
        return "Python asks for a number that only the data knows"
    return first_line(text).rstrip(".")


def about_a_number(text: str) -> bool:
    """Return whether Dynamo's reason is that Python needs a data-dependent number."""
    return _SIZE in first_line(text)


def innermost(stack: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Return the last line outside of torch."""
    own = [f for f in stack if not f.filename.startswith(TORCH) and not f.filename.startswith("<")]
    return own[-1] if own else None


def inside(
    function: str, path: str, line: int | None, breaks: Sequence[GraphCompileReason]
) -> GraphCompileReason | None:
    """Return the break inside the call on this line. It is the cause if Dynamo names a generator or a
    comprehension, which it cannot leave half-way."""
    for b in breaks:
        called = [f for f in b.user_stack if not f.filename.startswith(TORCH)]
        outer = {_key(f) for f in called[:-1]} - {_key(f) for f in called[-1:]}
        if any(f[:2] == (function, path) and line in (None, f[2]) for f in outer):
            return b
    return None


def _key(frame: traceback.FrameSummary) -> tuple[str, str, int | None]:
    return frame.name, frame.filename, frame.lineno
