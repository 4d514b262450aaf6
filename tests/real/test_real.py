"""Other people's packages, installed as they are and run under backend="fp4": `make test-real`."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

import pytest

import groups
from groups import Case, Group

GROUPS = [groups.load(name) for name in groups.names()]
CASES = [
    pytest.param(
        group,
        case,
        id=f"{case.package} {case.what}",
        marks=[pytest.mark.xdist_group(group.name), *([pytest.mark.xfail()] if case.unfinished else [])],
    )
    for group in GROUPS
    for case in group.cases
]
pytestmark = pytest.mark.real


@functools.cache
def _results(name: str) -> dict[str, Any] | str:
    """Of each of a group's cases what became of it; or why its packages cannot be had."""
    try:
        folder = groups.installed(groups.load(name))
    except groups.CannotInstall as why:
        return str(why)
    env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    worker = [sys.executable, str(groups.HERE / "worker.py"), name]
    done = subprocess.run(worker, env=env, capture_output=True, text=True, cwd=folder)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {(r["package"], r["what"]): r for r in lines}
    assert len(found) == len(groups.load(name).cases), done.stderr[-3000:]
    return {"results": found, "log": done.stderr}


@pytest.mark.parametrize(("group", "case"), CASES)
def test_real(group: Group, case: Case) -> None:
    all_of_it = _results(group.name)
    if isinstance(all_of_it, str):
        pytest.skip(f"{case.package} cannot be had: {all_of_it}")
    found = all_of_it["results"][case.package, case.what]
    assert "raised" not in found, (found["raised"], all_of_it["log"][-3000:])
    assert not found["failed"], found["failed"]
    if case.refused:
        assert any(case.refused in why for why in (*found["reasons"], *found["breaks"])), found
        assert not found["ops"] and found["moved"] < 1e-4, found
    else:
        assert found["ops"] and found["error"] < 1e-4, found
        assert found["far"] > 1e-2, found
