"""A program without Python runs a package of a prepared model, by the commands of docs/deployment.md."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import DEVICES
from places import ROOT
from transformers import AutoModelForCausalLM

import fp4_ops
from fp4_ops.runtime.libraries import libraries

PAGE = (ROOT / "docs/deployment.md").read_text().partition("\n## Without Python\n")[2].partition("\n## ")[0]
COMMANDS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0]
TOKENS = (2, 3, 17, 130)
pytestmark = pytest.mark.drawn_together


@pytest.fixture(scope="module", params=DEVICES)
def built(request, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str], str]:
    """The folder with the program and the package, what the commands printed, and the device."""
    device = request.param
    for tool in ("cmake", "g++"):
        if shutil.which(tool, path=path()) is None:
            pytest.skip(f"there is no {tool}")
    if device == "cuda" and not any("cuda" in library.name for library in libraries()):
        pytest.skip("this build has no _C_cuda.so")
    folder = tmp_path_factory.mktemp("cpp")
    commands = COMMANDS.replace("build/cpp", str(folder))
    if device == "cuda":
        commands = commands.replace(f"make_package.py {folder}", f"make_package.py {folder} --device cuda")
    done = run(["bash", "-euc", commands], ROOT)
    return folder, done, device


def path() -> str:
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def run(command: list[str], where: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=where,
        env={**os.environ, "PATH": path(), "PYTHONFAULTHANDLER": "1"},
        capture_output=True,
        text=True,
    )


def errors(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the end of the standard error, without the hundreds of modules that a crash of Python lists."""
    lines = done.stderr.splitlines()
    return "\n".join(line for line in lines if not line.startswith("Extension modules:"))[-3000:]


@pytest.mark.more
@pytest.mark.slow
def test_the_documented_commands_give_the_bits_of_python(built):
    _, done, device = built
    assert done.returncode == 0, done.stdout[-2000:] + errors(done)
    on = "cpu" if device == "cpu" else "cuda:0"
    lines = [line for line in done.stdout.splitlines() if "bits" in line or "DIFFERS" in line]
    assert lines == [f"[1, {n}] on {on}: the same bits" for n in TOKENS]


@pytest.mark.more
@pytest.mark.slow
@torch.no_grad()
def test_the_package_answers_as_the_model(built):
    """Up to rounding, which now and then sends a token to another expert: in bfloat16 up to 0.27 of the norm
    in 300 draws. Unrelated logits differ by 1.4."""
    folder, done, device = built
    assert done.returncode == 0, errors(done)
    model = AutoModelForCausalLM.from_pretrained(ROOT / "examples/demo_model", dtype=torch.bfloat16)
    fp4_ops.prepare(model.to(device).eval(), format="nvfp4")
    examples = torch.load(folder / "expected.pt")
    assert [tuple(ids.shape) for ids, _ in examples] == [(1, n) for n in TOKENS]
    got = torch.cat([logits.double() for _, logits in examples], 1)
    want = torch.cat([model(input_ids=ids, use_cache=False).logits.double() for ids, _ in examples], 1)
    assert (got - want).norm() < 0.5 * want.norm()


@pytest.mark.more
@pytest.mark.slow
def test_another_answer_is_noticed(built, tmp_path):
    """One bit of one logit: a comparison that cannot fail would show nothing."""
    folder, done, _ = built
    assert done.returncode == 0, errors(done)
    examples = torch.load(folder / "expected.pt")
    examples[1][1].view(torch.int16).view(-1)[7] ^= 1
    torch.save(examples, tmp_path / "other.pt")
    program = [str(folder / "run_package"), str(folder / "model.pt2"), str(tmp_path / "other.pt")]
    done = run([*program, *map(str, libraries())], tmp_path)
    assert done.returncode == 1
    assert [line.rpartition(": ")[2] for line in done.stdout.splitlines()] == [
        "the same bits", "DIFFERS", "the same bits", "the same bits",
    ]  # fmt: skip


@pytest.mark.more
@pytest.mark.slow
def test_without_the_libraries_torch_knows_no_schema(built, tmp_path):
    folder, done, _ = built
    assert done.returncode == 0, errors(done)
    message = re.search(r"Without it torch says \"(.*?)\"", PAGE)
    assert message is not None
    program = [str(folder / n) for n in ("run_package", "model.pt2", "expected.pt")]
    done = run(program, tmp_path)
    assert done.returncode == 2
    assert message[1] in done.stderr


@pytest.mark.more
@pytest.mark.slow
def test_the_program_links_no_python(built):
    folder, done, _ = built
    assert done.returncode == 0, errors(done)
    assert not python_in(folder / "run_package")


def python_in(binary: Path) -> list[str]:
    needed = run(["ldd", str(binary)], ROOT)
    assert needed.returncode == 0 and "libc.so" in needed.stdout, needed.stderr
    return [line for line in needed.stdout.splitlines() if "python" in line.split("=>")[0]]


@pytest.mark.more
@pytest.mark.skipif(shutil.which("ldd") is None, reason="there is no ldd")
def test_libraries_link_no_python():
    found = libraries()
    assert found[0].name == "_C.so"
    for library in (*found, *found[0].parent.glob("_sm?0.so")):
        assert not python_in(library), library
    own = Path(torch.__path__[0]) / "lib/libtorch_python.so"
    assert subprocess.run(["nm", "-D", str(own)], capture_output=True, text=True).stdout.count("Py_") > 0
    for library in found:  # nor does it wait for a process to have one
        symbols = subprocess.run(
            ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True
        )
        assert symbols.returncode == 0
        assert not re.findall(r"\b_?Py[A-Z_]\w+", symbols.stdout)


@pytest.mark.more
def test_the_libraries_are_printed(capsys):
    from fp4_ops.__main__ import main

    main(["libraries"])
    assert capsys.readouterr().out.splitlines() == [str(p) for p in libraries()]
