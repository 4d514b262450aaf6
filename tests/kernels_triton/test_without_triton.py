"""Triton is needed by its own kernels alone: everything else runs where it is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest
from emulated import cuda_headers
from places import HELPERS

NO_TRITON = """
import sys, types
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import importlib.util
of_all = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else of_all(name, package)
sys.path.insert(0, FOLDER)
"""


def run(code: str) -> str:
    """Run a process in which `import triton` fails. Return what it prints."""
    start = NO_TRITON.replace("FOLDER", repr(str(HELPERS)))
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


REGISTERS = """
import torch, fp4_ops
from fp4_ops.meta.fakes import OPERATORS
from fp4_ops import backends
has = torch._C._dispatch_has_kernel_for_dispatch_key
assert all(has("fp4::" + name, "CUDA") for name in OPERATORS)
assert [b.name for b in backends.BACKENDS] == ["cpu", "hopper", "mma", "triton"]
assert backends.available("cuda") == ()  # there is no GPU, and no Triton
print(fp4_ops.info())

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(4, 32, 32))
    def forward(self, x, offs):
        return torch._grouped_mm(x, self.w.transpose(-2, -1), offs=offs)

x, offs = torch.randn(4, 32).bfloat16(), torch.tensor([1, 2, 3, 4], dtype=torch.int32)
print(fp4_ops.explain(Block().bfloat16(), x, offs))
"""


@pytest.mark.more
def test_the_package_registers_and_explains():
    said = run(REGISTERS)
    assert "fp4::grouped_mm" in said and "cpu" in said


OPERATORS = """
import torch
from fp4_ops.backends import BACKENDS, anywhere, operators

of = {b.name: b for b in BACKENDS}
find = operators.implementation
for name in ("quantize", "dequantize", "quantize_int8", "prepack", "to_masked", "m_indices_to_offs"):
    assert find(name, "plain", 0) is getattr(anywhere, name)
for name in ("mm", "grouped_mm", "moe", "grouped_mm_k"):
    try:
        find(name, "plain", 0)()
    except RuntimeError as error:
        print(error)
x = torch.randn(3, 32, 64)
made = anywhere.quantize(x, "nvfp4")
assert torch.equal(made[0], torch.ops.fp4.quantize(x, "nvfp4")[0])
there = anywhere.prepack(*made, "nvfp4", "tile16")
back = anywhere.dequantize(*there, "nvfp4", torch.float32, layout="tile16")
assert torch.equal(back, torch.ops.fp4.dequantize(*made, "nvfp4", torch.float32))
"""


def test_products_of_plain_weights_say_what_they_need():
    lines = run(OPERATORS).splitlines()
    assert [line.split(":")[2] for line in lines] == ["mm", "grouped_mm", "moe", "grouped_mm_k"]
    for line in lines:
        assert "pip install triton" in line and "sm90" in line and "mma_bf16" in line


EMULATED = """
import emulated, torch
emulated.pretend()
from fp4_ops import backends
assert [b.name for b in backends.available("cuda", 0)] == ["hopper"]
with emulated.OnCpu(), torch.no_grad():
    x = torch.randn(5, 256).bfloat16()
    w = torch.ops.fp4.quantize(torch.randn(3, 64, 256), "nvfp4")
    offs = torch.tensor([1, 3, 5], dtype=torch.int32)
    for layout in ("mma_bf16", "sm90"):
        there = torch.ops.fp4.prepack(*w, "nvfp4", layout)
        out = torch.ops.fp4.grouped_mm(x, *there, offs, format="nvfp4", layout=layout)
        ids = torch.tensor([0, 1, 1, 2, 2])
        exact = torch.ops.fp4.dequantize(*w, "nvfp4", torch.float64)[ids]
        want = torch.einsum("mk,mnk->mn", x.double(), exact)
        assert ((out - want).norm() / want.norm()).item() < 4e-3
    print("triton" in __import__("sys").modules)
"""


@pytest.mark.skipif(cuda_headers() is None, reason="the emulator needs the headers of a CUDA toolkit")
@pytest.mark.more
def test_the_native_kernels_run():
    assert run(EMULATED).splitlines() == ["False"]
