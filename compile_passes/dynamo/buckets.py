"""Keeps graphs of modules in DDP whole, or remembers them while their parts are compiled.

DDP cuts a graph where its buckets of gradients end. A cut may go through a block of experts, or separate the
block from its router. If no gradients are needed, no cut is made. If gradients are needed, experts keep their
original weights. The report must then name the experts, and only the whole graph shows that there are any.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..graph.traced_nodes import asks_for_gradients
from .rules import is_ours

if TYPE_CHECKING:
    from torch import fx

    from .api import DDPOptimizer, Function


@dataclass
class Whole:
    """A graph of Dynamo's that DDP has cut."""

    graph: fx.GraphModule
    inputs: Sequence[object]
    is_told: bool = False
    """Whether a report on one of its parts has named its experts."""


class _Compiled(threading.local):
    whole: Whole | None = None


_compiled = _Compiled()


def in_one_bucket(method: Function) -> Function:
    """Wrap `DDPOptimizer.compile_fn`, which cuts a graph and compiles its parts."""

    def compile_fn(
        self: DDPOptimizer, gm: fx.GraphModule, inputs: Sequence[object], **kwargs: object
    ) -> object:
        if not is_ours(self.backend_compile_fn):
            return method(self, gm, inputs, **kwargs)
        if asks_for_gradients(gm, inputs):
            _compiled.whole = Whole(gm, inputs)
        else:
            self.bucket_bytes_cap = self.first_bucket_cap = sys.maxsize
        try:
            return method(self, gm, inputs, **kwargs)
        finally:
            _compiled.whole = None

    return compile_fn


def whole() -> Whole | None:
    """Return the whole graph whose part is being compiled. None if the graph was not cut."""
    return _compiled.whole
