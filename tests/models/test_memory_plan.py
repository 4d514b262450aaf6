"""Plans of a GPU's memory: sizes, slots a layer, costs of a token, and budgets that do not suffice."""

from __future__ import annotations

import random

import pytest
import torch
from moe_models import build, tokens
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import fp4_ops
from fp4_ops.experts.packed import PackedWeight
from fp4_ops.models.memory_plan import (
    SLOT_ROWS,
    TOKENS_LEAST,
    WORKSPACE,
    Activations,
    LayerExperts,
    MemoryPlan,
    Rates,
    parse_bytes,
    plan_memory,
)

GIB = 2**30


@pytest.mark.parametrize(
    "given, want",
    [
        (5, 5),
        ("20GiB", 20 * GIB),
        ("1.5 gb", 15 * 10**8),
        ("500MB", 5 * 10**8),
        (" .5GiB ", GIB // 2),
        ("7", 7),
    ],
)
def test_bytes_are_read(given, want):
    assert parse_bytes(given) == want


@pytest.mark.parametrize(
    "given", [0, -1, True, 1.5, None, "", "GiB", "20 GiBs", "-3GB", "0GB", "1e9", "2 5GB"]
)
def test_what_is_no_size_is_named(given):
    with pytest.raises(ValueError, match=r"fp4: gpu_memory is .*must be a number of bytes"):
        parse_bytes(given)


def test_slots_of_gpt_oss_120b():
    """36 layers of 128 experts of 13.2 MB, 4 of them for a token, beside 4 GB."""
    layers = tuple(LayerExperts(f"layer {i}", 128, 4, 13_219_200) for i in range(36))
    plan = MemoryPlan(24 * GIB, 4 * 10**9, layers, Rates(1000e9, 25e9))
    slots = plan.slots(layers[0])
    room = plan.budget - plan.reserve - plan.dense_bytes
    assert slots == room // (36 * 13_219_200) == 40
    assert plan.gpu_bytes + plan.reserve <= plan.budget < plan.gpu_bytes + plan.reserve + 36 * 13_219_200
    per_token = 36 * 4 * 13_219_200
    worst = (4e9 + per_token) / 1000e9 + per_token * (1 - slots / 128) / 25e9
    assert plan.seconds(recency=False) == pytest.approx(worst)
    assert plan.seconds(recency=True) < worst
    assert "40 slots for 128 experts in each of 36 layers" in str(plan)
    everything = MemoryPlan(80 * GIB, 4 * 10**9, layers)
    assert everything.resident and everything.slots(layers[0]) == 128 and "fit" in str(everything)


def test_layers_of_several_kinds_stay_within_the_budget():
    """Random layers: never over the budget, never below top_k, and no room for a slot more in each layer."""
    rng = random.Random(torch.initial_seed())
    for _ in range(50):
        layers = tuple(
            LayerExperts(
                str(i), e := rng.randint(4, 512), rng.randint(1, min(e, 10)), rng.randint(10**5, 10**7)
            )
            for i in range(rng.randint(1, 20))
        )
        least = sum(layer.top_k * layer.expert_bytes for layer in layers)
        dense = rng.randint(0, 10**9)
        plan = MemoryPlan((least + dense) * rng.randint(2, 5) + GIB, dense, layers)
        assert plan.gpu_bytes + plan.reserve <= plan.budget
        slots = [plan.slots(layer) for layer in layers]
        assert all(layer.top_k <= s <= layer.experts for s, layer in zip(slots, layers))
        if not plan.resident:
            more = sum(min(x.experts, s + 1) * x.expert_bytes for s, x in zip(slots, layers))
            assert dense + more + plan.reserve > plan.budget


def test_the_budget_that_an_error_asks_for_suffices():
    layers = (LayerExperts("a", 64, 8, 10**8), LayerExperts("b", 64, 8, 10**8))
    for dense in (0, 10**9, 50 * 10**9):
        with pytest.raises(
            ValueError, match=r"gpu_memory is 1\.00 GiB; it must be at least (\d+\.\d+) GiB"
        ) as e:
            MemoryPlan(GIB, dense, layers)
        asked = float(str(e.value).split("at least ")[1].split(" GiB")[0])
        plan = MemoryPlan(int((asked + 0.01) * GIB), dense, layers)
        assert plan.slots(layers[0]) >= 8
        with pytest.raises(ValueError, match="must be at least"):
            MemoryPlan(int((asked - 0.02) * GIB), dense, layers)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_model_is_counted(family):
    """All that is not of experts is dense; shared memory counts once; the model's answer does not change."""
    model = build(family, torch.float32, "grouped_mm")
    fp4_ops.prepare(model, "nvfp4", activation="bf16")
    ids = tokens(1, 5)
    want = model(input_ids=ids).logits
    plan = plan_memory(model, "2GiB")
    packed = [m for m in model.modules() if isinstance(m, PackedWeight)]
    biases = [p.nbytes for name, p in model.named_parameters() if "experts" in name and name.endswith("bias")]
    assert plan.expert_bytes == sum(w.num_bytes for w in packed) + sum(biases)
    held = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers()) if t.numel()}
    assert plan.dense_bytes + plan.expert_bytes == sum(held.values()) + sum(biases)  # slots copy them
    assert len(plan.layers) == len(packed) // 2 and plan.layers[0].top_k == model.config.num_experts_per_tok
    assert plan.resident
    torch.testing.assert_close(model(input_ids=ids).logits, want, rtol=0, atol=0)


