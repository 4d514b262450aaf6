"""Thresholds and sizes of the CPU's kernels are data.

benchmarks/fit_cpu.py measures from how many rows on the kernels for many rows are faster.
"""

from __future__ import annotations

import random
import re

import pytest
import torch
from places import ROOT

from fp4_ops import backends
from fp4_ops.runtime import fitted

GROUPS = fitted.groups("cpu")


@pytest.fixture
def fit_cpu(from_benchmarks):
    return from_benchmarks("fit_cpu")


def test_the_kernels_read_every_one_of_them():
    """Each by its name, and no other ones: a number beside the data would be what counts."""
    text = "".join(f.read_text() for f in sorted((ROOT / "csrc/cpu").iterdir()))
    read = set(re.findall(r"fitted::(\w+)::(\w+)", text))
    assert read == {(group, key) for group, g in GROUPS.items() for key in g.values}
    assert dict(backends.BACKENDS[0].constants) == GROUPS


def points_of(fit_cpu, least: dict[str, int], fast: float) -> list[object]:
    """Times of kernels that win from `least` rows of a kind on, and lose before, by a few per cent."""
    rng = random.Random(torch.initial_seed())
    points = []
    for kind, rows in least.items():
        for n in fit_cpu.ROWS:
            speedup = rng.uniform(1.02, 2) if n >= rows else rng.uniform(0.3, 0.98)
            points += [fit_cpu.Point(kind, n, speedup)] * 4
        points += [fit_cpu.Point(kind, fit_cpu.SPEED_AT, fast)] * 4
    return points


def test_the_fit_finds_where_many_rows_win(fit_cpu):
    before = {"min_rows_floating": 0, "min_rows_int8": 3, "min_rows_bf16": 9, "speed": 2, "waiting_sums": 2}
    points = points_of(fit_cpu, {"int8": 25, "bf16": 6}, 4.2)
    found = fit_cpu.fit(points, before)
    assert found == {**before, "min_rows_int8": 25, "min_rows_bf16": 6, "speed": 4}
    assert fit_cpu.fit(points_of(fit_cpu, {"bf16": 1000}, 0.4), before) == {
        **before,
        "min_rows_bf16": 0,  # never
        "speed": 1,
    }


def test_one_loss_on_the_way_counts(fit_cpu):
    """Eight rows win, 24 lose: three times eight rows are what the other kernels take at once."""
    points = [fit_cpu.Point("int8", n, 0.9 if n == 24 else 1.1) for n in fit_cpu.ROWS]
    assert fit_cpu.fit(points, {"min_rows_int8": 0})["min_rows_int8"] == 25


@pytest.mark.more
@pytest.mark.skipif(
    torch.ops.fp4.cpu_capability() not in ("amx_bf16", "avx512_bf16"), reason="no kernels for many rows"
)
def test_it_measures_two_builds(fit_cpu):
    group = torch.ops.fp4.cpu_capability()
    kinds = fit_cpu.kinds_of(GROUPS[group].values)
    points = list(fit_cpu.measure(group, kinds, rows=(3, 16), size=256, rounds=1))
    assert {(p.kind, p.rows) for p in points} == {(kind, n) for kind in kinds for n in (3, 16)}
    assert all(0 < p.speedup < 1e3 for p in points)
