"""torch.export and AOTInductor on a prepared model: the operators stay, and so do the answers."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch
from conftest import AOTI, more
from moe_models import Logits, build, tokens
from torch import nn

import fp4_ops


def prepared(family: str, layers: int = 1) -> Logits:
    # float32 and no int8 activations: the other rounding of a decomposition must not send a token elsewhere,
    # or an activation to the next int8 code.
    model = build(family, torch.float32, "grouped_mm", num_hidden_layers=layers)
    fp4_ops.prepare(model, activation="bf16")  # "bf16": activations stay in the model's own dtype
    return Logits(model).eval()


def export(model: nn.Module, strict: bool) -> torch.export.ExportedProgram:
    """Skips what torch cannot export, prepared or not (docs/troubleshooting.md): torch 2.11 makes a condition
    of the length, min(16 * length, 32 * length) == 16 * length, and does not see that it always holds."""
    length = torch.export.Dim("length", min=2, max=256)
    with torch.no_grad():
        try:
            return torch.export.export(model, (tokens(2, 8),), dynamic_shapes=({1: length},), strict=strict)
        except torch._dynamo.exc.UserError as error:
            known = "satisfy the generated guard min(" in str(error)
            if not known or not torch.__version__.startswith("2.11."):
                raise
            pytest.skip("torch 2.11 does not export Mixtral's attention with a Dim")


def moe_calls(program: torch.export.ExportedProgram) -> int:
    return sum(n.target is torch.ops.fp4.moe.default for n in program.graph.nodes)


@torch.no_grad()
def agree(got: nn.Module, want: nn.Module) -> None:
    for length in (2, 8, 21):
        ids = tokens(2, length)
        torch.testing.assert_close(got(ids), want(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("family", "layers", "strict"),
    [("mixtral", 1, False), more("mixtral", 2, True), more("qwen3_moe", 1, False), ("gpt_oss", 1, True)],
)
def test_export_keeps_the_operator_for_any_token_count(family, layers, strict):
    model = prepared(family, layers)
    program = export(model, strict)
    assert moe_calls(program) == layers
    agree(program.module(), model)
    lower = program.run_decompositions()
    assert moe_calls(lower) == layers
    agree(lower.module(), model)


FRESH = """
import sys, torch, fp4_ops
program = torch.export.load(sys.argv[1])
ids, want = torch.load(sys.argv[2])
with torch.no_grad():
    torch.testing.assert_close(program.module()(ids), want, rtol=1e-4, atol=1e-4)
assert "transformers" not in sys.modules
"""


def test_a_saved_program_runs_in_a_fresh_process(tmp_path):
    model = prepared("mixtral")
    torch.export.save(export(model, strict=False), tmp_path / "model.pt2")
    ids = tokens(2, 17)
    with torch.no_grad():
        torch.save((ids, model(ids)), tmp_path / "want.pt")
    run = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        FRESH,
        str(tmp_path / "model.pt2"),
        str(tmp_path / "want.pt"),
    ]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.more  # test_cpp.py packages the demo model
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles C++ on a CPU")
def test_aotinductor_packages_and_runs_it(tmp_path):
    model = prepared("mixtral")
    path = torch._inductor.aoti_compile_and_package(
        export(model, strict=False), package_path=str(tmp_path / "model.pt2"), inductor_configs=AOTI
    )
    agree(torch._inductor.aoti_load_package(path), model)
