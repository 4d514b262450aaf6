"""Other people's packages, installed as they are and run under backend="fp4": `make test-real`."""

from __future__ import annotations

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


@pytest.mark.parametrize(("group", "case"), CASES)
def test_real(group: Group, case: Case) -> None:
    try:
        found = groups.results(group)[case.package, case.what]
    except groups.CannotInstall as why:
        pytest.skip(f"{case.package} cannot be had: {why}")
    assert "raised" not in found, (found["raised"], found["log"][-3000:])
    assert not found["failed"], found["failed"]
    if case.refused:
        assert any(case.refused in why for why in (*found["reasons"], *found["breaks"])), found
        assert not found["ops"] and found["moved"] < 1e-4, found
    else:
        assert found["ops"] and found["error"] < case.tolerance, found
        assert found["far"] > 5 * max(case.tolerance, 2e-3), found
