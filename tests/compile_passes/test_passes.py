"""The passes of a graph: their list, their times, and where their graphs are written."""

from __future__ import annotations

import itertools
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from lookalikes import Loop
from moe_models import Block, Recorder

import fp4_ops
from fp4_ops.compile_passes import passes, pipeline
from fp4_ops.compile_passes.passes import Pass

expecttest = pytest.importorskip("expecttest")
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def compiled(form: str = "batched_mm", **options: Any) -> Recorder:
    recorder = Recorder(**options)
    with torch.no_grad():
        torch.compile(Block(form), backend=recorder)(torch.randn(4, Block.H))
    return recorder


class TestGolden(expecttest.TestCase):
    def test_the_log_of_one_graph(self) -> None:
        with self.assertLogs("fp4_ops", logging.DEBUG) as seen:
            compiled()
        lines = [m for r in seen.records if ": pass " in (m := r.getMessage())]
        text = "\n".join(
            re.sub(r"^.*?: (?=pass)|[\d.]+(?= ms| ->| nodes)", "#", line).removeprefix("#pass ")
            for line in lines
        )
        self.assertExpectedInline(
            text,
            """\
capture: # ms, # -> # nodes
read_past_writes: # ms, # -> # nodes
decode: # ms, # -> # nodes
find_products: # ms, # -> # nodes
mixtures: # ms, # -> # nodes
batched_products: # ms, # -> # nodes
single_products: # ms, # -> # nodes
topk: # ms, # -> # nodes
attention: # ms, # -> # nodes
sums: # ms, # -> # nodes
step_linears: # ms, # -> # nodes
step_router: # ms, # -> # nodes
caches: # ms, # -> # nodes
step_attention: # ms, # -> # nodes
cached_attention: # ms, # -> # nodes
shared: # ms, # -> # nodes
counters: # ms, # -> # nodes
inputs: # ms, # -> # nodes
step_packed_linears: # ms, # -> # nodes
strides: # ms, # -> # nodes""",
        )


@pytest.mark.parametrize("linear", [False, True])
def test_each_pass_is_in_the_report_with_its_time(linear):
    report = fp4_ops.explain(Block("grouped_mm"), torch.randn(4, Block.H), options={"linear": linear})
    (frame,) = report.frames
    left_out = set() if linear else {"linear_layers"}
    assert [run.name for run in frame.passes] == [
        "capture",
        *(one.name for one in passes.PASSES if one.name not in left_out),
    ]
    assert all(run.seconds > 0 for run in frame.passes)
    for before, after in itertools.pairwise(frame.passes):
        assert before.nodes_after == after.nodes_before
    assert frame.passes[-1].nodes_after < frame.passes[0].nodes_after
    plain = report.to_dict()["frames"][0]["passes"]
    assert [run["name"] for run in plain] == [run.name for run in frame.passes]
    assert "fp4_mixtures" in torch._dynamo.utils.compile_times(repr="csv")[0]


def test_passes_of_an_exported_program():
    program = torch.export.export(Block("batched_mm").eval(), (torch.randn(4, Block.H),))
    names = [run.name for run in fp4_ops.rewrite(program).report.passes]
    assert names[0] == "capture" and names[-1] == "strides"


def test_a_graph_without_experts_has_no_passes():
    recorder = Recorder()
    with torch.no_grad():
        torch.compile(lambda x: x + 1, backend=recorder)(torch.randn(3))
    assert [frame.passes for frame in recorder.frames] == [[]]


def test_the_report_names_the_pass_that_failed(monkeypatch):
    def fails(state: Any) -> None:
        raise KeyError("odd")

    first, *rest = passes.PASSES
    monkeypatch.setattr(passes, "PASSES", (first, Pass("unlucky", fails), *rest))
    (frame,) = compiled().frames
    assert frame.note == "left to Inductor, pass unlucky failed: KeyError: 'odd'"
    assert [run.name for run in frame.passes] == ["capture", first.name]


def calls_of_the_passes(module: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many functions of the package run while the passes rewrite the module's graph."""
    folder, count = str(Path(passes.__file__).parent), 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(folder)

    def counted(*args: Any) -> Any:
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            return passes.rewrite(*args)
        finally:
            sys.setprofile(before)

    monkeypatch.setattr(pipeline, "rewrite", counted)
    recorder = Recorder()
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(module, backend=recorder, fullgraph=True)(torch.randn(8, 32))
    assert [site.op for site in recorder.sites] == ["fp4::moe"]
    return count


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
def test_many_experts_of_one_parameter_take_no_more_steps(form, monkeypatch):
    few, many = (type("Sized", (Block,), {"E": n}) for n in (8, 64))
    assert calls_of_the_passes(many(form), monkeypatch) <= 1.02 * calls_of_the_passes(few(form), monkeypatch)


def test_steps_grow_with_the_experts_of_a_loop_as_these_do(monkeypatch):
    counts = [calls_of_the_passes(Loop(experts=n), monkeypatch) for n in (4, 8, 16)]
    first, second = (b - a for a, b in itertools.pairwise(counts))
    assert second <= 2.1 * first, counts


def test_graphs_are_files_in_the_debug_folder(tmp_path):
    inductor, dynamo = torch._inductor.config, torch._dynamo.config
    with inductor.patch({"trace.enabled": True}), dynamo.patch(debug_dir_root=str(tmp_path)):
        (frame,) = compiled().frames
    paths = sorted(tmp_path.rglob("*.py"))
    assert {p.parent for p in paths} == {paths[0].parent} and paths[0].parent.parent.name == "fp4_ops"
    names, texts = [p.stem for p in paths], [p.read_text() for p in paths]
    assert names[:2] == ["00_input", "01_capture"] and names[-1].endswith("_strides")
    assert all(text.startswith(f"# {frame.name}\n") for text in texts)
    assert all(a != b for a, b in itertools.pairwise(texts))  # a pass that changes nothing writes nothing
    assert "05_mixtures" in names and "06_batched_products" not in names
    assert ["fp4.moe" in text for text in (*texts[:2], texts[-1])] == [False, False, True]


def test_no_file_is_written_unasked(tmp_path):
    with torch._dynamo.config.patch(debug_dir_root=str(tmp_path)):
        compiled()
    assert not list(tmp_path.iterdir())


SCRIPT = """
import torch
from lookalikes import Loop
from moe_models import Block, Recorder
with torch.no_grad():
    torch.compile(Block("batched_mm"), backend=Recorder())(torch.randn(4, Block.H))
"""


@pytest.mark.more
def test_torch_shows_them_as_it_shows_its_own(tmp_path):
    env = processes.environment(TORCH_LOGS="+fp4_ops", TORCH_TRACE=str(tmp_path), OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"pass mixtures: [\d.]+ ms, \d+ -> \d+ nodes", done.stderr)
    (trace,) = tmp_path.iterdir()
    text = trace.read_text()
    for name in ("fp4_00_input", "fp4_01_capture", "_inputs"):
        assert re.search(rf'"artifact": {{"name": "[^"]*{name}"', text), name
