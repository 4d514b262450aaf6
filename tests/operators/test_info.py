"""fp4_ops.info() and `python -m fp4_ops info` report correct facts."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import forks
import pytest
import torch
from conftest import more

import fp4_ops
from fp4_ops.__main__ import main
from fp4_ops.info import TESTED, Gpu
from fp4_ops.meta.layouts import LAYOUTS


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return forks.run(["-m", "fp4_ops", *arguments], {**os.environ, **environment})


def test_info():
    info = fp4_ops.info()
    assert info.torch == torch.__version__
    assert Path(info.library.split(" (")[0]).exists()
    assert info.formats == ("nvfp4", "mxfp4", "int4", "int4_g64", "int4_g32")
    assert set(info.operators) >= {"quantize", "mm", "grouped_mm", "indexed_mm", "moe"}
    kernels = {k.device: k for k in info.kernels}
    assert kernels["cpu"].family == torch.ops.fp4.cpu_capability()
    assert ("cuda" in kernels) == torch.cuda.is_available() == bool(info.gpus)
    for k in info.kernels:
        assert k.preferred_layout in LAYOUTS


@pytest.mark.gpu
def test_info_names_the_gpu():
    info = fp4_ops.info()
    assert info.gpus[0].name == torch.cuda.get_device_name(0)
    assert {k.device: k.family for k in info.kernels}["cuda"] in (
        "triton",
        "hopper, triton",
        "mma, triton",
    )


def test_info_says_which_kernels_failed_their_check(monkeypatch):
    """The GPU is pretended. The result of the first use decides, not what was built."""
    module = sys.modules["fp4_ops.info"]
    native = importlib.import_module("fp4_ops.backends.triton.scaled.native")
    right = {"mma": True, "triton": True, "nvfp4": True, "mxfp4": True, "fp8": False}
    backends = [SimpleNamespace(name=n, trusted=lambda _, n=n: right[n]) for n in ("mma", "triton")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "available", lambda *_: backends)
    monkeypatch.setattr(module, "preferred_layout", lambda *_, **__: "plain")
    monkeypatch.setattr(module, "multiplies_fp4", lambda *_: True)
    monkeypatch.setattr(native, "launcher", lambda _: native.scaled)
    monkeypatch.setattr(native, "runs", lambda format, _: right[format])

    def family() -> str:
        return module._gpu_kernels()[0].family

    assert family().startswith("mma, triton (FP4 rows on FP4 tensor cores, by CUDA kernels")
    assert "fp8" not in family()
    right["fp8"] = True
    assert "fp8 rows by mxfp4 weights by CUDA kernels" in family()
    right["mxfp4"] = False
    assert "nvfp4 by CUDA kernels" in family() and "mxfp4 by Triton" in family()
    right["nvfp4"] = right["fp8"] = right["mma"] = False
    assert "by Triton" in family() and "CUDA" not in family() and "mma (not used: its first use" in family()


def test_the_command_prints_it():
    result = run("info")
    assert result.returncode == 0, result.stderr
    text = str(fp4_ops.info())
    assert [line.split(", ")[0] for line in result.stdout.splitlines()] == [
        line.split(", ")[0] for line in text.splitlines()
    ]
    for word in (torch.__version__, "nvfp4", "cpu:", "layout tile16"):
        assert word in result.stdout


@pytest.mark.parametrize("arguments, buffered", [("info", ""), more("info", "1"), more("--help", "")])
def test_a_reader_that_goes_early(arguments, buffered):
    """As in `python -m fp4_ops info | head -1`: no traceback, and the exit status of other programs."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "fp4_ops", arguments], stdout=pipe, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": buffered},
        )  # fmt: skip
    assert done.stderr == "" and done.returncode == 128 + signal.SIGPIPE


OTHER_PIPE = """
import os, sys
from fp4_ops import __main__ as command
def fail():
    read, write = os.pipe()
    os.close(read)
    os.write(write, b"x")
command.info = fail
command.main(["info"])
"""


def test_another_broken_pipe_is_an_error():
    done = forks.run(["-c", OTHER_PIPE])
    assert done.returncode == 1 and "BrokenPipeError" in done.stderr


FORCED = """
import os
from fp4_ops.__main__ import main
for capability in ("sse9", "scalar"):  # the first that exists is kept for the process
    os.environ["FP4_CPU_CAPABILITY"] = capability
    main(["info"])
    print("NEXT")
"""


def test_a_forced_capability_shows():
    done = forks.run(["-c", FORCED])
    assert done.returncode == 0, done.stderr
    wrong, scalar, _ = done.stdout.split("NEXT")
    assert "FP4_CPU_CAPABILITY is 'sse9'" in wrong
    assert "cpu: scalar;" in scalar


PINNED = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import torch
from fp4_ops.__main__ import main
torch.set_num_threads(3)
main(["info"])
print(torch.ops.fp4.cpu_threads())
"""


def test_no_more_threads_than_processors():
    """More threads than a process has processors wait for each other."""
    done = forks.run(["-c", PINNED])
    assert done.returncode == 0, done.stderr
    assert "3 threads, of which 1 work" in done.stdout and done.stdout.splitlines()[-1] == "1"


def test_no_command_shows_the_commands(capsys):
    with pytest.raises(SystemExit) as error:
        main([])
    assert error.value.code == 2 and "info" in capsys.readouterr().err


MISSING = """
import sys
from pathlib import Path
sys.path.insert(0, "")  # the folder that it runs in, also where PYTHONSAFEPATH is set
for content in (None, b"not a library"):
    if content:
        Path("fp4_ops/_C.so").write_bytes(content)
    try:
        import fp4_ops
    except ImportError as error:
        print(error)
"""


def test_a_missing_library_is_one_readable_line(tmp_path):
    """What a user sees whose wheel was built for another platform, or not built at all."""
    package = tmp_path / "fp4_ops"
    (package / "runtime").mkdir(parents=True)
    for name in ("__init__.py", "_library.py", "runtime/__init__.py", "runtime/libraries.py"):
        (package / name).write_text((Path(fp4_ops.__file__).parent / name).read_text())

    done = subprocess.run(
        [sys.executable, "-c", MISSING], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    missing, broken = done.stdout.splitlines()
    assert missing.startswith("fp4_ops: the compiled operators are missing")
    assert broken.startswith("fp4_ops: _C.so does not load in torch")


@pytest.mark.parametrize(
    "capability, words",
    [((9, 0), "tests run"), ((8, 6), "nobody has run them"), ((7, 5), "neither run nor compile")],
)
def test_a_gpu_says_whether_its_kernels_were_ever_run(capability, words):
    gpu = Gpu("a GPU", "{}.{}".format(*capability))
    assert words in str(gpu) and "a GPU (compute capability" in str(gpu)


def test_what_is_said_to_be_compiled_is():
    architectures = pytest.importorskip("triton_targets").ARCHITECTURES
    assert set(TESTED) == {f"{a // 10}.{a % 10}" for a in architectures}
