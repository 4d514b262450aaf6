"""Adds our rules to Dynamo such that they never stop a program that runs without them.

A rule is a function that takes one of Dynamo's functions and returns its replacement.

- A rule for tracing (`while_tracing`) runs in graphs for backends with `sees_through_branches`. Others get
  Dynamo's own function. If tracing fails in a way that Dynamo does not expect, or fails although no graph
  break is allowed, a rule may be the cause. `without_rules` then traces the function again without rules. If
  that fails, too, the failure is Dynamo's own.
- A rule around tracing (`around`) does something before or after Dynamo's function. If that fails, the result
  or the error of Dynamo's function stands.

The state of the rules, for one output graph and for all attempts to trace one function, is stored on Dynamo's
own objects, in one attribute each, and lives as long as these.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import sympy
import torch
from torch import fx

from ...meta.text import first_line
from . import api
from .api import (
    BackendCompilerFailed,
    RestartAnalysis,
    SkipFrame,
    UnspecializeRestartAnalysis,
    Unsupported,
    UserError,
)

if TYPE_CHECKING:
    from .api import (
        Function,
        Guard,
        Instruction,
        ListVariable,
        OutputGraph,
        SymNodeVariable,
        Tracer,
        Variable,
    )

Place = tuple[CodeType, int]
"""An instruction: the function's code, and the offset in it."""


@dataclass
class Counted:
    """The row counts of all experts, as Dynamo has them, and their sum."""

    numbers: list[SymNodeVariable]
    total: int | torch.SymInt
    ids: fx.Node
    """Ids that are counted."""
    parts: dict[fx.Node, Sequence[Variable]] = field(default_factory=dict)
    """Parts of tensors, with as many rows as the counts say."""
    written: dict[fx.Node, dict[int, tuple[Variable, fx.Node]]] = field(default_factory=dict)
    """Writes to each expert's rows of such tensors, with the node that writes."""

    def expressions(self) -> list[sympy.Expr]:
        return [n.sym_num.node.expr for n in self.numbers]

    def between(self, start: sympy.Expr, stop: sympy.Expr) -> int | None:
        """Return the expert whose rows, among rows sorted by expert, begin and end at these positions."""
        before: sympy.Expr = sympy.Integer(0)
        for e, n in enumerate(self.expressions()):
            if before == start and before + n == stop:
                return e
            before = before + n
        return None


class Grown(NamedTuple):
    """A list that would be shorter if idle experts were skipped, and the branch that skips them."""

    items: ListVariable
    branch: Place
    place: str
    """file:line"""


class Numbers(NamedTuple):
    """Numbers of each expert, in order: its rows, or the rows up to and including its own."""

    rows: list[Variable]
    shown: list[Variable]
    is_open: bool
    """True if the program's own list may be shorter."""


class OpenList(NamedTuple):
    """A list of numbers that may be shorter in the program itself."""

    tx: Tracer
    begins: Instruction
    """If the proof fails, Dynamo starts over and leaves this instruction as it is."""
    numbers: Numbers


@dataclass
class Session:
    """The state of the rules in one output graph."""

    is_ours: bool
    """Whether the graph is for a backend with `sees_through_branches`."""
    has_known_values: bool = False
    """Whether some nodes have a known value (known_values.py)."""
    counted: list[Counted] = field(default_factory=list)
    numbers: dict[fx.Node, Variable] = field(default_factory=dict)
    """Tensors that Dynamo also has as Python numbers."""
    elements: dict[fx.Node, list[Variable]] = field(default_factory=dict)
    """The same for tensors of one dimension."""
    grown: list[Grown] = field(default_factory=list)
    open_lists: list[OpenList] = field(default_factory=list)
    added_guards: list[Guard] = field(default_factory=list)
    """Guards from earlier attempts. They are not Dynamo's own."""


@dataclass
class Attempts:
    """State that all attempts to trace a function share."""

    kept: set[Place] = field(default_factory=set)
    """Branches and loops that stay as they are."""
    failure: str | None = None
    """The reason why rules no longer apply."""


_SESSION, _ATTEMPTS = "_fp4_session", "_fp4_attempts"


def session(output: OutputGraph) -> Session:
    """Return the session of Dynamo's OutputGraph."""
    known = vars(output)
    if _SESSION not in known:
        known[_SESSION] = Session(is_ours(output.compiler_fn))
    found: Session = known[_SESSION]
    return found


def attempts(speculation_log: object) -> Attempts:
    """Return the state that the attempts with this SpeculationLog share."""
    found: Attempts = vars(speculation_log).setdefault(_ATTEMPTS, Attempts())
    return found


def has_attempts(found: object) -> bool:
    return hasattr(found, _ATTEMPTS)


def new_list(items: list[Variable]) -> ListVariable:
    """Return a variable for a list that the program itself may have made."""
    return api.ListVariable(items, mutation_type=api.ValueMutationNew())


def frames(tx: Tracer | None) -> Iterator[Tracer]:
    """Yield the frame that is traced, and those into which Dynamo inlines it."""
    while tx is not None:
        yield tx
        tx = getattr(tx, "parent", None)


@contextmanager
def scalar_outputs(output: OutputGraph) -> Iterator[None]:
    """Let numbers of tensors become numbers of the graph, as a context manager."""
    mode = output.fake_mode
    allowed, mode.allow_scalar_outputs = mode.allow_scalar_outputs, True
    try:
        yield
    finally:
        mode.allow_scalar_outputs = allowed


def within(backend: object) -> list[object]:
    """Return the backend, and what Dynamo and `torch.compile` wrapped in it, the innermost last."""
    found = [backend]
    while True:
        last = found[-1]
        ddp = getattr(last, "__self__", None)  # a DDPOptimizer, where a module in DDP is called
        inner = ((last, "_torchdynamo_orig_backend"), (ddp, "backend_compile_fn"), (last, "compiler_fn"))
        next_one = [getattr(holder, name) for holder, name in inner if hasattr(holder, name)]
        if not next_one:
            return found
        found.append(next_one[0])


