"""Makes tables for README and docs from the records: rows, cells, and the register of tables."""

from __future__ import annotations

import functools
import statistics
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

import record

Cell = str | int | float | None
TABLES: dict[str, Callable[[], str]] = {}
AGAIN = {
    "humming_h100": "h200_humming",
    "humming_h200": "h200_humming",
    "accuracy_moe_lm_h200": "accuracy --minutes 2.2",
    "accuracy_demo_cpu": "accuracy",
    "compile_time_loop_cpu": "compile_time loop 8 64 128",
    "compile_time_layers_cpu": "compile_time layers 64x48 128x48",
}
"""Arguments of run.py that measure a file again, if they differ from those in its record."""


@functools.cache
def read(name: str) -> dict[str, Any]:
    return record.read(record.RESULTS / f"{name}.json")


def rows(name: str, table: str, **where: Any) -> list[dict[str, Any]]:
    return [r for r in read(name)["rows"] if r["table"] == table and all(r[k] == v for k, v in where.items())]


def one(name: str, table: str, **where: Any) -> dict[str, Any]:
    (found,) = rows(name, table, **where)
    return found


# --- Markdown ---


def cell(value: Cell) -> str:
    """Formats a number with three or four digits."""
    if isinstance(value, float):
        if value >= 1000 or (value >= 100 and value.is_integer()):
            return f"{value:.0f}"
        return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"
    return "" if value is None else str(value)


def grid(heads: list[str], lines: Iterable[Iterable[Cell]]) -> str:
    shown = [heads, ["---"] * len(heads), *([cell(c) for c in line] for line in lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in shown)


def again(name: str) -> str:
    """Returns the command that measures a record again."""
    found = read(name)["command"]
    arguments = AGAIN.get(name) or found.removeprefix("python benchmarks/").removeprefix("run.py ").replace(
        ".py", "", 1
    )
    benchmark = arguments.split()[0].removeprefix("h200_")
    usual = {f"{benchmark}_{card}" for card in ("h200", "h100", "cpu")}
    out = "" if name in usual else f" --out benchmarks/results/{name}.json"
    if "--out" in arguments:
        out = ""
    return f"python benchmarks/run.py {arguments}{out}"


def source(*names: str) -> str:
    """Names the machine and versions of a table's numbers, and the command that measures them again."""
    lines = []
    for name in names:
        r = read(name)
        versions = ", ".join(f"{k} {v}" for k, v in r["versions"].items() if k not in ("python", "cuda"))
        parts = [r["gpu"] or r["cpu"], f"commit {r['commit'] or 'not recorded'}", r["date"] or "", versions]
        line = f"*{', '.join(p for p in parts if p)}:* `{again(name)}`"
        lines.append(textwrap.fill(line, 120, break_long_words=False, break_on_hyphens=False))
    return "\n\n".join(lines)


def table(make: Callable[[], str]) -> Callable[[], str]:
    TABLES[make.__name__] = make
    return make


def spread(ratios: list[float]) -> list[Cell]:
    """Returns the number of points, the minimum, the median and the maximum."""
    return [len(ratios), min(ratios), statistics.median(ratios), max(ratios)]
