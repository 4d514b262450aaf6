"""Runs as one of two processes with a GPU each, where rank 1 is lost: `python lost_gpu_ranks.py FOLDER HOW`.

HOW is "late" if rank 1 never calls, "killed" if it is killed, and "other" if it makes another call.
`rank0.json` in FOLDER gets the errors of rank 0, and the seconds until each of them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import fp4_ops  # noqa: F401  loads the operators
from fp4_ops.distributed import workspace

PATIENCE = 4
"""The timeout in seconds."""


def main() -> None:
    folder, how = Path(sys.argv[1]), sys.argv[2]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(seconds=120), device_id=device)
    group = dist.new_group(timeout=timedelta(seconds=PATIENCE))
    name, rank = group.group_name, dist.get_rank()
    assert workspace.connect("a test", name, device, 1024, 8) == ""
    x = torch.ones(64, device=device)
    assert (torch.ops.fp4.all_reduce(x, group_name=name) == 2).all()
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "other":
            torch.ops.fp4.all_reduce(torch.ones(128, device=device), group_name=name)
        time.sleep(3 * PATIENCE)
        os._exit(0)
    start, told = time.monotonic(), {}
    try:
        torch.ops.fp4.all_reduce(x, group_name=name)
        torch.cuda.synchronize()
        told["at once"] = "no error"
    except RuntimeError as error:
        told["at once"] = str(error)
    told["seconds"] = time.monotonic() - start
    try:
        torch.ops.fp4.all_reduce(x, group_name=name)
        told["again"] = "no error"
    except RuntimeError as error:
        told["again"] = str(error)
    (folder / "rank0.json").write_text(json.dumps(told))
    time.sleep(1)  # so that the text on stderr arrives


if __name__ == "__main__":
    main()
    os._exit(0)
