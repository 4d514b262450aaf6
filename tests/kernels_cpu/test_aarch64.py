"""The wheel for aarch64 on emulated processors: the chosen kernels, their results and their instructions.

`make test-aarch64` builds the wheel and runs this file.
"""

from __future__ import annotations

import collections
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from places import HELPERS, ROOT, TESTS

sys.path.insert(0, str(ROOT / "release"))
import aarch64

pytestmark = pytest.mark.aarch64
BEST = "neon_bf16"
DRAW = os.environ.get("FP4_EMULATED_DRAW", "1")
OPERATORS = ("test_ops_matmul.py", "test_ops_rows.py"), ("test_ops_moe.py", "test_ops_quantize.py")
"""Files by process. An emulated processor takes long to import torch, and two run at a time."""


class Emulated:
    def __init__(self, folder: Path) -> None:
        self.machine, self.wheel = aarch64.Machine(), aarch64.install(folder / "fp4_ops")

    def python(self, *args: str, cpu: str = BEST, **env: str) -> subprocess.CompletedProcess[str]:
        paths = [self.wheel, HELPERS]
        options = {"OMP_NUM_THREADS": "1", "FP4_TEST_SEED": os.environ["FP4_TEST_SEED"], **env}
        return self.machine.python(*args, paths=paths, cpu=aarch64.CPUS[cpu], capture=True, **options)


@pytest.fixture(scope="session")
def emulated(tmp_path_factory) -> Emulated:
    return Emulated(tmp_path_factory.mktemp("aarch64"))


@pytest.mark.slow
@pytest.mark.parametrize("files", OPERATORS, ids=" ".join)
def test_operators(emulated, files):
    """On the best kernels: sdot, smmla, bfdot and bfmmla."""
    options = ["-q", "-p", "no:cacheprovider", "-m", "not more", "--rootdir", str(ROOT), "--draw", DRAW]
    done = emulated.python("-m", "pytest", *options, *(str(TESTS / "operators" / file) for file in files))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout)


CHOICE = """
import os, runpy, sys, torch, fp4_ops
try:
    torch.ops.fp4.cpu_capability()
except RuntimeError as error:
    print(str(error).splitlines()[0])
os.environ["FP4_CPU_CAPABILITY"] = ""
print(torch.ops.fp4.cpu_capability())
print(fp4_ops.info().kernels[0].family)
del sys.argv[0]  # "-c"
if sys.argv:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, lacks, has",
    [
        ("neon", "neon_dotprod", "neon, scalar"),
        ("neon_dotprod", "neon_bf16", "neon_dotprod, neon, scalar"),
        ("neon_bf16", "avx2", "neon_bf16, neon_i8mm, neon_dotprod, neon, scalar"),
    ],
)
def test_the_processor_decides(emulated, family, lacks, has):
    """Kernels that it lacks are refused; else it takes the best, and `fp4_ops.info()` names them. Families
    other than the best, whose operators `test_operators` tests, compute the cases of test_cpu_dispatch.py."""
    cases = [] if family == BEST else script()
    done = emulated.python("-c", CHOICE, *cases, cpu=family, FP4_CPU_CAPABILITY=lacks)
    assert done.returncode == 0, done.stderr[-4000:]
    refused, chosen, shown, *found = done.stdout.splitlines()
    assert f"FP4_CPU_CAPABILITY is '{lacks}'; on this machine it must be one of: {has}" in refused
    assert chosen == shown == family
    if cases:
        check_cases(found[0], family)


@pytest.mark.slow
def test_scalar_kernels(emulated):
    done = emulated.python(*script(), cpu="neon", FP4_CPU_CAPABILITY="scalar")
    assert done.returncode == 0, done.stderr[-4000:]
    check_cases(done.stdout, "scalar")


def script() -> list[str]:
    """Returns test_cpu_dispatch.py and its arguments: a seed, one in how many cases, and the activations.
    Activations that are neither float32 nor int8 become float32 before the kernels."""
    seed = str(torch.randint(0, 2**31, ()).item())
    return [str(Path(__file__).with_name("test_cpu_dispatch.py")), seed, DRAW, "f32", "int8"]


def check_cases(output: str, family: str) -> None:
    found = json.loads(output)
    assert found.pop("capability") == family
    wrong = {case: outcome for case, outcome in found.items() if not (isinstance(outcome, int) and outcome)}
    assert found and not wrong, "\n".join(f"{case}:\n{outcome}" for case, outcome in wrong.items())


# --- the instructions ---

SCALES = 4
"""The types of block scales, each of which has its own kernels."""


@pytest.fixture(scope="session")
def loops(emulated) -> dict[str, list[list[str]]]:
    """Return the mnemonics of the innermost loops of each function in the library."""
    (library,) = emulated.wheel.glob("fp4_ops/_C*.so")
    command = ["aarch64-linux-gnu-objdump", "-d", "-C", "--no-show-raw-insn", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, list[list[str]]] = collections.defaultdict(list)
    for function in re.split(r"\n\n(?=[0-9a-f]{16} <)", text):
        name = re.match(r"\s*[0-9a-f]{16} <(.*)>:", function)
        if name is None or "fp4::" not in name[1]:
            continue
        lines = re.findall(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*)$", function, re.M)
        at = {address: i for i, (address, _, _) in enumerate(lines)}
        back = []
        for i, (_, mnemonic, operands) in enumerate(lines):
            to = re.search(r"\b([0-9a-f]+) <", operands)
            if mnemonic.startswith(("b.", "cbnz", "cbz", "tbnz", "tbz")) and to and at.get(to[1], i) < i:
                back.append((at[to[1]], i))
        inner = [a for a in back if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in back)]
        found[name[1]] += [[m for _, m, _ in lines[a : b + 1]] for a, b in inner]
    return found


@pytest.mark.parametrize(
    "instruction, products",
    [("sdot", 16), ("smmla", 16), ("bfdot", 32), ("bfmmla", 32), ("fmla", 120)],
)
def test_inner_loops(loops, instruction, products):
    """For each type of scales a loop with as many products as 16 k take, without a call or a division."""
    found = [loop for function in loops.values() for loop in function if loop.count(instruction) >= products]
    assert len(found) >= SCALES
    for loop in found:
        assert loop.count("tbl") or "shl" in loop, loop  # int4 is shifted where bytes are multiplied
        assert not {"bl", "blr", "udiv", "sdiv", "fdiv"} & set(loop)


@pytest.mark.parametrize("function", ["quantize_int8_row", "quantize_fp4_as", "quantize_row_4bit"])
def test_rows_are_quantised_in_vectors(emulated, function):
    """The portable loops over rows become vectors: a division of four at a time."""
    (library,) = emulated.wheel.glob("fp4_ops/_C*.so")
    command = ["aarch64-linux-gnu-objdump", "-d", "-C", "--no-show-raw-insn", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    bodies = [b for b in re.split(r"\n\n(?=[0-9a-f]{16} <)", text) if re.match(rf"\s*\S+ <.*{function}", b)]
    assert bodies and all(re.search(r"fdiv\s+v\d+\.4s", body) for body in bodies)
