"""docs/contributing.md names files that exist, and its numbers of files are correct."""

import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import draws
import pytest
from places import ROOT

FILE = ROOT / "docs" / "contributing.md"
if not FILE.exists():
    pytest.skip("a source distribution has no docs/", allow_module_level=True)
PAGE = FILE.read_text()
SECTIONS = dict(re.findall(r"^## (Adding .*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("name", SECTIONS)
def test_files_to_touch(name):
    """If a file has moved: change the list, and the count that stands above it."""
    count = int(re.search(r"^\*\*Files: (\d+)\*\*", SECTIONS[name], re.MULTILINE)[1])
    files = re.findall(r"^- `([^`]+)`:", SECTIONS[name], re.MULTILINE)
    assert len(files) == count == len(set(files))
    assert [f for f in files if not (ROOT / f).is_file()] == []


def test_other_paths_on_the_page():
    named = re.findall(r"`((?:csrc|fp4_ops|meta|compile_passes|tests|docs|benchmarks|release)/[^` ]+)`", PAGE)
    there = [f for f in named if "sm100" not in f]
    assert len(there) > 30
    assert [f for f in there if not (ROOT / f).exists()] == []


def test_four_things_to_add():
    assert list(SECTIONS) == [
        "Adding a format", "Adding a GPU architecture", "Adding a form of Mixture of Experts",
        "Adding a checkpoint dialect",
    ]  # fmt: skip


@pytest.mark.parametrize("n", [2, 8, 18, 48, 96])
def test_each_draw_takes_other_tests(n):
    """Of two tests that a seed draws together, one in n are drawn together with another seed. Each has its
    turn."""
    names = [f"tests/a_folder/test_a_file.py::test_of_something[{i:04d}]" for i in range(400)]
    start = random.SystemRandom().randrange(2**32)
    runs = [{name for name in names if draws.is_drawn(start + i, name, n)} for i in range(40 * n)]
    assert set().union(*runs) == set(names), start
    of_first = [run for run in runs if names[0] in run]
    together = sum(len(run) - 1 for run in of_first) / len(of_first)
    assert 0.5 < together / (len(names) / n) < 2, start
    most = max(sum(name in run for run in of_first) for name in names[1:])
    assert most < len(of_first), start  # crc32 drew some tests together each time


def make(where: Path, *args: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    command = ["make", "-C", str(where), "-f", str(ROOT / "Makefile"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("held", ["pyvenv.cfg", "conda-meta/history", "thesis.tex"])
def test_make_leaves_an_environment_of_others_alone(tmp_path, held):
    own = tmp_path / "own"
    (own / held).parent.mkdir(parents=True)
    (own / held).write_text("home = /nowhere\n")
    done = make(ROOT, f"VENV={own}", f"PYTHON={sys.executable}", f"{own}/deps")
    assert done.returncode and "make did not make it" in done.stdout, done.stdout + done.stderr
    cleaned = make(tmp_path, f"VENV={own}", "clean")
    assert not cleaned.returncode and "make did not make it" in cleaned.stdout, (
        cleaned.stdout + cleaned.stderr
    )
    assert (own / held).read_text() == "home = /nowhere\n"


def test_make_begins_again_where_it_was_interrupted(tmp_path):
    """Its first run ended in `python -m venv`, such as for a Python without ensurepip."""
    own, python = tmp_path / "own", tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -m ] || exit 0\nshift; {sys.executable} -m "$@" --without-pip; exit 9\n'
    )
    python.chmod(0o755)
    for _ in range(2):
        done = make(ROOT, f"VENV={own}", f"PYTHON={python}", f"{own}/deps")
        assert done.returncode and "make did not make it" not in done.stdout, done.stdout
        assert (own / "pyvenv.cfg").exists(), done.stdout + done.stderr
    assert not make(tmp_path, f"VENV={own}", "clean").returncode
    assert not own.exists()
