"""`fp4_ops.explain` says what the backend would do with a model, without compiling it."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import fx

from ..experts.zero3 import refuse_emptied
from ..models.memory_plan import memory_plan_of
from .dynamo.api import config, counters, get_compilation_metrics
from .dynamo.branches import KEPT, SEEN_THROUGH, Kept
from .dynamo.extend import extend_dynamo
from .dynamo.left_frames import noted
from .dynamo.left_out import (
    about_a_number,
    breaks_since,
    described,
    expert_parameters,
    innermost,
    inside,
    known_breaks,
    matrices_of,
    reason_of,
)
from .dynamo.limits import each_compiled, too_often
from .naming import short_path
from .options import parse
from .pipeline import analyse, failure
from .report import Report
from .weights.given import given


def explain(
    model: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Report:
    """Runs `model(*args, **kwargs)` once and reports what the backend would do with each of its experts.

    model: a module, or any function that torch.compile takes.
    args, kwargs: inputs that it can run with; their sizes matter only for the estimated gain.
    options: the options of the backend (docs/compiler.md).

    The run is eager, under `torch.no_grad()`; nothing is quantised or compiled. `str(report)` is a text to
    read. `report.sites` has a `Site` for each place that looks like experts; a site that is not rewritten has
    a `reason` and a `change`. `report.frames` has the graphs, and `report.to_dict()` returns the whole report
    as plain data. Raises ValueError for unknown options. Errors of the model are raised as they are.
    """
    chosen = parse(None, options)
    report = Report()

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        frame = analyse(given(gm, inputs), chosen)[1]
        frame.not_compiled = failure(frame.name)
        report.frames.append(frame)
        return gm.forward

    model = getattr(model, "_orig_mod", model)
    if isinstance(model, torch.nn.Module):
        refuse_emptied(model)
    before = {name: Counter(counters[name]) for name in _COUNTERS}
    stayed = dict(KEPT)
    compilations, known = list(get_compilation_metrics()), known_breaks()
    # The graphs made here stay in Dynamo's cache beside the user's own, so they must not use up its limit.
    settings = {"recompile_limit": 1024, "accumulated_recompile_limit": 4096}
    extend_dynamo()
    backend.sees_through_branches = True  # type: ignore[attr-defined]
    backend.watched = False  # type: ignore[attr-defined]
    with config.patch(settings), torch.no_grad(), noted() as left, each_compiled() as compiled:
        torch.compile(model, backend=backend)(*args, **kwargs)
    new = {name: Counter(counters[name]) - before[name] for name in _COUNTERS}
    breaks = breaks_since(known)
    reasons = list(new["graph_break"] | new["unimplemented"])
    counted = list(map(reason_of, reasons))
    asks_for_number = any(map(about_a_number, [*reasons, *(b.reason for b in breaks)]))
    placed = list(dict.fromkeys(map(described, breaks)))
    report.graph_breaks = placed + [
        r for r in dict.fromkeys(counted) if not any(p.startswith(r) for p in placed)
    ]
    report.skipped = new["frames"]["total"] - new["frames"]["ok"]
    new_ones = [m for m in get_compilation_metrics() if not any(m is old for old in compilations)]
    failed = [*left, *(m for m in new_ones if m.fail_type is not None)]
    report.not_captured = list(dict.fromkeys(_not_captured(frame, breaks) for frame in failed))
    plan = memory_plan_of(model)
    report.memory = str(plan) if plan is not None else ""
    report.seen_through = [short_path(place) for place in new[SEEN_THROUGH]]
    new_kept = [kept for place, kept in KEPT.items() if stayed.get(place) is not kept]
    report.hints = too_often(compiled) + (
        _hints(model, report, new_kept, asks_for_number, breaks)
        or _dynamos_hints(failed, breaks)
        or _no_products(model, report)
    )
    return report


def _not_captured(frame: Any, breaks: Sequence[Any]) -> str:
    """Describe a frame that Dynamo did not capture, from its CompilationMetrics or a similar object."""
    what = f"{frame.co_name} ({short_path(frame.co_filename)}:{frame.co_firstlineno})"
    cause = inside(frame.co_name, frame.co_filename, frame.fail_user_frame_lineno, breaks)
    if cause is not None:
        return f"{what}, for what line {frame.fail_user_frame_lineno} calls: {described(cause)}"
    reason = reason_of(frame.fail_reason or frame.fail_type)
    at = f"line {frame.fail_user_frame_lineno}"
    if frame.fail_user_frame_filename != frame.co_filename:
        at = f"{short_path(frame.fail_user_frame_filename or '?')}:{frame.fail_user_frame_lineno}"
    return f"{what}, for {at}: {reason}"


_COUNTERS = ("graph_break", "unimplemented", "frames", SEEN_THROUGH)


_NUMBERS = ("tolist", "item()", "Data dependent operator")
"""Texts in Dynamo's reasons, and in the lines that these quote, which show that Python takes numbers out of
tensors."""


def _hints(
    model: Any, report: Report, branches: Sequence[Kept], asks_for_number: bool, breaks: Sequence[Any]
) -> list[str]:
    """List changes to the model that would bring experts into a graph."""
    hints: list[str] = []
    config = getattr(model, "config", None)
    if getattr(config, "_experts_implementation", None) == "eager" and not report.bytes_before:
        others = (getattr(m, "_can_set_experts_implementation", None) for m in model.modules())
        if any(can is not None and can() for can in others):  # not if the model only has its own loop
            hints.append(
                "transformers' eager experts are a loop, which is not recognised in this model: "
                "model.set_experts_implementation('grouped_mm'), or fp4_ops.prepare(model)"
            )
    places = [kept.place for kept in branches]
    places += [f"{f.filename}:{f.lineno}" for b in breaks if (f := innermost(b.user_stack)) is not None]
    if places and not any(_may_be_of_experts(model, place) for place in places):
        return hints
    for kept in branches:
        what, instead = ("a loop", "loop over all of them") if kept.is_loop else ("a branch", "drop it")
        hints.append(
            f"{short_path(kept.place)} stays {what}: {kept.why.reason}. Change: {kept.why.change}. "
            f"If it only skips experts without rows, {instead}: they cost nothing"
        )
    if not branches and any("branching" in reason for reason in report.graph_breaks):
        hints.append(
            "a branch on data keeps a function out of the graphs: compute both ways, or use torch.where"
        )
    over_unique = any("unique(" in reason for reason in report.graph_breaks)
    if over_unique:
        hints.append(
            "how often a loop over torch.unique(ids) runs depends on the data: loop over all experts, "
            "`for e in range(E): token, slot = torch.where(ids == e)`; those without rows cost nothing"
        )
    takes_numbers = any(name in reason for name in _NUMBERS for reason in report.graph_breaks)
    if not over_unique and (takes_numbers or (asks_for_number and not branches)):
        hints.append(
            "a function takes numbers out of tensors (.tolist(), .item(), .cpu().numpy()) and goes on "
            "in Python; if it slices rows sorted by expert (`x[start:end]`), cut them all at once, "
            "`rows.split(counts.tolist())` with counts = torch.bincount(ids, minlength=E) of topk's ids, or "
            "let each expert take its rows by the tensors that `token, slot = torch.where(ids == e)` gives, "
            "x[token] (no list of them), or all of them by one grouped_mm with offsets counts.cumsum(0): "
            "then no number leaves the graph"
        )
    return hints


def _may_be_of_experts(model: Any, place: str) -> bool:
    """Return whether a module whose code has this line ("file:line"), or a module that holds it, may have
    experts. True if no module's code has the line: any of them may call it."""
    modules = dict(model.named_modules()) if isinstance(model, torch.nn.Module) else {}
    have_line = {cls: _has_line(cls, place) for cls in set(map(type, modules.values()))}
    paths = [path for path, module in modules.items() if have_line[type(module)]]
    around = {path[:end] for path in paths for end, c in enumerate(path) if c == "."} | {""}
    below = (m for path in paths for m in modules[path].modules())
    return not paths or any(map(_may_have_experts, [*below, *(modules[path] for path in around)]))


