"""If this package's additions to Dynamo fail, a model compiles as with another backend."""

from __future__ import annotations

import logging

import pytest
import torch
from conftest import more
from count_loops import ByCounts
from hit_loops import HitsByItem, HitsByTensor
from moe_models import Recorder, relative_error
from repository_styles import NumpyEnds
from torch import nn

from fp4_ops import explain
from fp4_ops.compile_passes.dynamo import (
    api,
    branches,
    empty_rows,
    extend,
    hit_experts,
    known_values,
    left_frames,
    left_out,
    open_counts,
    row_counts,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

PARTS = [
    (branches, "_rows_asked_for", HitsByItem),
    (branches, "into_the_graph", HitsByItem),
    (empty_rows.Way, "prove", HitsByTensor),
    (hit_experts, "_hits", HitsByTensor),
    (hit_experts, "_rounds", HitsByItem),
    (known_values, "create", HitsByTensor),
    (known_values, "_value", HitsByTensor),
    (known_values, "number", HitsByTensor),
    (row_counts, "_are_counts", ByCounts),
    (row_counts, "number_of", ByCounts),
    (open_counts, "_list", NumpyEnds),
    (open_counts, "_source", ByCounts),
]
"""What rules call while Dynamo traces, and a model for which they do."""


def failing(monkeypatch, owner, name):
    """Every call of it fails; returns the list of calls."""
    calls = []

    def fail(*args, **kwargs):
        calls.append(args)
        raise KeyError("a fault")

    monkeypatch.setattr(owner, name, fail)
    return calls


def runs(module, backend, **options):
    compiled = torch.compile(module, backend=backend, **options)
    twins = [module.twin()] if hasattr(module, "twin") else []
    with torch.no_grad():
        for n in (9, 5):
            x = torch.randn(n, module.H)
            got = compiled(x)
            assert any(relative_error(got, m(x)) < 1e-5 for m in (module, *twins))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("owner", "name", "style"), [PARTS[0], PARTS[2], PARTS[5], *(more(*p) for p in PARTS)]
)
def test_a_rule_that_fails_while_dynamo_traces(owner, name, style, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "fp4_ops")
    calls, module = failing(monkeypatch, owner, name), style()
    runs(module, Recorder(activation="bf16"))
    assert calls
    told = [r.getMessage() for r in caplog.records if "rules for loops over experts" in r.getMessage()]
    kept = [k.why.reason for k in branches.KEPT.values()]  # a round of a loop failed: the loop alone stays
    assert any("a fault" in text for text in told + kept)


@pytest.mark.parametrize("style", [HitsByTensor, more(ByCounts), more(NumpyEnds)])
def test_other_backends_get_dynamos_own_functions(style, monkeypatch):
    calls = [failing(monkeypatch, owner, name) for owner, name, _ in PARTS]
    runs(style(), "eager")
    assert not any(calls)


class Breaks(nn.Module):
    """Reads the keys and values of dicts in a function that breaks the graph."""

    H = 16
    flags = {"a": True, "b": None, 3: 2.5}  # noqa: RUF012
    kinds = {int: "whole", str: "text"}  # noqa: RUF012
    names = {"a", "b"}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(self.H, self.H)

    def inner(self, x):
        for key, value in self.flags.items():
            x = x + len(str(key)) if value else x - 1
        for key in self.kinds:
            x = x * 2 if self.kinds.get(key) == "whole" else x
        for i, key in enumerate(self.flags):
            x = x + i if isinstance(key, str) else x
        x = x + len([n for n in self.names if n in self.flags])
        for name, module in self.named_children():
            x = module(x) + len(name)
        print("", end="")
        return x

    def forward(self, x):
        return self.inner(x) * 2


def test_guards_on_the_keys_of_dicts_that_an_attempt_read():
    runs(Breaks(), Recorder())


def test_guards_that_cannot_be_built_are_left_out(monkeypatch):
    monkeypatch.setattr(left_frames, "_stands_alone", lambda source: True)
    runs(Breaks(), Recorder())


class InALoop(HitsByItem):
    """Breaks the graph within a loop."""

    breaks = True

    def experts_of(self, x, ids, weights):
        if self.breaks:
            for e in range(2):
                x = x + e
                torch._dynamo.graph_break()
        return super().experts_of(x, ids, weights)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (left_out, "_waits"),
        (left_frames, "_as_it_is"),
        (left_frames, "_described"),
        (left_frames, "_stands_alone"),
        (left_frames, "_is_ours"),
    ],
)
def test_a_rule_around_tracing_that_fails(owner, name, monkeypatch):
    calls = failing(monkeypatch, owner, name)
    runs(InALoop(), Recorder(activation="bf16"))
    assert calls or name == "_described"


class Rated(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("rating", torch.tensor(1.0))

    def rate(self):
        return self.rating.item()


class Rates(nn.Module):
    """Dynamo's error has a cause without a text."""

    def __init__(self):
        super().__init__()
        self.experts, self.gate = nn.ModuleList(Rated() for _ in range(3)), nn.Linear(8, 3)

    def forward(self, x):
        ratings = torch.tensor([expert.rate() for expert in self.experts])
        weights = (self.gate(x) * ratings).softmax(-1)
        return sum(expert.linear(x) * weights[:, e, None] for e, expert in enumerate(self.experts))


def test_explain_where_dynamos_cause_has_no_text():
    with torch.no_grad():
        text = str(explain(Rates(), torch.randn(5, 8)))
    assert "return self.rating.item()" in text and "Reconstruction failure" in text


def test_each_patch_is_in_place_and_says_why():
    extend.extend_dynamo()
    for owner, names, rule, need in extend.PATCHES:
        assert need.without and need.upstream
        if hasattr(api, owner):
            hooked = [getattr(getattr(api, owner), name, None) for name in names]
            assert all(method is None or rule in method._fp4 for method in hooked), (owner, names)
    assert {need for *_, need in extend.PATCHES} == set(extend.Need)


def test_a_part_that_a_torch_lacks_is_not_patched(monkeypatch):
    """With another torch all other rules are in place; a rule that uses the name fails open."""
    places = {place: names for place, names in api._PLACES.items() if "NumpyNdarrayVariable" not in names}
    monkeypatch.setattr(api, "_PLACES", {**places, "no_such_module": ("NumpyNdarrayVariable",)})
    monkeypatch.delitem(vars(api), "NumpyNdarrayVariable", raising=False)
    with pytest.raises(AttributeError, match="no_such_module"):
        _ = api.NumpyNdarrayVariable
    extend.extend_dynamo()
