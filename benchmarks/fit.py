"""Fits the constants of fp4_ops/backends/*/constants.json to times again.

    python benchmarks/fit.py planner [--times benchmarks/results/rows_h200.json] [--write]
    python benchmarks/fit.py prefill [--write]
    python benchmarks/fit.py cpu_rows [--write]

`planner` fits the choice between decode and prefill. It uses the times in a file that `run.py h200_rows`
wrote on a Hopper GPU, and then needs no GPU. Without a file it measures this machine's GPU, like `python -m
fp4_ops tune`. `prefill` fits the cost of tiles of csrc/sm90's kernels to times of every candidate, on a
Hopper GPU. `cpu_rows` fits the number of rows per expert from which this processor uses its kernels for many
rows (fit_cpu.py; some minutes).

The script prints the constants beside the built-in ones, and the errors of both models. --write puts them
into the file, with the device, commit and date. Constants of csrc/sm80's tiles, of the exchange between GPUs,
of Triton's tiles, and the other constants of the CPU are written by hand. Their files name the measurements.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fp4_ops.runtime import fitted, native, tune
from fp4_ops.runtime.cost_fit import Point, errors, fit, solve

ROOT = Path(__file__).parents[1]
KINDS = {"16": "half", "bf16": "bf16", "8": "w4a8"}
"""Names of kernels, by their names in benchmarks/h200_rows.py."""


# --- decode or prefill ---


def recorded(file: Path, gpu: native.Gpu) -> list[Point]:
    """Returns the products of a table that benchmarks/h200_rows.py wrote."""
    points = []
    for row in json.loads(file.read_text())["rows"]:
        if row["table"] == "block":
            continue
        dense = row["table"] == "dense"
        groups = 1 if dense else row["experts"]
        rows, kp = max(round(row["rows"] * groups), 1), -(-row["k"] // 128) * 128
        product = native.product("dense" if dense else "offs", groups, rows, row["n"], kp)
        work = native.work(product, KINDS[row["kind"]], gpu)
        points.append(Point(KINDS[row["kind"]], groups, work, row["decode_us"], row["prefill_us"]))
    return points


# --- tiles of prefill ---


class Tiles(NamedTuple):
    """Whole waves of equal tiles, with their number of steps of 128 K and their width in tokens."""

    waves: int
    steps: int
    width: int
    cycles: float


def fit_tiles(points: Sequence[Tiles]) -> list[float]:
    """Fits (base, slope, full, tile_base, tile_slope) of Cost in csrc/sm90/prefill_host.cuh. A step takes
    max(base + slope * width, full * width), and the rest of a tile takes tile_base + tile_slope * width.

    It is not known which of the two terms limits a step. So each width is tried as a border: for narrower
    tiles the first term counts, for wider tiles the second. The best of these fits is returned.
    """
    best: tuple[float, list[float]] | None = None
    widths = sorted({p.width for p in points})
    for last in widths:
        rows = []
        for p in points:
            narrow = p.width <= last
            step = [narrow * 1.0, narrow * p.width, (not narrow) * p.width]
            rows.append([p.waves * p.steps * s for s in step] + [p.waves, p.waves * p.width])
        given = [i for i in range(5) if any(row[i] for row in rows)]  # all may be narrow: no `full`
        found = solve([[row[i] for i in given] for row in rows], [p.cycles for p in points])
        cost = [0.0] * 5
        for i, value in zip(given, found):
            cost[i] = value
        off = statistics.median(abs(tiles_cycles(p, cost) / p.cycles - 1) for p in points)
        if best is None or off < best[0] - 1e-9:
            best = off, cost
    assert best is not None
    return best[1]


def tiles_cycles(p: Tiles, cost: Sequence[float]) -> float:
    base, slope, full, tile_base, tile_slope = cost
    step = max(base + slope * p.width, full * p.width)
    return p.waves * (p.steps * step + tile_base + tile_slope * p.width)


class Candidate(NamedTuple):
    cost: str
    """The name of the candidate's constants in constants.json."""
    rows: int
    """Rows of weights in a tile, summed over the blocks of a cluster."""
    cluster: int
    widths: tuple[int, ...]


def candidates(header: str, prefix: str) -> list[Candidate]:
    """Returns the candidates that csrc/sm90/prefill_fp8.cuh or prefill_words.cuh lists."""
    text = (ROOT / "csrc/sm90" / header).read_text()
    widths = {
        name: tuple(map(int, numbers.split(",")))
        for name, numbers in re.findall(r"using (\w+) = WidthList<([\d, ]+)>;", text)
    }
    costs = dict(re.findall(r"(k\w+) = cost_of\(fitted::(\w+)\)", text))
    found = re.findall(r"PrefillConfig<Weights, (\d), (\w+), (\d), \w+>>\(\s*\"[^\"]*\",\s*(k\w+)\)", text)
    assert all(costs[cost].startswith(prefix) for *_, cost in found)
    return [Candidate(costs[cost], 64 * int(w) * int(c), int(c), widths[of]) for w, of, c, cost in found]


KERNELS = {"fp8": ("prefill_fp8.cuh", "w4a8"), "words": ("prefill_words.cuh", "bf16")}


