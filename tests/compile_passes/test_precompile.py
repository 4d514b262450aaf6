"""Compiled models that are saved: precompilation (`forward.aot_compile`), and torch's caches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import processes
import pytest
import torch
from conftest import more
from moe_models import relative_error
from moe_styles import STYLES
from places import HELPERS
from prepared_block import Prepared


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    torch.set_num_threads(1)


@pytest.fixture
def precompilation():
    if not hasattr(torch._dynamo.config, "enable_aot_compile"):
        pytest.skip(f"torch {torch.__version__} has no forward.aot_compile")
    with torch._dynamo.config.patch(enable_aot_compile=True):
        yield


def child(script: str, *arguments: Path) -> list[str]:
    """The lines that a fresh process prints, with a cache folder of its own."""
    command = [sys.executable, str(HELPERS / script), *map(str, arguments)]
    env = processes.environment(TORCHINDUCTOR_CACHE_DIR=str(arguments[0] / "cache"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


CASES = {
    "einsum": (lambda: STYLES["dense einsum"](), {}, (9,)),
    "loop": (lambda: STYLES["where loop"](), {"format": "mxfp4"}, (9, 5)),
    "grouped": (lambda: STYLES["sorted grouped_mm (torchtitan)"](), {"format": "int4"}, (9, 7)),
    "gather": (lambda: STYLES["gather + bmm"](), {"activation": "bf16"}, (9, 4)),
    "prepared": (lambda: Prepared(), {}, (9,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("names", [("einsum",), more(("loop", "grouped", "gather", "prepared"))])
def test_a_precompiled_model_gives_the_same_bits_in_a_fresh_process(names, precompilation, tmp_path):
    for name in names:
        build, options, sizes = CASES[name]
        module = build()
        compiled = torch.compile(
            module, backend="fp4", fullgraph=True, dynamic=len(sizes) > 1, options=options
        )
        calls = [(torch.randn(n, module.H),) for n in sizes]
        with torch.no_grad():
            saved = compiled.forward.aot_compile((calls[0], {}))
            results = [saved(module, *args) for args in calls]
            for got, args in zip(results, calls):
                if name == "prepared":
                    assert relative_error(got, module(*args)) < 1e-4
                else:
                    assert relative_error(got, module.twin(options.get("format", "nvfp4"))(*args)) < 2e-2
                    assert relative_error(got, module(*args)) > 1e-3
        saved.save_compiled_function(str(tmp_path / f"{name}.bin"))
        torch.save((module, calls, results), tmp_path / f"{name}.pt")
    said = child("load_precompiled.py", tmp_path)
    assert said == [f"{name} same" for name in sorted(names) for _ in CASES[name][2]]


def test_a_model_precompiled_by_another_build_is_refused(precompilation, tmp_path, monkeypatch):
    module = STYLES["dense einsum"]()
    compiled = torch.compile(module, backend="fp4", fullgraph=True)
    with torch.no_grad():
        compiled.forward.aot_compile(((torch.randn(9, module.H),), {})).save_compiled_function(
            str(tmp_path / "model.bin")
        )
    from fp4_ops.compile_passes import precompiled

    monkeypatch.setattr(precompiled, "version_hash", lambda: "another")
    with (tmp_path / "model.bin").open("rb") as f, pytest.raises(RuntimeError, match="compile it again"):
        torch.compiler.load_compiled_function(f)


@pytest.mark.more
@pytest.mark.slow
def test_cache_artifacts_spare_a_fresh_process_the_compilation(tmp_path):
    """`torch.compiler.save_cache_artifacts`: with the same graph, options and build of fp4_ops."""
    for phase in ("save", "load"):
        said = child("cache_artifacts.py", tmp_path / phase, tmp_path)
        assert said == (["4 bits", "missed"] if phase == "save" else ["4 bits", "hit", "same"])
