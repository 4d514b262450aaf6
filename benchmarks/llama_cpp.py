"""Measures whole models in llama.cpp, for the tables that compare it with fp4_ops.

    python benchmarks/llama_cpp.py --bench build/bin/llama-bench [--models qwen3-30b,gpt-oss-120b]
                                   [--where gpu,experts_on_cpu,cpu] [--threads 8,16] [--load none]
                                   [--folder /dev/shm] [--layers N]

llama-bench is llama.cpp's own program, built for this GPU and this CPU (GGML_CUDA, GGML_NATIVE). It loads a
file of random blocks. `gguf_models` writes this file into the folder, and it is removed at the end. Reading
from a folder in memory is fast, but the memory must have room for the file.

gpu              all layers on the GPU
experts_on_cpu   all layers' experts in host memory (--n-cpu-moe)
cpu              no GPU

decode           a step of one sequence after `depth` tokens, the mean of 3 times 64
prompt           all tokens of a prompt, the mean of 3; on the GPU in one batch of at most 2048

`--load` is llama.cpp's load mode of experts_on_cpu. With "none" the experts are copied from the file to
pinned memory. With "mmap" the pages of the file are used. They are not pinned, so prompts are slower.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf_models
import record
import torch

STEPS, REPEATS = 64, 3
GPU = ["-ngl", "99", "-b", "2048", "-ub", "2048"]
LIMIT_S = 120
"""A call of llama-bench that takes longer is stopped. Its measurements until then are kept."""


@dataclass(frozen=True)
class Place:
    arguments: list[str]
    depths: str
    prompts: str


PLACES = {
    "gpu": Place(GPU, "100,1000", "512,2048"),
    "experts_on_cpu": Place([*GPU, "--n-cpu-moe", "99"], "100", "2048"),
    "cpu": Place(["-ngl", "0"], "100", "512"),
}


class Used:
    """Finds the largest use of the GPU's memory, which is read 20 times a second."""

    def __init__(self) -> None:
        self.before = self.most = self._now()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch)

    def _now(self) -> int:
        if not torch.cuda.is_available():
            return 0
        free, all = torch.cuda.mem_get_info()
        return all - free

    def _watch(self) -> None:
        while not self.done.wait(0.05):
            self.most = max(self.most, self._now())

    def gb(self) -> float:
        return (self.most - self.before) / 1e9

    def __enter__(self) -> Used:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.done.set()
        self.thread.join()


def bench(arguments: list[str], on_gpu: bool, failed: list[int]) -> Iterator[tuple[dict, float]]:
    """Yields llama-bench's results as it prints them, and the GB of the GPU that it has used until then.
    Appends its exit status to `failed` if it failed.
    """
    env = os.environ | ({} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""})
    words = ["timeout", "--foreground", str(LIMIT_S), *arguments, "-r", str(REPEATS), "-o", "jsonl"]
    with Used() as used, subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line), used.gb()
    if process.returncode:
        print(f"{' '.join(arguments)} ended with {process.returncode}", flush=True)
        failed.append(process.returncode)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bench", type=Path, required=True)
    parser.add_argument("--models", default="qwen3-30b")
    parser.add_argument("--where", default=",".join(PLACES))
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--load", default="none")
    parser.add_argument("--threads", default=str(len(os.sched_getaffinity(0))), help="one or more numbers")
    parser.add_argument("--layers", type=int, help="instead of all")


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    failed: list[int] = []
    for name in args.models.split(","):
        model = gguf_models.MODELS[name]
        layers = args.layers or model.layers
        file = args.folder / f"{name}.gguf"
        try:
            size = gguf_models.write(file, model, layers)
            for where in args.where.split(","):
                place = PLACES[where]
                words = [str(args.bench), "-m", str(file), *place.arguments]
                if where != "gpu":
                    words += ["-t", args.threads]
                if where == "experts_on_cpu":
                    words += ["-lm", args.load]
                for table, test in (
                    ("decode", ["-p", "0", "-n", str(STEPS), "-d", place.depths]),
                    ("prompt", ["-p", place.prompts, "-n", "0"]),
                ):
                    for found, gpu_gb in bench([*words, *test], where != "cpu", failed):
                        record.ELSEWHERE["llama.cpp"] = found["build_commit"]
                        decode = table == "decode"
                        yield {
                            "table": table, "model": name, "bits": model.bits, "layers": layers,
                            "where": where, "tokens": 1 if decode else found["n_prompt"],
                            "depth": found["n_depth"],
                            "ms": found["avg_ns"] / 1e6 / (STEPS if decode else 1),
                            "tokens_per_s": found["avg_ts"], "threads": found["n_threads"],
                            "load": found["load_mode"], "gb": size / 1e9, "gpu_gb": gpu_gb,
                        }  # fmt: skip
        finally:
            file.unlink(missing_ok=True)
    if failed:
        raise SystemExit(f"{len(failed)} runs of llama-bench failed; the record has the rows of the others")


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
