"""Experts spread over several processes: by a group, by transformers' plans, from 4-bit folders."""

from __future__ import annotations

import processes
import pytest
import torch
from checkpoint_samples import tiny, write_folder
from moe_models import FAMILIES
from torch import nn

distributed = pytest.importorskip("torch.distributed")
if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)
pytest.importorskip("transformers.distributed.expert_parallel")

BY_GROUP = (
    "a_group_of_ranks_with_own_tokens", "a_group_that_generates", "a_group_and_activations_by_device",
    "a_folder_over_a_group",
)  # fmt: skip
SPREAD = (
    "own_implementation_of_expert_parallelism", "own_implementation_from_a_folder",
    "own_implementation_with_own_batches", "transformers_all_to_all_with_own_batches",
    "prepare_after_expert_parallelism", "a_folder_with_expert_parallelism",
    "load_checkpoint_with_expert_parallelism", "quantising_with_expert_parallelism",
)  # fmt: skip
SPLIT = (
    "prepare_after_tensor_parallelism", "a_folder_with_tensor_parallelism",
    "quantising_with_tensor_parallelism",
)  # fmt: skip
COMPILED = "compiled_implementation_of_expert_parallelism"
LONGER = "sums|compiled|backend_with"
"""Situations that only `more` runs: they compile whole models. test_several_ranks.py compiles the operator
alone, and test_distributed.py a model whose DTensors are read by `to_local()`."""
Bound = tuple[float, float]
"""Bounds of the error of the typical token, and of all logits."""
REORDERED = (1e-5, 1e-3)
"""The same products, whose float32 sums are in another order: about 1e-7."""
ROUNDED = (0.05, 0.3)
"""Activations in int8, in blocks of their own or of values that differ in the last bit. Another code is
off by 1/254 of its block's largest value at most, so a token is by 1% or less. Where its next router takes
another expert, it is off by as much as that expert gives, and the fourteen by a quarter of that."""
BOUNDS = {"a_group_and_activations_by_device": ROUNDED}
WHOLE_BY_TP = ("gpt_oss",)
"""Whose tensor parallel plan leaves experts whole."""
REFUSED = {
    "refused_blocks_that_do_not_fit": "has intermediate size 96, which 2 processes split (tp_size); each "
    "part must be a multiple of 128, the block of int4. Use another tp_size or format, or ep_size",
    "refused_gradients": "trainable_inputs=True, and model.layers.0.mlp.experts has 4 of 8 experts, on rank",
    "refused_twice": "ep_group is given, and model.layers.0.mlp.experts has 4 of 8 experts, on rank",
    "refused_to_save": "has 4 of 8 experts, on rank 0 of 2 here; a folder needs all. Save a model that is",
    "refused_linears": "q_proj.weight is stored in 4 or 8 bits, and the plan divides it ('colwise')",
    "refused_a_group_and_a_plan": "tp_size is 2, and ep_group is given; give one of the two",
    "refused_mixtures_of_plans": "down_proj 'colwise'; 4-bit experts take 'moe_tp_experts' around gate",
}


@torch.no_grad()
def run(folder, ranks: int, pattern: str, families: tuple[str, ...]):
    """What experts give is about as large as what is added to it: were it twice as large, logits would be off
    by 0.1 and more. Beside experts that give a hundred times as much, the norm that follows hides that."""
    for family in families:
        model = tiny(family)
        nn.init.normal_(model.get_input_embeddings().weight)
        for weight in model.parameters():
            if weight.dim() == 3:
                weight.normal_(0, 1 / 8)
        model.save_pretrained(folder / family / "bf16")
        dialect = "modelopt-nvfp4"
        if family == "gpt_oss":
            dialect = "gpt-oss-mxfp4"
            model.get_input_embeddings().weight.mul_(8)  # random blocks of MXFP4 are large
        write_folder(folder / family / "4bit", model, dialect, factors=lambda _, e: 2.0**-11 * (1 + e / 7))
        if family == "qwen3_moe":
            linears = ("model.layers.0.self_attn.q_proj",)
            write_folder(folder / family / "linears", model, dialect, linears=linears)
    return processes.outcomes("spread_models.py", ranks, folder, pattern, *families)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return processes.once(
        tmp_path_factory, "spread", lambda folder: run(folder, 2, f"^(?!{LONGER})", ("qwen3_moe",))
    )


