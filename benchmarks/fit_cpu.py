"""Finds the number of rows per expert from which the CPU's kernels for many rows are faster (`fit.py
cpu_rows`).

Two builds of the package are made in a temporary folder. One always uses the kernels for many rows, the other
never does. Each build has a process that waits for products to time, so that both take turns.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from fp4_ops.runtime import fitted

ROOT = Path(__file__).parents[1]
SOURCES = ["kernels_amx_bf16.cpp", "kernels_many_avx512_bf16.cpp"]
GROUPS = ("amx_bf16", "avx512_bf16")
KINDS = ("floating", "int8", "bf16")
"""Kinds of activation rows: `RowKind` of csrc/cpu/kernels.h."""
FORMATS = ("mxfp4", "nvfp4")
ROWS = (*range(2, 33), 40, 48, 64)
SPEED_AT = 128
"""The number of rows per expert at which the kernels' speeds are compared."""


class Point(NamedTuple):
    kind: str
    rows: int
    """Rows of each expert."""
    speedup: float
    """Speedup of the kernels for many rows."""


def fit(points: Sequence[Point], before: fitted.Values) -> fitted.Values:
    """Returns `before` with min_rows and speed fitted to these times. Kinds of rows without points stay as
    they are.

    min_rows is the smallest number of rows such that kernels for many rows are faster at this and every
    larger measured number. The speedup at a number is the geometric mean of its points. min_rows is 0 if they
    are never faster.
    """
    found = dict(before)
    for kind in KINDS:
        logs: dict[int, list[float]] = {}
        for p in points:
            if p.kind == kind and p.rows != SPEED_AT:
                logs.setdefault(p.rows, []).append(math.log(p.speedup))
        if not logs:
            continue
        least = 0
        for rows in sorted(logs, reverse=True):
            if statistics.fmean(logs[rows]) < 0:
                break
            least = rows
        found[f"min_rows_{kind}"] = least
    if fast := [p.speedup for p in points if p.rows == SPEED_AT]:
        found["speed"] = max(1, round(statistics.median(fast)))
    return found


# --- the processes that are timed ---


def timed() -> None:
    """Answers lines of [kind, format, rows of each of 8 experts, threads] with microseconds."""
    fp4, experts, size = torch.ops.fp4, 8, int(sys.argv[2])
    weights = {}
    for line in sys.stdin:
        kind, format, rows, threads = json.loads(line)
        torch.set_num_threads(threads)
        if format not in weights:
            weights[format] = fp4.prepack(
                *fp4.quantize(torch.randn(experts, size, size), format), format, "tile16"
            )
        x, scale = torch.randn(experts * rows, size), None
        if kind == "int8":
            x, scale = fp4.quantize_int8(x)
        elif kind == "bf16":
            x = x.bfloat16()
        offs = torch.arange(1, experts + 1, dtype=torch.int32) * rows
        options = {"format": format, "layout": "tile16", "out_dtype": torch.float32}
        times = []
        for _ in range(4):
            start = time.perf_counter()
            fp4.grouped_mm(x, *weights[format], offs, scale, **options)
            times.append(time.perf_counter() - start)
        print(min(times) * 1e6, flush=True)


@contextmanager
def build(min_rows: int, capability: str, kinds: Sequence[str], size: int) -> Iterator[subprocess.Popen[str]]:
    """Starts a process of a build whose kernels for many rows run experts with `min_rows` rows or more (0:
    none)."""
    sys.path[:0] = [str(ROOT / "csrc"), str(ROOT / "release")]
    import variants
    from generate import constants

    changed = {capability: {f"min_rows_{kind}": min_rows for kind in kinds}}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "cpu_constants.h").write_text(constants.cpu(changed))
        before = os.getcwd()
        os.chdir(ROOT)
        try:
            variants.build(Path(folder), [f"-I{folder}", "-O3"], only=SOURCES)
        finally:
            os.chdir(before)
        env = {**os.environ, "PYTHONPATH": folder, "FP4_CPU_CAPABILITY": capability}
        command = [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(size)]
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=folder
        )
        try:
            yield child
        finally:
            child.communicate()


CHILD = """
import sys
import fp4_ops
sys.path.append(sys.argv[1])
import fit_cpu
fit_cpu.timed()
"""


def measure(
    capability: str,
    kinds: Sequence[str],
    rows: Sequence[int] = (*ROWS, SPEED_AT),
    size: int = 2048,
    rounds: int = 5,
) -> Iterator[Point]:
    threads = {1, len(os.sched_getaffinity(0))}
    with ExitStack() as stack:
        never, always = (stack.enter_context(build(n, capability, kinds, size)) for n in (0, 1))

        def us(child: subprocess.Popen[str], case: object) -> float:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(json.dumps(case) + "\n")
            child.stdin.flush()
            answer = float(child.stdout.readline())
            time.sleep(0.005)  # its threads go on spinning for a while
            return answer

        for kind in kinds:
            for count in rows:
                for format in FORMATS:
                    for t in sorted(threads):
                        case = [kind, format, count, t]
                        ratios = []
                        for turn in range(rounds):
                            pair = (never, always) if turn % 2 == 0 else (always, never)
                            found = {child: us(child, case) for child in pair}
                            ratios.append(found[never] / found[always])
                        yield Point(kind, count, statistics.median(ratios))


def kinds_of(values: fitted.Values) -> list[str]:
    """Lists the kinds of rows that the kernels of a group multiply."""
    return [kind for kind in KINDS if values[f"min_rows_{kind}"] > 0]
