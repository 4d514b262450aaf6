"""Runs as one of three processes, where rank 1 is lost: `python lost_ranks.py FOLDER HOW`.

HOW is "late" if rank 1 calls neither the operators nor `prepare` and then ends, and "raises" if an exception
ends it in the middle of a forward. `rank0.json` and `rank2.json` in FOLDER get the errors of the other ranks,
and the seconds until each of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fp4_ops
from fp4_ops.distributed.parts import Part
from fp4_ops.models.pack_experts import Quantizer
from fp4_ops.quantization import find_method

PATIENCE = 6
"""The timeout in seconds."""


def all_reduce(name: str) -> Any:
    return torch.ops.fp4.all_reduce(torch.ones(5), group_name=name)


def block(name: str, tokens: str) -> Any:
    w13, w2 = (torch.ops.fp4.quantize(torch.randn(2, 32, 32), "mxfp4") for _ in range(2))
    ids = torch.tensor([[0], [5]])
    return torch.ops.fp4.moe_ep(
        torch.randn(2, 32), ids, torch.rand(2, 1), *w13[:2], None, *w2[:2], None,
        num_experts=6, tokens=tokens, group_name=name, format="mxfp4", activation="relu2",
    )  # fmt: skip


def own(name: str) -> Any:
    return block(name, "own")


def same(name: str) -> Any:
    return block(name, "same")


def prepare(name: str) -> Any:
    """Compute global scales of split weights, for which `prepare` asks the other processes."""
    quantizer = Quantizer("nvfp4", find_method("rtn", "nvfp4"), None, "plain")
    part = Part("split", 2, 3, dist.get_rank(), name)
    return quantizer.pack(torch.randn(2, 32, 32), "experts", "gate_up", part=part)


CALLS: dict[str, Callable[[str], Any]] = {f.__name__: f for f in (all_reduce, own, same, prepare)}


def error(call: Callable[[str], Any], name: str) -> list[Any]:
    start = time.monotonic()
    try:
        return [str(call(name)), time.monotonic() - start]
    except RuntimeError as reason:
        return [str(reason), time.monotonic() - start]


def late(rank: int) -> dict[str, Any]:
    groups = {what: dist.new_group(timeout=timedelta(seconds=PATIENCE)) for what in CALLS}
    for what, group in groups.items():
        CALLS[what](dist.group.WORLD.group_name)  # the first call may take longer than PATIENCE
        dist.barrier()
        CALLS[what](group.group_name)
    results = {}
    if rank != 1:
        for what, group in groups.items():
            results[what] = error(CALLS[what], group.group_name)
        results["again"] = error(all_reduce, groups["all_reduce"].group_name)
    dist.barrier()
    if rank == 1:
        os._exit(9)
    results["ends"] = error(all_reduce, dist.group.WORLD.group_name)
    return results


class Model(torch.nn.Module):
    def forward(self, name: str) -> Any:
        first = own(name)
        if dist.get_rank() == 1:
            raise ValueError("something is wrong with this rank's data")
        return first + own(name)


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    rank, name = dist.get_rank(), dist.group.WORLD.group_name
    assert torch.equal(all_reduce(name), torch.full((5,), 3.0))
    results = late(rank) if sys.argv[2] == "late" else {"own": error(Model(), name)}
    (Path(sys.argv[1]) / f"rank{rank}.json").write_text(json.dumps(results))
    if rank == 0:  # this rank has the store, in which rank 2 looks for missing ranks
        end = time.monotonic() + 120
        while not (Path(sys.argv[1]) / "rank2.json").exists() and time.monotonic() < end:
            time.sleep(0.1)


if __name__ == "__main__":
    assert fp4_ops
    with torch.no_grad():
        main()
    os._exit(0)
