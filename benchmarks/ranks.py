"""Runs benchmarks in several processes, one for each rank. The first process prints its rows."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

import record


def rows_of_the_first(file: str, args: argparse.Namespace, names: Sequence[str]) -> Iterator[record.Row]:
    """Runs `file` as each of `args.ranks` processes, with --rank and the arguments of these names."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(args.ranks):
        command = [sys.executable, file, "--rank", str(rank)]
        for name in names:
            command += [f"--{name}", str(getattr(args, name))]
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    assert processes[0].stdout is not None
    for line in processes[0].stdout:
        if line.startswith("{"):
            yield json.loads(line)
    if any(p.wait() for p in processes):
        raise SystemExit("a rank failed; its output is above")
