"""Loops over experts with several threads in one process."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import more
from families import expert_block, tiny
from moe_models import Recorder, relative_error
from moe_styles import STYLES

import fp4_ops
from fp4_ops.compile_passes.dynamo.extend import extend_dynamo

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_threads_that_compile_and_run_models_of_their_own():
    """Terms are interned for each thread, packed weights in one store for all."""
    names = ["where loop", "dense einsum", "slot mask loop (boolean masks)", "where loop"]

    def work(name: str) -> tuple[list[str], list[float]]:
        module, recorder = STYLES[name](), Recorder(activation="bf16")
        compiled = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
        twin, errors = module.twin(), []
        with torch.no_grad():
            for n in (9, 5, 9, 5):
                x = torch.randn(n, module.H)
                errors.append(relative_error(compiled(x), twin(x)))
        return recorder.ops, errors

    with ThreadPoolExecutor(len(names)) as pool:
        results = list(pool.map(work, names))
    # Layers that share code may find the graph of another thread's, whose recorder then has it.
    ops = [op for found, _ in results for op in found]
    assert set(ops) == {"fp4::moe"} and len(ops) >= len(set(names))
    assert max(e for _, errors in results for e in errors) < 1e-5


@pytest.mark.more
def test_threads_that_share_one_compiled_model():
    module, recorder = STYLES["where loop"](), Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    twin = module.twin()

    def work(n: int) -> float:
        with torch.no_grad():
            x = torch.randn(n, module.H)
            return max(relative_error(compiled(x), twin(x)) for _ in range(3))

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(work, [9, 5, 12, 7, 9, 3])) < 1e-5
    assert set(recorder.ops) == {"fp4::moe"}


# --- where a loop is compiled first ---


def in_a_pool(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def in_a_servers_task(work: Callable[[], None]) -> None:
    """As a server does: a task hands the work to a thread, with the context it was given."""

    async def task() -> None:
        await asyncio.to_thread(work)

    empty = contextvars.Context()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(empty.run, asyncio.run, task()).result()


def in_a_thread_of_a_thread(work: Callable[[], None]) -> None:
    in_a_pool(lambda: in_a_pool(work))


def in_an_older_thread(work: Callable[[], None]) -> None:
    """A thread that ran before the backend was loaded."""
    begin, started, raised = threading.Event(), threading.Event(), []

    def wait() -> None:
        started.set()
        begin.wait()
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait()
    extend_dynamo()
    begin.set()
    thread.join()
    assert raised == []


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "run",
    [in_a_pool, in_a_servers_task, in_a_thread_of_a_thread, in_an_older_thread],
    ids=lambda f: f.__name__,
)
def test_a_loop_that_a_worker_compiles_first(run):
    """Dynamo's settings belong to a thread or context, so other threads do not see the settings of the
    loading thread."""
    extend_dynamo()
    module, recorder = STYLES["where loop"](), Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder)

    def work() -> None:
        x = torch.randn(7, module.H)
        with torch.no_grad():
            assert relative_error(compiled(x), module.twin()(x)) < 1e-5

    run(work)
    assert recorder.ops == ["fp4::moe"]


@pytest.mark.parametrize("backend", [None, "eager", more("inductor")])
def test_threads_that_share_one_prepared_model(backend):
    """Compiled for the first time in worker threads, by several at once."""
    block = expert_block(tiny("qwen3_moe", "grouped_mm"))
    fp4_ops.prepare(block, activation="bf16")
    run = torch.compile(block, backend=backend, dynamic=True) if backend else block
    inputs = [torch.randn(1, n, 64) for n in (9, 5, 12, 7)]
    with torch.no_grad():
        want = [block(x) for x in inputs]

    def work(i: int) -> float:
        with torch.no_grad():
            return max(relative_error(run(inputs[i]), want[i]) for _ in range(3))

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(work, [0, 1, 2, 3, 0, 1])) < 1e-5


def test_threads_that_share_fp4_tensors():
    w = fp4_ops.quantize(torch.randn(4, 32, 64), "nvfp4").prepack("tile16")
    x = torch.randn(4, 7, 64)
    want = torch.bmm(x, w.mT)

    def work(_: int) -> bool:
        return all(torch.equal(torch.bmm(x, w.mT), want) for _ in range(10))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))
