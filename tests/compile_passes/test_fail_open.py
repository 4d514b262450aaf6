"""If Inductor cannot compile a rewritten graph, the captured graph runs instead, and one warning says so."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from moe_models import Block, Recorder, relative_error
from processes import environment
from retraced import retraced
from torch import nn

import fp4_ops
from fp4_ops.compile_passes import passes
from fp4_ops.compile_passes.pipeline import forget_failures

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WARNING = r"Inductor cannot compile graph forward .* with experts in 4 bits"


@pytest.fixture(autouse=True)
def no_failures():
    forget_failures()
    yield
    forget_failures()


def no_view(x: torch.Tensor) -> torch.Tensor:
    """A view that no tensor has, of one whose size is a new symbol."""
    return x.nonzero().view(7, 7, 7, 7)


@pytest.fixture
def broken(monkeypatch):
    """Every rewritten graph ends with what cannot be traced, as a fault of a pass might leave it."""

    def add(gm: torch.fx.GraphModule) -> None:
        (output,) = gm.graph.find_nodes(op="output")
        with gm.graph.inserting_before(output):
            view = gm.graph.call_function(no_view, (output.args[0][0],))
        output.args = ((*output.args[0], view),)

    monkeypatch.setattr(passes, "allow_any_strides", add)


class Rows(Block):
    """Chooses rows by a mask first: their number is a symbol that each trace makes anew."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.nonzero(x[:, 0] > 0).squeeze(-1)
        y = super().forward(x)
        return y + torch.zeros_like(y).index_add(0, rows, x[rows])


def same(model: nn.Module, compiled: nn.Module) -> None:
    x = torch.randn(9, Block.H)
    with torch.no_grad():
        assert relative_error(compiled(x), model(x)) < 1e-5


@pytest.mark.parametrize("kind", [Block, Rows])
def test_the_captured_graph_runs_and_a_warning_says_so_once(broken, kind):
    model, recorder = kind("grouped_mm"), Recorder(activation="bf16", run=retraced)
    compiled = torch.compile(model, backend=recorder, dynamic=False)
    with pytest.warns(UserWarning, match=WARNING) as said:
        same(model, compiled)
        with torch.no_grad():
            compiled(torch.randn(12, Block.H))
    assert recorder.compilations == 2
    text = [str(w.message) for w in said if "Inductor" in str(w.message)]
    assert len(text) == 1 and "its original weights" in text[0] and "Please report it" in text[0]
    assert "shape" in text[0] and "\n" not in text[0]
    assert all("7, 7" in f.not_compiled for f in recorder.frames)


@pytest.mark.more
def test_through_inductor_itself(broken):
    model = Rows("grouped_mm")
    with pytest.warns(UserWarning, match=WARNING):
        same(model, torch.compile(model, backend="fp4", fullgraph=True))
    with torch.no_grad():
        report = fp4_ops.explain(model, torch.randn(9, Block.H))
    assert "Inductor could not compile this graph with experts in 4 bits" in str(report)
    assert report.to_dict()["frames"][0]["not_compiled"]
    torch.compiler.reset()
    assert "could not compile" not in str(fp4_ops.explain(model, torch.randn(9, Block.H)))


def test_strict_raises(broken):
    recorder = Recorder(activation="bf16", strict=True, run=retraced)
    with (
        torch.no_grad(),
        pytest.raises(Exception, match=r"strict=True, but Inductor cannot compile(.|\n)*report it"),
    ):
        torch.compile(Block("grouped_mm"), backend=recorder)(torch.randn(9, Block.H))


def test_what_inductor_cannot_compile_either_is_its_own_error(broken):
    """No warning of ours precedes it."""

    def fails(gm: torch.fx.GraphModule, inputs: object, config_patches: object) -> None:
        raise NotImplementedError("no C++ compiler")

    recorder = Recorder(activation="bf16", run=fails)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        with pytest.raises(Exception, match="no C\\+\\+ compiler"):
            torch.compile(Block("grouped_mm"), backend=recorder)(torch.randn(9, Block.H))


def test_tests_fail_where_a_model_takes_this_way(broken):
    """The filter of conftest.py, here and in other processes."""
    recorder = Recorder(activation="bf16", run=retraced)
    with torch.no_grad(), pytest.raises(Exception, match=WARNING):
        torch.compile(Block("grouped_mm"), backend=recorder)(torch.randn(9, Block.H))
    code = "import warnings; warnings.warn('Inductor cannot compile graph f with experts')"
    other = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert other.returncode == 1 and "UserWarning: Inductor cannot compile" in other.stderr
