"""A rewritten graph that Inductor cannot compile goes to Inductor as Dynamo captured it.

Such a failure is a fault of this package, and the model must run all the same. A warning says so once for
each graph, `fp4_ops.explain` says so afterwards, and with option "strict" it is an error. Where Inductor
cannot compile the captured graph either, the user sees that error, as with backend="inductor".
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

from .dynamo.api import RestartAnalysis, SkipFrame
from .report import Frame

log = logging.getLogger("fp4_ops")

Compiled = Callable[..., Any]

_failures: dict[str, str] = {}
"""The error of each graph that was compiled as captured, by the graph's name."""


def compiled_or_as_captured(
    frame: Frame, rewritten: Callable[[], Compiled], as_captured: Callable[[], Compiled], strict: bool
) -> Compiled:
    """Compile the rewritten graph; if that fails, compile the captured graph and warn.

    Raises RuntimeError with `strict` if the rewritten graph fails, and what Dynamo uses to start over.
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
"""End of the cause in torch's errors. After it come the user's stack and general advice."""


def failure(name: str) -> str:
    """The error of the graph, if it was compiled as captured in this process; else an empty string."""
    return _failures.get(name, "")


def forget_failures() -> None:
    _failures.clear()
