"""Random divisions of experts among processes, and sequences that are divided among processes."""

from __future__ import annotations

import random

import pytest
import torch
from processes import outcomes

from fp4_ops.distributed.parts import Part
from fp4_ops.distributed.shares import own_experts
from fp4_ops.experts.packed import PackedWeight

distributed = pytest.importorskip("torch.distributed")
if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)


def test_shares_are_all_experts_once():
    """In the order of the ranks, as even as can be, and those of DTensor's Shard(0) where it divides."""
    rng = random.Random(torch.initial_seed())
    for _ in range(300):
        experts, ranks = rng.randint(0, 300), rng.randint(1, 17)
        shares = [own_experts(experts, ranks, rank) for rank in range(ranks)]
        assert [e for share in shares for e in share] == list(range(experts))
        sizes = {len(share) for share in shares}
        assert max(sizes) - min(sizes) <= 1
        if experts % ranks == 0:
            assert [*map(len, shares)] == [len(t) for t in torch.zeros(experts).tensor_split(ranks)]


def test_parts_of_columns_are_all_columns_once():
    rng = random.Random(torch.initial_seed())
    for _ in range(300):
        ranks, each = rng.randint(1, 17), rng.randint(1, 99)
        parts = [Part("split", rng.randint(1, 9), ranks, rank, "") for rank in range(ranks)]
        columns = [c for part in parts for c in part.own_columns(ranks * each)]
        assert columns == list(range(ranks * each))
        assert all(part.own == range(part.experts) for part in parts)
        assert [Part.of_numbers(part.numbers) for part in parts] == parts


@pytest.mark.more
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.more)])
def test_random_experts_and_divided_sequences(ranks, tmp_path):
    """Experts that are spread or split give what whole ones give, or are refused in words. Tokens of a
    sequence that is divided over processes (context parallelism) reach whole and spread experts alike."""
    for outcome in outcomes("random_shares.py", ranks, tmp_path):
        assert outcome == dict.fromkeys(outcome, "right")


def test_a_share_of_inference_tensors_knows_its_owner():
    """As `.to(device)` under inference_mode makes them: they have no count of writes."""
    part = Part("spread", 4, 2, 1, "")
    operands = torch.ops.fp4.quantize(torch.randn(2, 8, 32), "nvfp4")
    with torch.inference_mode():
        weight = PackedWeight(*(t.clone() for t in operands), "nvfp4", "plain", part=part)
        assert weight.packed.is_inference()
        weight.check_owner()
        weight.owner.fill_(0)
        with pytest.raises(RuntimeError, match="those of rank 0 were written over them"):
            weight.check_owner()
