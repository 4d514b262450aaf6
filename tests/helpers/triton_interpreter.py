"""Runs tests in Triton's interpreter. It applies to a whole process, so tests that are marked `inside` run in
a process of their own.

`test_in_the_interpreter` in test_triton_interpret.py starts it by `run_inside`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys

import pytest
from places import ROOT

INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INSIDE, reason="run by test_in_the_interpreter, in a process of its own")
compiles = pytest.mark.skipif(INSIDE, reason="needs the compiler")
TOO_NEW = "Triton's interpreter needs numpy < 2.4"

if INSIDE:
    import numpy
    from triton.runtime import interpreter

    # Otherwise each sum and product would check for integer overflow, without using the result.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def needs_older_numpy() -> pytest.MarkDecorator:
    """The `pytestmark` of a file with tests that are marked `inside`."""
    too_new = INSIDE and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4)
    return pytest.mark.skipif(too_new, reason=TOO_NEW)


def run_inside(which: str, *files: str) -> None:
    """Runs the tests of `files` that pytest's -m chooses by `which`, with kernels interpreted on the CPU."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, *files],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    print(result.stdout[-4000:], result.stderr[-2000:])
    assert result.returncode == 0
    if TOO_NEW in result.stdout:
        pytest.skip(TOO_NEW)
    assert re.search(r"\d+ passed", result.stdout)
