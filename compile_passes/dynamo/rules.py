"""Adds our rules to Dynamo such that they never stop a program that runs without them.

A rule is a function that takes one of Dynamo's functions and returns its replacement.

- A rule for tracing (`while_tracing`) runs in graphs for backends with `sees_through_branches`. Others get
  Dynamo's own function. If tracing fails in a way that Dynamo does not expect, or fails although no graph
  break is allowed, a rule may be the cause. `without_rules` then traces the function again without rules. If
  that fails, too, the failure is Dynamo's own.
- A rule around tracing (`around`) does something before or after Dynamo's function. If that fails, the result
  or the error of Dynamo's function stands.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ...meta.text import first_line
from .api import (
    BackendCompilerFailed,
    RestartAnalysis,
    SkipFrame,
    UnspecializeRestartAnalysis,
    Unsupported,
    UserError,
)
from .session import attempts, has_attempts, session

if TYPE_CHECKING:
    from .api import Function, Instruction, OutputGraph, Tracer, Variable

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
    """Whether a graph may break, or the function be left to Python."""
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
