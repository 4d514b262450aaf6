"""Measures experts that are spread over the GPUs of a node: the exchange alone, and whole blocks, compared
with NCCL and torch.

    python benchmarks/nvlink.py [--ranks 2] [--tables exchange,sum,own,same] [--models qwen3-30b,...]

Times are microseconds of a call in CUDA graphs, the median of the slower rank. Routings and weights change
from call to call. `tokens` counts the tokens of one GPU. The tables are: `exchange`, which sends tokens to
the ranks of their experts, and their sums back; `sum`, the all-reduce; `own`, a block where each GPU has its
own tokens; `same`, a block where all GPUs have the same tokens. The ways are: `nccl`, which runs without a
workspace; `alone`, where each GPU has all experts and its own tokens; `one`, where one GPU serves the tokens
of all GPUs; `local`, a rank's experts on all tokens, without any exchange. Each result is first compared with
that of one GPU for all tokens. `error` is the norm of the difference, divided by the norm. Both use the same
kernels, because with fp8 rows prefill rounds weights and decode does not: their results differ by 5e-2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import ranks
import record
import torch

import fp4_ops  # noqa: F401  loads the operators

MODELS = {
    "qwen3-30b": (128, 2048, 768, 8),
    "gpt-oss-120b": (128, 2880, 2880, 4),
    "deepseek-v3": (256, 7168, 2048, 8),
}
"""Experts, hidden size, intermediate size, experts per token."""
ROUTINGS = 8
Call = Callable[[int], object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tables", default="exchange,sum,own,same")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default="1,8,32,128,512,4096")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    """Yields the rows that the first of `ranks` processes measures."""
    return ranks.rows_of_the_first(__file__, args, ("ranks", "tables", "models", "tokens"))


# --- one rank ---


class Rank:
    def __init__(self, args: argparse.Namespace) -> None:
        import torch.distributed as dist

        self.rank, self.ranks, self.dist = args.rank, args.ranks, dist
        self.device = torch.device("cuda", args.rank)
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl", rank=args.rank, world_size=args.ranks, device_id=self.device)
        self.group = dist.group.WORLD
        self.by_nccl = dist.new_group()
        dist.all_reduce(torch.ones(1, device=self.device), group=self.by_nccl)
        self.generator = torch.Generator(self.device)

    def tell(self, row: record.Row) -> None:
        if self.rank == 0:
            print(json.dumps(row), flush=True)

    def largest(self, value: float) -> float:
        """Returns the largest value of all ranks."""
        t = torch.tensor([value], device=self.device, dtype=torch.float64)
        self.dist.all_reduce(t, op=self.dist.ReduceOp.MAX)
        return t.item()

    def us(self, call: Call, calls: int, replays: int = 15) -> float:
        torch.cuda.synchronize()
        self.dist.barrier()
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call(0)
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for i in range(calls):
                    call(i)
        torch.cuda.synchronize()
        self.dist.barrier()
        times = []
        for _ in range(replays + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            times.append((begin, end))
        torch.cuda.synchronize()
        median = statistics.median(a.elapsed_time(b) for a, b in times[3:]) * 1e3 / calls
        return self.largest(median)

    def routings(self, tokens: int, experts: int, top_k: int) -> list[torch.Tensor]:
        return [
            torch.rand(tokens, experts, device=self.device, generator=self.generator).topk(top_k).indices
            for _ in range(ROUTINGS)
        ]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def exchange(at: Rank, tokens_list: list[int]) -> None:
    from fp4_ops.distributed import workspace
    from fp4_ops.distributed.local import Parts

    experts, hidden, _, top_k = MODELS["qwen3-30b"]
    space = workspace.of(at.group.group_name)
    assert space is not None
    for tokens in tokens_list:
        at.generator.manual_seed(100 + at.rank)
        x = torch.randn(tokens, hidden, device=at.device, generator=at.generator).bfloat16()
        ids = at.routings(tokens, experts, top_k)
        weights = torch.rand(tokens, top_k, device=at.device, generator=at.generator)
        packed = torch.empty(tokens, 2 * hidden + 12 * top_k, dtype=torch.uint8, device=at.device)
        all_packed = torch.empty(at.ranks * tokens, packed.shape[1], dtype=torch.uint8, device=at.device)
        part = torch.randn(at.ranks * tokens, hidden, device=at.device).bfloat16()
        out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=at.device)
        whole = -(-tokens // at.ranks) * at.ranks
        pieces = torch.empty(whole, hidden, dtype=torch.bfloat16, device=at.device)
        other = torch.empty_like(pieces)

        def ours(i: int) -> torch.Tensor:
            given = space.gather(x, ids[i % ROUTINGS], weights, tokens, experts)  # noqa: B023
            own = ids[i % ROUTINGS], weights  # noqa: B023
            return space.reduce(Parts(part, True), given, *own, tokens, experts, part.dtype)  # noqa: B023

        def gather_and_scatter(i: int) -> None:
            at.dist.all_gather_into_tensor(all_packed, packed)  # noqa: B023
            at.dist.reduce_scatter_tensor(out, part)  # noqa: B023

        def all_to_all(i: int) -> None:
            at.dist.all_to_all_single(other, pieces)  # noqa: B023
            at.dist.all_to_all_single(pieces, other)  # noqa: B023

        ways: dict[str, Call] = {
            "ours": ours, "nccl all-gather and reduce-scatter": gather_and_scatter,
            "nccl all-to-all, twice": all_to_all,
        }  # fmt: skip
        for way, call in ways.items():
            at.tell({"table": "exchange", "tokens": tokens, "way": way, "us": at.us(call, 20)})


def sums(at: Rank, tokens_list: list[int]) -> None:
    import torch.distributed._symmetric_memory as symmetric

    hidden = MODELS["qwen3-30b"][1]
    for tokens in tokens_list:
        at.generator.manual_seed(100 + at.rank)
        x = torch.randn(tokens, hidden, device=at.device, generator=at.generator).bfloat16()
        want = x.double()
        at.dist.all_reduce(want)
        theirs = symmetric.empty(tokens * hidden, dtype=torch.bfloat16, device=at.device)
        symmetric.rendezvous(theirs, at.group.group_name)
        theirs = theirs.view(tokens, hidden)
        name = at.group.group_name
        scratch = x.clone()

        def torch_sum(two_shot: bool) -> None:
            theirs.copy_(x)  # noqa: B023
            if two_shot:
                torch.ops.symm_mem.two_shot_all_reduce_(theirs, "sum", name)  # noqa: B023
            else:
                torch.ops.symm_mem.one_shot_all_reduce(theirs, "sum", name)  # noqa: B023

        ways: dict[str, Call] = {
            "ours": lambda _: torch.ops.fp4.all_reduce(x, group_name=name),  # noqa: B023
            "nccl": lambda _: at.dist.all_reduce(scratch),  # noqa: B023
            "torch one-shot": lambda _: torch_sum(False),
            "torch two-shot": lambda _: torch_sum(True),
        }
        off = at.largest(error(torch.ops.fp4.all_reduce(x, group_name=name), want))
        for way, call in ways.items():
            row = {"table": "sum", "tokens": tokens, "way": way, "us": at.us(call, 20)}
            at.tell({**row, "error": off if way == "ours" else None})


def random_weight(at: Rank, experts: int, n: int, k: int) -> list[torch.Tensor]:
    """Makes the same weight on all ranks. Experts share a few matrices of codes, but have factors of their
    own."""
    few = torch.randn(8, n, k, device=at.device, generator=at.generator) / k**0.5
    operands = torch.ops.fp4.prepack(*torch.ops.fp4.quantize(few, "nvfp4"), "nvfp4", "sm90")
    codes, scales, factor = (torch.cat([t] * (experts // 8)) for t in operands)
    spread = 0.5 + torch.rand(experts, device=at.device, generator=at.generator)
    return [codes, scales, factor * spread]


def blocks(at: Rank, name: str, tables: list[str], tokens_list: list[int]) -> None:
    from fp4_ops.distributed import workspace
    from fp4_ops.distributed.local import Local
    from fp4_ops.distributed.shares import own_experts
    from fp4_ops.runtime import native

    experts, hidden, inner, top_k = MODELS[name]
    at.generator.manual_seed(5)
    whole = [*random_weight(at, experts, 2 * inner, hidden), *random_weight(at, experts, hidden, inner)]
    own = own_experts(experts, at.ranks, at.rank)
    mine = [t[own.start : own.stop].contiguous() for t in whole]
    options: dict[str, Any] = {"format": "nvfp4", "layout": "sm90", "activation": "silu_interleaved"}
    why = workspace.connect("the benchmark", at.group.group_name, at.device, 2 * hidden, max(tokens_list))
    assert why == "", why

    def alone(x, ids, weights, w, a_format="auto"):
        return torch.ops.fp4.moe(x, ids, weights, *w, a_format=a_format, **options)

    def spread(x, ids, weights, tokens: str, group: Any = at.group, a_format: str = "auto"):
        most = x.shape[0] if tokens == "own" else None
        return torch.ops.fp4.moe_ep(
            x, ids, weights, *mine, num_experts=experts, tokens=tokens, max_tokens=most,
            group_name=group.group_name, a_format=a_format, **options,
        )  # fmt: skip

    for tokens in tokens_list:
        at.generator.manual_seed(tokens)
        all_x = torch.randn(at.ranks * tokens, hidden, device=at.device, generator=at.generator).bfloat16()
        all_ids = at.routings(at.ranks * tokens, experts, top_k)
        all_weights = torch.rand(at.ranks * tokens, top_k, device=at.device, generator=at.generator)
        calls = 16 if tokens <= 512 else 8
        for table in tables:
            first = at.rank * tokens if table == "own" else 0
            part = slice(first, first + tokens)
            x, weights = all_x[part].contiguous(), all_weights[part].contiguous()
            ids = [t[part].contiguous() for t in all_ids]
            every = (all_x, all_ids, all_weights) if table == "own" else (x, ids, weights)
            local_ids = [t - own.start for t in every[1]]
            shape = _shape(mine, hidden, inner)
            kind = Local(shape, experts, own, (), {}, "auto").chosen(every[0].shape[0] * top_k, at.device)
            kernel = _kernel(experts, every[0].shape[0] * top_k, hidden, inner, kind, at.device)
            with native.only(kernel):
                want = alone(every[0], every[1][0], every[2], whole, kind)
                got = spread(x, ids[0], weights, table, a_format=kind)
            off = at.largest(error(got, want[part] if table == "own" else want))

            def turn(f: Callable[..., object], given: tuple, *more: object) -> Call:
                return lambda i: f(given[0], given[1][i % ROUTINGS], given[2], *more)

            mine_only = (every[0], local_ids, every[2])
            ways = {
                "ours": turn(spread, (x, ids, weights), table),
                "nccl": turn(spread, (x, ids, weights), table, at.by_nccl),
                "local": turn(alone, mine_only, mine, kind),
                "alone": turn(alone, (x, ids, weights), whole),
            }
            if table == "own":
                ways["one"] = turn(alone, every, whole)
            for way, call in ways.items():
                row = {"table": table, "model": name, "tokens": tokens, "way": way}
                at.tell({**row, "us": at.us(call, calls), "error": off if way == "ours" else None})


def _kernel(experts: int, pairs: int, hidden: int, inner: int, kind: str, device: torch.device) -> str:
    """Names the kernel of both products, for all experts and tokens."""
    from fp4_ops.backends.launchers.library import multiprocessors
    from fp4_ops.meta.layouts import LAYOUTS
    from fp4_ops.runtime import native

    padded = LAYOUTS["sm90"].padded
    sizes = (2 * inner, padded(hidden)), (hidden, padded(inner))
    few = native.takes_few(experts, pairs, 16, *sizes, kind, multiprocessors(device.index))
    return "decode" if few else "prefill"


def _shape(weights: list[torch.Tensor], hidden: int, inner: int) -> Any:
    from fp4_ops.meta import checks
    from fp4_ops.meta.formats import FORMATS
    from fp4_ops.meta.layouts import LAYOUTS

    of = FORMATS["nvfp4"], LAYOUTS["sm90"], torch.float8_e4m3fn
    groups, padded = weights[0].shape[0], LAYOUTS["sm90"].padded
    return checks.Experts(
        checks.Weight(groups, 2 * inner, padded(hidden), *of),
        checks.Weight(groups, hidden, padded(inner), *of),
    )


def measure(args: argparse.Namespace) -> None:
    from fp4_ops.distributed import workspace

    at = Rank(args)
    tables, tokens = args.tables.split(","), [int(t) for t in args.tokens.split(",")]
    hidden = MODELS["qwen3-30b"][1]
    why = workspace.connect("the benchmark", at.group.group_name, at.device, 2 * hidden, max(tokens))
    assert why == "", why
    if "exchange" in tables:
        exchange(at, tokens)
    if "sum" in tables:
        sums(at, tokens)
    of_blocks = [table for table in tables if table in ("own", "same")]
    for name in args.models.split(",") if of_blocks else []:
        blocks(at, name, of_blocks, tokens)
        torch.cuda.empty_cache()
    at.dist.barrier()


if __name__ == "__main__":
    if "--rank" in sys.argv:
        with torch.inference_mode():
            measure(record.parser_of(__doc__, add_arguments).parse_args())
        sys.stdout.flush()
        os._exit(0)
    record.main(__doc__, add_arguments, rows)