def _may_have_experts(module: torch.nn.Module) -> bool:
    """Return whether a module has a stack of matrices [E, N, K], two members with the same matrices, or two
    such matrices."""
    children = list(module.children())
    lists = [m for m in children if isinstance(m, _LISTS)]
    members = [*children, *(m for each in lists for m in each.children())]
    own = [w for holder in (module, *lists) for w in matrices_of(holder, False, 2, 3)]
    alike = [[w.shape for w in matrices_of(m, True, 2, 3)] for m in members if m not in lists]
    alike += [[w.shape] for w in own if w.dim() == 2]
    stacked = any(w.dim() == 3 and w.shape[0] > 1 for w in own)
    return stacked or any(n > 1 for n in Counter(str(shapes) for shapes in alike if shapes).values())


_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)


def _has_line(cls: type, place: str) -> bool:
    """Return whether the code of a class, or of a function inside of it, has this line."""
    path, _, line = place.rpartition(":")
    functions = (inspect.unwrap(f) for c in cls.__mro__ for f in vars(c).values() if callable(f))
    todo = [code for f in functions if isinstance(code := getattr(f, "__code__", None), CodeType)]
    for code in todo:
        if code.co_filename == path and any(n == int(line) for *_, n in code.co_lines()):
            return True
        todo += [c for c in code.co_consts if isinstance(c, CodeType)]
    return False


def _no_products(model: Any, report: Report) -> list[str]:
    """Return hints for parameters that look like experts, if nothing was reported about the model's
    graphs."""
    if any(frame.sites or frame.note for frame in report.frames) or not isinstance(model, torch.nn.Module):
        return []
    return [
        f"the parameters of {name} look like experts, but no product of theirs with rows is read as an "
        "expert's: write one by F.linear, @, einsum, torch.bmm or grouped_mm with the parameter itself, "
        "not by elementwise products and sums, a convolution, or weights that forward puts together "
        "(torch.stack, sums of experts' weights); an expert is down(act(gate(x)) * up(x)) or down(act(up(x)))"
        for name in expert_parameters(model)
    ]


def _dynamos_hints(failed: Sequence[Any], breaks: Sequence[Any]) -> list[str]:
    """Return, for each function that Dynamo did not capture, Dynamo's first suggestion."""
    hints: dict[str, None] = {}
    for frame in failed:
        cause = inside(frame.co_name, frame.co_filename, frame.fail_user_frame_lineno, breaks)
        text = (frame.fail_reason or "") if cause is None else cause.reason
        first = next((line for line in map(str.strip, text.splitlines()) if line.startswith("Hint: ")), None)
        if first is not None:
            hints[f"{_not_captured(frame, breaks)}. {first.removeprefix('Hint: ')}"] = None
    return list(hints)
