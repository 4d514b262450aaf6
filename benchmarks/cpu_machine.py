"""The CPU that a benchmark runs on: its name, and how fast it reads and copies memory."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import torch


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    found = {key.strip(): value.strip() for key, value in fields.items()}
    return (
        f"{found.get('model name', platform.processor())}, family {found.get('cpu family')} "
        f"model {found.get('model')}, {torch.get_num_threads()} threads, "
        f"load average {os.getloadavg()[0]:.1f}"
    )


def bandwidth() -> str:
    """Of memory: two vectors of 128 MiB read (their dot product), and one copied to the other."""
    a, b = torch.zeros(1 << 25), torch.zeros(1 << 25)
    best = {}
    for name, action in (("read", lambda: torch.dot(a, b)), ("copy", lambda: b.copy_(a))):
        times = []
        for _ in range(8):
            start = time.perf_counter()
            action()
            times.append(time.perf_counter() - start)
        best[name] = 2 * a.numel() * 4 / min(times) / 1e9
    return f"read bandwidth {best['read']:.1f} GB/s, copy bandwidth {best['copy']:.1f} GB/s (read + written)"
