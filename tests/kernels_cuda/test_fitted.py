"""Fitted constants: they name their origin, C++ and Python use the same, and a fit finds known constants."""

from __future__ import annotations

import copy
import importlib
import json
import math
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import SEED
from development import development

from fp4_ops import backends
from fp4_ops.meta.layouts import LAYOUTS
from fp4_ops.runtime import cost_fit, fitted, native, tune

ROOT = Path(__file__).resolve()
while not (ROOT / "setup.py").exists():
    ROOT = ROOT.parent
FILES = sorted((ROOT / "fp4_ops").rglob(fitted.FILE))
GPUS = {"hopper": native.Gpu(native.HOPPER, 132, 227 * 1024, 0)}

runtime = pytest.mark.skipif(
    native.library() is None or not native.kernels_file(native.HOPPER).exists(),
    reason="needs the native runtime and the Hopper kernels (build with FP4_CUDA_ARCHS=90a)",
)


@pytest.fixture
def fit(from_benchmarks):
    return from_benchmarks("fit")


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.parent.name)
def test_every_group_says_where_it_comes_from(file):
    groups = fitted.read(file)
    assert {f.parent.name for f in FILES} == {"cpu", "hopper", "mma", "triton", "distributed"} and groups
    for group in groups.values():
        assert group.device and re.fullmatch(r"[0-9a-f]{7,}", group.commit)
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", group.date)
        if script := re.match(r"python (\S+)", group.fit):
            assert not (ROOT / "benchmarks").exists() or (ROOT / script[1]).exists()
        else:  # nobody has measured them
            assert group.device.startswith("none") and group.fit.startswith("none")
        if file.parent.name == "triton":  # lists of tiles
            continue
        numbers = fitted.flat(group.values)
        assert numbers and all(math.isfinite(n) and n >= 0 for n in numbers)
        assert fitted.unflat(numbers, group.values) == group.values


@pytest.mark.skipif(not (ROOT / "build/fitted.h").exists(), reason="needs the build's headers")
def test_the_header_is_made_of_them(monkeypatch):
    for folder in ("csrc", ""):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    for name in [n for n in sys.modules if n.split(".")[0] == "generate"]:
        monkeypatch.delitem(sys.modules, name)
    made = importlib.import_module("generate.constants")
    assert made.fitted() == (ROOT / "build/fitted.h").read_text()
    assert made.kernel_libraries() == (ROOT / "build/kernel_libraries.h").read_text()
    assert made.cpu() == (ROOT / "build/cpu_constants.h").read_text()


def test_families_are_what_backends_and_layouts_are():
    """kernels.json of each backend: its layouts are native, its sources are there."""
    found = fitted.families()
    assert [(f.name, f.family) for f in found] == [("hopper", native.HOPPER), ("mma", native.MMA)]
    of = {b.name: b for b in backends.BACKENDS}
    for f in found:
        assert of[f.name].layouts == f.layouts and all(LAYOUTS[name].native for name in f.layouts)
        assert (ROOT / f"csrc/sm{f.family}/prefill.cu").exists()
        assert f.capability_words in of[f.name].needs
        linears = {"linears"} if f.family == native.HOPPER else set()
        assert set(of[f.name].constants) == {"planner", "prefill", *linears}
    assert {layout for f in found for layout in f.layouts} == {n for n, la in LAYOUTS.items() if la.native}


@pytest.mark.skipif(native.library() is None, reason="needs the native runtime")
@pytest.mark.parametrize("family", native.FOLDERS)
def test_the_planner_has_them(family):
    assert native.constants(native.Gpu(family, 100, 99 * 1024, 10**6)) == native.built_in(family)


def changed(values: fitted.Values) -> fitted.Values:
    """Each constant of the cost model by up to a third more or less."""
    made = copy.deepcopy(values)
    for name in ("decode_us", "row_us", "group_us"):
        made[name] *= random.uniform(0.7, 1.4)
    for name in ("decode_rate", "prefill_launch_us", "prefill_scale", "shared_scale"):
        made[name] = [v * random.uniform(0.7, 1.4) for v in made[name]]
    made["shared_extra_us"] = [random.uniform(0.3, 2) for _ in made["shared_extra_us"]]
    return made


