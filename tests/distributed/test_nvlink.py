"""The protocol of csrc/nvlink on the emulated GPU: two to four ranks, each a thread of this process."""

from __future__ import annotations

import random
import time

import emulated
import pytest
import torch
from conftest import SEED, more
from emulated_nvlink import seed, spaces, together

from fp4_ops.distributed import nvlink, workspace
from fp4_ops.distributed.local import Parts
from fp4_ops.distributed.shares import own_experts

pytestmark = pytest.mark.skipif(emulated.cuda_headers() is None, reason="needs CUDA's headers")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class Tokens:
    """Tokens of each rank in one call. Expert e multiplies by gains[e]."""

    def __init__(self, rng, ranks, tokens, hidden, top_k, experts, dtype):
        self.tokens, self.experts = tokens, experts
        self.gains = torch.rand(experts) + 0.5
        counts = [rng.randint(0, tokens) for _ in range(ranks)]
        counts[rng.randrange(ranks)] = tokens
        low, high = rng.choice([(-1, experts + 1), (0, experts), (0, 1), (-1, 0), (experts - 1, experts)])
        kind = rng.choice([torch.int32, torch.int64])
        self.x = [torch.randn(n, hidden).to(dtype) for n in counts]
        self.ids = [torch.randint(low, high, (n, top_k)).to(kind) for n in counts]
        weight_type = rng.choice(DTYPES)
        self.weights = [torch.rand(n, top_k).to(weight_type) for n in counts]
        self.sorted = rng.choice([True, False])
        self.y_type = rng.choice([None, torch.bfloat16, torch.float32]) if dtype != torch.float32 else None

    def want(self, rank: int) -> torch.Tensor:
        x, ids, w = self.x[rank].double(), self.ids[rank].long(), self.weights[rank].double()
        live = (ids >= 0) & (ids < self.experts)
        factor = (self.gains[ids.clamp(0, self.experts - 1)].double() * w * live).sum(1)
        return factor[:, None] * x

    def step(self, space: workspace.Workspace) -> torch.Tensor:
        rank = space.rank
        got = space.gather(self.x[rank], self.ids[rank], self.weights[rank], self.tokens, self.experts)
        x, _, ids, weights = got
        own = own_experts(self.experts, space.ranks, rank)
        here = ids >= 0
        assert (ids[here] < len(own)).all()
        if self.y_type is not None:
            return self.step_fused(space, got, own)
        factor = (self.gains[(ids + own.start).clamp(0, self.experts - 1).long()] * weights * here).sum(1)
        part = factor[:, None] * x.float()  # rows of nobody here are poison, or left from before
        part = torch.where(here.any(1)[:, None], part, float("nan")).to(x.dtype)
        own = self.ids[rank], self.weights[rank]
        return space.reduce(Parts(part, summed=True), got, *own, self.tokens, self.experts, x.dtype)

    def step_fused(self, space, got, own) -> torch.Tensor:
        """Rows of experts in any order, or in that of the slots; of slots without one, poison."""
        x, _, ids, _ = got
        gains = self.gains[(ids + own.start).clamp(0, self.experts - 1).long()]
        y = torch.where((ids >= 0)[..., None], x.float()[:, None] * gains[..., None], float("nan"))
        y, order = y.flatten(0, 1).to(self.y_type), torch.randperm(ids.numel())
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order))
        parts = Parts(y[order], False, places.int()) if self.sorted else Parts(y, False)
        own = self.ids[space.rank], self.weights[space.rank]
        return space.reduce(parts, got, *own, self.tokens, self.experts, x.dtype)


def small(monkeypatch, word_bytes):
    """So that few tokens take all ways; few blocks, since a block is many fibers."""
    monkeypatch.setattr(workspace, "WORD_BYTES", word_bytes)
    monkeypatch.setattr(workspace, "SUM_WORD_BYTES", word_bytes)
    for name in ("GATHER_BLOCKS", "GATHER_WORD_BLOCKS", "REDUCE_BLOCKS", "REDUCE_WORD_BLOCKS", "SUM_BLOCKS"):
        monkeypatch.setattr(workspace, name, 3)


def close(got, want, dtype, parts):
    """Parts and rows of experts are rounded to bfloat16 where the call says so."""
    eps = torch.finfo(torch.bfloat16 if dtype == torch.float16 else dtype).eps
    error = (got.double() - want).norm()
    assert error <= 3 * parts * eps * want.norm(), (error, want.norm())


