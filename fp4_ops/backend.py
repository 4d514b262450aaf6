"""The torch.compile backend `fp4`. torch finds it by its entry point, so nobody needs to import fp4_ops."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

log = logging.getLogger("fp4_ops")


def fp4(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles a graph with Inductor and 4-bit experts: `torch.compile(model, backend="fp4", options={...})`.

    Expert blocks become `fp4::moe`, or single products. A block that cannot be proved keeps its weights, and
    `fp4_ops.explain` or the log ("fp4_ops") says why. With gradients on, Inductor gets the graph unchanged.

    mode: one of Inductor's modes.
    options: any of Inductor's, and these:
        "format": "nvfp4", "mxfp4", "int4", ... (fp4_ops.info().formats).
        "activation": "auto", "bf16" (the model's dtype), "fp8", "int8", or the weights' FP4 format.
        "attention", "dense", "head": a format for the linear layers outside the experts, by kind, as in
            `fp4_ops.prepare`; "keep" (default) leaves them as they are.
        "linear": True means "dense" in the experts' format.
        "strict": True raises an error if something that looks like experts keeps its weights.

    Loading this module lets Dynamo capture loops over experts for this backend. For others nothing changes.
    """
    from .compile_passes.options import parse
    from .compile_passes.pipeline import compile_graph
    from .meta.torch_internals import compile_fx

    with _says_when_long():
        return compile_graph(gm, example_inputs, parse(mode, options), compile_fx)


PATIENCE = 5.0
"""After this number of seconds, a message says that a compilation is still running."""

_said = threading.Event()


@contextmanager
def _says_when_long() -> Iterator[None]:
    """Say once in a process that a graph is being compiled, if that takes long.

    A user at a terminal sees a warning. Elsewhere the log gets a line of level INFO.
    """

    def say() -> None:
        if _said.is_set():
            return
        _said.set()
        at_a_terminal = sys.stderr is not None and sys.stderr.isatty()
        log.log(
            logging.WARNING if at_a_terminal else logging.INFO,
            "fp4: Inductor compiles the first graph, which can take minutes for a large model. Later calls "
            "of the same kind do not wait.",
        )

    timer = threading.Timer(PATIENCE, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _capture_loops() -> None:
    """Lets Dynamo capture loops over experts for this backend. Without that it skips such frames silently.

    Dynamo traces before it calls a backend. So this happens when `torch.compile(backend="fp4")` loads this
    module.
    """
    from .compile_passes.dynamo.extend import extend_dynamo

    extend_dynamo()


_capture_loops()


def _reset() -> None:
    """Forgets packed weights and recorded CUDA graphs. torch.compiler.reset() calls this."""
    from .compile_passes.weights.runtime import forget_all

    forget_all()
    if "fp4_ops.compile_passes.pipeline" in sys.modules:  # else nothing was compiled
        from .compile_passes.dynamo.left_out import forget_limits
        from .compile_passes.pipeline import forget_failures

        forget_failures()
        forget_limits()
    if torch.cuda.is_available():
        from .meta.torch_internals import reset_cudagraph_trees

        reset_cudagraph_trees()


fp4.reset = _reset  # type: ignore[attr-defined]
fp4.sees_through_branches = True  # type: ignore[attr-defined]
