"""Notes which functions Dynamo leaves to Python because it has compiled them too often.

Dynamo compiles a function again for each kind of module and of input that it meets, and stops at
`recompile_limit`. All that the function calls then runs in Python, too. Hooks of accelerate are one such
function for all modules of a model.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from ..naming import short_path
from . import api, left_out
from .api import Unsupported
from .rules import is_ours

if TYPE_CHECKING:
    from types import CodeType

    from .api import Function

_LIMIT = re.compile(r"Limit type: ((?:accumulated_)?recompile_limit)\b")
"""Finds the limit in Dynamo's error. The name of a limit alone is not enough: another error may quote a line
of the user's code with that name."""


_REST = "torch_dynamo_resume_in"
"""How Dynamo's name for the rest of a function after a graph break begins. Its arguments are the user's
variables, which do not show what was called."""


class _Counting(threading.local):
    compiled: Counter[CodeType] | None = None
    is_last: bool = False


_counting = _Counting()


@contextmanager
def each_compiled() -> Iterator[Counter[CodeType]]:
    """Count how often Dynamo compiles each function in this thread, as a context manager."""
    before, _counting.compiled = _counting.compiled, Counter()
    try:
        yield _counting.compiled
    finally:
        _counting.compiled = before


def is_last() -> bool:
    """Return whether Dynamo will not compile the current function again after this time."""
    return _counting.is_last


def noticed(method: Function) -> Function:
    """Wrap `_compile` of Dynamo's `convert_frame`, which asks for the limit."""

    def compile_one(code: CodeType, *args: object, **kwargs: object) -> object:
        if _counting.compiled is not None:
            _counting.compiled[code] += 1
        before, _counting.is_last = _counting.is_last, any(map(_is_nearly_full, args))
        given = _modules_given(code, args) if any(map(is_ours, args)) else []
        if not code.co_name.startswith(_REST):
            left_out.note_given(given)
        try:
            return method(code, *args, **kwargs)
        except Unsupported as error:
            limit = _LIMIT.search(str(error))
            if limit is not None and any(map(is_ours, args)):
                left_out.note_limit(limit[1], getattr(api.config, limit[1]), _described(code), given)
            raise
        finally:
            _counting.is_last = before

    return compile_one


def _modules_given(code: CodeType, args: Sequence[object]) -> list[nn.Module]:
    """Return the modules among a function's arguments."""
    known = args[1] if len(args) > 1 and isinstance(args[1], dict) else {}
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [known[n] for n in names if isinstance(known.get(n), nn.Module)]


def _is_nearly_full(given: object) -> bool:
    """Return whether this is Dynamo's record of a function's cache, with room for one entry."""
    entries = getattr(given, "num_cache_entries_with_same_id_matched_objs", None)
    return entries is not None and entries + 1 >= api.config.recompile_limit


def too_often(compiled: Counter[CodeType]) -> list[str]:
    """Return, for each function that is compiled more often than the limit allows, what to set."""
    limit = api.config.recompile_limit
    return [
        f"{_described(code)} is compiled {times} times, but torch._dynamo.config.recompile_limit is {limit}: "
        "Dynamo leaves the rest, and all that it calls, to Python. "
        f"Set torch._dynamo.config.recompile_limit = {times} before the first call"
        for code, times in compiled.items()
        if times > limit
    ]


def _described(code: CodeType) -> str:
    return f"{code.co_name} ({short_path(code.co_filename)}:{code.co_firstlineno})"
