"""A step of a compiled model as one CUDA graph.

With torch's own CUDA graphs every step passes through guards and wrappers of the compiled function, which
take longer than many steps on the GPU. Here the function is compiled without them, and the whole step is
captured: a replay costs the host some microseconds. That is right where a step is the same kernels on the
same memory each time, as with a static cache and a token a row.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_WITHOUT = {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}
"""The modes of torch.compile that use CUDA graphs, and what they are without."""
_BACKENDS = ("inductor", "fp4")
"""Those that are known to use no CUDA graphs but where they are asked to."""
_log = logging.getLogger("fp4_ops")


def without_graphs(config: Any) -> Any:
    """transformers' CompileConfig `config`, without its CUDA graphs. None if it asks for none, or if its
    backend may use them all the same."""
    options = dict(config.options or {})
    asked = options.pop("triton.cudagraphs", False) or config.mode in _WITHOUT
    if not asked or config.backend not in _BACKENDS:
        return None
    changed = copy.copy(config)
    changed.mode, changed.options = _WITHOUT.get(config.mode, config.mode), options or None
    return changed


class GraphStep:
    """`step`, which is called with a token a row, with a CUDA graph.

    What a step compiles, and what it waits for the GPU to tell, cannot be captured. So the first steps run as
    they are, until one did neither. If one waits, `give_up` is called, and `step` runs as it is ever after.
    The outputs of a step are overwritten by the next one.
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
        compiled = _graphs_compiled()
        outputs, waited = _observed(self.step, self.token)
        self.quiet = compiled == _graphs_compiled()
        if self.quiet and waited:
            _log.info("fp4: a step of the model waits for the GPU (%s): no CUDA graph of all of it", waited)
            self.quiet, self.given_up = False, True
            self.give_up()
        return outputs

    def _capture(self, token: Tensor) -> None:
        # torch.cuda.graph would collect garbage first, which takes as long as dozens of steps.
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")  # other threads may use the GPU meanwhile
            try:
                self.outputs = self.step(token)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = graph


def _graphs_compiled() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _observed(step: Callable[[Tensor], Any], token: Tensor) -> tuple[Any, str]:
    """What a step returns, and where it waits for the GPU; "" if it does not."""
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
