"""Starts a script several times, like torchrun: one process for each rank, on the CPU or each with a GPU."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest


def environment(**more: str) -> dict[str, str]:
    """Environment of a process that imports files beside this one, even if PYTHONSAFEPATH is set."""
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **more}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(script: str, ranks: int, *args: object, gpus: bool = False) -> list[Any]:
    """Start `script`, which is beside this file, with each rank's settings in the environment."""
    port, processes = free_port(), []
    for rank in range(ranks):
        env = environment(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
            OMP_NUM_THREADS="1", **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
        command = [str(Path(__file__).parent / script), *map(str, args)]
        if gpus:
            out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            processes.append(subprocess.Popen([sys.executable, *command], env=env, **out))
        else:
            processes.append(forks.start(command, env, merged=True))
    return processes


def outcomes(
    script: str, ranks: int, folder: Path, *args: object, gpus: bool = False
) -> list[dict[str, Any]]:
    """Run a script in several processes. Return what each wrote into `folder`, as rank0.json, ..."""
    processes = start(script, ranks, folder, *args, gpus=gpus)
    logs = [p.communicate(timeout=600)[0].decode() for p in processes]
    assert not any(p.returncode for p in processes), "\n".join(log[-4000:] for log in logs)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Any:
    """Return the result of `make(folder)`. One worker of the session calls it; the others read its result."""
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # each worker has its own folder in the session's folder
    folder = shared / f"once-{name}"
    folder.mkdir(exist_ok=True)
    answer = folder / "answer.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not answer.exists():
            answer.write_text(json.dumps(make(folder)))
    return json.loads(answer.read_text())
