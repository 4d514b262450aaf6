"""`fp4_ops.explain`: what the backend would do with a model, without compiling it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .options import CAPTURE, parse
from .pipeline import analyse
from .report import Report


def explain(
    model: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Report:
    """Run `model(*args, **kwargs)` once under `torch.no_grad()` and report every graph and every expert site.

    Nothing is quantised or compiled; `options` are those of the backend. `str(report)` is for people,
    `report.sites` (and `report.frames`) for programs.
    """
    chosen = parse(None, options)
    report = Report()

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        report.frames.append(analyse(gm, inputs, chosen)[1])
        return gm.forward

    model = getattr(model, "_orig_mod", model)
    breaks = torch._dynamo.utils.counters["graph_break"]
    before = Counter(breaks)
    # The graphs made here stay in Dynamo's cache beside the user's own: don't let them use up the limit.
    settings = {"recompile_limit": 1024, "accumulated_recompile_limit": 4096, **CAPTURE}
    with torch._dynamo.config.patch(settings), torch.no_grad():
        torch.compile(model, backend=backend)(*args, **kwargs)
    report.graph_breaks = [reason.strip().splitlines()[0] for reason in Counter(breaks) - before]
    return report
