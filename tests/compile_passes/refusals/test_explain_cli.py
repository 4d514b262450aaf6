"""Tests of explain for experts that reach no graph, and of `python -m fp4_ops explain`."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import forks
import pytest
import torch
from conftest import more
from families import LOOPS, tiny
from moe_styles import STYLES, ListStyle
from places import HELPERS

import fp4_ops
from fp4_ops.__main__ import main

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FACTORY = """
from moe_styles import STYLES
import torch

def loop():
    return STYLES["where loop"](), (torch.randn(5, 32),)

def mixed():
    module = STYLES["where loop"]()
    module.list[2].act = torch.nn.functional.gelu
    return module, (torch.randn(5, 32),)

def wrong():
    return STYLES["where loop"]()
"""


class Counts(ListStyle):
    def experts_of(self, x, ids, weights):
        out, busy = torch.zeros_like(x), 0
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            busy += 1
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out / busy


class CountsHits(ListStyle):
    def experts_of(self, x, ids, weights):
        out, busy = torch.zeros_like(x), 0
        mask = torch.nn.functional.one_hot(ids, self.E).permute(2, 0, 1)
        for e in (mask.sum((1, 2)) > 0).nonzero():
            e = e[0]
            busy += 1
            token, slot = torch.where(mask[e])
            out.index_add_(0, token, self.list[e](x[token]) * weights[token, slot, None])
        return out / busy


class CountsOutside(ListStyle):
    """`Counts` with the change that it is told."""

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        busy = (torch.nn.functional.one_hot(ids, self.E).sum((0, 1)) > 0).sum()
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out / busy


def test_the_change_that_is_told_helps():
    counts, x = Counts(), torch.randn(5, 32)
    outside = copy.deepcopy(counts)
    outside.__class__ = CountsOutside
    report = fp4_ops.explain(outside, x)
    assert [s.op for s in report.sites] == ["fp4::moe"] and not report.hints
    with torch.no_grad():
        torch.testing.assert_close(outside(x), counts(x))


@pytest.mark.parametrize(
    ("style", "stays", "drop", "skipped"),
    [(Counts, "a branch", "drop it", 1), (CountsHits, "a loop", "loop over all of them", 0)],
)
def test_what_skips_experts_and_stays_is_told_with_the_change_that_helps(style, stays, drop, skipped):
    report = fp4_ops.explain(style(), torch.randn(5, 32))
    assert not report.sites and report.skipped == len(report.not_captured) == skipped
    for told in report.not_captured:
        assert told.startswith("experts_of (") and "test_explain_cli.py" in told and told in str(report)
        assert "for line " in told and "branching" in told
    (hint,) = report.hints
    assert "test_explain_cli.py" in hint and drop in hint, hint
    assert "Change: compute `busy` outside of the code that is skipped." in hint, hint
    assert f" stays {stays}: `busy`, which is read later, changes" in hint, hint


class Reads(ListStyle):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            with open(os.devnull) as log:
                log.read()
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


def test_of_what_only_dynamo_knows_its_own_hint_is_told():
    report = fp4_ops.explain(Reads(), torch.randn(5, 32))
    assert report.skipped == 1 and not report.sites
    (hint,) = report.hints
    assert "experts_of (" in hint and "`open`" in hint and f"hint: {hint}" in str(report)


def test_a_branch_that_was_seen_through_is_told():
    report = fp4_ops.explain(STYLES["where loop, `if len(token):`"](), torch.randn(5, 32))
    assert report.sites and not report.graph_breaks and not report.hints
    (place,) = report.seen_through
    assert "moe_style_loops.py" in place and f"no branch at {place}" in str(report)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("family", "sizes", "recognised", "hinted"),
    [
        more("mixtral", {"num_hidden_layers": 1, "num_local_experts": 4}, True, False),
        ("muse_spark_text", {"num_hidden_layers": 1, "num_experts": 4}, False, True),
        ("nllb-moe", {"encoder_layers": 1, "decoder_layers": 1, "num_experts": 4}, False, False),
    ],
    ids=["recognised", "not recognised", "no other way"],
)
def test_eager_experts_are_told_where_another_way_to_run_them_helps(family, sizes, recognised, hinted):
    model = tiny(family, "" if family in LOOPS else "eager", **sizes)
    tokens = torch.randint(3, 128, (1, 5))
    assert model.config._experts_implementation == "eager"
    for module in model.modules():
        if type(module).__name__ == "NllbMoeExperts":
            module["expert_3"].act = torch.nn.GELU()  # unlike the others': no block
        if type(module).__name__ == "MuseSparkExperts":
            module.post_expert_norm = torch.nn.Dropout()  # not read in a loop
    more = {"decoder_input_ids": tokens} if family == "nllb-moe" else {}
    report = fp4_ops.explain(model, tokens, use_cache=False, **more)
    assert bool(report.bytes_before) is recognised
    assert ("set_experts_implementation('grouped_mm')" in str(report)) is hinted


def test_the_settings_of_dynamo_are_as_they_were():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=False):
        fp4_ops.explain(Counts(), torch.randn(5, 32))
        assert torch._dynamo.config.capture_dynamic_output_shape_ops is False


def explain(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess:
    (tmp_path / "factories.py").write_text(FACTORY)
    paths = os.pathsep.join([str(tmp_path), str(HELPERS)])
    command = ["-m", "fp4_ops", "explain", *arguments]
    return forks.run(command, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})


def test_the_command_prints_json(tmp_path):
    done = explain(tmp_path, "factories:loop", "--format", "mxfp4", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (site,) = report["frames"][0]["sites"]
    assert site["op"] == "fp4::moe" and site["format"] == "mxfp4" and len(site["weights"]) == 18
    assert report["bytes_before"] > 6 * report["bytes_after"] > 0


@pytest.fixture
def factories(tmp_path, monkeypatch):
    """For the command in this process."""
    (tmp_path / "factories.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "factories", raising=False)


@pytest.mark.parametrize("json_too", [False, True])
def test_the_command_says_what_would_help(factories, capsys, json_too):
    main(["explain", "factories:mixed", *["--json"] * json_too])
    out = capsys.readouterr().out
    if json_too:
        (site,) = json.loads(out)["frames"][0]["sites"]
        assert site["op"] is None and "different activations" in site["reason"]
        assert site["change"].startswith("none: experts with different activations")
    else:
        assert "have different activations\n      change: none: " in out


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("factories", "MODULE:FACTORY"),
        ("factories:wrong", "must return"),
        ("nowhere:f", "there is no module 'nowhere'"),
        ("factories:nothing", r"factories.py\) has no function 'nothing'"),
    ],
)
def test_the_command_refuses_what_it_cannot_use(factories, factory, message):
    with pytest.raises(SystemExit, match=message):
        main(["explain", factory])


class ASet(ListStyle):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e in sorted(set(ids.flatten().tolist())):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.list[e](x[token]) * weights[token, slot, None])
        return out


class RowsAsNumbers(ListStyle):
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            rows = token.tolist()
            if len(rows) > 1 and rows[0] > rows[1]:
                continue
            out.index_add_(0, token, expert(x[rows]) * weights[token, slot, None])
        return out


class InAGenerator(ListStyle):
    def one(self, e, x, ids, weights):
        token, slot = torch.where(ids == e)
        if ids.max().item() > 10**6:
            return x
        return torch.zeros_like(x).index_add(0, token, self.list[e](x[token]) * weights[token, slot, None])

    def experts_of(self, x, ids, weights):
        return sum(self.one(e, x, ids, weights) for e in range(self.E))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("style", "line", "change"),
    [
        (ASet, "for e in sorted(set(ids.flatten().tolist())):", "no number leaves the graph"),
        (RowsAsNumbers, "rows = token.tolist()", "x[token] (no list of them)"),
        (InAGenerator, "if ids.max().item() > 10**6:", "no number leaves the graph"),
    ],
)
def test_a_graph_break_is_told_with_its_line_and_what_would_help(style, line, change, caplog):
    """The line is that of the function that a generator or comprehension calls. Only the report tells it: no
    warning sends the reader to `explain`."""
    report = fp4_ops.explain(style(), torch.randn(5, 32))
    assert not [r for r in caplog.records if r.name.startswith("fp4_ops")]
    assert not any(site.rewritten for site in report.sites)
    told = [reason for reason in report.graph_breaks if line in reason]
    assert told and all("test_explain_cli.py:" in reason for reason in told), report.graph_breaks
    assert any(change in hint for hint in report.hints), report.hints
    assert bool(report.not_captured) is (style is not ASet)  # whose list is made before the loop
    assert not any("uninitialized cell" in text for text in report.not_captured)
    assert "graph break: " + told[0] in str(report)
