"""Fits the constants of the planner's cost model to measured times.

The model gives microseconds. With the names of constants in fp4_ops/backends/*/constants.json:

    decode  = decode_us + weights / decode_rate * passes ** pass_power + row_us * values / 2048
    prefill = prefill_launch_us + group_us * groups + tiles + ordered / order_rate
    tiles   = prefill_scale * model, or shared_extra_us + shared_scale * prefill_scale * model where
              multiprocessors share tiles

csrc/cuda/choice.cpp uses the same formulas. It also computes the work of a product (`native.Work`).
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from .fitted import Values
from .native import KERNELS, Work

FEWEST = 6
"""Fewest points that a constant is fitted to."""
FOCUS = (10.0, 1.0, 0.3, 0.1)
PASS_POWERS = (0.0, 0.02, 0.04, 0.06, 0.09, 0.12)
ROUNDS = 8
"""The number of rounds of reweighting, which reduce the influence of a few outliers."""


class Point(NamedTuple):
    """A product with its measured times of decode and prefill."""

    kernel: str
    """One of native.KERNELS."""
    groups: int
    work: Work
    decode_us: float
    prefill_us: float


def decode_us(p: Point, v: Values) -> float:
    rate: float = v["decode_rate"][KERNELS.index(p.kernel)]
    weights = p.work.weights / rate * p.work.passes ** v["pass_power"]
    return float(v["decode_us"] + weights + v["row_us"] * p.work.values / 2048)


def prefill_us(p: Point, v: Values) -> float:
    k = KERNELS.index(p.kernel)
    time = v["prefill_scale"][k] * p.work.seconds * 1e6
    if p.work.shares:
        time = v["shared_extra_us"][k] + v["shared_scale"][k] * time
    return float(
        v["prefill_launch_us"][k] + v["group_us"] * p.groups + time + p.work.ordered / v["order_rate"]
    )


def losses(points: Iterable[Point], v: Values) -> list[float]:
    """Returns the loss of each point: time of the chosen kernel / time of the faster one - 1."""
    found = []
    for p in points:
        chosen = p.decode_us if decode_us(p, v) < prefill_us(p, v) else p.prefill_us
        found.append(chosen / min(p.decode_us, p.prefill_us) - 1)
    return found


def errors(points: Sequence[Point], v: Values) -> tuple[float, float]:
    """Returns the model's median relative error for decode and for prefill."""
    decode = [abs(decode_us(p, v) / p.decode_us - 1) for p in points]
    prefill = [abs(prefill_us(p, v) / p.prefill_us - 1) for p in points]
    return statistics.median(decode), statistics.median(prefill)


def fit(points: Sequence[Point], start: Values) -> Values:
    """Returns the constants with the least loss. Among equal losses, it takes the constants that predict
    times best.

    Constants that the points do not determine keep their values in `start`. The choice matters most where
    both kernels take nearly the same time, so the fit tries several weights for such points.
    """
    return min((_fitted(points, start, focus) for focus in FOCUS), key=lambda v: _order(points, v))


def better(points: Sequence[Point], start: Values) -> Values:
    """Returns the result of `fit`, or `start` if `start` chooses better on unseen products.

    For that test each half of the points is predicted by a fit of the other half.
    """
    halves = points[::2], points[1::2]
    if min(map(len, halves)) == 0:
        return start
    seen = [_order(other, fit(half, start)) for half, other in (halves, halves[::-1])]
    before = [_order(half, start) for half in halves]
    lost, off = (statistics.mean(column) for column in zip(*seen))
    lost_before, off_before = (statistics.mean(column) for column in zip(*before))
    return fit(points, start) if (round(lost, 4), off) < (round(lost_before, 4), off_before) else start


def _order(points: Sequence[Point], v: Values) -> tuple[float, float]:
    """Returns a sort key: the smaller it is, the better are these constants."""
    return round(statistics.mean(losses(points, v)), 4), sum(errors(points, v))


def _fitted(points: Sequence[Point], start: Values, focus: float) -> Values:
    v = copy.deepcopy(start)
    _fit_decode([p for p in points if p.work.weights == p.work.weights], v, focus)
    for kernel in KERNELS:
        _fit_prefill([p for p in points if p.kernel == kernel], KERNELS.index(kernel), v, focus)
    return v