def within(errors: list[float], bound: Bound) -> bool:
    return all(error < most for error, most in zip(errors, bound, strict=True))


def check(told, ranks: int, whole: bool = False, bound: Bound = REORDERED) -> None:
    """One process's outputs but for rounding, with a share of its bytes: of split weights, scales are on
    each."""
    assert isinstance(told, list), told
    *errors, here, all_bytes = told
    assert within(errors, bound), told
    if whole:
        assert here == all_bytes
    else:
        assert all_bytes / ranks <= here <= all_bytes / ranks * 1.01, told


@pytest.mark.parametrize("name", [*BY_GROUP, *SPREAD, *SPLIT, "bytes_read_by_a_rank"])
def test_two_processes_are_one(name, two):
    for outcome in two:
        check(outcome[f"{name} qwen3_moe"], 2, bound=BOUNDS.get(name, REORDERED))


def check_backend(told) -> None:
    """In models whose DTensors are read by `to_local()` alone: `fp4::moe`, then transformers' all-reduce."""
    errors, sites, report = told
    assert within(errors, REORDERED), errors
    assert sites == 2 and report.count("fp4::moe") == 2, report


def test_tp_plan_auto_is_right(two):
    for outcome in two:
        *errors, here, all_bytes = outcome["a_folder_with_tp_plan_auto qwen3_moe"]
        assert within(errors, ROUNDED) and here < 0.51 * all_bytes  # once, the sum was twice what it is


@pytest.mark.parametrize("name", REFUSED)
def test_what_processes_refuse(name, two):
    """Rank 0 alone saves."""
    for outcome in two[: 1 if name == "refused_to_save" else 2]:
        told = outcome[f"{name} qwen3_moe"]
        assert REFUSED[name] in told, told


@pytest.mark.more
def test_families(tmp_path):
    others = tuple(f for f in FAMILIES if f != "qwen3_moe")
    for outcome in run(tmp_path, 2, "^(a|compiled|own|prepare|quantising|transformers)_", others):
        for family in others:
            for name in (COMPILED, *BY_GROUP, *SPREAD, *SPLIT):
                if f"{name} {family}" in outcome:
                    whole = name in SPLIT and family in WHOLE_BY_TP
                    check(outcome[f"{name} {family}"], 2, whole, BOUNDS.get(name, REORDERED))


@pytest.mark.more
def test_a_compiled_model(tmp_path):
    for outcome in run(tmp_path, 2, "^(compiled|backend_with)", ("qwen3_moe",)):
        check(outcome[f"{COMPILED} qwen3_moe"], 2)
        check_backend(outcome["backend_with_expert_parallelism qwen3_moe"])
        check_backend(outcome["backend_with_tensor_parallelism qwen3_moe"])


@pytest.mark.more
def test_three_processes_with_unequal_shares(tmp_path):
    """8 experts: 2, 3 and 3 of them."""
    told = run(tmp_path, 3, "^a_(group|folder_over)", ("qwen3_moe",))
    for name in BY_GROUP:
        results = [outcome[f"{name} qwen3_moe"] for outcome in told]
        assert all(within(told[:2], BOUNDS.get(name, REORDERED)) for told in results), results
        assert sum(here for *_, here, _ in results) == results[0][-1]


@pytest.mark.more
def test_sums_over_processes_are_operators(tmp_path):
    """Attention's and the experts', of two layers, where there is a workspace; of one group for all."""
    names = ("sums_with_expert_parallelism", "sums_with_tensor_parallelism", "sums_of_a_prepared_model")
    for outcome in run(tmp_path, 2, "^sums", ("qwen3_moe",)):
        for name in names:
            told = outcome[f"{name} qwen3_moe"]
            assert told == [True, ["  sums over processes (4x): by fp4::all_reduce, over NVLink"]], told
