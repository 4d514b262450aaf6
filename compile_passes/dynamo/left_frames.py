"""Limits the effect of a function that Dynamo leaves to Python to calls of the same kind.

If Dynamo cannot continue within a loop, it runs the function in Python and never looks at its code again. One
call in training mode, or with unusual arguments, would then take the 4 bits from all other calls, of this
model and of every other model with the same code. By then Dynamo has read the values that led there: a mode,
a flag, the kinds of arguments. This module keeps guards on exactly these. Calls that match them run the code
in Python; all other calls are traced as if nothing had happened.

If a function with experts does nothing in some call, Dynamo leaves it to Python, too. The same is done for
such calls.

Dynamo limits how often it compiles a function (`recompile_limit`). Beyond the limit the function, and all
that it calls, runs in Python. Functions that run in Python must not reach the limit: without these rules,
Dynamo would still compile what they call. So at the last permitted time only the function itself is left
to Python for good.

If Dynamo can continue after a call, it traces the function once more up to there, and forgets the values it
read inside the call. Those guards are kept, too.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from . import api, left_out, limits
from .api import ConstDictKeySource, RestartAnalysis, SkipFrame, Unsupported, UserError, counters
from .rules import failure, may_break, session, tell_failure, without_rules

if TYPE_CHECKING:
    from .api import DynamoOutput, Function, Guard, Source, Tracer

log = logging.getLogger("fp4_ops")

_OF_FLAGS = ("BOOL_MATCH", "CONSTANT_MATCH", "EQUALS_MATCH", "NONE_MATCH", "TYPE_MATCH")
"""Guards on values of Python objects."""


class Left(NamedTuple):
    """A function that runs in Python, with the field names that Dynamo's CompilationMetrics use for a
    failed function. Dynamo counts this one as compiled."""

    co_name: str
    co_filename: str
    co_firstlineno: int
    fail_type: str
    fail_reason: str
    fail_user_frame_filename: str | None
    fail_user_frame_lineno: int | None


class _Read(threading.local):
    """Record of reads in earlier attempts to trace the current function, and its listeners."""

    guards: tuple[Guard, ...] = ()
    left: list[Left] | None = None


_read = _Read()


@contextmanager
def noted() -> Iterator[list[Left]]:
    """Collect the calls that Dynamo leaves to Python in this thread, as a context manager."""
    before, _read.left = _read.left, []
    try:
        yield _read.left
    finally:
        _read.left = before


def guarded(method: Function) -> Function:
    """Wrap `compile_frame` of Dynamo's `convert_frame`."""

    def compile_frame(code: types.CodeType, *args: Any, **kwargs: object) -> object:
        before, _read.guards = _read.guards, ()
        try:
            return method(code, *args, **kwargs)
        except (Unsupported, UserError) as error:
            tracer = _left_by(error)
            left = None if tracer is None or kwargs.get("package") is not None else _as_it_is(code, tracer)
            if left is None:
                raise
            if _read.left is None:  # explain reports it itself
                left_out.note_left(args[1].values(), error)
            if limits.is_last():
                error.frame_exec_strategy = api.FrameExecStrategy(  # type: ignore[assignment]
                    api.FrameAction.RUN_ONLY, api.FrameAction.DEFAULT
                )
                raise
            counters["frames"]["ok"] -= 1  # it will be counted when this returns
            if _read.left is not None:
                _read.left.append(_described(code, error))
            return left
        except SkipFrame as error:
            if _left_by(error) is None or not any(map(left_out.has_experts, args[1].values())):
                raise
            with api.config.patch(allow_empty_graphs=True):
                return method(code, *args, **kwargs)
        finally:
            _read.guards = before

    return compile_frame


def traced(method: Function) -> Function:
    """Wrap `trace_frame`, which is one attempt to trace a function."""

    def trace_frame(*args: object, **kwargs: object) -> object:
        try:
            done = method(*args, **kwargs)
        except Exception as error:
            tracer = _traced_by(error)
            if tracer is None:
                raise
            if isinstance(error, RestartAnalysis) and _is_ours(tracer):
                found = (g for g in tracer.output.guards if g.create_fn_name() in _OF_FLAGS)
                _read.guards = (*_read.guards, *(g for g in found if _stands_alone(g.originating_source)))
            without_rules(tracer, error)
            tell_failure(args, error)
            raise
        tell_failure(args)
        if kwargs.get("package") is None:  # saved code has Dynamo's own guards
            known = done.output_graph.tracing_context.guards_context.dynamo_guards
            added = [g for g in _read.guards if g not in known.inner]
            for guard in added:
                known.add(guard)
            session(done.output_graph).added_guards = added
        return done

    return trace_frame


def _stands_alone(source: Source | None) -> bool:
    """Return whether a guard on `source` works alone. A guard on a dict's key, or on a value by its
    position among the keys, also needs the guard on the whole dict, from the attempt that read it."""
    while source is not None:
        if isinstance(source, ConstDictKeySource) or isinstance(
            getattr(source, "index", None), ConstDictKeySource
        ):
            return False
        source = getattr(source, "base", None)
    return True


def guards_built(method: Function) -> Function:
    """Wrap `build_guards` of Dynamo's result for a function."""

    def build_guards(self: DynamoOutput, *args: object, **kwargs: object) -> object:
        output = self.tracer_output.output_graph
        added = session(output).added_guards if output is not None else []
        if output is None or not added:
            return method(self, *args, **kwargs)
        session(output).added_guards = []
        try:
            return method(self, *args, **kwargs)
        except Exception:
            log.debug("Dynamo's guards cannot be built with those of an attempt before", exc_info=True)
        known = output.tracing_context.guards_context.dynamo_guards
        known.inner.difference_update(added)
        return method(self, *args, **kwargs)

    return build_guards


def _described(code: types.CodeType, error: BaseException) -> Left:
    stack = getattr(error, "real_stack", ())
    at = (stack[-1].filename, stack[-1].lineno) if stack else (None, None)
    return Left(
        code.co_name, code.co_filename, code.co_firstlineno, type(error).__qualname__, str(error), *at
    )


def _traced_by(error: BaseException) -> Tracer | None:
    """Return the tracer that was at work when the error was raised, or None."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "trace_frame" and "tracer" in trace.tb_frame.f_locals:
            return trace.tb_frame.f_locals["tracer"]
        trace = trace.tb_next
    return None


def _is_ours(tracer: Tracer) -> bool:
    """Return whether the function is traced for one of our backends, and may run in Python instead."""
    fixed = not may_break(tracer) or tracer.is_tracing_resume_prologue
    return not fixed and session(tracer.output).is_ours and failure(tracer) is None


def _left_by(error: BaseException) -> Tracer | None:
    """Return the tracer of a function of ours that may run in Python instead."""
    tracer = _traced_by(error)
    return tracer if tracer is not None and _is_ours(tracer) else None


def _as_it_is(code: types.CodeType, tracer: Tracer) -> DynamoOutput | None:
    """Return the code under the guards that led to the error. None if these cannot be built."""
    given: dict[str, object] = {
        "tracer_output": api.DynamoTracerOutput(tracer), "bytecode": code.replace(), "pycode": [],
        "last_attempt_start_time": None,
    }  # fmt: skip
    left = api.DynamoOutput(**{f.name: given[f.name] for f in dataclasses.fields(api.DynamoOutput)})
    try:
        left.build_guards(code)
    except Exception:  # the trace may have ended anywhere; without guards Dynamo does what it always did
        return None
    return left
