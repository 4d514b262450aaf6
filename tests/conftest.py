"""Code that all tests share: a fresh seed for each run, devices, poisoned allocations."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import random
import zlib
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType
from typing import Any

if gc.isenabled():  # off until all is imported and collected, which makes little garbage
    gc.disable()
# With symbolic sizes, a trace rarely finds an operator's result in this cache, and filling it takes a fifth
# of the time. torch reads the variable when it is imported; processes that tests start inherit it.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")
# Otherwise Inductor tries with the C++ compiler, in each new cache, which vector instructions of the
# processor work.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Python collects garbage often enough without a collection after each of thousands of compilations.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

import pytest
import torch

if not torch.cuda.is_available():
    # One thread is enough for few kernels. Each process of a pool would have to import torch first.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import draws
import emulated
import torch._dynamo.guards
from places import ROOT

import fp4_ops

# After each compilation Dynamo times its guards, for its statistics, and flushes the processor's caches
# first: 40 ms, more than many compilations here take.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
# pytest adds a handler to every logger that does not propagate. If this logger has a handler, torch writes
# each graph to it.
logging.getLogger("torch.__trace").propagate = True
# Where opt_einsum is installed, torch orders a product of three operands by their sizes, and compiles each.
torch.backends.opt_einsum.enabled = False

AOTI = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
"""Without precompiled headers and optimised wrappers: for the two packages that tests make, these cost more
time than they save."""
SEED = int(os.environ.get("FP4_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
os.environ["FP4_TEST_SEED"] = str(SEED)  # workers and other processes use the same seed
NOT_COMPILED = "error:Inductor cannot compile graph"
"""A warning that fails a test: compile_passes/pipeline.py hides a fault from users, not from tests."""
os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), NOT_COMPILED]))


def pytest_addoption(parser) -> None:
    parser.addoption("--emulate", action="store_true", help="run GPU tests of the Hopper kernels on the CPU")
    parser.addoption("--draw", type=int, default=1, metavar="N", help="only one test in N, others each time")


def emulates(config) -> bool:
    return config.getoption("--emulate") and emulated.cuda_headers() is not None


def pytest_configure(config) -> None:
    config.addinivalue_line("filterwarnings", NOT_COMPILED)
    if emulates(config):
        emulated.pretend()


def pytest_report_header(config) -> str:
    header = f"fp4_ops: torch {torch.__version__}, FP4_TEST_SEED={SEED}"
    if config.getoption("--emulate"):
        no = "no CUDA toolkit (set CUDA_HOME), so no GPU is emulated"
        header += f"\nfp4_ops: {'a Hopper GPU is emulated' if emulates(config) else no}"
    return header


def more(*values: Any) -> Any:
    """Marks values for pytest.mark.parametrize that only `make test-more` runs."""
    return pytest.param(*values, marks=pytest.mark.more)


def large(*values: Any) -> Any:
    """Marks values for pytest.mark.parametrize for which an emulated GPU would need minutes, or gigabytes."""
    return pytest.param(*values, marks=pytest.mark.hardware)


def drawn_as(item) -> str:
    """Returns the name that decides whether --draw takes a test."""
    together = item.get_closest_marker("drawn_together")
    return next(iter(together.args), item.path.name) if together else item.nodeid


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items) -> None:
    if emulates(config):
        items[:] = [item for item in items if not item.get_closest_marker("hardware")]
    places: dict[tuple[Any, str], dict[str, int]] = defaultdict(dict)
    for item in items:
        if crossed := item.get_closest_marker("one_in"):
            total = 0
            for name, value in item.callspec.params.items():
                place = places[item.function, name]
                total += place.setdefault(repr(value), len(place))
            if total % crossed.args[0]:  # not random: `make test` and `make test-more` together run all
                item.add_marker("more")
    n = config.getoption("--draw")
    numbers = {item: draws.number(SEED, drawn_as(item)) for item in items}
    least = min(numbers.values(), default=0)  # at least one: pytest fails where no test is run
    items[:] = [i for i in items if numbers[i] % n == 0] or [i for i in items if numbers[i] == least]
    if getattr(config.option, "loadgroup", False):
        for item in items:
            group = item.get_closest_marker("xdist_group")
            if group and hasattr(item, "_id"):  # pytest 9.2 does not use the name that xdist 3.8 sets
                item._id = type(item._id).parse(f"{item.nodeid}@{group.args[0]}")
    # Long tests begin first, so that no worker still has one at the end.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def needs_gpu() -> None:
    pytest.skip("needs an NVIDIA GPU")


@pytest.hookimpl(hookwrapper=True)
def pytest_pycollect_makeitem(collector, name):
    """Without a GPU, replaces the thousands of variants that need one by one skipped test for each
    function."""
    found = (yield).get_result()
    if torch.cuda.is_available() or not isinstance(found, list):
        return
    variants = [i for i in found if isinstance(i, pytest.Function)]
    on_gpu = [i for i in variants if i.get_closest_marker("gpu")]
    if on_gpu or any("device" in i.fixturenames for i in variants):
        found[:] = [i for i in found if i not in on_gpu]
        skipped = pytest.Function.from_parent(collector, name=f"{name}[cuda]", callobj=needs_gpu)
        skipped.add_marker("gpu")
        found.append(skipped)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session) -> None:
    """Freezes existing objects, so that the garbage collector does not visit torch and thousands of tests
    each time."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.failed:
        report.sections.append(("seed", f"fails again with FP4_TEST_SEED={SEED}"))


