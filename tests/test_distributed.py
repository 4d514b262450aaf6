"""Two processes: a model that is split is right, or refused in words. gloo on the CPU."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoint_samples import tiny, write_folder

distributed = pytest.importorskip("torch.distributed")
if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

WHOLE = "each process must hold all experts in 4 bits, whole. Load the model without tp_plan"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What became of each situation of split_models.py, of both processes."""
    folder = tmp_path_factory.mktemp("split")
    model = tiny()
    model.save_pretrained(folder / "bf16")
    write_folder(folder / "4bit", model, "modelopt-nvfp4")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = Path(__file__).parent
    processes = []
    for rank in range(2):
        env = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        command = [sys.executable, str(here / "split_models.py"), str(folder)]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    logs = [p.communicate(timeout=600)[0].decode() for p in processes]
    assert not any(p.returncode for p in processes), "\n".join(log[-4000:] for log in logs)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def told(outcomes: list[dict[str, Any]], name: str) -> list[Any]:
    """Of both processes; skips what transformers itself cannot do here."""
    both = [outcome[name] for outcome in outcomes]
    for outcome in both:
        if "requires `accelerate`" in str(outcome):
            pytest.skip("transformers splits models with accelerate, which is not installed")
    return both


SPLIT_BY_TRANSFORMERS = {
    "a_folder_with_tp_plan_auto": "tp_size is 2",
    "a_folder_with_tensor_parallelism": "tp_size is 2",
    "a_folder_with_expert_parallelism": "tp_size is 2",
    "a_folder_with_expert_parallelism_alone": "tp_size is 2",
    "a_folder_with_enable_expert_parallel": "tp_size is 2",
    "a_folder_with_pipeline_parallelism": "pp_size is 2",
    "quantising_with_tensor_parallelism": "tp_size is 2",
}


@pytest.mark.parametrize("name", SPLIT_BY_TRANSFORMERS)
def test_a_folder_that_transformers_would_split_is_refused(name, outcomes):
    for outcome in told(outcomes, name):
        assert re.match("ValueError: fp4: ", outcome), outcome
        assert SPLIT_BY_TRANSFORMERS[name] in outcome and WHOLE in outcome


@pytest.mark.parametrize(
    "name",
    [
        "prepare_after_tensor_parallelism",
        "prepare_after_expert_parallelism",
        "prepare_after_fully_shard",
        "quantising_with_fsdp",
    ],
)
def test_prepare_refuses_experts_that_are_split(name, outcomes):
    start = (
        "ValueError: fp4: no experts module could be prepared:\n  model.layers.0.mlp.experts: gate_up_proj "
    )
    for outcome in told(outcomes, name):
        assert re.match(start + r"is a DTensor, placed .+ on 2 processes; ", outcome), outcome
        assert WHOLE in outcome


def test_prepare_refuses_lists_of_experts_that_are_split(outcomes):
    for outcome in told(outcomes, "prepare_of_a_list_of_experts_that_are_split"):
        assert outcome.startswith("ValueError: fp4: ") and WHOLE in outcome, outcome
        assert "experts: 0.weight is a DTensor, placed" in outcome


@pytest.mark.parametrize(
    "name",
    [
        "a_folder_with_fsdp",
        "fully_shard_after_prepare",
        "ddp_broadcasts_buffers",
        "a_state_dict_from_rank_0",
        "a_full_state_dict_after_fully_shard",
        "buffers_are_broadcast_one_by_one",
    ],
)
def test_what_wraps_whole_experts_is_right(name, outcomes):
    for outcome in told(outcomes, name):
        assert isinstance(outcome, float) and outcome < 1e-6, outcome


@pytest.mark.parametrize(
    "name, words",
    [
        ("operators_with_sharded_rows", "fp4::mm: a is a DTensor, placed S(0) on 2 processes; it must be"),
        (
            "operators_with_sharded_operands",
            "fp4::mm: a is a DTensor, placed S(0) on 2 processes; it must be",
        ),
        (
            "operators_with_replicated_operands",
            "fp4::mm: a is a DTensor, placed R on 2 processes; it must be",
        ),
        ("an_fp4_tensor_that_is_split", "on an FP4Tensor"),
    ],
)
def test_operators_refuse_dtensors(name, words, outcomes):
    for outcome in told(outcomes, name):
        assert words in outcome, outcome


def test_the_backend_leaves_split_experts_alone(outcomes):
    for error, report in told(outcomes, "the_backend_with_sharded_experts"):
        assert error < 1e-6, report
        assert "DTensor" in report
