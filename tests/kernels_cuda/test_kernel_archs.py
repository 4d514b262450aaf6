"""The kernels of `_sm80.so` as machine code of each GPU that they are built for: `make test-kernels`.

By default every file is compiled once: half of the files for compute capability 8.0 and the other half for
another one, both chosen at random. FP4_KERNEL_ARCHS names architectures ("all" for all) for which every file
is compiled. If a build has objects of the architecture (build/sm80), these are updated and read. Otherwise
only the GPU's code is compiled (-cubin), without the host's code.
"""

import os
import random
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import setuptools
from places import ROOT
from test_sm80_binary import products_of

ASKED = os.environ.get("FP4_KERNEL_ARCHS", "")
NVCC = shutil.which("nvcc")
pytestmark = [
    pytest.mark.skipif(not ASKED, reason="compiles for minutes: make test-kernels"),
    pytest.mark.skipif(NVCC is None, reason="needs nvcc"),
]

SHARED = {"80": 166912, "100f": 232448}
"""Bytes that a thread block may have; others: 101376."""


def setup() -> dict:
    with mock.patch.object(setuptools, "setup"), mock.patch.object(os, "getcwd", lambda: str(ROOT)):
        return runpy.run_path(str(ROOT / "setup.py"))


def drawn(library) -> dict[str, list[Path]]:
    """Architecture -> the sources that are compiled for it."""
    if ASKED == "drawn":
        files = random.sample(library.sources, len(library.sources))
        other = random.choice([name for name in library.archs if name != "80"])
        return {"80": files[::2], other: files[1::2]}
    return dict.fromkeys(library.archs if ASKED == "all" else ASKED.split(","), library.sources)


@pytest.fixture(scope="module")
def objects(monkeypatch_module) -> dict[str, list[Path]]:
    """Architecture -> the objects of its sources."""
    monkeypatch_module.chdir(ROOT)
    found = setup()
    library, made = found["MMA"], {}
    for arch, sources in drawn(library).items():
        built, command = Path("build/sm80", arch), [NVCC, *library.flags([arch])]
        folder, only = (built, []) if built.exists() else (Path("build/sm80_cubin", arch), ["-cubin"])
        made[arch] = found["compile_all"]([*command, *only], sources, library.headers, folder)
    return {arch: [Path(file) for file in files] for arch, files in made.items()}


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def cuobjdump() -> str:
    triton = pytest.importorskip("triton")
    bundled = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return str(bundled) if bundled.exists() else shutil.which("cuobjdump") or pytest.skip("no cuobjdump")


def of_kernels(objects, *options: str, pattern: str) -> dict[str, str]:
    """Kernel -> what cuobjdump says of it."""
    found = {}
    for file in objects:
        text = subprocess.run([cuobjdump(), *options, str(file)], capture_output=True, text=True).stdout
        found |= dict(re.findall(pattern, text, re.S))
    assert found
    return found


def test_instructions(objects):
    """Tensor cores multiply bfloat16 or float16 to float32, or int8 to int32; weights come 16 bytes at a
    time, and do not stay in L1."""
    code = {
        (arch, name): body
        for arch, files in objects.items()
        for name, body in of_kernels(
            files, "-sass", pattern=r"Function : (\S+)(.*?)(?=Function : |\Z)"
        ).items()
    }
    seen, elements = set(), set()
    for (arch, name), body in code.items():
        kernel = next((k for k in ("decode_kernel", "gemv_kernel", "prefill_kernel") if k in name), None)
        if kernel is None:
            continue
        seen.add(kernel)
        elements.add(products_of(name))
        assert re.search(products_of(name), body), (arch, name)
        copies = r"LDGSTS\S*128" if kernel == "prefill_kernel" else r"LDG\.E\.NA\.128\.CONSTANT"
        assert re.search(copies, body), (arch, name)
    assert seen == {"decode_kernel", "gemv_kernel", "prefill_kernel"} and len(elements) == 3


def test_registers_and_memory(objects):
    usage = {
        (arch, name): text
        for arch, files in objects.items()
        for name, text in of_kernels(
            files, "-res-usage", pattern=r"Function (\S+):\s*\n\s*(REG:[^\n]*)"
        ).items()
    }
    for (arch, name), text in usage.items():
        used = {k: int(v) for k, v in re.findall(r"(\w+)(?:\[\d+\])?:(\d+)", text)}
        # decode with many warps keeps its place among its runs in memory, outside of products; a tile of fp16
        # rows needs a few registers more than sm_100 leaves it.
        spills = "decode" in name or ("8MmaWords" in name and "ElementE1E" in name)
        assert used["STACK"] + used["LOCAL"] <= (64 if spills else 32), (arch, name, used)
        assert used["SHARED"] <= SHARED.get(arch, 101376), (arch, name, used)
