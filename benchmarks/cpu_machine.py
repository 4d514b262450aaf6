"""Measures how fast the CPU reads and copies memory, and reads the size of its caches."""

from __future__ import annotations

import os
import time
from pathlib import Path

import record
import torch


def last_cache_bytes() -> int:
    """Returns the size of the largest cache, as Linux reports it; 32 MiB if it does not."""
    sizes = [f.read_text().strip() for f in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size.removesuffix("K")) * 1024 for size in sizes), default=32 << 20)


def bandwidth(threads: int) -> record.Row:
    """Measures GB/s for reading two vectors (their dot product), and for copying one to the other (read +
    written). Together they are four times as large as the largest cache, and at least 256 MiB."""
    count = max(1 << 25, last_cache_bytes() // 2)
    a, b = torch.zeros(count), torch.zeros(count)
    best = {}
    for name, action in (("read", lambda: torch.dot(a, b)), ("copy", lambda: b.copy_(a))):
        times = []
        for _ in range(8):
            start = time.perf_counter()
            action()
            times.append(time.perf_counter() - start)
        best[f"{name}_gb_per_s"] = 2 * a.numel() * 4 / min(times) / 1e9
    read = 2 * a.nbytes / 1e6
    return {"table": "memory", "threads": threads, **best, "mb": read, "load": os.getloadavg()[0]}