@runtime
def test_python_predicts_what_the_planner_predicts():
    """With given constants cost_fit.py and the planner predict the same times."""
    random.seed(SEED)
    planner, gpu = development("planner"), GPUS["hopper"]
    values = changed(native.built_in(native.HOPPER))
    number = native.tuned("", gpu.family, values)
    assert native.constants(native.Gpu(gpu.family, gpu.sms, gpu.shared_bytes, 0, number)) == values
    hopper = planner.KernelFamily.HOPPER
    mine = planner.Gpu(hopper, gpu.sms, gpu.shared_bytes, 0, planner.tuned(hopper, values))
    for p in random.sample(list(tune.products(native.HOPPER)), 40):
        point = cost_fit.Point(p.kernel, p.groups, native.work(p.planned, p.kernel, gpu), 1, 1)
        product = planner.product("offs", p.groups, p.rows, p.n, p.kp)
        if point.work.weights == point.work.weights:
            assert planner.decode_us(product, p.kernel, mine) == pytest.approx(
                cost_fit.decode_us(point, values), rel=1e-12
            )
        assert planner.prefill_us(product, p.kernel, mine) == pytest.approx(
            cost_fit.prefill_us(point, values), rel=1e-12
        )


@runtime
def test_constants_decide():
    planner, values = development("planner"), copy.deepcopy(native.built_in(native.HOPPER))
    product, hopper = planner.product("offs", 128, 256, 1536, 2048), planner.KernelFamily.HOPPER
    assert planner.plan(product, "bf16", 132).family.name == "decode"
    values["decode_us"] = 1e4
    other = planner.Gpu(hopper, 132, constants=planner.tuned(hopper, values))
    assert planner.plan(product, "bf16", other).family.name == "prefill"
    assert planner.plan(product, "bf16", 132).family.name == "decode"  # built in as before


def points_of(values: fitted.Values, noise: float) -> list[cost_fit.Point]:
    """Return the times that a GPU with these constants would give."""
    made = []
    for p in tune.products(native.HOPPER):
        work = native.work(p.planned, p.kernel, GPUS["hopper"])
        if work.weights == work.weights:
            point = cost_fit.Point(p.kernel, p.groups, work, 1, 1)
            times = (
                of(point, values) * random.uniform(1 - noise, 1 + noise)
                for of in (cost_fit.decode_us, cost_fit.prefill_us)
            )
            made.append(point._replace(**dict(zip(("decode_us", "prefill_us"), times))))
    return made


def measured(values: fitted.Values) -> list[float]:
    return fitted.flat(
        {k: v for k, v in values.items() if k in ("decode_us", "decode_rate", "prefill_scale")}
    )


@runtime
def test_a_fit_finds_the_constants_that_made_the_times():
    random.seed(SEED)
    start = native.built_in(native.HOPPER)
    truth = {**changed(start), "group_us": start["group_us"]}
    found = cost_fit.fit(points_of(truth, 0), start)
    assert measured(found) == pytest.approx(measured(truth), rel=1e-3)
    assert found["row_us"] == pytest.approx(truth["row_us"], rel=1e-2)
    assert {k: v for k, v in found.items() if k.endswith("sort_us")} == {"sort_us": 12, "block_sort_us": 9}


@runtime
def test_a_fit_has_no_negative_costs():
    """Times that a negative one would give best: it is 0, and the other constants follow the times all the
    same. On an H100 more rows of an expert and more passes cost the mma.sync kernels next to nothing."""
    random.seed(SEED)
    start = native.built_in(native.HOPPER)
    truth = copy.deepcopy(start)
    truth["row_us"], truth["pass_power"] = -0.03, 0.02
    truth["decode_rate"] = [1.3 * rate for rate in start["decode_rate"]]
    truth["prefill_launch_us"], truth["prefill_scale"] = [-1.0] * 3, [1.4] * 3
    points = [p for p in points_of(truth, 0) if min(p.decode_us, p.prefill_us) > 1]
    found = cost_fit.fit(points, start)
    assert found["row_us"] == 0 and found["pass_power"] == 0.02
    assert found["decode_rate"] == pytest.approx(truth["decode_rate"], rel=0.1)
    assert found["prefill_scale"] == pytest.approx(truth["prefill_scale"], rel=0.1)
    assert all(n >= 0 for n in fitted.flat(found))
    for off, before in zip(cost_fit.errors(points, found), cost_fit.errors(points, start)):
        assert off < 0.05 < before


