"""Nothing of Triton is loaded before a GPU needs it."""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import sys

import pytest
import torch
from conftest import more
from reference import random_weight

from fp4_ops.backends import operators
from fp4_ops.meta.fakes import OPERATORS


def loaded_after(*steps: str) -> list[set[str]]:
    """Return the modules that a process has after each step."""
    code = "\n".join(f"{step}\nimport sys\nprint(*sys.modules)" for step in steps)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


def of_triton(modules: set[str]) -> set[str]:
    ours = "fp4_ops.backends.triton."  # what is in it; the package itself says only where it runs
    return {name for name in modules if name == "triton" or name.startswith(ours)}


ON_CPU = """
import fp4_ops, torch
fp4_ops.info()
w = fp4_ops.quantize(torch.randn(4, 16, 32), "nvfp4")
offs = torch.tensor([1, 2, 2, 3], dtype=torch.int32)
torch.ops.fp4.grouped_mm(torch.randn(3, 32), w.packed, w.block_scale, w.global_scale, offs, format="nvfp4")
torch.nn.functional.linear(torch.randn(3, 32), w[0])
"""


COMPILE = "import torch\ntorch.compile(torch.nn.Linear(2, 2), backend='fp4')(torch.randn(3, 2))"


@pytest.mark.parametrize("use", ["import fp4_ops.backend", more(COMPILE)])
def test_each_step_loads_what_it_needs(use):
    """Dynamo itself loads Triton where it is installed; our kernels stay out until a GPU calls."""
    imported, on_cpu, used = loaded_after("import fp4_ops", ON_CPU, use)
    assert not [name for name in imported if "compile_passes" in name]
    assert "torch._inductor.compile_fx" not in imported
    assert of_triton(imported) == of_triton(on_cpu) == set()
    assert of_triton(used) <= {"triton"}


def test_every_operator_is_there_for_a_gpu():
    pytest.importorskip("triton")
    for name in OPERATORS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fp4::{name}", "CUDA"), name
        if name in operators.ON_EVERY_DEVICE:
            continue
        function = operators.implementation(name, "plain", 0)
        schema = getattr(torch.ops.fp4, name).default._schema
        assert list(inspect.signature(function).parameters) == [a.name for a in schema.arguments], name


def test_the_first_call_loads_them(monkeypatch):
    module = pytest.importorskip("fp4_ops.backends.triton.operators")
    called = []
    monkeypatch.setattr(module, "grouped_mm", lambda *args, **kwargs: called.append((args, kwargs)))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    w = random_weight("nvfp4", 2, 16, 32).operands()
    offs = torch.tensor([1, 3], dtype=torch.int32)
    a = torch.randn(3, 32)
    operators.on_cuda("grouped_mm")(a, *w, offs, format="nvfp4")
    ((args, kwargs),) = called
    assert args[0] is a and args[-1] is offs and kwargs == {"format": "nvfp4"}
