"""Finds numbers that Python passes to a graph. Results that depend on them may differ in the next call.

If `counts.tolist()` breaks the graph, the rest of the function is compiled for the numbers of this call.
Slices that have equal lengths by chance, or experts 0 to n of a list of hits, would then look like a block,
but not in the next call: the use of 4 bits would depend on the data.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ...meta.torch_internals import TracingContext


def lists_given() -> dict[str, int]:
    """Return the lists of numbers that the compiled function was given, and how many numbers of each it
    read."""
    context: Any = TracingContext.try_get()
    if context is None:
        return {}
    found: Counter[str] = Counter()
    for guard in context.guards_context.dynamo_guards:
        source = guard.originating_source
        base: Any = getattr(source, "base", None)
        constant = guard.create_fn_name() in ("CONSTANT_MATCH", "EQUALS_MATCH")
        if constant and type(source).__name__ == "GetItemSource" and type(base).__name__ == "LocalSource":
            found[base.local_name] += 1
    return {name: n for name, n in found.items() if n > 1}
