"""Routing weights that are masked by the process that has an expert: such a mask is not that of one
expert."""

from __future__ import annotations

import pytest
import torch
from conftest import more
from hit_styles import HitLoop
from moe_models import Recorder, relative_error
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

EACH, RANK = 4, 1
"""Experts of a process, and which one this is: a number that is an expert's, too."""

AWAY = {
    "ids // n": lambda ids: ids // EACH != RANK,
    "not ids // n": lambda ids: ~(ids // EACH == RANK),
    "div": lambda ids: torch.div(ids, EACH, rounding_mode="trunc") != RANK,
    "shift": lambda ids: (ids >> 2) != RANK,
    "bits": lambda ids: (ids & 12) != EACH * RANK,
    "table": lambda ids: (torch.arange(16) // EACH)[ids] != RANK,
    "remainder": lambda ids: ids % 4 != RANK,
    "range": lambda ids: (ids < EACH * RANK) | (ids >= EACH * (RANK + 1)),
}
MASKS = {
    "masked_fill": lambda w, away: w.masked_fill(away, 0.0),
    "times": lambda w, away: w * ~away,
    "where": lambda w, away: torch.where(away, 0.0, w),
}
SHOWN = [("ids // n", "masked_fill"), ("table", "times")]


class Spread(HitLoop):
    """One of four processes; what it does not have counts for nothing."""

    def __init__(self, away: str, mask: str) -> None:
        super().__init__(experts=EACH)
        self.router, self.away, self.mask = nn.Linear(self.H, 4 * EACH, bias=False), away, mask

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.router(x).softmax(-1).topk(8)
        away = AWAY[self.away](ids)
        own = ids // 4 if self.away == "remainder" else ids % EACH
        return own.masked_fill(away, EACH), MASKS[self.mask](weights, away)


@pytest.mark.parametrize(
    "away, mask",
    [pair if pair in SHOWN else more(*pair) for pair in ((a, m) for a in AWAY for m in MASKS)],
)
def test_a_process_share_of_experts(away, mask):
    module, recorder = Spread(away, mask), Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, dynamic=True)
    with torch.no_grad():
        for n in (9, 7):
            x = torch.randn(n, module.H)
            assert relative_error(compiled(x), module.twin()(x)) < 1e-5
    assert recorder.ops == ["fp4::moe"], recorder.reasons
