"""How fast the CPU that a benchmark runs on reads and copies memory."""

from __future__ import annotations

import os
import time

import record
import torch


def bandwidth(threads: int) -> record.Row:
    """GB/s: two vectors of 128 MiB read (their dot product), and one copied to the other (read + written)."""
    a, b = torch.zeros(1 << 25), torch.zeros(1 << 25)
    best = {}
    for name, action in (("read", lambda: torch.dot(a, b)), ("copy", lambda: b.copy_(a))):
        times = []
        for _ in range(8):
            start = time.perf_counter()
            action()
            times.append(time.perf_counter() - start)
        best[f"{name}_gb_per_s"] = 2 * a.numel() * 4 / min(times) / 1e9
    return {"table": "memory", "threads": threads, **best, "load": os.getloadavg()[0]}
