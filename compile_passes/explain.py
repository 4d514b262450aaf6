"""`fp4_ops.explain`: what the backend would do with a model, without compiling it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .dynamo import CAPTURE, break_at_tolist
from .options import parse
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
    counters = torch._dynamo.utils.counters
    before = {name: Counter(counters[name]) for name in _COUNTERS}
    # The graphs made here stay in Dynamo's cache beside the user's own: don't let them use up the limit.
    settings = {"recompile_limit": 1024, "accumulated_recompile_limit": 4096, **CAPTURE}
    break_at_tolist()
    with torch._dynamo.config.patch(settings), torch.no_grad():
        torch.compile(model, backend=backend)(*args, **kwargs)
    new = {name: Counter(counters[name]) - before[name] for name in _COUNTERS}
    reasons = (new["graph_break"] | new["unimplemented"]).keys()
    report.graph_breaks = list(dict.fromkeys(reason.strip().splitlines()[0] for reason in reasons))
    report.skipped = new["frames"]["total"] - new["frames"]["ok"]
    report.hints = _hints(model, report)
    return report


_COUNTERS = ("graph_break", "unimplemented", "frames")


def _hints(model: Any, report: Report) -> list[str]:
    """What the user could change, for what is known to keep experts out of the graphs."""
    hints = []
    config = getattr(model, "config", None)
    if getattr(config, "_experts_implementation", None) == "eager" and not report.bytes_before:
        hints.append(
            "transformers' eager experts are a loop that Dynamo does not capture: "
            "model.set_experts_implementation('grouped_mm'), or fp4_ops.prepare(model)"
        )
    if any("branching" in reason for reason in report.graph_breaks):
        hints.append(
            "a branch on data keeps a function out of the graphs; if it is `if rows.numel() == 0: continue` "
            "in a loop over experts, drop it: an expert without rows costs nothing"
        )
    if any("tolist" in reason or "Data dependent operator" in reason for reason in report.graph_breaks):
        hints.append(
            "a function takes numbers out of tensors (.tolist(), .item(), .cpu().numpy()) and goes on "
            "in Python; if it slices rows sorted by expert (`x[start:end]`, with the counts of bincount), "
            "let each expert take its rows by `token, slot = torch.where(ids == e)`, or all of them by one "
            "grouped_mm with offsets counts.cumsum(0): then no number leaves the graph"
        )
    if any(frame.note.startswith("left to Inductor, because gradients") for frame in report.frames):
        hints.append("run the model under torch.no_grad() or torch.inference_mode()")
    return hints
