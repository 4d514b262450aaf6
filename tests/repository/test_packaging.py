"""Installation: no large downloads for headers, a clear error without torch, and the compiler flags of the
machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import forks
import pytest
from places import ROOT

import fp4_ops
from fp4_ops import _library
from fp4_ops.meta import torch_internals


def setup(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` after setup.py has been read with setuptools' own setup() left out."""
    program = f"""
import runpy, setuptools
setuptools.setup = lambda **options: globals().update(options=options)
found = runpy.run_path("setup.py")
{code}
"""
    return forks.run(["-c", program], {**os.environ, **env}, ROOT)


def test_a_build_asks_pip_for_no_torch():
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert not [r for r in requires if "torch" in r or "nvidia" in r]


def test_the_wheel_has_every_folder_of_python():
    child = setup("print(*options['packages'], sep='\\n')")
    assert child.returncode == 0, child.stderr
    found = set()
    for name, room in (
        ("fp4_ops", "fp4_ops"),
        ("fp4_ops.meta", "meta"),
        ("fp4_ops.compile_passes", "compile_passes"),
    ):
        for file in (ROOT / room).rglob("*.py"):
            found.add(".".join((name, *file.relative_to(ROOT / room).parts[:-1])))
    assert {"fp4_ops.distributed", "fp4_ops.checkpoints.dialects", "fp4_ops.dev"} <= found
    assert sorted(child.stdout.split()) == sorted(found - {"fp4_ops.dev"})


