"""`python -m fp4_ops tune` fits constants to times and stores them in the user's cache; `info` names them."""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import emulated
import pytest
import torch
from conftest import SEED
from places import HELPERS

from fp4_ops.info import constants_of
from fp4_ops.runtime import cost_fit, first_use, native, tune, tuned

HOPPER = native.HOPPER
GPU = native.Gpu(HOPPER, 132, 227 * 1024, 0)
NAME = "NVIDIA H999 (a test's)"

pytestmark = pytest.mark.skipif(
    native.library() is None or not native.kernels_file(HOPPER).exists(),
    reason="needs the native runtime and the Hopper kernels (build with FP4_CUDA_ARCHS=90a)",
)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuned, "in_use", {})


def far_off() -> dict:
    """Constants of a GPU on which decode is much slower than the built-in ones say."""
    values = copy.deepcopy(native.built_in(HOPPER))
    values["decode_us"] = 30.0
    values["decode_rate"] = [rate / 2.5 for rate in values["decode_rate"]]
    return values


def timer_of(values: dict, noise: float = 0.02):
    def timer(p: tune.Product, kernel: str) -> float:
        point = cost_fit.Point(p.kernel, p.groups, native.work(p.planned, p.kernel, GPU), 1, 1)
        time = (cost_fit.decode_us if kernel == "decode" else cost_fit.prefill_us)(point, values)
        return time * random.uniform(1 - noise, 1 + noise)

    return timer


def test_it_finds_what_this_gpu_is():
    random.seed(SEED)
    truth = far_off()
    made, points = tune.tune(GPU, NAME, timer_of(truth))
    assert (made.device, made.family, made.build) == (NAME, HOPPER, native.build(HOPPER))
    assert made.values["decode_us"] == pytest.approx(30, rel=0.2)
    assert made.values["decode_rate"] == pytest.approx(truth["decode_rate"], rel=0.2)
    before, after = (sum(cost_fit.losses(points, v)) for v in (native.built_in(HOPPER), made.values))
    assert after < before / 4
    said = tune.report(points, tune.built_in(GPU), made.values)
    assert "decode_us" in said and "built in" in said and "measured here" in said
    assert "auto_gain" not in said  # what it did not measure


def test_a_gpu_like_the_built_in_one_keeps_its_choices():
    random.seed(SEED)
    made, points = tune.tune(GPU, NAME, timer_of(native.built_in(HOPPER)))
    assert sum(cost_fit.losses(points, made.values)) / len(points) < 0.01


def test_the_planner_takes_them_for_gpus_of_that_name():
    values = far_off()
    number = native.tuned(NAME, HOPPER, values)
    assert native.constants(native.Gpu(HOPPER, 132, 227 * 1024, 0, number)) == values
    assert native.constants(GPU) == native.built_in(HOPPER)


def kept(**other) -> tuned.Tuned:
    made = tuned.Tuned(NAME, HOPPER, native.build(HOPPER), "2026-11-26", far_off())
    return replace(made, **other)


def test_another_process_reads_what_was_kept(tmp_path):
    path = tuned.store(kept())
    assert path.is_relative_to(tmp_path) and not list(path.parent.glob("*.part"))
    code = "from fp4_ops.runtime import tuned, native\nfrom fp4_ops.info import constants_of\n"
    code += "(used, path), = tuned.in_use.values(); print(used.values['decode_us'], path)\n"
    code += f"print(constants_of({NAME!r}, native.HOPPER))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"30.0 {path}", f"measured here (2026-11-26), {path}"]
    assert done.stderr == ""


def test_info_says_where_the_built_in_ones_come_from():
    said = constants_of("a GPU", HOPPER)
    assert said.startswith("built in (NVIDIA H200, commit ") and "fp4_ops tune" in said


