"""Numbers that Python hands to a graph: what comes of them may be another thing at the next call.

Where `counts.tolist()` breaks the graph, the rest of the function is compiled for the numbers of this call.
Slices that are as long as each other by chance, or experts 0 to n of a list of hits, would be taken for a
block, and at the next call not: what runs in 4 bits would depend on the data.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ...meta.torch_internals import TracingContext


def lists_given() -> dict[str, int]:
    """The lists of numbers that the function being compiled was given, and how many of each it read."""
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
