"""Other people's packages, installed as they are and run under backend="fp4": `make test-real`."""

from __future__ import annotations

import functools
import json
import subprocess
from typing import Any

import groups
import pytest
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
    group = groups.load(name)
    try:
        folder = groups.installed(group)
    except groups.CannotInstall as why:
        return str(why)
    done = subprocess.run(
        groups.worker(name), env=groups.environment(folder), cwd=folder, capture_output=True, text=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {(r["package"], r["what"]): r for r in lines}
    assert len(found) == len(group.cases), done.stderr[-3000:]
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
        assert found["ops"] and found["error"] < case.tolerance, found
        assert found["far"] > 5 * max(case.tolerance, 2e-3), found
