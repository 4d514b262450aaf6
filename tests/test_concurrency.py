"""Loops over experts with several threads in one process, and with Inductor's caches across processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


LOOP = """
import json, sys, torch
sys.path.insert(0, {tests!r})
from moe_models import relative_error
from moe_styles import STYLES
from torch._dynamo.utils import counters
torch.set_num_threads(1)
torch.manual_seed(int(sys.argv[1]))
def total(what):
    aot, inductor = counters["aot_autograd"], counters["inductor"]
    return aot[f"autograd_cache_{{what}}"] + inductor[f"fxgraph_cache_{{what}}"]
for format in sys.argv[2:]:
    torch._dynamo.reset()
    counters.clear()
    module, x = STYLES["where loop"](experts=3), torch.randn(5, 32)
    with torch.no_grad():
        compiled = torch.compile(module, backend="fp4", options={{"format": format, "activation": "bf16"}})
        error = relative_error(compiled(x), module.twin(format)(x))
    print("RESULT", json.dumps([total("hit"), total("miss"), error]))
"""


def in_a_fresh_process(folder: Path, seed: int, *formats: str) -> list[tuple[int, int, float]]:
    """(hits, misses, error) of each format, one after the other."""
    code = LOOP.format(tests=str(Path(__file__).parent))
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code, str(seed), *formats]
    out = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert out.returncode == 0, out.stderr
    return [tuple(json.loads(line.split("\n")[0])) for line in out.stdout.split("RESULT")[1:]]


@pytest.mark.slow
def test_a_loop_from_the_cache_of_another_process(tmp_path):
    """It hits with weights of its own, which it packs for itself; another format misses."""
    ((hits, misses, error),) = in_a_fresh_process(tmp_path, 1, "nvfp4")
    assert (hits, error < 1e-5) == (0, True) and misses > 0
    same, another = in_a_fresh_process(tmp_path, 2, "nvfp4", "mxfp4")
    hits, misses, error = same
    assert (misses, error < 1e-5) == (0, True) and hits > 0
    hits, misses, error = another
    assert (hits, error < 1e-5) == (0, True) and misses > 0
