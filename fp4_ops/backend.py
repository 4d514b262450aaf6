"""The torch.compile backend `fp4`; torch finds it by its entry point, without an import of fp4_ops."""

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
    """Inductor with 4-bit experts: `torch.compile(model, backend="fp4", options={...})`.

    options: "format" ("nvfp4", "mxfp4", "int4", ...: fp4_ops.info().formats), "activation" ("auto", "bf16",
    "fp8", "int8" or the weights' own FP4 format; "bf16" leaves activations in the model's dtype), "linear"
    (also linear layers outside experts), "strict" (an error where something that looks like experts keeps
    its weights), and any of Inductor's own. `mode` is Inductor's.
    Loading this backend turns torch._dynamo.config.capture_dynamic_output_shape_ops on: see `_capture_loops`.
    Expert blocks become `fp4::moe`, or else single products; what cannot be proved stays as it is, and
    `fp4_ops.explain` or the log ("fp4_ops") says why. With gradients the graph is Inductor's own.
    """
    from torch._inductor.compile_fx import compile_fx

    from .compile_passes.options import parse
    from .compile_passes.pipeline import compile_graph

    with _says_when_long():
        return compile_graph(gm, example_inputs, parse(mode, options), compile_fx)


PATIENCE = 5.0
"""Seconds after which a compilation says that it goes on."""

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
    """Let Dynamo capture loops over experts: otherwise it skips such frames silently, before any backend.

    Dynamo reads this setting before it calls a backend and has none for a single backend, so it is made when
    this module is loaded, which `torch.compile(backend="fp4")` does, and for the whole process.
    """
    from .compile_passes.dynamo.extend import capture_loops

    capture_loops()


_capture_loops()


def _reset() -> None:
    """torch.compiler.reset() forgets packed weights, and recorded CUDA graphs as it does for Inductor."""
    from .compile_passes.fail_open import forget_failures
    from .compile_passes.weights.runtime import forget_all

    forget_all()
    forget_failures()
    if torch.cuda.is_available():
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


fp4.reset = _reset  # type: ignore[attr-defined]
fp4.sees_through_branches = True  # type: ignore[attr-defined]