def test_what_is_for_development_is_in_no_wheel(tmp_path):
    """Nor does anything that is need it."""
    done = forks.run(["setup.py", "-q", "build_py", "--build-lib", str(tmp_path)], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    files = [file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*") if file.is_file()]
    assert "fp4_ops/runtime/native.py" in files and "fp4_ops/compile_passes/pipeline.py" in files
    assert not [file for file in files if "dev" in Path(file).parts or "_native" in Path(file).name]
    needs = re.compile(r"^\s*(from \S*\bdev\b|import \S*\bdev\b|from \S+ import .*\bdev\b)", re.M)
    for room in ("fp4_ops", "meta", "compile_passes"):
        for file in (ROOT / room).rglob("*.py"):
            assert "dev" in file.relative_to(ROOT).parts or not needs.search(file.read_text()), file


def test_the_wheel_has_the_data_of_backends():
    child = setup("print(*options['package_data'][''], sep='\\n')")
    assert child.returncode == 0, child.stderr
    assert set(child.stdout.split()) == {file.name for file in (ROOT / "fp4_ops").rglob("*.json")}


@pytest.mark.parametrize(
    "block, words",
    [
        ("sys.modules['torch'] = None", "Install torch 2.11 .*--no-build-isolation"),
        (
            "import setuptools; setuptools.__version__ = '66.1.1'",
            "has 66.1.1. Run pip install 'setuptools>=77'",
        ),
    ],
)
def test_what_a_build_lacks_is_said_in_one_line(block, words):
    block = f"import sys; {block}; import runpy; runpy.run_path('setup.py')"
    run = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode != 0
    (line,) = run.stderr.strip().splitlines()
    assert re.search(words, line)


def test_the_setuptools_of_ci_suits_every_torch():
    """setup.py needs 77 or later, and torch 2.11 requires less than 82: `make test TORCH=torch==2.11.0`."""
    if not (ROOT / "constraints.txt").exists():
        pytest.skip("a source distribution has no constraints.txt")
    (version,) = re.findall(r"^setuptools==(\d+)\.", (ROOT / "constraints.txt").read_text(), re.M)
    assert 77 <= int(version) < 82


@pytest.mark.more
def test_another_machine_gets_no_flags_and_no_kernels_of_x86():
    code = "print(*(s for e in options['ext_modules'] for s in e.sources)); print(found['MACHINE'])"
    run = setup(code, _PYTHON_HOST_PLATFORM="linux-aarch64")
    assert run.returncode == 0, run.stderr
    sources, machine = run.stdout.splitlines()
    assert machine == "aarch64"
    neon = {f"kernels_{isa}.cpp" for isa in ("neon", "neon_dotprod", "neon_i8mm", "neon_bf16")}
    found = {Path(s).name for s in sources.split()}
    assert {name for name in found if name.startswith("kernels_")} == neon | {"kernels_scalar.cpp"}
    here = setup(code, _PYTHON_HOST_PLATFORM="linux-x86_64").stdout
    found = {Path(s).name for s in here.split()}
    assert found > {"kernels_scalar.cpp", "kernels_avx2.cpp", "kernels_avx512_bf16.cpp"} and not found & neon
    other = setup(code, _PYTHON_HOST_PLATFORM="linux-riscv64").stdout
    found = {Path(s).name for s in other.split()}
    assert {name for name in found if name.startswith("kernels_")} == {"kernels_scalar.cpp"}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "platform", ["macosx-14.0-arm64", "macosx-10.13-universal2", "win-amd64", "win-arm64"]
)
def test_only_linux_is_built_for(platform):
    run = setup("", _PYTHON_HOST_PLATFORM=platform)
    assert run.returncode != 0
    # A torch for CUDA warns before, where CUDA is installed and no GPU is there.
    assert "Traceback" not in run.stderr
    line = run.stderr.strip().splitlines()[-1]
    assert line.startswith(
        f"fp4_ops: nothing is built for {platform}. It runs on Linux, on x86-64 and aarch64."
    )


def test_each_kernel_file_names_an_instruction_set_that_has_flags():
    files = "found['Path']('csrc/cpu').glob('kernels_*.cpp')"
    run = setup(f"for file in {files}: print(file.stem, found['isa_of'](file))")
    assert run.returncode == 0, run.stderr
    found = dict(line.split() for line in run.stdout.splitlines())
    assert found.pop("kernels_scalar") == "None"
    assert all(re.fullmatch(f"kernels_(many_)?{isa}", stem) for stem, isa in found.items()), found


BUILD = """
import os, pathlib, tempfile, torch
build = object.__new__(found["Build"])
g = build._build_kernels.__func__.__globals__

def outcome(asked, gpu=None, there=False, nvcc="nvcc", library="sm90", before=None):
    os.environ.pop("FP4_CUDA_ARCHS", None)
    if asked is not None:
        os.environ["FP4_CUDA_ARCHS"] = asked
    torch.cuda.is_available, torch.cuda.device_count = lambda: gpu is not None, lambda: 1
    torch.cuda.get_device_capability = lambda i: gpu
    g["subprocess"].run = lambda command, **_: ran.append(command) or pathlib.Path(command[-1]).touch()
    g["find_nvcc"] = lambda archs: (nvcc, "no nvcc (set CUDA_HOME)")
    ran = []
    os.chdir(tempfile.mkdtemp(dir={folder!r}))
    made, target = pathlib.Path("build", library), pathlib.Path("fp4_ops", f"_{{library}}.so")
    for folder in ("csrc/device", f"csrc/{{library}}", "csrc/common", "fp4_ops", made):
        pathlib.Path(folder).mkdir(parents=True)
    headers = "csrc/common/sm90_layout.h", "build/fitted.h"
    for file in (f"csrc/{{library}}/a.cu", *headers, *[target] * there):
        pathlib.Path(file).touch()
    if there:
        os.utime(target, (0, 0))
    if before:
        (made / "archs").write_text(before)
    try:
        build._build_kernels(g["MMA" if library == "sm80" else "HOPPER"], pathlib.Path("fp4_ops"))
    except SystemExit as error:
        return str(error)
    if ran:
        codes = [word.rpartition("=")[2] for word in ran[-1] if word.startswith("-gencode")]
        return "built " + " ".join(codes)
    return "left, there is one" if target.exists() else "left"

for case in {cases!r}:
    print("outcome:", outcome(**case))
"""


def test_when_the_cuda_kernels_are_built(tmp_path):
    unknown = "nothing is built for 75, 130. It may name some of 80, 86, 89, 90a, 100f, 120f, be 'all', or ''"
    hopper, ada, every = (9, 0), (8, 9), "built sm_80 sm_86 sm_89 sm_100f sm_120f"
    mma = dict(library="sm80")
    cases = [
        (dict(asked=None), "left"),
        (dict(asked=None, gpu=hopper), "built sm_90a"),
        (dict(asked=None, gpu=ada), "left"),
        (dict(asked=None, there=True), "built sm_90a"),  # what was built once is kept up to date
        (dict(asked="90a"), "built sm_90a"),
        (dict(asked=" 9.0;sm_90a"), "built sm_90a"),
        (dict(asked="89"), "left"),
        (dict(asked="", gpu=hopper, there=True), "left"),
        (dict(asked="90a;75,130"), f"fp4_ops: FP4_CUDA_ARCHS is '90a;75,130', and {unknown}"),
        (dict(asked="90a", nvcc=None), "fp4_ops: FP4_CUDA_ARCHS asks for CUDA kernels, but no nvcc"),
        (dict(asked=None, gpu=hopper, nvcc=None), "left"),
        (dict(asked=None, **mma), "left"),
        (dict(asked=None, gpu=ada, **mma), "built sm_89"),
        (dict(asked=None, gpu=(8, 7), **mma), "built sm_80"),
        (dict(asked=None, gpu=hopper, **mma), "left"),
        (dict(asked=None, gpu=(7, 5), **mma), "left"),
        (dict(asked=None, there=True, **mma), every),
        (dict(asked=None, there=True, before="86", gpu=(12, 1), **mma), "built sm_86 sm_120f"),
        (dict(asked="all", **mma), every),
        (dict(asked="8.6, 12.1 sm_103a", **mma), "built sm_86 sm_100f sm_120f"),
        (dict(asked="90a", there=True, **mma), "left"),
    ]
    run = setup(BUILD.format(folder=str(tmp_path), cases=[case for case, _ in cases]))
    assert run.returncode == 0, run.stderr
    outcomes = [line[9:] for line in run.stdout.splitlines() if line.startswith("outcome: ")]
    assert len(outcomes) == len(cases)
    for outcome, (case, want) in zip(outcomes, cases):
        assert outcome.startswith(want) and (outcome == want or ":" in want), (case, outcome)
    assert "FP4_CUDA_ARCHS names none" in run.stdout


def test_a_machine_without_what_aarch64_needs_skips_it_by_name(tmp_path):
    """No qemu: `make test-aarch64` says so; and so with qemu where nothing can be fetched."""
    script = ROOT / "release" / "aarch64.py"
    run = subprocess.run(
        [sys.executable, str(script)], env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert run.returncode == 75 and "apt-get install qemu-user gcc-aarch64-linux-gnu" in run.stderr
    for name in ("qemu-aarch64", "aarch64-linux-gnu-gcc", "dpkg", "apt-get"):
        tool = tmp_path / name
        tool.write_text("#!/bin/sh\nexit 100\n")
        tool.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FP4_AARCH64_CACHE": str(tmp_path)}
    run = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)
    assert run.returncode == 75 and "cannot be fetched" in run.stderr


def test_a_library_that_lacks_an_operator_says_to_rebuild(monkeypatch):
    """Python files are newer than it after a git pull."""

    def register():
        raise AttributeError("'_OpNamespace' 'fp4' object has no attribute 'new'")

    monkeypatch.setattr(_library, "_register", register)
    with pytest.raises(ImportError, match=r"_C\S*so is older than the Python files.*Rebuild: pip install"):
        _library.load()


@pytest.mark.parametrize("asked_before", [False, True])
def test_a_copied_folder_registers_the_backend(asked_before, tmp_path):
    """No entry point leads to a package without metadata. torch said: Invalid backend."""
    copy = tmp_path / "packages"
    copy.mkdir()
    (copy / "fp4_ops").symlink_to(Path(fp4_ops.__file__).parent)
    for folder in filter(os.path.isdir, sys.path):
        for file in Path(folder).iterdir():
            into = copy / file.name
            if "site-packages" in folder and "fp4_ops" not in file.name and not into.exists():
                into.symlink_to(file)
    program = f"""
import sys
sys.path.append({str(copy)!r})
import torch
from importlib.metadata import entry_points
assert "fp4" not in entry_points(group="torch_dynamo_backends").names
if {asked_before}:
    assert "fp4" not in torch._dynamo.list_backends()
import fp4_ops
assert "fp4_ops.backend" not in sys.modules and "fp4" in torch._dynamo.list_backends()
for _ in range(2):
    fp4_ops._library.register_backend()
    found = torch._dynamo.lookup_backend("fp4")
    assert found is sys.modules["fp4_ops.backend"].fp4
from fp4_ops.runtime.libraries import version_of
assert version_of("fp4_ops") == "not installed" and "not installed" in str(fp4_ops.info())
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_entry_point_is_enough(monkeypatch):
    """Then importing fp4_ops does not import Dynamo, which takes a second."""
    monkeypatch.setattr(torch_internals, "dynamo_backends", None, raising=False)
    _library.register_backend()