def is_ours(backend: object) -> bool:
    """Return whether graphs for this backend are captured with the rules: it has `sees_through_branches`."""
    return bool(getattr(within(backend)[-1], "sees_through_branches", False))


def is_watched(tx: Tracer) -> bool:
    """Return whether the instructions of a frame are watched up to where two paths meet
    (`branches.watch`)."""
    return "step" in vars(tx)


log = logging.getLogger("fp4_ops")

Rule: TypeAlias = "Callable[[Function], Function]"

_FORESEEN = (RestartAnalysis, SkipFrame, BackendCompilerFailed)
_BREAKS = (Unsupported, UserError)
"""Errors that break the graph or leave the function to Python, if that is allowed."""


# --- while Dynamo traces ---


def while_tracing(
    rule: Rule, method: Function, output_of: Callable[..., OutputGraph], always: bool = False
) -> Function:
    """Apply `rule(method)` in our graphs and `method` in others. output_of: returns Dynamo's output, given
    the first two arguments of a call. always: also while a function is traced again without rules."""
    ruled = rule(method)

    @functools.wraps(method)
    def traced(*args: object, **kwargs: object) -> object:
        output = output_of(*args[:2])
        applies = session(output).is_ours and (always or failure(getattr(output, "root_tx", None)) is None)
        return (ruled if applies else method)(*args, **kwargs)

    return traced


def failure(tracer: Tracer | None) -> str | None:
    """Return why rules no longer apply to the function that is traced; None if they do."""
    shared = getattr(tracer, "speculation_log", None)
    return None if shared is None else attempts(shared).failure


def without_rules(tracer: Tracer, error: Exception) -> None:
    """Have Dynamo trace one of our functions again without rules, if a rule may be why it failed."""
    if not session(tracer.output).is_ours or failure(tracer) is not None or isinstance(error, _FORESEEN):
        return
    if isinstance(error, _BREAKS) and may_break(tracer):
        return
    attempts(tracer.speculation_log).failure = _named(error)
    tracer.speculation_log.clear()
    log.debug("tracing %s failed, and begins again without rules", tracer.f_code, exc_info=error)
    again = UnspecializeRestartAnalysis(restart_reason="fp4: without rules")
    again._torch_dynamo_tracer_output = getattr(error, "_torch_dynamo_tracer_output", None)  # type: ignore[attr-defined]
    raise again from None


def tell_failure(given: Sequence[Any], error: Exception | None = None) -> None:
    """Report that a function was traced without rules. given: the arguments of `trace_frame`. error: the
    error that ended it. If it is the same as with rules, no rule caused it."""
    why = next((attempts(a).failure for a in given if has_attempts(a)), None)
    if why is None or isinstance(error, RestartAnalysis) or (error is not None and _named(error) == why):
        return
    what = "%s is traced without this backend's rules for loops over experts, one of which failed: %s"
    log.warning(what, given[0].co_qualname, why)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(str(error))}"


def may_break(tracer: Tracer) -> bool:
    """Return whether a graph may break, or the function be left to Python."""
    return not (tracer.one_graph or tracer.export or tracer.error_on_graph_break)


# --- forms of rules while Dynamo traces ---


def answers(find: Callable[[Tracer, Variable], Variable | None]) -> Rule:
    """Make a rule for a method that takes no arguments. `find` returns its result, or None to call Dynamo's
    own method."""

    def rule(method: Function) -> Function:
        def call(self: Variable, tx: Tracer, *args: object, **kwargs: object) -> Variable:
            found = find(tx, self) if not args and not kwargs else None
            return found if found is not None else method(self, tx, *args, **kwargs)

        return call

    return rule


def replaces(count: int) -> Callable[[Callable[..., Variable | None]], Rule]:
    """Make a rule for an instruction that takes `count` variables from the stack and puts one there. `find`
    returns that variable, or None to call Dynamo's own function."""

    def made(find: Callable[..., Variable | None]) -> Rule:
        def rule(method: Function) -> Function:
            def handle(tx: Tracer, inst: Instruction) -> None:
                found = find(tx, *tx.stack[-count:])
                if found is None:
                    return method(tx, inst)
                tx.popn(count)
                tx.push(found)

            return handle

        return rule

    return made


# --- around ---


class _Call:
    """Result of Dynamo's function in one call of a rule."""

    error: BaseException | None = None
    returned = False
    result: object = None


class _Calls(threading.local):
    def __init__(self) -> None:
        self.open: list[_Call] = []


def around(rule: Rule, method: Function) -> Function:
    """Apply `rule(method)`, or return the result of `method` if the rule fails."""
    calls = _Calls()

    def recorded(*args: object, **kwargs: object) -> object:
        call = calls.open[-1]
        try:
            call.result = method(*args, **kwargs)
        except BaseException as error:
            call.error = call.error or error
            raise
        call.returned = True
        return call.result

    ruled = rule(recorded)

    @functools.wraps(method)
    def called(*args: object, **kwargs: object) -> object:
        call = _Call()
        calls.open.append(call)
        try:
            return ruled(*args, **kwargs)
        except Exception as error:
            if error is call.error or isinstance(error, (*_FORESEEN, *_BREAKS)):
                raise
            log.debug("a rule around %s failed", method.__qualname__, exc_info=True)
            if call.returned:
                return call.result
            if call.error is not None:
                raise call.error from None
        finally:
            calls.open.pop()
            call.error = None  # it holds this frame
        return method(*args, **kwargs)

    return called
