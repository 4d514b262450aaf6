"""Sums over processes in graphs of `backend="fp4"`: these use NVLink's operators if there is a workspace."""

from __future__ import annotations

import pytest
from processes import outcomes

distributed = pytest.importorskip("torch.distributed")
if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

REWRITTEN = {
    "in_place": 1, "in_place_of_a_group": 1, "as_a_function": 1, "behind_a_residual": 1, "two_of_them": 2,
    "by_dtensors": 1,
}  # fmt: skip
LEFT_ALONE = (
    "the_largest", "of_integers", "of_one_process", "a_share_of_the_sum", "more_than_the_workspace_holds",
)  # fmt: skip


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.more)])
def test_sums_become_operators(ranks, tmp_path):
    """With the same bits. A graph that other processes take part in never runs twice for one call: one
    process may see other weights than it packed, while the others have gone on."""
    for outcome in outcomes("summed_blocks.py", ranks, tmp_path):
        assert outcome == {
            **{name: [True, count, False] for name, count in REWRITTEN.items()},
            **{name: [True, 0, False] for name in LEFT_ALONE},
            "no_sum": [True, 0, True],
        }