def measure_tiles(kind: str, values: fitted.Values) -> dict[str, list[Tiles]]:
    """Measures dense products that are whole waves of one candidate's tiles. Returns the times by the name of
    constants."""
    from h200_hopper import median_us, random_weight

    from fp4_ops.backends.launchers.library import multiprocessors
    from fp4_ops.dev import prefill
    from fp4_ops.dev.product import Routing

    header, kernel = KERNELS[kind]
    sms = multiprocessors(torch.cuda.current_device())
    launch_us = native.built_in(native.HOPPER)["prefill_launch_us"][native.KERNELS.index(kernel)]
    points: dict[str, list[Tiles]] = {}
    for config, c in enumerate(candidates(header, kind)):
        for waves, steps in ((1, 16), (2, 16), (2, 48)):
            n = c.rows * (sms // c.cluster) * waves
            w = random_weight(1, n, 128 * steps, "mma_bf16" if kernel == "bf16" else "sm90")
            for width in c.widths:
                x, scale = torch.randn(width, 128 * steps, device="cuda").bfloat16(), None
                if kernel == "w4a8":
                    x, scale = torch.ops.fp4.quantize_fp8(x, layout="sm90")
                out = torch.empty(width, n, dtype=torch.bfloat16, device="cuda")

                def run(_: int, given: tuple[Any, ...] = (x, scale, w, out), config: int = config) -> None:
                    x, scale, w, out = given
                    prefill.run(x, scale, w, None, Routing.DENSE, x.shape[0], out, config=config)

                cycles = (median_us(run) - launch_us) * 1e-6 * values["clock"]
                points.setdefault(c.cost, []).append(Tiles(waves, steps, width, cycles))
    return points


# --- the command ---


def write(file: Path, group: str, values: fitted.Values, gpu: str) -> None:
    """Puts a group's values into a file of constants, together with their origin."""
    text = json.loads(file.read_text())
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    today = datetime.date.today().isoformat()
    text[group] |= {"device": gpu, "commit": commit, "date": today, "values": values}
    file.write_text(as_text(text))


def as_text(groups: dict[str, Any]) -> str:
    """Returns JSON with a line for each constant."""
    text = json.dumps(groups, indent=1)
    on_a_line = re.sub(r"\[[^\]]*\]", lambda m: " ".join(m[0].split()), text)
    return on_a_line.replace("[ ", "[").replace(" ]", "]") + "\n"


def show(before: fitted.Values, found: fitted.Values) -> None:
    for name, value in before.items():
        print(f"{name:<24}{value!s:>48}{rounded(found[name])!s:>48}")


def rounded(value: Any) -> Any:
    return [rounded(v) for v in value] if isinstance(value, list) else float(f"{value:.4g}")


def planner(args: argparse.Namespace) -> None:
    if args.times:
        gpu, name = native.Gpu(native.HOPPER, 132, 227 * 1024, 0), json.loads(args.times.read_text())["gpu"]
        points = recorded(args.times, gpu)
    else:
        gpu, name = native.gpu(torch.cuda.current_device()), torch.cuda.get_device_name()
        points = tune.measure(gpu, tune.OnGpu())
    before = tune.built_in(gpu)
    found = fit(points, before)
    show(before, found)
    print(tune.report(points, before, found))
    for what, values in (("built in", before), ("fitted", found)):
        decode, prefill = errors(points, values)
        print(f"  {what:<16}median error of decode {decode:.1%}, of prefill {prefill:.1%}")
    if args.write:
        file = fitted.HOME / native.FOLDERS[gpu.family] / fitted.FILE
        write(file, "planner", {k: rounded(v) for k, v in found.items()}, name)


def prefill_tiles(args: argparse.Namespace) -> None:
    before = fitted.groups("hopper")["prefill"].values
    found = dict(before)
    for kind in KERNELS:
        for name, points in measure_tiles(kind, before).items():
            found[name] = rounded(fit_tiles(points))
            for what, cost in (("built in", before[name]), ("fitted", found[name])):
                off = statistics.median(abs(tiles_cycles(p, cost) / p.cycles - 1) for p in points)
                print(f"{name:<24}{what:<10}median error {off:.1%}")
    show(before, found)
    if args.write:
        write(fitted.HOME / "hopper" / fitted.FILE, "prefill", found, torch.cuda.get_device_name())


def cpu_rows(args: argparse.Namespace) -> None:
    import fit_cpu
    import record

    group = torch.ops.fp4.cpu_capability()
    if group not in fit_cpu.GROUPS:
        raise SystemExit(
            f"the kernels of {group} are the same for many and for few rows: there is nothing to fit"
        )
    before = fitted.groups("cpu")[group].values
    points = []
    for p in fit_cpu.measure(group, fit_cpu.kinds_of(before)):
        print(f"{p.kind} {p.rows} rows an expert: {p.speedup:.2f} times as fast", flush=True)
        points.append(p)
    found = fit_cpu.fit(points, before)
    show(before, found)
    if args.write:
        write(fitted.HOME / "cpu" / fitted.FILE, group, found, record.cpu_name())


FITS = {"planner": planner, "prefill": prefill_tiles, "cpu_rows": cpu_rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("group", choices=FITS)
    parser.add_argument("--times", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    FITS[args.group](args)


if __name__ == "__main__":
    main()