def _attention(points: Iterable[Point], focus: float) -> list[float]:
    """Returns the weight of each point. It is largest where decode takes as long as prefill."""
    return [1 / (focus + abs(math.log(p.decode_us / p.prefill_us))) for p in points]


def solve(
    rows: Sequence[Sequence[float]], times: Sequence[float], weights: Sequence[float] | None = None
) -> list[float]:
    """Solves rows @ x = times by least squares of relative errors, with less weight on large errors."""
    a, t = torch.tensor(rows, dtype=torch.float64), torch.tensor(times, dtype=torch.float64)
    given = (torch.tensor(weights, dtype=torch.float64) if weights else torch.ones_like(t)) / t
    weight = given
    x = torch.zeros(a.shape[1], dtype=torch.float64)
    for _ in range(ROUNDS):
        x = torch.linalg.lstsq(a * weight[:, None], (t * weight)[:, None]).solution[:, 0]
        off = ((a @ x - t) / t).abs()
        weight = given / torch.sqrt(off.clamp(min=float(off.median()) + 1e-9))
    return x.tolist()


def solve_positive(
    rows: Sequence[Sequence[float]], times: Sequence[float], weights: Sequence[float] | None = None
) -> list[float]:
    """Solves like `solve`, without negative results: sets the most negative one to 0 until none is left."""
    found = [0.0] * len(rows[0])
    kept = list(range(len(found)))
    while kept:
        x = solve([[row[i] for i in kept] for row in rows], times, weights)
        worst = min(range(len(kept)), key=x.__getitem__)
        if x[worst] >= 0:
            for i, value in zip(kept, x):
                found[i] = value
            break
        del kept[worst]
    return found


def _off(rows: Sequence[Sequence[float]], times: Sequence[float], x: Sequence[float]) -> float:
    """Returns the median relative error of rows @ x."""
    return statistics.median(abs(sum(a * b for a, b in zip(row, x)) / t - 1) for row, t in zip(rows, times))


def _fit_decode(points: list[Point], v: Values, focus: float) -> None:
    """Fits decode's constants: launch, rows and passes for all kernels together, a rate for each kernel."""
    kernels = [k for k in KERNELS if sum(p.kernel == k for p in points) >= FEWEST]
    points = [p for p in points if p.kernel in kernels]
    if not points:
        return
    times, weights = [p.decode_us for p in points], _attention(points, focus)

    def fitted(power: float) -> tuple[float, float, list[float]]:
        rows = [
            [1.0, p.work.values / 2048]
            + [p.work.weights * p.work.passes**power * (p.kernel == k) for k in kernels]
            for p in points
        ]
        found = solve_positive(rows, times, weights)
        return _off(rows, times, found), power, found

    several = any(p.work.passes > 1 for p in points)
    powers = {v["pass_power"], *PASS_POWERS} if several else {v["pass_power"]}
    _, power, (launch, row, *inverse) = min(map(fitted, sorted(powers)))
    if launch <= 0 or min(inverse) <= 0:
        return
    v["decode_us"], v["row_us"], v["pass_power"] = launch, row, power
    for k, one in zip(kernels, inverse):
        v["decode_rate"][KERNELS.index(k)] = 1 / one


def _fit_prefill(points: list[Point], k: int, v: Values, focus: float) -> None:
    def tiles_us(p: Point) -> float:
        return p.prefill_us - v["group_us"] * p.groups - p.work.ordered / v["order_rate"]

    points = [p for p in points if tiles_us(p) > 0]
    whole = [p for p in points if not p.work.shares]
    if len(whole) >= FEWEST:
        rows = [[1.0, p.work.seconds * 1e6] for p in whole]
        launch, scale = solve_positive(rows, list(map(tiles_us, whole)), _attention(whole, focus))
        if scale <= 0:
            return
        v["prefill_launch_us"][k], v["prefill_scale"][k] = launch, scale
    launch, scale = v["prefill_launch_us"][k], v["prefill_scale"][k]
    shared = [p for p in points if p.work.shares and tiles_us(p) > launch]
    if len(shared) < FEWEST:
        return
    rows = [[1.0, scale * p.work.seconds * 1e6] for p in shared]
    times, weights = [tiles_us(p) - launch for p in shared], _attention(shared, focus)
    extra, factor = solve_positive(rows, times, weights)
    if factor > 0:
        v["shared_extra_us"][k], v["shared_scale"][k] = extra, factor
