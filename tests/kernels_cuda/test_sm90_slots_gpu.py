"""Experts in host memory with slots on the GPU.

The cache is compared with a model of LRU, and the block over slots with the block over all experts, bit for
bit.
"""

from __future__ import annotations

import pytest
import torch
from conftest import more
from test_sm90_gpu import Weights, pytestmark
from test_sm90_parts_gpu import poisoned_memory

from fp4_ops.meta.slot_checks import ALIGN, COUNTERS, slot_bytes
from fp4_ops.runtime import native

__all__ = ["poisoned_memory", "pytestmark"]


def parts():
    return torch.ops.fp4_parts if torch.version.cuda else torch.ops.fp4_emulated_parts


def new_state(experts: int, slots: int) -> torch.Tensor:
    state = torch.zeros(experts + slots + COUNTERS, dtype=torch.int32, device="cuda")
    state[:experts] = -1
    return state


def room(host: list[torch.Tensor | None], slots: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Poisoned memory for slots, and each tensor's part of it."""
    memory = torch.full((slot_bytes(host, slots),), 255, dtype=torch.uint8, device="cuda")
    views, at = [], 0
    for t in host:
        if t is not None:
            size = slots * (t.nbytes // t.shape[0])
            views.append(memory[at : at + size].view(t.dtype).view(slots, *t.shape[1:]))
            at += -(-size // ALIGN) * ALIGN
    assert at == memory.numel()
    return memory, views


def in_host_memory(t: torch.Tensor) -> torch.Tensor:
    """The same values in pinned memory of the host, as a tensor of the GPU; the emulated GPU reads any."""
    if not torch.version.cuda:
        return t.clone()
    pinned = t.cpu().contiguous().pin_memory()
    data = pinned.view(torch.uint8)

    class Mapped:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": tuple(data.shape), "typestr": "|u1", "data": (data.data_ptr(), False), "version": 3,
        }  # fmt: skip
        owner = pinned

    return torch.as_tensor(Mapped(), device="cuda").view(t.dtype).view(t.shape)


class Lru:
    """A cache of experts in slots, in the order that csrc/device/slots.cu states."""

    def __init__(self, experts: int, slots: int) -> None:
        self.experts, self.slots = experts, slots
        self.held = [-1] * slots
        """The expert of each slot."""
        self.used = [0] * slots
        self.calls = self.wanted = self.fetched = 0

    def call(self, ids: list[int]) -> list[tuple[dict[int, int], list[tuple[int, int]]]]:
        """For each round the slots of its experts, and (expert, slot) of those that are fetched."""
        self.calls += 1
        wanted = sorted({i for i in ids if 0 <= i < self.experts})
        hits = [e for e in wanted if e in self.held]
        misses = [e for e in wanted if e not in self.held]
        self.wanted, self.fetched = self.wanted + len(wanted), self.fetched + len(misses)
        free = [s for s in range(self.slots) if self.held[s] not in wanted]
        free.sort(key=lambda s: (self.held[s] >= 0, self.used[s], s))
        first = dict(zip(misses, free))
        rounds = [({**{e: self.held.index(e) for e in hits}, **first}, [*first.items()])]
        rest = misses[len(first) :]
        while rest:
            its = {e: s for s, e in enumerate(rest[: self.slots])}
            rounds.append((its, [*its.items()]))
            rest = rest[self.slots :]
        for its, _ in rounds:
            for expert, slot in its.items():
                self.held[slot], self.used[slot] = expert, self.calls
        return rounds

    def halves(self, ids: list[int]) -> list[tuple[dict[int, int], list[tuple[int, int]]]]:
        """The same, where each round is two: of the slots below slots / 2, and of the others."""
        made = []
        for its, fetched in self.call(ids):
            for half in (False, True):
                made.append(
                    (
                        {e: s for e, s in its.items() if (s >= self.slots // 2) == half},
                        [(e, s) for e, s in fetched if (s >= self.slots // 2) == half],
                    )
                )
        return made

    def check(self, state: torch.Tensor) -> None:
        slot_of = [self.held.index(e) if e in self.held else -1 for e in range(self.experts)]
        assert state[: self.experts].tolist() == slot_of
        assert state[self.experts : self.experts + self.slots].tolist() == self.used
        assert state[-COUNTERS:].tolist() == [self.calls, self.wanted, self.fetched]


def routings(experts: int, tokens: int, top_k: int, calls: int):
    """Routings with the recency of text, uniform ones, one of the call before again, and one of nobody."""
    recent = torch.randint(experts, (tokens, top_k))
    for call in range(calls):
        ids = torch.randint(experts, (tokens, top_k))
        if call % 2:
            ids = torch.where(torch.rand(tokens, top_k) < 0.7, recent, ids)
        if call == 3:
            ids = recent
        if call == 4:
            ids = torch.full_like(ids, -1)
        if call % 3 == 2:
            ids[0, 0], ids[-1, -1] = -1, experts + 5
        recent = ids.clamp(0, experts - 1)
        yield ids.to(torch.int32 if call % 2 else torch.int64)


@pytest.mark.parametrize(
    "experts, slots, tokens, top_k",
    [
        (8, 3, 1, 2),
        (8, 11, 3, 2),  # more slots than experts
        (6, 1, 4, 3),  # one slot
        (128, 51, 70, 8),  # more experts than slots
        (512, 205, 8, 10),
        more(8, 8, 5, 2),
        more(1, 1, 3, 1),
        more(128, 51, 1, 8),
        more(512, 30, 300, 10),
        more(1024, 1024, 200, 8),
    ],
)
@pytest.mark.parametrize("halves", [False, True])
def test_cache_is_lru(experts, slots, tokens, top_k, halves, poisoned_memory):
    """The kernel agrees on the copies, the new ids, the contents of slots in each round, and the state."""
    host = [
        in_host_memory(torch.randint(256, (experts, size), dtype=torch.uint8))
        for size in ((16400, 48) if experts < 100 else (32,))
    ]
    host += [in_host_memory(torch.randint(256, (experts, 7), dtype=torch.uint8))]
    host += [in_host_memory(torch.randn(experts))]
    memory, cached = room(host, slots)
    state, model = new_state(experts, slots), Lru(experts, slots)
    for ids in routings(experts, tokens, top_k, calls=7):
        want = (model.halves if halves else model.call)(ids.flatten().tolist())
        there = ids.to("cuda")
        fetches, place = parts().slots_plan(there, state, slots, halves)
        most = max(1, -(-min(experts, ids.numel()) // slots)) * (1 + halves)
        assert fetches.shape == (most, 1 + 2 * slots)
        for r in range(most):
            its, fetched = want[r] if r < len(want) else ({}, [])
            count = int(fetches[r, 0])
            pairs = fetches[r, 1 : 1 + 2 * count].view(-1, 2).tolist()
            pairs, copies = [tuple(pair) for pair in pairs], fetched
            if halves:  # in the order of atomics
                pairs, copies = sorted(pairs), sorted(copies)
            assert pairs == copies
            got = parts().slots_fetch(there, fetches, place, host, memory, r)
            assert got.dtype == torch.int32 and got.shape == ids.shape
            assert got.flatten().tolist() == [its.get(i, -1) for i in ids.flatten().tolist()]
            for expert, slot in its.items():
                assert all(torch.equal(c[slot], h[expert]) for c, h in zip(cached, host))
        model.check(state)


def test_ages_pass_the_end_of_the_clock():
    """Slots keep their order where 32 bits of the clock begin again."""
    experts, slots = 9, 4
    state, model = new_state(experts, slots), Lru(experts, slots)
    state[-COUNTERS] = -6  # 2^32 - 6
    for ids in routings(experts, 1, 2, calls=20):
        want = [pair for _, fetched in model.call(ids.flatten().tolist()) for pair in fetched]
        fetches, _ = parts().slots_plan(ids.to("cuda"), state, slots)
        assert fetches[0, 1 : 1 + 2 * int(fetches[0, 0])].view(-1, 2).tolist() == [list(p) for p in want]


EXPERTS, HIDDEN, INNER, TOP_K = 9, 256, 128, 3


def block(format: str, layout: str, bias: bool) -> list[torch.Tensor | None]:
    """w13 and w2, each codes, block scales and global scale, and their biases."""
    up = Weights(EXPERTS, 2 * INNER, HIDDEN, format=format, layout=layout)
    down = Weights(EXPERTS, HIDDEN, INNER, format=format, layout=layout)
    biases = [torch.randn(EXPERTS, n, device="cuda").bfloat16() for n in (2 * INNER, HIDDEN)]
    packed = [t if t.numel() else None for w in (up, down) for t in w.packed]
    return [*packed, *(biases if bias else [None, None])]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("slots", [1, 4, EXPERTS])
@pytest.mark.parametrize("format, layout", [("nvfp4", "sm90"), ("mxfp4", "mma_bf16"), ("int4", "sm90_int4")])
@pytest.mark.parametrize(
    "only, tokens", [("prefill", 20), ("prefill", 30), ("decode", 6), ("decode", 1), ("gemv", 1)]
)
def test_block_over_slots_is_the_block_over_all(only, tokens, format, layout, slots, poisoned_memory):
    """Bit for bit, in one round and in several; gemv's sums of several rounds are those of float32. With 30
    tokens what a round fetches overlaps with the product before."""
    bias = format == "mxfp4"
    weights = block(format, layout, bias)
    host = [None if w is None else in_host_memory(w) for w in weights]
    memory, _ = room(host, slots)
    state = new_state(EXPERTS, slots)
    options = {
        "format": format, "layout": layout, "activation": "silu_interleaved",
        "a_format": "fp8" if layout == "sm90_int4" else "none", "out_dtype": torch.bfloat16,
    }  # fmt: skip
    for call, ids in enumerate(routings(EXPERTS, tokens, TOP_K, calls=4)):
        ids = ids.to("cuda")
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        shares = torch.rand(tokens, TOP_K, device="cuda")
        with native.only(only):
            want = torch.ops.fp4.moe(x, ids, shares, *weights, **options)
            got = torch.ops.fp4.moe_slots(x, ids, shares, *host, memory, state, **options)
        if only == "gemv" and slots < TOP_K:
            torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=1e-2)
        else:
            assert torch.equal(got, want), call


def test_a_call_that_fails_leaves_no_wrong_experts(poisoned_memory):
    """Its plan names what slots hold after all rounds, and it fails in the first."""
    weights = block("mxfp4", "mma_bf16", False)
    host, slots = [None if w is None else in_host_memory(w) for w in weights], 4
    memory, _ = room(host, slots)
    state = new_state(EXPERTS, slots)
    x, ids = torch.randn(30, HIDDEN, device="cuda").bfloat16(), next(iter(routings(EXPERTS, 30, TOP_K, 1)))
    given = x, ids.to("cuda"), torch.rand(30, TOP_K, device="cuda")
    options = {"format": "mxfp4", "layout": "mma_bf16", "activation": "silu_interleaved"}
    with pytest.raises(RuntimeError, match="Hopper GPUs have no kernel"):
        torch.ops.fp4.moe_slots(*given, *host, memory, state, **options, a_format="int8")
    assert (state[:EXPERTS] == -1).all()
    with native.only("prefill"):
        want = torch.ops.fp4.moe(*given, *weights, **options, a_format="none")
        got = torch.ops.fp4.moe_slots(*given, *host, memory, state, **options, a_format="none")
    assert torch.equal(got, want)
