"""Runs as one of several processes, each with a GPU, that replay CUDA graphs: `python spread_graphs.py
FOLDER`.

`rank0.json`, ... in FOLDER get the outcome of each situation. Expected values are those of one process with
all experts. FP4_REPLAYS: the number of replays of a graph; a few of them are compared.
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

import torch
import torch.distributed as dist
from reference import random_weight

import fp4_ops  # noqa: F401  loads the operators
from fp4_ops.distributed import workspace
from fp4_ops.distributed.shares import own_experts

FOLDER = Path(sys.argv[1])
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
SEED = int(os.environ.get("FP4_TEST_SEED", "0"))
REPLAYS = int(os.environ.get("FP4_REPLAYS", "1000"))
HIDDEN, INNER, EXPERTS, TOP_K = 512, 128, 16, 4
MOST = 300


class Block:
    """A block with the same weights on all ranks. Each rank uses its own experts."""

    def __init__(self, layout: str = "sm90", a_format: str = "none") -> None:
        torch.manual_seed(SEED)
        w13 = random_weight("nvfp4", EXPERTS, 2 * INNER, HIDDEN, layout=layout, device=DEVICE)
        w2 = random_weight("nvfp4", EXPERTS, HIDDEN, INNER, layout=layout, device=DEVICE)
        own = own_experts(EXPERTS, dist.get_world_size(), dist.get_rank())
        self.whole = [*w13.operands(), *w2.operands()]
        self.own = [t[own.start : own.stop].contiguous() for t in self.whole]
        self.name = dist.group.WORLD.group_name
        self.options = {"format": "nvfp4", "layout": layout, "activation": "silu", "a_format": a_format}

    def spread(self, x, ids, weights, tokens: str = "own", max_tokens: int | None = None) -> torch.Tensor:
        return torch.ops.fp4.moe_ep(
            x, ids, weights, *self.own, num_experts=EXPERTS, tokens=tokens, max_tokens=max_tokens,
            group_name=self.name, **self.options,
        )  # fmt: skip

    def alone(self, x, ids, weights) -> torch.Tensor:
        return torch.ops.fp4.moe(x, ids, weights, *self.whole, **self.options)


class Inputs:
    """Inputs of one rank, changed in place, for CUDA graphs."""

    def __init__(self, tokens: int) -> None:
        self.x = torch.zeros(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
        self.ids = torch.zeros(tokens, TOP_K, device=DEVICE, dtype=torch.int64)
        self.weights = torch.zeros(tokens, TOP_K, device=DEVICE)

    def draw(self, generator: torch.Generator, kind: str) -> None:
        low, high = {
            "any": (0, EXPERTS), "first": (0, 1), "last": (EXPERTS - 1, EXPERTS), "none": (-1, 0),
            "odd": (-2, EXPERTS + 3),
        }[kind]  # fmt: skip
        self.x.normal_(generator=generator)
        self.weights.uniform_(generator=generator)
        self.ids.random_(low + 5, high + 5, generator=generator).sub_(5)

    @property
    def all(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.ids, self.weights


KINDS = ("any", "any", "any", "first", "last", "none", "odd")


def captured(call: Any) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call()
    return graph, out


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.isfinite(got.float()).all(), "not finite"
    error = (got.double() - want.double()).norm().item()
    assert error <= 1.2e-2 * want.double().norm().item() + 1e-30, (error, want.double().norm().item())


def poison() -> None:
    """Fill the buffer to which other ranks write, at a time when no rank writes."""
    space = workspace.of(dist.group.WORLD.group_name)
    assert space is not None
    torch.cuda.synchronize()
    dist.barrier()
    space.buffer[space.layout.at["parts"] :].fill_(0xFF)
    torch.cuda.synchronize()
    dist.barrier()


def delay(rng: random.Random) -> None:
    kind = rng.randrange(8)
    if kind == 0:
        time.sleep(rng.random() * 2e-3)
    elif kind == 1:
        torch.cuda._sleep(rng.randrange(200_000))


def equal_on_all_ranks(t: torch.Tensor) -> None:
    bits = t.contiguous().view(torch.uint8)
    told = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(told, bits)
    assert all(torch.equal(told[0], other) for other in told), "ranks differ"


def replayed(tokens: str, layout: str, a_format: str = "none") -> None:
    """Replay graphs of several sizes in turn, on one workspace."""
    block, rank = Block(layout, a_format), dist.get_rank()
    same = tokens == "same"
    shared = torch.Generator(DEVICE)
    shared.manual_seed(SEED + (0 if same else rank))
    rng = random.Random(SEED + rank)  # delays differ
    agreed = random.Random(SEED)  # kinds need not, but the order of graphs must be the same
    graphs = []
    for count in (1, 5, 64, MOST):
        inputs = Inputs(count if same or count < 5 else count - 3 * rank)
        inputs.draw(shared, "any")
        graph, out = captured(
            lambda inputs=inputs, count=count: block.spread(
                *inputs.all, tokens=tokens, max_tokens=None if same else count
            )
        )
        graphs.append((inputs, graph, out))
    for i in range(REPLAYS):
        inputs, graph, out = graphs[agreed.randrange(len(graphs))]
        kind = agreed.choice(KINDS)
        inputs.draw(shared, kind)
        checked = i % 10 == 0 or i < 40
        if i % 50 == 0:
            poison()
        if checked:
            out.fill_(float("nan"))
        delay(rng)
        graph.replay()
        if not checked:
            continue
        first = out.clone()
        want = block.alone(*inputs.all)
        close(first, want) if kind != "none" else torch.testing.assert_close(first, torch.zeros_like(first))
        if same:
            equal_on_all_ranks(first)
        graph.replay()
        assert torch.equal(first, out), "another run has other bits"


def own_tokens():
    replayed("own", "sm90")


def own_tokens_of_many_rows_in_fp8():
    replayed("own", "sm90", "fp8")


def own_tokens_that_go_in_fp8():
    """The rows that arrive are those that the block itself would have made."""
    before = workspace.FP8_BYTES
    workspace.FP8_BYTES = 0
    try:
        replayed("own", "sm90", "fp8")
    finally:
        workspace.FP8_BYTES = before


def own_tokens_plain():
    replayed("own", "plain")


def same_tokens():
    replayed("same", "sm90")


def a_rank_without_tokens():
    block, rank = Block(), dist.get_rank()
    generator = torch.Generator(DEVICE)
    generator.manual_seed(SEED + rank)
    for most in (4, 200):
        for owner in range(dist.get_world_size()):
            inputs = Inputs(most if rank == owner else 0)
            inputs.draw(generator, "any")
            graph, out = captured(lambda inputs=inputs, most=most: block.spread(*inputs.all, max_tokens=most))
            for _ in range(20):
                inputs.draw(generator, "any")
                out.fill_(float("nan"))
                graph.replay()
            close(out, block.alone(*inputs.all))


def sums():
    """Sums of all sizes and dtypes, in one step and in two, give the same bits twice."""
    space = workspace.of(dist.group.WORLD.group_name)
    assert space is not None
    rank, name = dist.get_rank(), dist.group.WORLD.group_name
    for numel in (8, 1024, 100_000, 150_000):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for two_steps in (None, True):
                torch.manual_seed(SEED + rank)
                x = torch.randn(numel, device=DEVICE).to(dtype)
                if x.nbytes > space.layout.part_stride:
                    continue
                want = x.double()
                dist.all_reduce(want)
                delay(random.Random(SEED + rank + numel))
                if two_steps is None:
                    got = torch.ops.fp4.all_reduce(x, group_name=name)
                else:
                    got = space.all_reduce(x, two_steps=True)
                close(got, want)
                equal_on_all_ranks(got)


def compiled_with_cuda_graphs():
    block, rank = Block(), dist.get_rank()
    router = torch.randn(EXPERTS, HIDDEN, device=DEVICE, dtype=torch.bfloat16) / HIDDEN**0.5
    dist.broadcast(router, 0)

    def model(x, call):
        p = torch.softmax(x @ router.t(), -1, dtype=torch.float32)
        weights, ids = p.topk(TOP_K, -1)
        for _ in range(3):  # of the first input's experts: rounding must not change them
            h = torch.nn.functional.rms_norm(x, (HIDDEN,))
            x = x + call(h, ids, weights) * 0.01
        return x

    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead", dynamic=False)
    torch.manual_seed(SEED + rank)
    for tokens in (1, 16, 200):
        for step in range(6):
            x = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
            time.sleep(0.01 * rank * (step % 2))
            torch.compiler.cudagraph_mark_step_begin()
            close(compiled(x, block.spread).clone(), model(x, block.alone))


def more_than_the_workspace_holds():
    block, rank = Block(), dist.get_rank()
    generator = torch.Generator(DEVICE)
    generator.manual_seed(SEED + rank)
    inputs = Inputs(MOST + 50 + rank)
    inputs.draw(generator, "any")
    close(block.spread(*inputs.all), block.alone(*inputs.all))


def a_larger_workspace():
    """Graphs that hold the old workspace still run."""
    block, rank, name = Block(), dist.get_rank(), dist.group.WORLD.group_name
    generator = torch.Generator(DEVICE)
    generator.manual_seed(SEED + rank)
    inputs = Inputs(3)
    inputs.draw(generator, "any")
    graph, out = captured(lambda: block.spread(*inputs.all))
    assert workspace.connect("a test", name, DEVICE, 2 * HIDDEN, 2 * MOST) == ""
    for _ in range(3):
        inputs.draw(generator, "any")
        out.fill_(float("nan"))
        graph.replay()
        close(out, block.alone(*inputs.all))
        close(block.spread(*inputs.all), block.alone(*inputs.all))


def main() -> None:
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", timeout=timedelta(seconds=300), device_id=DEVICE)
    name = dist.group.WORLD.group_name
    why = workspace.connect("a test", name, DEVICE, 2 * HIDDEN, MOST)
    assert why == "", why
    results: dict[str, Any] = {}
    for function in (
        own_tokens, own_tokens_of_many_rows_in_fp8, own_tokens_that_go_in_fp8, own_tokens_plain,
        same_tokens, a_rank_without_tokens, sums, compiled_with_cuda_graphs,
        more_than_the_workspace_holds, a_larger_workspace,
    ):  # fmt: skip
        start = time.monotonic()
        try:
            function()
            results[function.__name__] = "right"
        except Exception as reason:
            results[function.__name__] = f"{type(reason).__name__}: {reason}"
        print(f"{function.__name__}: {time.monotonic() - start:.1f} s", flush=True)
        torch.cuda.synchronize()
        dist.barrier()
    (FOLDER / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
    os._exit(0)