@pytest.mark.parametrize("ranks", [more(2), 3, more(4)])
def test_tokens_go_to_experts_and_back(monkeypatch, ranks):
    """Calls of other sizes follow each other on one workspace, with words and flags; ranks out of step."""
    rng = random.Random(SEED)
    torch.manual_seed(SEED)
    small(monkeypatch, 2048)
    row = 2 * 136 * 4
    all = spaces(ranks, 9, row)
    seed(SEED)
    calls = []
    for _ in range(12):
        dtype, hidden = rng.choice(DTYPES), rng.choice([128, 136, 264])
        calls.append(
            Tokens(rng, ranks, rng.randint(1, 9), hidden, rng.randint(1, 5), rng.choice([2, ranks, 7]), dtype)
        )

    def run(rank):
        made = []
        for i, call in enumerate(calls):
            time.sleep(0.003 * ((rank + i) % ranks))
            made.append(call.step(all[rank]))
        return made

    for rank, made in enumerate(together(run, ranks)):
        assert isinstance(made, list), made
        for call, got in zip(calls, made):
            assert got.shape == call.x[rank].shape and got.dtype == call.x[rank].dtype
            close(got, call.want(rank), got.dtype, ranks)
    assert {int(space.counters[0]) for space in all} == {2 * len(calls)}


@pytest.mark.parametrize(
    "ranks, rounds",
    [(2, 8), pytest.param(2, 40, marks=pytest.mark.more), pytest.param(4, 20, marks=pytest.mark.more)],
)
def test_a_rank_goes_on_while_another_still_adds_up(monkeypatch, ranks, rounds):
    """It has all parts of its tokens, and its next gather may bring fewer of them to other places: nothing
    that the other still reads. No rank waits between calls, and the emulator's dawdle."""
    rng = random.Random(SEED)
    torch.manual_seed(SEED)
    small(monkeypatch, 1024)
    for _ in range(rounds):
        all = spaces(ranks, 9, 2 * 264)
        seed(SEED)
        sizes = [(rng.choice([3, 9]), rng.choice([128, 264]), rng.choice([1, 5])) for _ in range(24)]
        calls = [Tokens(rng, ranks, *size, 7, torch.bfloat16) for size in sizes]
        made = together(lambda rank: [call.step(all[rank]) for call in calls], ranks)  # noqa: B023
        for rank, results in enumerate(made):
            assert isinstance(results, list), results
            for call, got in zip(calls, results):
                close(got, call.want(rank), got.dtype, ranks)


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.more)])
def test_sums_have_equal_bits_on_all_ranks(monkeypatch, ranks):
    rng = random.Random(SEED)
    torch.manual_seed(SEED)
    small(monkeypatch, 2048)
    all = spaces(ranks, 64, 512)
    seed(SEED)
    calls = []
    for _ in range(12):
        n = 8 * rng.choice([1, 5, 128, 300, rng.randint(1, 2000)])
        dtype = rng.choice(DTYPES)
        calls.append(([torch.randn(n).to(dtype) for _ in range(ranks)], rng.choice([True, False])))
    calls = [(of, twice) for of, twice in calls if of[0].nbytes <= all[0].layout.part_stride]

    def run(rank):
        made = []
        for i, (of, twice) in enumerate(calls):
            time.sleep(0.003 * ((rank + i) % ranks))
            made.append(all[rank].all_reduce(of[rank], two_steps=twice))
        return made

    made = together(run, ranks)
    for i, (of, _) in enumerate(calls):
        want = torch.zeros_like(of[0], dtype=torch.float32)
        for part in of:
            want = want + part.float()
        for rank in range(ranks):
            assert isinstance(made[rank], list), made[rank]
            assert torch.equal(made[rank][i], want.to(of[0].dtype)), (i, rank)


def test_epochs_go_on_past_their_greatest():
    """0 is no epoch: it is what memory begins with."""
    all = spaces(2, 8, 512)
    for space in all:
        space.counters[0] = -3  # 2**32 - 3
    x = [torch.randn(128).bfloat16() for _ in range(2)]
    want = (x[0].float() + x[1].float()).bfloat16()
    for _ in range(5):
        assert all_equal(together(lambda rank: all[rank].all_reduce(x[rank]), 2), want)
    assert {int(space.counters[0]) for space in all} == {4}


def all_equal(made, want):
    return all(isinstance(got, torch.Tensor) and torch.equal(got, want) for got in made)


@pytest.mark.more
def test_a_rank_that_does_not_come_is_named():
    """Rank 0 gives up before rank 2 begins. Were they to wait at once, each could be late for the other."""
    all = spaces(3, 8, 512)
    x = torch.randn(128).bfloat16()
    assert not any(isinstance(r, Exception) for r in together(lambda rank: all[rank].all_reduce(x), 3))
    for space in all:
        space.seconds, space.space.patience = 0.25, int(0.25e9)
    for rank in (0, 2):
        with pytest.raises(RuntimeError):
            all[rank].all_reduce(x)
        words = all[rank].failure()
        assert words is not None and "rank 1 did not come within 0.25 s" in words, words


def test_ranks_that_call_otherwise_are_told():
    all = spaces(2, 8, 512)
    x = torch.randn(128).bfloat16()
    together(lambda rank: all[rank].all_reduce(x if rank else x[:64]), 2)
    words = [space.failure() for space in all]
    assert any(w is not None and "the sum of 128 bytes" in w and "the sum of 256 bytes" in w for w in words)


def test_python_has_the_structures_of_the_kernels():
    spaces(2, 8, 512)
    assert nvlink.library() is not None  # which compares their sizes
