"""Forks run scripts as new processes do: status, output, environment, arguments (tests/helpers/forks.py)."""

from __future__ import annotations

import time
from pathlib import Path

import forks
import pytest

SCRIPT = """
import os, sys
print(sys.argv[1:], os.environ["WHERE"], "HOME" in os.environ, os.getcwd(), __name__)
print("an error", file=sys.stderr)
sys.exit(3)
"""


def test_a_script_gets_what_it_is_given(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    for script in (["-c", SCRIPT], [str(tmp_path / "script.py")]):
        done = forks.run([*script, "a", "b"], {"WHERE": "here"}, tmp_path)
        assert (done.returncode, done.stderr) == (3, "an error\n")
        assert done.stdout == f"['a', 'b'] here False {tmp_path} __main__\n"


def test_errors_and_signals_are_its_status():
    done = forks.run(["-c", "raise ValueError('no')"])
    assert done.returncode == 1 and done.stderr.endswith("ValueError: no\n")
    assert forks.run(["-c", "import os; os.kill(os.getpid(), 9)"]).returncode == -9


def until(holds) -> None:
    for _ in range(600):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it took too long")


def test_a_fork_that_is_given_up_ends():
    forked = forks.start(["-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"])
    until(lambda: forked.output().endswith(b"\n"))
    with pytest.raises(TimeoutError):
        forked.communicate(timeout=0.1)
    process = Path("/proc", forked.output().decode().strip())
    until(lambda: not process.exists())