@pytest.fixture(autouse=True)
def fresh_data(request) -> None:
    """Seeds the random numbers of each test by FP4_TEST_SEED and the test's name."""
    seed = SEED ^ zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():  # without CUDA, torch.manual_seed keeps a stack trace
        torch.cuda.manual_seed_all(seed)


@pytest.fixture(autouse=True)
def emulated_gpu(request, fresh_data):
    if not emulates(request.config):
        yield
        return
    emulated.seed(torch.initial_seed())
    with emulated.OnCpu():
        yield


@pytest.fixture
def fresh_dynamo() -> None:
    """Resets Dynamo before each test, and makes it capture loops over experts, as a first compilation
    does."""
    from fp4_ops.compile_passes.dynamo.branches import KEPT
    from fp4_ops.compile_passes.dynamo.extend import extend_dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    KEPT.clear()
    torch.set_num_threads(1)
    extend_dynamo()


@pytest.fixture
def from_benchmarks(monkeypatch) -> Callable[[str], ModuleType]:
    """Imports a module of benchmarks/ by its name."""
    folder = ROOT / "benchmarks"
    if not folder.exists():
        pytest.skip("a source distribution has no benchmarks/")
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module


@pytest.fixture
def registered():
    """Applies fp4_ops.register_with_transformers for one test."""
    from transformers.quantizers import auto

    mappings = (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING)
    before = [dict(m) for m in mappings]
    fp4_ops.register_with_transformers()
    yield
    for mapping, old in zip(mappings, before):
        mapping.clear()
        mapping.update(old)


DEVICES = ["cpu"] + [pytest.param("cuda", marks=pytest.mark.gpu)] * torch.cuda.is_available()


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    return request.param


M_PERTURB = -6  # glibc: malloc.h


def poison_malloc(on: bool) -> bool:
    """Makes the C library fill all memory that it allocates with 0xfe (-1.7e38 as a float32)."""
    try:
        return bool(ctypes.CDLL(None).mallopt(M_PERTURB, 0x01 if on else 0))
    except AttributeError:  # not glibc
        return False


@contextlib.contextmanager
def poisoned():
    """Fills memory that kernels allocate with garbage: in malloc on the CPU, in at::empty on a GPU."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    poison_malloc(True)
    try:
        yield
    finally:
        poison_malloc(False)
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = before[2]
