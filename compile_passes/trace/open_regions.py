"""Ends what a graph has begun when its trace fails in between: regions of autocast, and levels of torch.func.

Whatever is traced afterwards would run inside them: the whole graph after its calls, or Inductor's own trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ...meta.torch_internals import enter_autocast, exit_autocast, functorch_depth, leave_functorch_levels


class OpenRegions:
    """The regions of autocast that the calls of a graph have entered so far."""

    def __init__(self) -> None:
        self._autocasts: list[Any] = []

    def ran(self, function: Any, args: Any, result: Any) -> None:
        """Take note of a call of the graph, which has run."""
        if function is enter_autocast:
            self._autocasts.append(result)
        elif function is exit_autocast:
            self._autocasts.remove(args[0])

    @contextlib.contextmanager
    def ended(self) -> Iterator[None]:
        """End the regions and levels that are still open at the end."""
        depth = functorch_depth()
        try:
            yield
        finally:
            leave_functorch_levels(depth)
            while self._autocasts:
                exit_autocast(self._autocasts.pop())
