"""Tests of wrapping, saving and loading 4-bit models over several processes: correct, or an error."""

from __future__ import annotations

import re

import processes
import pytest

pytest.importorskip("transformers.integrations.moe")
distributed = pytest.importorskip("torch.distributed")
if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

RIGHT = (
    "spread_in_ddp", "spread_in_fsdp", "own_state_dict", "fsdp_of_converted_models",
    "spread_over_more_ranks_than_experts", "models_over_several_groups",
    "mesh_of_replicas_and_experts", "stages_of_a_pipeline",
)  # fmt: skip
OVERWRITTEN = (
    r"RuntimeError: fp4: this process held \d of 4 experts, on rank [12] of \d, and those of rank 0 were "
    "written over them: buffers were broadcast"
)
ANOTHERS = (
    r"the state dict has \d of 4 experts, on rank (\d) of \d, and this process holds \d of 4 experts, "
    r"on rank (\d)"
)
NOT_ON_RANK_0 = {
    "spread_in_ddp_with_a_module_around": OVERWRITTEN,
    "buffers_that_are_broadcast_one_by_one": OVERWRITTEN,
    "state_dict_of_rank_0": ANOTHERS,
    "state_dict_that_rank_0_broadcasts": ANOTHERS,
}
REFUSED = {
    "refused_parameters_of_parts": "gate_up_proj has 2 of 4 experts, on rank 0 of 2. FSDP leaves them",
    "refused_parameters_of_none": "the model has no 4-bit experts. Call prepare first",
}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return processes.once(
        tmp_path_factory, "wrapped", lambda folder: processes.outcomes("wrapped_models.py", 2, folder)
    )


def check(outcomes, seconds: range) -> None:
    """seconds: the ranks whose experts are as many as those of rank 0."""
    for outcome in outcomes:
        for name in RIGHT:
            assert isinstance(outcome[name], float) and outcome[name] < 1e-5, (name, outcome[name])
    for name, words in NOT_ON_RANK_0.items():
        assert outcomes[0][name] in ("right", "loaded"), (name, outcomes[0][name])
        for rank in seconds:
            assert re.search(words, outcomes[rank][name]), (name, outcomes[rank][name])


@pytest.mark.more
@pytest.mark.drawn_together
def test_what_a_process_holds_stays_its_own(two):
    """DDP and FSDP leave it alone, or an error says that it was overwritten. All of it was silently wrong."""
    check(two, range(1, 2))


@pytest.mark.more
@pytest.mark.drawn_together
def test_a_distributed_checkpoint_of_spread_experts_is_refused(two):
    """torch keeps one of tensors that have one name: of either rank."""
    told = "".join(str(outcome["distributed_checkpoint_of_spread_experts"]) for outcome in two)
    assert (found := re.search(ANOTHERS, told)) and found[1] != found[2], told


def check_shards(outcomes) -> None:
    """8 experts of qwen3_moe, whole ones in each process."""
    shares = []
    for outcome in outcomes:
        error, before, after, cast = outcome["fsdp_around_packed_parameters"]
        assert error < 1e-5 and cast < 0.2, (error, cast)
        assert before == after
        shares.append(before)
        assert all(error < 1e-5 for error in outcome["fsdp_state_dicts"]), outcome["fsdp_state_dicts"]
        assert outcome["fsdp_with_gradients_to_what_goes_in"] < 1e-5
    assert sum(shares) == pytest.approx(1) and max(shares) == -(-8 // len(outcomes)) / 8


@pytest.mark.more
@pytest.mark.drawn_together
def test_fsdp_shards_packed_parameters(two):
    check_shards(two)


@pytest.mark.more
@pytest.mark.drawn_together
def test_what_packed_parameters_refuse(two):
    for name, words in REFUSED.items():
        assert words in two[0][name]


@pytest.mark.more
def test_three_processes_with_unequal_shares(tmp_path):
    names = "^(spread|own|fsdp|state|states|stages|models|mesh|buffers)_"
    outcomes = processes.outcomes("wrapped_models.py", 3, tmp_path, names)
    check(outcomes, range(1, 3))
    check_shards(outcomes)


@pytest.mark.more
def test_two_replicas_of_experts_over_two_processes(tmp_path):
    """A mesh of two by two: groups that are not the world, and DDP over the replicas."""
    for outcome in processes.outcomes("wrapped_models.py", 4, tmp_path, "^(mesh|models)_"):
        assert max(outcome.values()) < 1e-5, outcome