def needed(each: Activations, tokens: int, resident: bool) -> int:
    rows = tokens * each.top_k if resident else min(tokens * each.top_k, SLOT_ROWS)
    return WORKSPACE + tokens * each.token_bytes + rows * each.row_bytes


@pytest.mark.parametrize("fits", [False, True], ids=["slots", "resident"])
def test_the_activations_of_prompts_fit_into_what_is_kept_free(fits):
    """As many tokens as half of it holds, in steps of 64. Slots multiply at most 16384 rows at once."""
    rng = random.Random(torch.initial_seed())
    for _ in range(50):
        top_k = rng.randint(1, 10)
        each = Activations(rng.randint(10**4, 10**6), rng.randint(10**3, 10**5), top_k)
        layers = (LayerExperts("a", 128, top_k, 10**5 if fits else 10**9),)
        plan = MemoryPlan(rng.randint(12, 200) * GIB, 10**8, layers, activations=each)
        assert plan.resident == fits or plan.budget > 128 * 10**9
        tokens = plan.prompt_tokens

        assert tokens % TOKENS_LEAST == 0
        least, more = (needed(each, n, plan.resident) for n in (tokens, tokens + TOKENS_LEAST))
        assert least <= plan.reserve // 2 < more or (tokens == TOKENS_LEAST and least > plan.reserve // 2)
        assert f"at most {tokens} tokens at once" in str(plan)


def test_activations_of_qwen3_30b():
    """The estimate for a layer exceeds what was measured: 79 KB a token, and 160 MB for 16384 rows."""
    config = Qwen3MoeConfig(
        hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_hidden_layers=1,
        num_experts_per_tok=8, num_experts=9, moe_intermediate_size=768, vocab_size=99,
        experts_implementation="grouped_mm",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fp4_ops.prepare(model, "nvfp4", activation="bf16")
    plan = plan_memory(model, "24GiB")
    each = plan.activations
    assert each is not None and each.top_k == 8 and plan.cache_token_bytes == 2 * 4 * 128 * 2
    assert 79e3 < each.token_bytes < 2 * 79e3 and 160e6 < each.row_bytes * SLOT_ROWS < 2 * 160e6


def test_a_model_without_experts_is_an_error():
    with pytest.raises(ValueError, match="no experts of the model run by fp4::moe"):
        plan_memory(torch.nn.Linear(3, 3), "1GiB")
