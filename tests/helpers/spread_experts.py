"""Runs as one of several processes that call the operators over a group: `python spread_experts.py FOLDER
[WAY]`.

WAY is gloo (on the CPU), nccl (each rank on a GPU), or nvlink (the same with a workspace).

`rank0.json`, ... in FOLDER get the outcome of each situation. Each rank draws the same weights and the tokens
of all ranks. It compares its own rows with float64 over exactly dequantised weights.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import reference
import torch
import torch.distributed as dist
from reference import FORMATS, GATES, assert_close, random_weight, rows_per_column

import fp4_ops  # noqa: F401  loads the operators
from fp4_ops.distributed.local import Local
from fp4_ops.distributed.shares import own_experts
from fp4_ops.distributed.workspace import connect

FOLDER = Path(sys.argv[1])
WAY = sys.argv[2] if len(sys.argv) > 2 else "gloo"
DEVICE = "cpu" if WAY == "gloo" else f"cuda:{os.environ['LOCAL_RANK']}"
SEED = int(os.environ.get("FP4_TEST_SEED", "0"))
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ON_GPU = WAY != "gloo"
QUANTISED = "fp8" if ON_GPU else "int8"
"""The `a_format` of tests with quantised activations. On GPUs, layout plain ignores it."""


def cut(w: reference.Weight, own: range) -> tuple[Any, ...]:
    part = slice(own.start, own.stop)
    return tuple(None if t is None else t[part].contiguous() for t in w.operands())


class Case:
    """A block of E experts and the tokens of each rank, the same draw on all of them."""

    def __init__(
        self, rng: random.Random, ranks: int, rank: int, *, experts: int, counts: list[int], **fixed: Any
    ):
        self.rank, self.ranks, self.experts, self.counts = rank, ranks, experts, counts
        self.format = fixed.get("format") or rng.choice(("nvfp4", "mxfp4") if ON_GPU else FORMATS)
        self.activation = fixed.get("activation") or rng.choice(GATES)
        self.a_format = fixed.get("a_format") or rng.choice(("none", "int8", "fp8", "auto"))
        self.dtype = fixed.get("dtype") or rng.choice(FLOATS)
        layout = rng.choice(("plain", "tile16"))
        hidden, inner = 2 * rng.choice((16, 24, 47)), 2 * rng.choice((8, 16, 33))
        if ON_GPU:
            layout = "sm90" if self.format in ("nvfp4", "mxfp4") and rng.random() < 0.8 else "plain"
            self.a_format = rng.choice(("none", "fp8")) if layout == "sm90" else "none"
            self.dtype = torch.float16 if self.dtype == torch.float16 else torch.bfloat16
            if layout == "sm90":
                hidden, inner = rng.choice((128, 256, 320)), rng.choice((64, 128))
        self.hidden, self.inner, self.top_k = hidden, inner, rng.randint(1, 3)
        n = rows_per_column(self.activation) * inner
        self.w13 = random_weight(self.format, experts, n, hidden, layout=layout, device=DEVICE)
        self.w2 = random_weight(self.format, experts, hidden, inner, layout=layout, device=DEVICE)
        biases = fixed.get("biases") or rng.random() < 0.5
        self.b13 = torch.randn(experts, n).to(DEVICE) if biases else None
        self.b2 = torch.randn(experts, hidden).to(DEVICE) if biases else None
        low, high = fixed.get("ids", (-1, experts + 1))
        dtype = rng.choice((torch.int32, torch.int64))
        self.x = [torch.randn(t, hidden).to(DEVICE, self.dtype) for t in counts]
        self.ids = [torch.randint(low, high, (t, self.top_k)).to(DEVICE, dtype) for t in counts]
        self.weights = [torch.rand(t, self.top_k).to(DEVICE) for t in counts]
        self.own = own_experts(experts, ranks, rank)

    def operands(self) -> tuple[Any, ...]:
        biases = (None if b is None else b[self.own.start : self.own.stop] for b in (self.b13, self.b2))
        return *cut(self.w13, self.own), *cut(self.w2, self.own), *biases

    def options(self, **more: Any) -> dict[str, Any]:
        return {
            "format": self.format, "layout": self.w13.layout, "activation": self.activation,
            "a_format": self.a_format, **more,
        }  # fmt: skip

    def call(self, tokens: str, of: int, op: Any = None, **more: Any) -> torch.Tensor:
        op = op or torch.ops.fp4.moe_ep
        more = {
            "num_experts": self.experts,
            "tokens": tokens,
            "group_name": dist.group.WORLD.group_name,
            **more,
        }
        return op(self.x[of], self.ids[of], self.weights[of], *self.operands(), **self.options(**more))

    def check(self, got: torch.Tensor, of: int) -> None:
        """Compare a result with float64, and with one process in float32.

        The result of one process may differ in the order of sums, and in the codes of values half-way between
        two codes.
        """
        x, ids, weights = self.x[of], self.ids[of], self.weights[of]
        assert got.shape == x.shape and got.dtype == self.dtype, (got.shape, got.dtype)
        a_format = "int8" if self.a_format == "auto" else self.a_format
        kwargs = {"activation": self.activation, "a_format": a_format}
        args = (x, ids, weights, self.w13.dense, self.w2.dense, self.b13)
        between = reference.moe_between_codes(*args, **kwargs)
        whole = (*self.w13.operands(), *self.w2.operands(), self.b13, self.b2)
        one = torch.ops.fp4.moe(x, ids, weights, *whole, **self.options(out_dtype=torch.float32)).double()
        typical = one.norm().item()
        # On GPUs, kernels for few rows and for many round intermediate values to different dtypes.
        factor = 3.0 if ON_GPU else 1.0
        assert_close(got, one, self.dtype, self.hidden * self.top_k, factor, typical=typical, more=between)
        want = reference.moe(*args, self.b2, **kwargs)
        if ON_GPU:  # the values were rounded to bfloat16 before they got codes, whatever the dtype
            factor *= 4 if self.dtype == torch.float16 else 1
            between = reference.moe_between_codes(*args, **kwargs, near=2**-7)
        assert_close(got, want, self.dtype, self.hidden, 2 * factor, typical=typical, more=between)


def group_calls(rng: random.Random, ranks: int, rank: int) -> dict[str, Any]:
    """Return for each situation the word "right", or what is wrong."""

    def case(**named: Any) -> Case:
        return Case(rng, ranks, rank, **named)

    def uneven(most: int = 9) -> list[int]:
        return [rng.randint(0, most) for _ in range(ranks)]

    def own(c: Case, **more: Any) -> None:
        c.check(c.call("own", rank, **more), rank)

    def same(c: Case) -> None:
        c.check(c.call("same", 0), 0)

    def own_tokens():
        for experts in (1, 2, ranks, 5, 7, 8):
            own(case(experts=experts, counts=uneven()))

    def every_format_and_a_format():
        for format in FORMATS:
            for a_format in ("none", "fp8") if ON_GPU else ("none", "int8", "fp8"):
                own(case(experts=rng.choice((3, 4)), counts=uneven(), format=format, a_format=a_format))

    def ranks_without_tokens():
        for counts in ([0] * ranks, [5] + [0] * (ranks - 1), [0] * (ranks - 1) + [1]):
            own(case(experts=4, counts=counts))

    def one_rank_has_all_the_work():
        own(case(experts=4, counts=uneven(), ids=(0, 1)))
        own(case(experts=4, counts=uneven(), ids=(3, 4)))

    def no_token_chooses_an_expert():
        c = case(experts=4, counts=uneven(), ids=(-1, 0))
        got = c.call("own", rank)
        assert (got == 0).all()

    def padded_to_max_tokens():
        c = case(experts=5, counts=uneven(6))
        own(c, max_tokens=6)
        own(c, max_tokens=11)

    def same_tokens():
        for experts, count in ((1, 3), (2, 1), (5, 8), (8, 0), (ranks, 33)):
            same(case(experts=experts, counts=[count]))

    def same_tokens_of_which_few_differ():
        """Ranks may choose different experts for a token, as after a near tie. The call must not fail."""
        c = case(experts=5, counts=[9], ids=(0, 5))
        c.ids[0][4] = (c.ids[0][4] + rank) % 5
        got = c.call("same", 0)
        assert got.isfinite().all() and got.shape == c.x[0].shape

    def activations_by_the_rows_of_all():
        """`a_format="auto"` depends on all experts and the rows of all ranks, so all ranks make the same
        choice."""
        asked, chosen = [], Local.chosen
        try:
            for tokens in ("own", "own", "padded", "same", "same"):
                counts = uneven() if tokens != "same" else [rng.randint(0, 9)] * ranks
                c = case(experts=rng.randint(1, 9), counts=counts, a_format="auto")
                padded = max(counts) + rng.randint(0, 3)
                rows = padded * ranks if tokens == "padded" else sum(counts) if tokens == "own" else counts[0]
                limit = rng.choice((rows * c.top_k, rows * c.top_k + 1))
                c.a_format = QUANTISED if rows * c.top_k >= limit else "none"
                if c.w13.layout == "plain" and ON_GPU:
                    c.a_format = "none"
                Local.chosen = lambda self, pairs, device: (
                    asked.append((self.num_experts, pairs)) or c.a_format  # noqa: B023
                )
                if tokens == "padded":
                    own(c, max_tokens=max(padded, 1))
                    rows = max(padded, 1) * ranks
                else:
                    own(c) if tokens == "own" else same(c)
                assert asked and set(asked) == {(c.experts, rows * c.top_k)}, (asked, rows, c.top_k)
                asked.clear()
        finally:
            Local.chosen = chosen

    def equal_bits_on_all_ranks():
        c = case(experts=7, counts=[12], a_format=QUANTISED)
        bits = c.call("same", 0).float()
        told = [torch.empty_like(bits) for _ in range(ranks)]
        dist.all_gather(told, bits)
        assert all(torch.equal(t, bits) for t in told)
        assert torch.equal(c.call("same", 0).float(), bits)

    def compiled_whole_for_any_number_of_tokens():
        c = case(experts=5, counts=[4] * ranks, dtype=torch.bfloat16, format="nvfp4", biases=True)
        graphs = []

        def backend(graph, _):
            graphs.append(graph)
            return graph.forward

        def call(x, ids, weights, *w, **options):
            return torch.ops.fp4.moe_ep(x * 1, ids, weights, *w, **options) * 1

        compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=backend)
        for counts in (
            [11] * ranks,
            [13 + r for r in range(ranks)],
            [21] * ranks,
        ):  # none of these is the size of anything else
            c.x, c.counts = [torch.randn(t, c.hidden).to(DEVICE, c.dtype) for t in counts], counts
            c.ids = [torch.randint(0, 5, (t, c.top_k)).to(DEVICE) for t in counts]
            c.weights = [torch.rand(t, c.top_k).to(DEVICE) for t in counts]
            c.check(c.call("own", rank, compiled), rank)
        assert len(graphs) == 1, len(graphs)

    def all_reduce():
        for dtype in FLOATS:
            parts = [torch.randn(5, 8).to(DEVICE, dtype) for _ in range(ranks)]
            mine = parts[rank].clone()
            got = torch.ops.fp4.all_reduce(mine.T, group_name=dist.group.WORLD.group_name)
            assert torch.equal(mine, parts[rank]), "its argument changed"
            assert_close(got, sum(p.double() for p in parts).T, dtype, ranks, typical=40**0.5)
        none = torch.ops.fp4.all_reduce(
            torch.empty(0, 3, device=DEVICE), group_name=dist.group.WORLD.group_name
        )
        assert none.shape == (0, 3)

    def a_smaller_group():
        group = dist.new_group([0, ranks - 1])
        if rank in (0, ranks - 1):
            place = 0 if rank == 0 else 1
            c = Case(rng, 2, place, experts=5, counts=[3, 4])
            c.check(c.call("own", place, group_name=group.group_name), place)

    results: dict[str, Any] = {}
    for function in (
        own_tokens, every_format_and_a_format, ranks_without_tokens, one_rank_has_all_the_work,
        no_token_chooses_an_expert, padded_to_max_tokens, same_tokens, same_tokens_of_which_few_differ,
        activations_by_the_rows_of_all, equal_bits_on_all_ranks, compiled_whole_for_any_number_of_tokens,
        all_reduce, a_smaller_group,
    ):  # fmt: skip
        rng.seed(f"{SEED} {function.__name__}")
        torch.manual_seed(rng.getrandbits(32))
        start = time.monotonic()
        try:
            function()
            results[function.__name__] = "right"
        except Exception as reason:
            results[function.__name__] = f"{type(reason).__name__}: {reason}"
        print(f"{function.__name__}: {time.monotonic() - start:.1f} s", flush=True)
        dist.barrier()
    return results


def refusals(rng: random.Random, ranks: int, rank: int) -> dict[str, Any]:
    """Returns the error of each bad call. The group must still work after it."""
    rng.seed(SEED)
    torch.manual_seed(SEED)
    c = Case(rng, ranks, rank, experts=2 * ranks, counts=[3] * ranks, dtype=torch.float32)

    def another_share():
        c.call("own", rank, num_experts=9 * ranks)

    def an_unknown_group():
        c.call("own", rank, group_name="nobody's")

    def ranks_that_differ():
        other = Case(
            rng, ranks, rank, experts=4, counts=[3] * ranks, format="int4", dtype=FLOATS[1 if rank else 2]
        )
        other.call("own", rank)

    def an_unknown_mode():
        c.call("mine", rank)

    def too_few_experts():
        c.call("own", rank, num_experts=1)

    def too_many_tokens():
        c.call("own", rank, max_tokens=2)

    def padding_of_the_same():
        c.call("same", 0, max_tokens=9)

    def same_with_other_tokens():
        count = 3 + rank if not ON_GPU else 3
        other = Case(rng, 2 * ranks, 0, experts=4 * ranks, counts=[count])
        assert not ON_GPU, "x, topk_ids and topk_weights differ between ranks, and tokens is 'same'"
        other.own = own_experts(4 * ranks, ranks, rank)
        other.call("same", 0)

    def same_of_a_divided_sequence():
        assert not ON_GPU, "3 of 3 tokens choose other experts on another rank"
        ids = torch.arange(3)[:, None] + rank * torch.ones(1, c.top_k, dtype=torch.int64)
        c.ids = [ids % (2 * ranks)] * ranks
        c.call("same", 0)

    def another_max_tokens():
        assert not ON_GPU, "and max_tokens is 5, which must be one number on all ranks"
        c.call("own", rank, max_tokens=5 + rank)

    def another_sum():
        assert not ON_GPU, "x differs between ranks in dtype or shape"
        torch.ops.fp4.all_reduce(torch.ones(3 + rank), group_name=dist.group.WORLD.group_name)

    def another_operator():
        assert not ON_GPU, "calls fp4::moe_ep with tokens 'own', and this rank"
        if rank == 0:
            c.call("own", rank)
        elif rank == 1:
            c.call("same", 0)
        else:
            torch.ops.fp4.all_reduce(torch.ones(3), group_name=dist.group.WORLD.group_name)

    results = {}
    for function in (
        another_share, an_unknown_group, ranks_that_differ, an_unknown_mode, too_few_experts,
        too_many_tokens, padding_of_the_same, same_with_other_tokens, same_of_a_divided_sequence,
        another_max_tokens, another_sum, another_operator,
    ):  # fmt: skip
        rng.seed(f"{SEED} {function.__name__}")
        torch.manual_seed(rng.getrandbits(32))
        try:
            function()
            results[function.__name__] = "no error"
        except (RuntimeError, AssertionError) as reason:  # only with gloo: GPUs exchange no messages
            results[function.__name__] = str(reason)
    c.check(c.call("own", rank), rank)
    return results


def main() -> None:
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if ON_GPU else "gloo", timeout=timedelta(seconds=300))
    torch.set_num_threads(1)
    if WAY == "nvlink":
        why = connect("a test", dist.group.WORLD.group_name, torch.device(DEVICE), 640, 64)
        assert why == "", why
    ranks, rank = dist.get_world_size(), dist.get_rank()
    rng = random.Random(SEED)
    results = group_calls(rng, ranks, rank) | refusals(rng, ranks, rank)
    (FOLDER / f"rank{rank}.json").write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    with torch.no_grad():
        main()
    os._exit(0)  # a normal exit may abort, because a thread of gloo may still run then
