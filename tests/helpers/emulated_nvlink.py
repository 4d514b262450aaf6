"""Runs the kernels of csrc/nvlink without GPUs. Ranks are threads of one process, and their buffers are
tensors.

They are compiled in the same way as the Hopper kernels in emulated.py. nvlink_emulator/ replaces the accesses
to other GPUs' memory.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import emulated
import torch
from places import HELPERS, ROOT

from fp4_ops.distributed import nvlink
from fp4_ops.distributed.workspace import Layout, Workspace

SOURCES, OURS = ROOT / "csrc/nvlink", HELPERS / "nvlink_emulator"


def library() -> Path:
    target = ROOT / "build/nvlink_emulated.so"
    headers = emulated.cuda_headers()
    assert headers is not None
    files = [file for folder in (SOURCES, OURS, emulated.EMULATOR) for file in folder.iterdir()]
    if target.exists() and target.stat().st_mtime > max(file.stat().st_mtime for file in files):
        return target
    target.parent.mkdir(exist_ok=True)
    compiler = [os.environ.get("CXX", "g++"), *emulated.FLAGS, f"-I{headers}", f"-I{emulated.EMULATOR}"]
    with tempfile.TemporaryDirectory() as made:
        sources = shutil.copytree(SOURCES, Path(made) / "nvlink")
        shutil.copy(OURS / "memory.cuh", sources)
        objects = []
        for source in [*sorted(sources.glob("*.cu")), *sorted(emulated.EMULATOR.glob("*.cpp"))]:
            to = f"{made}/{source.stem}.o"
            device = ["-include", str(emulated.EMULATOR / "device.h")] if source.suffix == ".cu" else ["-O2"]
            subprocess.run([*compiler, *device, "-x", "c++", "-c", str(source), "-o", to], check=True)
            objects.append(to)
        subprocess.run([*compiler, "-shared", *objects, "-o", f"{made}/all.so", "-lpthread"], check=True)
        emulated.put(Path(made, "all.so"), target)
    return target


def spaces(ranks: int, max_tokens: int, row_bytes: int, seconds: float = 300.0) -> list[Workspace]:
    """Make a workspace for each rank. The buffers are poisoned, except headers, flags and words."""
    nvlink.FILE = str(library())  # replaces the path in the package's folder
    nvlink.library.cache_clear()
    layout = Layout(ranks, max_tokens, row_bytes)
    buffers = [torch.zeros(layout.bytes + 16, dtype=torch.uint8) for _ in range(ranks)]
    buffers = [b[-b.data_ptr() % 16 :][: layout.bytes] for b in buffers]
    for b in buffers:
        b[layout.at["parts"] :] = 0xFF
    addresses = [b.data_ptr() for b in buffers]
    return [Workspace(b, addresses, r, max_tokens, row_bytes, seconds) for r, b in enumerate(buffers)]


def seed(value: int) -> None:
    loaded = nvlink.library()
    assert loaded is not None
    loaded.emulator_seed(ctypes.c_uint32(value % 2**32))


def together(run: Callable[[int], Any], ranks: int) -> list[Any]:
    """Run all ranks at once. Return the result of run(rank), or its RuntimeError, for each."""

    def one(rank: int) -> Any:
        try:
            return run(rank)
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))
