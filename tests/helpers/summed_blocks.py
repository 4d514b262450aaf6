"""Runs as one of several processes whose blocks end in a sum over the processes: `python summed_blocks.py
FOLDER`.

`rank0.json`, ... in FOLDER get, for each way to write the sum: [whether the graph with a workspace gives the
same bits as the graph without, how many sums became fp4::all_reduce, whether the graph may run twice for one
call].
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import fp4_ops  # noqa: F401  loads the operators
from fp4_ops.compile_passes import pipeline
from fp4_ops.compile_passes.options import parse
from fp4_ops.compile_passes.pipeline import compile_graph
from fp4_ops.distributed import workspace

FOLDER, SEED = Path(sys.argv[1]), int(os.environ.get("FP4_TEST_SEED", "0"))
EXPERTS, HIDDEN, INNER, TOP_K = 4, 64, 32, 2


class Workspace:
    """Stands for memory that GPUs share. Operators on the CPU do not use it."""

    def __init__(self, most: int = 2**40) -> None:
        self.most = most

    def sums(self, num_bytes: int) -> bool:
        return num_bytes <= self.most


class Block(nn.Module):
    """Runs this rank's experts on all tokens, and then `add`."""

    def __init__(self, add: Any) -> None:
        super().__init__()
        self.add = add
        generator = torch.Generator().manual_seed(100 * SEED + dist.get_rank())
        self.w13 = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator) / 8)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER, generator=generator) / 8)
        self.gate = nn.Parameter(torch.randn(EXPERTS, HIDDEN, generator=generator))

    def experts(self, x: Tensor) -> Tensor:
        weights, ids = torch.softmax(x @ self.gate.T, -1).topk(TOP_K)
        gate, up = torch.einsum("th,enh->etn", x, self.w13).chunk(2, -1)
        y = torch.einsum("eti,ehi->eth", nn.functional.silu(gate) * up, self.w2)
        return torch.einsum("eth,te->th", y, torch.zeros(len(x), EXPERTS).scatter(1, ids, weights))

    def forward(self, x: Tensor) -> Tensor:
        return self.add(self.experts(x), x) * 2


def in_place(out: Tensor, x: Tensor) -> Tensor:
    dist.all_reduce(out)
    return out


def in_place_of_a_group(out: Tensor, x: Tensor) -> Tensor:
    dist.all_reduce(out, group=GROUPS["all"])
    return out


def as_a_function(out: Tensor, x: Tensor) -> Tensor:
    return functional.all_reduce(out, "sum", dist.group.WORLD)


def behind_a_residual(out: Tensor, x: Tensor) -> Tensor:
    return functional.all_reduce(out + x / dist.get_world_size(), "sum", dist.group.WORLD)


def two_of_them(out: Tensor, x: Tensor) -> Tensor:
    total = functional.all_reduce(out, "sum", dist.group.WORLD)
    return functional.all_reduce(total.tanh(), "sum", dist.group.WORLD)


def by_dtensors(out: Tensor, x: Tensor) -> Tensor:
    part = DTensor.from_local(out, MESH, [Partial()], run_check=False)
    return part.redistribute(placements=[Replicate()]).to_local()


def the_largest(out: Tensor, x: Tensor) -> Tensor:
    return functional.all_reduce(out, "max", dist.group.WORLD)


def of_integers(out: Tensor, x: Tensor) -> Tensor:
    return out * functional.all_reduce((x > 0).sum(), "sum", dist.group.WORLD)


def of_one_process(out: Tensor, x: Tensor) -> Tensor:
    return functional.all_reduce(out, "sum", GROUPS["alone"])


def a_share_of_the_sum(out: Tensor, x: Tensor) -> Tensor:
    total = functional.reduce_scatter_tensor(out.repeat(dist.get_world_size(), 1), "sum", 0, dist.group.WORLD)
    return total


ADD = [
    in_place, in_place_of_a_group, as_a_function, behind_a_residual, two_of_them, by_dtensors,
    the_largest, of_integers, of_one_process, a_share_of_the_sum,
]  # fmt: skip
GROUPS: dict[str, Any] = {}
MESH: Any = None


def told(block: nn.Module, x: Tensor, spaces: dict[str, Any], dynamic: bool) -> tuple[Tensor, int, bool]:
    """Run the graph without Inductor.

    Return its result, the number of fused sums, and if it may run twice.
    """
    frames: list[Any] = []
    may: list[bool] = []

    def fp4(gm: Any, inputs: Any) -> Any:
        options = parse(None, {"activation": "bf16", "strict": True})
        return compile_graph(gm, inputs, options, lambda graph, *_, **__: graph.forward, frames.append)

    ask = pipeline.undo_of
    pipeline.undo_of = lambda *given: (undo := ask(*given), may.append(undo is not None))[0]
    workspace._SPACES.update(spaces)
    torch.compiler.reset()
    try:
        out = torch.compile(block, backend=fp4, fullgraph=True, dynamic=dynamic)(x)
    finally:
        pipeline.undo_of = ask
        workspace._SPACES.clear()
    found = [re.search(r"sums over processes \((\d+)x\)", text) for text in frames[0].also]
    assert [site.op for site in frames[0].sites] == ["fp4::moe"], frames
    return out, sum(int(match[1]) for match in found if match), may[-1]


def main() -> None:
    global MESH
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    size = dist.get_world_size()
    MESH = init_device_mesh("cpu", (size,))
    GROUPS["all"] = dist.new_group()
    GROUPS["alone"] = [dist.new_group([rank]) for rank in range(size)][dist.get_rank()]
    world = dist.group.WORLD.group_name
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(SEED))
    results: dict[str, Any] = {}
    with torch.no_grad():
        for add in ADD:
            block = Block(add)
            one, none, again = told(block, x, {}, False)
            assert none == 0 and not again, "a graph with a collective runs once for each call"
            two, count, again = told(block, x, {world: Workspace()}, add is two_of_them)
            results[add.__name__] = [torch.equal(one, two), count, again]
        *_, count, again = told(Block(as_a_function), x, {world: Workspace(x.nbytes - 1)}, False)
        results["more_than_the_workspace_holds"] = [True, count, again]
        *_, count, again = told(Block(lambda out, x: out), x, {world: Workspace()}, False)
        results["no_sum"] = [True, count, again]
    (FOLDER / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    main()
    os._exit(0)  # a normal exit may abort, because a thread of gloo may still run then