def damaged(text: str) -> dict[str, str]:
    values = json.loads(text)
    del values["values"]["decode_us"]
    negative = json.loads(text)
    negative["values"]["row_us"] = -1
    words = json.loads(text)
    words["values"]["row_us"] = "fast"
    short = json.loads(text)
    short["values"]["decode_rate"] = [1.0]
    nan = text.replace("30.0", "NaN")
    return {
        "half": text[: len(text) // 2], "empty": "", "a list": "[]", "a name less": json.dumps(values),
        "negative": json.dumps(negative), "words": json.dumps(words), "short": json.dumps(short), "nan": nan,
        "no such family": text.replace('"family": 90', '"family": 75'),
    }  # fmt: skip


DAMAGES = (
    "half", "empty", "a list", "a name less", "negative", "words", "short", "nan", "no such family",
)  # fmt: skip
"""By name: what they do to a file needs the native runtime, and the tests are collected without it."""


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_ignored_with_one_warning(how, caplog):
    path = tuned.store(kept())
    texts = damaged(path.read_text())
    assert set(texts) == set(DAMAGES)
    path.write_text(texts[how])
    with caplog.at_level(logging.WARNING, "fp4_ops"):
        tuned.load()
    assert [r.getMessage() for r in caplog.records] == [
        f"fp4: constants in {path} are not used: it is damaged. The built-in constants are used; to measure "
        "this machine again: python -m fp4_ops tune"
    ]
    assert not tuned.in_use


@pytest.mark.parametrize("build", ["fp4_ops 0.0.1, kernels 0123456789ab"])
def test_what_another_build_measured_is_ignored_with_one_warning(build, caplog):
    tuned.store(kept(build=build))
    with caplog.at_level(logging.WARNING, "fp4_ops"):
        tuned.load()
    (record,) = caplog.records
    assert f"it was measured with {build}" in record.getMessage() and not tuned.in_use


def test_a_folder_that_cannot_be_read_is_none(monkeypatch, caplog):
    def no_home() -> None:
        raise RuntimeError("no home")

    monkeypatch.setattr(first_use, "cache_file", no_home)
    tuned.load()
    assert not caplog.records and not tuned.in_use


def test_many_that_write_at_once_leave_a_whole_file():
    def write(i: int) -> None:
        values = {**far_off(), "decode_us": float(i)}
        tuned.store(kept(values=values))
        assert tuned.read(tuned.file_of(NAME, HOPPER)).values["decode_us"] in range(1, 33)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(1, 33)))
    assert len(list(tuned.folder().iterdir())) == 1


def test_each_gpu_has_a_file_of_its_own():
    names = [NAME, NAME.replace("(", "["), "another"]
    assert len({tuned.store(kept(device=name)) for name in names}) == 3
    tuned.load()
    assert {device for device, _ in tuned.in_use} == set(names)


def test_without_a_gpu_it_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"It needs an NVIDIA GPU .* Torch sees no GPU here.* CPU kernels"):
        tune.main(argparse.Namespace())


def test_the_command_measures_and_keeps(monkeypatch, capsys):
    random.seed(SEED)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: NAME)
    monkeypatch.setattr(native, "family", lambda device: HOPPER)
    monkeypatch.setattr(native, "gpu", lambda device: GPU)
    monkeypatch.setattr(tune, "OnGpu", lambda: timer_of(far_off()))
    tune.main(argparse.Namespace())
    said = capsys.readouterr().out
    path = tuned.file_of(NAME, HOPPER)
    assert f"stored in {path}" in said and tuned.read(path).values == tuned.in_use[NAME, HOPPER][0].values


EMULATED = """
import emulated, torch
emulated.pretend()
from fp4_ops.runtime import native, tune
seen = []
def captured(launch, count):
    seen.append(launch(0))
    return count
tune._captured, tune._replay_us = captured, lambda count: 600.0 * count
with emulated.OnCpu():
    timer = tune.OnGpu()
    for kernel in native.KERNELS:
        for which in ("decode", "prefill"):
            assert timer(tune.Product(kernel, 3, 64, 256, 5), which) == 600.0
print(len(seen))
"""


@pytest.mark.more
@pytest.mark.skipif(emulated.cuda_headers() is None, reason="the emulator needs a CUDA toolkit's headers")
def test_the_timer_calls_the_operators_as_they_are():
    """On the emulated GPU, with a clock that stands still: twice for each time, roughly and then often."""
    done = subprocess.run(
        [sys.executable, "-c", EMULATED], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(HELPERS)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "12"
