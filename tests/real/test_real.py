"""Runs other people's unmodified packages under backend="fp4": `make test-real`."""

from __future__ import annotations

import groups
import pytest
from groups import Case, Group
from installs import CannotInstall

GROUPS = sorted(map(groups.load, groups.names()), key=lambda group: -len(group.cases))  # the longest begins
CASES = [
    pytest.param(
        group,
        case,
        id=f"{case.package} {group.version(case.package)} {case.what}",
        marks=pytest.mark.xdist_group(group.name),
    )
    for group in GROUPS
    for case in group.cases
]
pytestmark = pytest.mark.real


@pytest.mark.parametrize(("group", "case"), CASES)
def test_real(group: Group, case: Case, request: pytest.FixtureRequest) -> None:
    given = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    chosen = tuple(str(p["case"]) for p in given if "case" in p and p["group"] is group)  # by --draw, or -k
    try:
        found = groups.result(group, case, chosen)
    except CannotInstall as why:
        pytest.skip(f"{case.package} cannot be had: {why}")
    assert "raised" not in found, (found["raised"], found["log"][-3000:])
    assert not found["failed"], found["failed"]
    assert set(found["ops"]) == set(case.becomes), found
    assert found["far"] > 5 * max(case.tolerance, 2e-3), found  # errors would be visible
    if case.becomes:
        assert found["error"] < case.tolerance, found
        assert not found["reasons"], found
    else:
        assert found["moved"] < (1e-5 if found["retraced"] else 1e-6), found
        assert any(case.because in why for why in (*found["reasons"], *found["breaks"])), found


@pytest.mark.parametrize("group", GROUPS, ids=[g.name for g in GROUPS])
def test_expectations(group: Group) -> None:
    """A case is rewritten, or has a reason why not; no two have one name."""
    assert all(bool(c.becomes) != bool(c.because) for c in group.cases)
    assert len({str(c) for c in group.cases}) == len(group.cases)
