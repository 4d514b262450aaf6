"""Measures how a checkpoint that is larger than memory is quantised: peak memory, rate, and a run that is
killed half-way.

    python benchmarks/checkpoint_stream.py --gb 20 --dir DIR

Makes a bf16 checkpoint of random weights in DIR, in the layout of a Qwen3-MoE. Then it takes these steps, and
drops the files from the page cache before each of them:

1. It only reads the source and writes as many bytes as the result has. This measures the disk, through the
   page cache and past it, one after the other (the sum of the faster read and the faster write) and at the
   same time.
2. It runs `python -m fp4_ops quantize` in a process of its own, and measures seconds and peak memory.
3. It does the same, but kills the process (SIGKILL) after half of the files and runs it again. Then it
   compares the results.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import record
import torch

from fp4_ops.checkpoints import direct
from fp4_ops.checkpoints.files import Writer, write_json
from fp4_ops.checkpoints.folder import INDEX
from fp4_ops.checkpoints.resume import PROGRESS

HIDDEN, INTERMEDIATE, EXPERTS, VOCAB = 2048, 768, 128, 151_936
CHUNK = 16 << 20

Header = tuple[str, torch.dtype, tuple[int, ...]]


def layer_tensors(layer: int) -> Iterator[Header]:
    for expert in range(EXPERTS):
        name = f"model.layers.{layer}.mlp.experts.{expert}"
        yield f"{name}.down_proj.weight", torch.bfloat16, (HIDDEN, INTERMEDIATE)
        yield f"{name}.gate_proj.weight", torch.bfloat16, (INTERMEDIATE, HIDDEN)
        yield f"{name}.up_proj.weight", torch.bfloat16, (INTERMEDIATE, HIDDEN)
    for projection in "qkvo":
        yield f"model.layers.{layer}.self_attn.{projection}_proj.weight", torch.bfloat16, (HIDDEN, HIDDEN)


def make_source(folder: Path, gb: float) -> None:
    """Writes files of about 2.5 GB each, with two layers in each."""
    folder.mkdir(parents=True)
    per_layer = sum(2 * a * b for _, _, (a, b) in layer_tensors(0))
    layers = max(2, round((gb * 1e9 - 2 * VOCAB * HIDDEN) / per_layer))
    groups = [list(range(i, min(i + 2, layers))) for i in range(0, layers, 2)]
    weight_map = {}
    for number, group in enumerate(groups, 1):
        tensors = [t for layer in group for t in layer_tensors(layer)]
        if number == 1:
            tensors.append(("model.embed_tokens.weight", torch.bfloat16, (VOCAB, HIDDEN)))
        file = folder / f"model-{number:05}-of-{len(groups):05}.safetensors"
        writer = Writer(file, tensors)
        for name, dtype, shape in tensors:
            writer.write(name, torch.empty(shape, dtype=dtype).normal_(0, 0.02))
            weight_map[name] = file.name
        writer.close()
    write_json(folder / INDEX, {"metadata": {}, "weight_map": weight_map})
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE, "num_experts": EXPERTS}
    write_json(folder / "config.json", {"model_type": "qwen3_moe", "num_hidden_layers": layers, **sizes})


def weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def drop_cache(folder: Path) -> None:
    for file in weights(folder):
        with file.open("rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_cached(folder: Path) -> None:
    buffer = bytearray(CHUNK)
    for file in weights(folder):
        with file.open("rb", buffering=0) as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while f.readinto(buffer):
                pass


def read_direct(folder: Path) -> None:
    for file in weights(folder):
        fd = direct.open_reading(file)
        for start in range(0, file.stat().st_size, CHUNK):
            direct.read(fd, start, min(CHUNK, file.stat().st_size - start))
        os.close(fd)


def write_cached(folder: Path, sizes: list[int]) -> None:
    data = os.urandom(CHUNK)
    folder.mkdir()
    for number, size in enumerate(sizes):
        with (folder / f"{number}.safetensors").open("wb", buffering=0) as f:
            for start in range(0, size, CHUNK):
                f.write(data[: size - start])
                if start % (8 * CHUNK) == 0:
                    os.fdatasync(f.fileno())
            os.fsync(f.fileno())


def write_direct(folder: Path, sizes: list[int]) -> None:
    data = memoryview(os.urandom(CHUNK))
    folder.mkdir()
    for number, size in enumerate(sizes):
        sink = direct.Sink(folder / f"{number}.safetensors")
        for start in range(0, size, CHUNK):
            sink.write(data[: size - start])
        sink.finish()


WAYS = (("cached", read_cached, write_cached), ("direct", read_direct, write_direct))


def timed(what, *args) -> float:
    start = time.perf_counter()
    what(*args)
    return time.perf_counter() - start


class Plain(NamedTuple):
    """Seconds to read, to write, and to do both at the same time. The page cache is used or bypassed."""

    read: float
    write: float
    both: float


def plain_copy(source: Path, scratch: Path, sizes: list[int], read, write) -> Plain:
    drop_cache(source)
    reading = timed(read, source)
    writing = timed(write, scratch, sizes)
    shutil.rmtree(scratch)
    drop_cache(source)

    def both() -> None:
        with ThreadPoolExecutor(2) as pool:
            for job in [pool.submit(read, source), pool.submit(write, scratch, sizes)]:
                job.result()

    together = timed(both)
    shutil.rmtree(scratch)
    return Plain(reading, writing, together)


def run(command: list[str], killed: Callable[[], bool] | None = None) -> tuple[float, float, float, str]:
    """Runs a command. Returns seconds, seconds of processor time, peak resident GB, and the output.

    killed: the command gets a SIGKILL when this returns True.
    """
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while killed is not None:
        if killed():
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.05)
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == (0 if killed is None else -signal.SIGKILL), status
    seconds, processor = time.perf_counter() - start, usage.ru_utime + usage.ru_stime
    return seconds, processor, usage.ru_maxrss * 1024 / 1e9, text.strip()


def quantize(source: Path, out: Path, kill_after: int | None = None) -> tuple[float, float, float, str]:
    """Runs the command. kill_after: the number of finished files after which it gets a SIGKILL."""

    def enough() -> bool:
        state = out / PROGRESS
        return state.exists() and len(json.loads(state.read_text())["done"]) >= kill_after

    drop_cache(source)
    command = [sys.executable, "-m", "fp4_ops", "quantize", str(source), "-o", str(out)]
    return run(command, None if kill_after is None else enough)


def same(a: Path, b: Path) -> bool:
    names = sorted(f.name for f in a.iterdir())
    if names != sorted(f.name for f in b.iterdir()):
        return False
    return filecmp.cmpfiles(a, b, names, shallow=False)[0] == names


def machine() -> record.Row:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"memory_gib": memory, "load": os.getloadavg()[0]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gb", type=float, default=20)
    parser.add_argument("--dir", type=Path, required=True, help="scratch space: 1.6 x gb, removed afterwards")
    parser.add_argument("--repeat", type=int, default=3, help="pairs of plain copy and quantisation")


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    source, whole, resumed = (args.dir / name for name in ("bf16", "whole", "resumed"))
    try:
        make_source(source, args.gb)
        size = sum(f.stat().st_size for f in weights(source))
        yield {"table": "source", **machine(), "files": len(weights(source)), "gb": size / 1e9}
        quantize(source, whole)  # plain_copy needs the sizes of its result
        sizes = [f.stat().st_size for f in weights(whole)]
        plain, runs = [], []
        for _ in range(args.repeat):
            for name, read, write in WAYS:
                plain.append(plain_copy(source, args.dir / "plain", sizes, read, write))
                reading, writing, both = plain[-1]
                yield {
                    "table": "plain copy", "way": name, "read_s": reading, "write_s": writing, "both_s": both,
                }  # fmt: skip
            shutil.rmtree(whole)
            runs.append(quantize(source, whole))
            took, processor, peak, _ = runs[-1]
            yield {
                "table": "quantize", "seconds": took, "processor_seconds": processor, "peak_gb": peak,
                "load": os.getloadavg()[0],
            }  # fmt: skip
        reading, writing, together = map(min, zip(*plain, strict=True))
        took = min(run[0] for run in runs)
        yield {
            "table": "best of each", "read_s": reading, "write_s": writing, "both_s": together,
            "quantize_s": took, "gb_per_s": size / took / 1e9,
            "rate_ratio_to_read_then_write": (reading + writing) / took,
            "rate_ratio_to_both_at_once": together / took, "peak_gb": max(run[2] for run in runs),
        }  # fmt: skip
        half = len(weights(source)) // 2
        quantize(source, resumed, kill_after=half)
        left = len(weights(resumed))
        took, *_ = quantize(source, resumed)
        yield {
            "table": "killed and resumed", "files_done": left, "files": len(weights(source)),
            "resumed_s": took, "result_is": "identical" if same(whole, resumed) else "DIFFERENT",
        }  # fmt: skip
        assert same(whole, resumed)
    finally:
        for folder in (source, whole, resumed, args.dir / "plain"):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
