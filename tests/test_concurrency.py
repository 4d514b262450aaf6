"""Loops over experts with several threads in one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from moe_models import Recorder, relative_error
from moe_styles import STYLES


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch.set_num_threads(1)


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
