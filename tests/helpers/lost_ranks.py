"""One of three processes, of which rank 1 does not come, and then ends: `python lost_ranks.py FOLDER`.

FOLDER gets `rank0.json` and `rank2.json`: the others' errors, and after how many seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fp4_ops  # noqa: F401  loads the operators

PATIENCE = 6
"""Seconds."""


def call(name: str) -> Any:
    return torch.ops.fp4.all_reduce(torch.ones(5), group_name=name)


def error(name: str) -> list[Any]:
    start = time.monotonic()
    try:
        return [str(call(name)), time.monotonic() - start]
    except RuntimeError as reason:
        return [str(reason), time.monotonic() - start]


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    rank, impatient = dist.get_rank(), dist.new_group(timeout=timedelta(seconds=PATIENCE))
    for group in (dist.group.WORLD, impatient):  # what takes long the first time has no short patience
        assert torch.equal(call(group.group_name), torch.full((5,), 3.0))
    results = {}
    if rank != 1:
        results["never_comes"] = error(impatient.group_name)
        results["again"] = error(impatient.group_name)
    dist.barrier()
    if rank == 1:
        os._exit(9)
    results["ends"] = error(dist.group.WORLD.group_name)
    (Path(sys.argv[1]) / f"rank{rank}.json").write_text(json.dumps(results))
    if rank == 0:  # it holds the store, of which rank 2 asks who is missing
        end = time.monotonic() + 120
        while not (Path(sys.argv[1]) / "rank2.json").exists() and time.monotonic() < end:
            time.sleep(0.1)


if __name__ == "__main__":
    main()
    os._exit(0)
