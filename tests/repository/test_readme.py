"""The README's examples run as they stand."""

import contextlib
import io
import re
import subprocess
import sys

import pytest
import torch
from places import ROOT

USE = (ROOT / "README.md").read_text().partition("\n## Use\n")[2].partition("\n## ")[0]
EXAMPLES = dict(re.findall(r"^\*\*(\w+)\*\*.*?^```python\n(.*?)^```", USE, re.DOTALL | re.MULTILINE))
PRINTS = {
    "Compile": "torch.Size([1, 32, 256])",
    "Call": "torch.Size([10, 256])",
    "Export": "torch.Size([1, 32, 256])",
}


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the operators of fp4."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "fp4" and "moe" in str(func)
        return func(*args, **(kwargs or {}))


def test_three_uses_in_about_five_lines():
    assert list(EXAMPLES) == list(PRINTS)
    for code in EXAMPLES.values():
        lines = [line for line in code.splitlines() if line and not line.startswith(("import", "from"))]
        assert len(lines) <= 5, code


def test_call(monkeypatch):
    assert run("Call", monkeypatch) == PRINTS["Call"]


def test_compile(monkeypatch):
    """Without Inductor, which takes most of a minute: what it would get is run as it is."""
    calls = Calls()

    def eager(gm, inputs, **options):
        def forward(*args):
            with calls:
                return gm(*args)

        return forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", eager)
    torch.compiler.reset()
    assert run("Compile", monkeypatch) == PRINTS["Compile"]
    assert calls.count == 3  # one in each layer of the demo model
    torch.compiler.reset()


@pytest.mark.slow
def test_export(monkeypatch):
    pytest.importorskip("accelerate")
    assert run("Export", monkeypatch) == PRINTS["Export"]


@pytest.mark.more
@pytest.mark.slow
def test_compile_with_inductor_in_a_process_of_its_own():
    done = subprocess.run(
        [sys.executable, "-c", EXAMPLES["Compile"]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == PRINTS["Compile"]


def run(name: str, monkeypatch) -> str:
    """The last line that an example prints."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(ROOT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(EXAMPLES[name], f"README.md: {name}", "exec"), {})
    return printed.getvalue().splitlines()[-1]