@runtime
def test_noise_and_a_few_disturbed_times_move_it_little():
    random.seed(SEED)
    start = native.built_in(native.HOPPER)
    truth = {**changed(start), "group_us": start["group_us"]}
    points = points_of(truth, 0.03)
    for i in random.sample(range(len(points)), 4):
        points[i] = points[i]._replace(decode_us=5 * points[i].decode_us)
    decode, prefill = cost_fit.errors(points, cost_fit.fit(points, start))
    assert decode < 0.06 and prefill < 0.06
    exact = points_of(truth, 0)
    lost, before = (sum(cost_fit.losses(exact, v)) for v in (cost_fit.better(points, start), start))
    assert lost <= before + 0.005 * len(exact)


@runtime
def test_times_of_the_built_in_constants_keep_them(fit):
    """Noise that a fit would follow is no reason to leave them: halves that it did not see decide."""
    random.seed(SEED)
    start = native.built_in(native.HOPPER)
    points = fit.recorded(ROOT / "benchmarks/results/rows_h200.json", GPUS["hopper"])
    assert len(points) > 400
    assert cost_fit.better(points, start) == start
    lost = cost_fit.losses(points, start)
    assert sum(lost) / len(lost) < 0.004  # as docs/kernels.md says


def test_few_points_change_nothing():
    start = native.built_in(native.HOPPER)
    work = native.Work(1e6, 1, 0, 1e-5, 0, 0)
    assert cost_fit.better([cost_fit.Point("bf16", 8, work, 9.0, 5.0)], start) == start


def test_the_fit_of_tiles_finds_their_costs(fit):
    random.seed(SEED)
    widths = (16, 32, 64, 96, 128, 192, 256)
    truth = [
        random.uniform(300, 800),
        random.uniform(1, 4),
        0,
        random.uniform(600, 2000),
        random.uniform(4, 9),
    ]
    truth[2] = truth[1] + truth[0] / random.uniform(100, 180)  # where both bounds of a step meet
    points = [fit.Tiles(waves, steps, width, 0) for waves in (1, 2) for steps in (16, 48) for width in widths]
    points = [p._replace(cycles=fit.tiles_cycles(p, truth)) for p in points]
    assert fit.fit_tiles(points) == pytest.approx(truth, rel=1e-3)


def test_the_fit_of_tiles_knows_the_candidates(fit):
    values = fitted.groups("hopper")["prefill"].values
    for header, prefix, count in (("prefill_fp8.cuh", "fp8", 8), ("prefill_words.cuh", "words", 9)):
        found = fit.candidates(header, prefix)
        assert len(found) == count and {c.cost for c in found} == {k for k in values if k.startswith(prefix)}
        assert all(c.widths and c.rows % 64 == 0 for c in found)


def test_what_a_fit_writes_is_read_again(fit, tmp_path):
    file = tmp_path / fitted.FILE
    file.write_text((fitted.HOME / "hopper" / fitted.FILE).read_text())
    before = fitted.read(file)
    fit.write(file, "planner", {**before["planner"].values, "decode_us": 5.5}, "a GPU")
    after = fitted.read(file)
    assert after["planner"].device == "a GPU" and after["planner"].values["decode_us"] == 5.5
    assert after["prefill"] == before["prefill"]
    assert fit.as_text(json.loads(file.read_text())) == file.read_text()


def test_solve_is_least_squares_where_nothing_disturbs():
    generator = torch.Generator().manual_seed(SEED)
    rows = torch.rand(40, 3, generator=generator, dtype=torch.float64) + 0.1
    x = torch.rand(3, generator=generator, dtype=torch.float64) + 0.5
    assert cost_fit.solve(rows.tolist(), (rows @ x).tolist()) == pytest.approx(x.tolist(), rel=1e-6)
