"""Captures a step of a compiled model as one CUDA graph.

With torch's own CUDA graphs every step passes through the compiled function's guards and wrappers, which
often take longer than the step on the GPU. Here the function is compiled without CUDA graphs, and the whole
step is captured, so a replay costs the host only microseconds. This is correct if every step runs the same
kernels on the same memory, as with a static cache and one token for each row.
"""

from __future__ import annotations

import copy
import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...meta.torch_internals import graphs_compiled

_WITHOUT = {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}
"""Modes of torch.compile that use CUDA graphs, each with the same mode without them."""
_BACKENDS = ("inductor", "fp4")
"""Backends that use CUDA graphs only if they are asked to."""
_log = logging.getLogger("fp4_ops")
_streams = threading.local()


def without_graphs(config: Any) -> Any:
    """Returns transformers' CompileConfig `config` without CUDA graphs.

    Returns None if it asks for none, or if its backend may use them in any case.
    """
    options = dict(config.options or {})
    asked = options.pop("triton.cudagraphs", False) or config.mode in _WITHOUT
    if not asked or config.backend not in _BACKENDS:
        return None
    changed = copy.copy(config)
    changed.mode, changed.options = _WITHOUT.get(config.mode, config.mode), options or None
    return changed


class GraphStep:
    """Runs `step`, which takes one token for each row, as a CUDA graph.

    A step that compiles code or waits for the GPU cannot be captured. So steps run without capture until one
    step does not compile. If a step waits, `give_up` is called, and no step is captured. Each step overwrites
    the outputs of the one before.
    """

    def __init__(self, step: Callable[[Tensor], Any], give_up: Callable[[], None]) -> None:
        self.step, self.give_up = step, give_up
        self.token: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: Any = None
        self.quiet = self.given_up = False

    def __call__(self, token: Tensor) -> Any:
        if self.given_up:
            return self.step(token)
        if self.token is None:
            self.token = token.clone()
        else:
            self.token.copy_(token)
        if self.graph is None and self.quiet:
            self._capture(self.token)
        if self.graph is not None:
            self.graph.replay()
            return self.outputs
        compiled = graphs_compiled()
        outputs, waited = _observed(self.step, self.token)
        self.quiet = compiled == graphs_compiled()
        if self.quiet and waited:
            _log.info(
                "fp4: a step of the model waits for the GPU (%s), so it cannot be one CUDA graph", waited
            )
            self.quiet, self.given_up = False, True
            self.give_up()
        return outputs

    def _capture(self, token: Tensor) -> None:
        # torch.cuda.graph collects garbage first, which takes as long as dozens of steps.
        graph, stream = torch.cuda.CUDAGraph(), _capture_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")  # other threads may use the GPU meanwhile
            try:
                self.outputs = self.step(token)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = graph


def _capture_stream(device: int) -> torch.cuda.Stream:
    """Returns this thread's stream for captures. cuBLAS keeps a workspace for every stream that it sees (32
    MiB on Hopper), so a new stream for each call of `generate` would cost memory."""
    streams: Any = vars(_streams)  # streams of this thread
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    found: torch.cuda.Stream = streams[device]
    return found


def _observed(step: Callable[[Tensor], Any], token: Tensor) -> tuple[Any, str]:
    """Runs a step. Returns its result, and where it waits for the GPU ("" if it does not)."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            outputs = step(token)
        finally:
            torch.cuda.set_sync_debug_mode(before)
    waits = [w for w in said if "synchronizing CUDA operation" in str(w.message)]
    for other in said:
        if other not in waits:
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
    return outputs, f"{waits[0].filename}:{waits[0].lineno}" if waits else ""
