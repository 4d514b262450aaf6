"""`fp4::moe_ep` and `fp4::all_reduce` over two and three processes.

If one process is lost, the others must get an error.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from processes import once, outcomes, start

from fp4_ops.backends.launchers import library
from fp4_ops.distributed.local import Local
from fp4_ops.meta import operand_checks
from fp4_ops.meta.formats import FORMATS
from fp4_ops.meta.layouts import LAYOUTS
from fp4_ops.runtime import native

distributed = pytest.importorskip("torch.distributed")
if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

RIGHT = (
    "own_tokens", "every_format_and_a_format", "ranks_without_tokens", "one_rank_has_all_the_work",
    "no_token_chooses_an_expert", "padded_to_max_tokens", "same_tokens", "same_tokens_of_which_few_differ",
    "activations_by_the_rows_of_all", "equal_bits_on_all_ranks", "compiled_whole_for_any_number_of_tokens",
    "all_reduce", "a_smaller_group",
)  # fmt: skip
REFUSED = {
    "another_share": r"fp4::moe_ep: w13 has 2 experts; of \d+ on \d ranks, rank \d must have 9",
    "an_unknown_group": "group_name is 'nobody's', and this process is in no such group. Pass group",
    "ranks_that_differ": "topk_weights differ between ranks in dtypes, hidden size or top_k; here they are",
    "an_unknown_mode": "tokens is 'mine'; it must be one of: own, same",
    "too_few_experts": "num_experts is 1; it counts the experts of all processes, so it must be at least 2",
    "too_many_tokens": "x has 3 tokens; it must have at most max_tokens, 2",
    "same_with_other_tokens": "x, topk_ids and topk_weights differ between ranks, and tokens is 'same'",
    "same_of_a_divided_sequence": "3 of 3 tokens choose other experts on another rank",
    "another_max_tokens": r"and max_tokens is \d, which must be one number on all ranks",
    "another_sum": "x differs between ranks in dtype or shape",
    "another_operator": "calls fp4::.*, and this rank",
    "padding_of_the_same": "max_tokens is 9; with tokens 'same' it must be None",
}


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    ranks = request.param
    return once(
        tmp_path_factory, f"experts-{ranks}", lambda folder: outcomes("spread_experts.py", ranks, folder)
    )


PROCESSES = [2, pytest.param(3, marks=pytest.mark.more)]


@pytest.mark.parametrize("ranks", PROCESSES, indirect=True)
def test_operators_over_a_group(ranks):
    assert set(ranks[0]) == {*RIGHT, *REFUSED}
    for outcome in ranks:
        assert {name: outcome[name] for name in RIGHT} == dict.fromkeys(RIGHT, "right")


@pytest.mark.parametrize("ranks", PROCESSES, indirect=True)
def test_bad_calls_over_a_group(ranks):
    """All ranks say so, and the group still works (spread_experts.py)."""
    for outcome in ranks:
        for name, words in REFUSED.items():
            with pytest.raises(RuntimeError, match=words.replace("(", r"\(")):
                raise RuntimeError(outcome[name])


@pytest.mark.skipif(
    native.library() is None, reason="needs the native runtime (build with FP4_CUDA_ARCHS=90a)"
)
def test_how_activations_enter_is_decided_by_all_experts_and_rows(monkeypatch):
    """On Hopper "auto" is what one GPU with all experts takes, whatever number of them a rank has."""
    monkeypatch.setattr(library, "multiprocessors", lambda index: 132)
    device, chosen = torch.device("cuda", 0), {}
    for held in (128, 64, 16):
        up, down = (
            operand_checks.Weight(held, n, k, FORMATS["nvfp4"], LAYOUTS["sm90"], torch.float8_e4m3fn)
            for n, k in ((1536, 2048), (2048, 768))
        )
        experts = operand_checks.Experts(up, down)
        local = Local(experts, 128, range(held), (), {}, "auto")
        chosen[held] = [local.chosen(8 * 2**i, device) for i in range(14)]
        assert replace(local, a_format="fp8").chosen(8, device) == "fp8"
        plain = operand_checks.Experts(*(w._replace(layout=LAYOUTS["plain"]) for w in experts))
        assert replace(local, experts=plain).chosen(8, device) == "auto"
    assert chosen[128] == chosen[64] == chosen[16]
    assert chosen[128] == sorted(chosen[128], key=["none", "fp8"].index)
    assert {"none", "fp8"} == set(chosen[128])


@pytest.mark.skipif(
    native.library() is None, reason="needs the native runtime (build with FP4_CUDA_ARCHS=90a)"
)
def test_the_plan_expects_the_rows_that_are_here():
    """Of the slots of all ranks' tokens, one in so many has an expert here. The others cost next to nothing,
    so the kernels are those for as many valid ones."""
    sizes, told = ((1536, 2048), (2048, 768)), []
    for held in (8, 16, 64):
        for slots in (2**i for i in range(3, 12)):
            for ranks in (2, 4, 8):
                few = native.takes_few(held, slots, 16, *sizes, "none", 132, expected=slots // ranks)
                assert few == native.takes_few(held, slots // ranks, 16, *sizes, "none", 132)
                told.append((few, native.takes_few(held, slots, 16, *sizes, "none", 132)))
    assert {(True, True), (True, False), (False, False)} == set(told)


def lost(folder, how: str) -> None:
    """Rank 1 of three is lost. The others' errors name it and the operator, soon."""
    processes = start("lost_ranks.py", 3, folder, how)
    logs = [p.communicate(timeout=600)[0].decode() for p in processes]
    ended = 9 if how == "late" else 1
    assert [p.returncode for p in processes] == [0, ended, 0], logs
    operators = {"own": "fp4::moe_ep", "same": "fp4::moe_ep", "prepare": "fp4_ops.prepare"}
    for rank in (0, 2):
        told = json.loads((folder / f"rank{rank}.json").read_text())
        for name, (words, seconds) in told.items():
            what = operators.get(name, "fp4::all_reduce")
            assert words.startswith(f"{what}: on rank {rank} of the group 0, 1, 2: rank 1 did not"), told
            assert "start all ranks anew" in words
            assert seconds < 100, (name, seconds)  # not the 120 of the whole group


@pytest.mark.more
def test_a_rank_that_raises_in_its_forward_is_named(tmp_path):
    lost(tmp_path, "raises")


@pytest.mark.more
def test_a_rank_that_never_comes_is_named(tmp_path):
    """To each operator and to `prepare`, and once it has ended."""
    lost(tmp_path, "late")
