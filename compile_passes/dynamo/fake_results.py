"""torch's cache of what operators give for fake tensors, left out where it only costs time.

Dynamo runs each operator on fake tensors, and keeps the result for the next operator that is given the like.
A size that only the data knows is like no other, so in a loop over experts nearly each entry is made, checked
by making the result once more, and never found: with 128 experts that was over a third of Dynamo's time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api import OutputGraph, Proxy


def without_cache(method: Callable[..., Proxy]) -> Callable[..., Proxy]:
    """Wrap the method by which Dynamo's output adds a node. It stops caching at the first such size."""

    def create_proxy(self: OutputGraph, *args: object, **kwargs: object) -> Proxy:
        mode = self.tracing_context.fake_mode
        if mode is not None and mode.cache_enabled and mode.shape_env.size_like:
            mode.cache_enabled = False
        return method(self, *args, **kwargs)

    return create_proxy
