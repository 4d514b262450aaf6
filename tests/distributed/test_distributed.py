"""Two processes with gloo on the CPU: a split model is correct, or an error explains why not."""

from __future__ import annotations

import re
from typing import Any

import processes
import pytest
from checkpoint_samples import tiny, write_folder

distributed = pytest.importorskip("torch.distributed")
if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

WHOLE = "each process must hold all experts, or the part that transformers' tp_size or ep_size gives it"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Run split_models.py. Return the outcome of each situation in both processes."""

    def make(folder):
        model = tiny()
        model.save_pretrained(folder / "bf16")
        write_folder(folder / "4bit", model, "modelopt-nvfp4")
        return processes.outcomes("split_models.py", 2, folder)

    return processes.once(tmp_path_factory, "split", make)


def told(outcomes: list[dict[str, Any]], name: str) -> list[Any]:
    """Return the outcomes of both processes. Skip what transformers itself cannot do here."""
    both = [outcome[name] for outcome in outcomes]
    for outcome in both:
        if "requires `accelerate`" in str(outcome):
            pytest.skip("transformers splits models with accelerate, which is not installed")
    return both


def test_a_folder_of_several_stages_is_refused(outcomes):
    for outcome in told(outcomes, "a_folder_with_pipeline_parallelism"):
        assert re.match("ValueError: fp4: pp_size is 2", outcome) and WHOLE in outcome, outcome


@pytest.mark.parametrize(
    "name",
    [
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


def test_the_backend_sees_through_to_local(outcomes):
    for first, second, sites, report in told(outcomes, "the_backend_sees_through_to_local"):
        assert sites in (1, 2) and first < 1e-5 and second < 1e-5, (first, second, report)


def test_a_part_that_is_read_otherwise_too_is_left_alone(outcomes):
    for error, sites, report in told(outcomes, "the_backend_where_a_part_is_read_otherwise_too"):
        assert sites == 0 and error < 1e-5 and "DTensor" in report, report


def test_parts_are_weights_only_where_nobody_asks_for_gradients(outcomes):
    for on, off in told(outcomes, "the_backend_where_a_model_turns_gradients_on_or_off"):
        assert on[0] < 1e-6 and on[1:3] == [True, True] and on[3] == 0, on
        assert 1e-3 < off[0] < 0.3 and off[1:3] == [False, False] and off[3] > 0, off


def test_the_backend_leaves_split_experts_alone(outcomes):
    for error, report in told(outcomes, "the_backend_with_sharded_experts"):
        assert error < 1e-6, report
        assert "DTensor" in report
