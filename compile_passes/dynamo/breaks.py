"""Says why Dynamo left a graph, and at which line, from the reasons that Dynamo keeps."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...meta.text import first_line
from ..naming import TORCH, short_path
from .api import graph_break_reasons

if TYPE_CHECKING:
    from .api import GraphCompileReason

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
