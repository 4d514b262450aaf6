"""Turns off torch's cache of operator results for fake tensors where the cache only costs time.

Dynamo runs each operator on fake tensors, and caches the result for later calls with similar inputs. In a
loop over experts, nearly every call has a new data-dependent size. Its cache entry is then created, checked
by computing the result again, and never used. With 128 experts this took over a third of Dynamo's time.
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
