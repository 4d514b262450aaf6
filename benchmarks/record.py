"""Prints or stores the rows that a benchmark yields.

A benchmark is a module with

    add_arguments(parser)       its command line
    rows(args)                  an iterator of rows: dicts of strings and numbers, each as soon as measured

`python benchmarks/NAME.py` prints the rows. `python benchmarks/run.py NAME` also writes them as JSON.
A row's `table` says which of the benchmark's tables it belongs to. The name of a number ends in its unit:
`us`, `ms`, `s`, `gb`, ... A ratio has the word `ratio` or `speedup` in its name.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
FIELDS = ("command", "commit", "date", "gpu", "cpu", "versions", "rows")
"""Fields of a record. An unknown field is null; only old records have such fields."""
PACKAGES = {
    "torch": "torch", "triton": "triton", "transformers": "transformers", "peft": "peft",
    "ggml": "ggml-python", "humming": "humming-kernels", "experts4bit_qlora": "experts4bit-qlora",
    "bitsandbytes": "bitsandbytes", "vllm": "vllm", "flashinfer": "flashinfer-python",
    "sgl_kernel": "sglang-kernel",
}  # fmt: skip
"""Modules and their distributions. A record has the versions of all modules that the benchmark imported."""

ELSEWHERE: dict[str, str] = {}
"""Versions in the processes that a benchmark started and measured. They replace those of this process."""

Row = dict[str, Any]
Rows = Callable[[argparse.Namespace], Iterator[Row]]


# --- printing ---


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if value and abs(value) < 1e-3 else f"{value:.5g}"
    return "-" if value is None else str(value)


class Printer:
    """Prints rows as text tables. A new heading begins when the names in a row change."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.widths: list[int] = []

    def show(self, row: Row) -> None:
        cells = [shown(value) for value in row.values()]
        if list(row) != self.names:
            self.names = list(row)
            self.widths = [max(9, len(n), len(c)) for n, c in zip(self.names, cells)]
            print(f"\n{self._line(self.names)}")
        print(self._line(cells), flush=True)

    def _line(self, cells: list[str]) -> str:
        return "  ".join(cell.rjust(width) for cell, width in zip(cells, self.widths))


# --- machine and versions ---


def gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def cpu_name() -> str:
    """Returns the CPU's name, and the number of processors that this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    found = {k.strip(): v.strip() for k, v in (line.split(":", 1) for line in lines if ":" in line)}
    name = found.get("model name", platform.processor() or platform.machine())
    if "model" in found:
        name += f", family {found.get('cpu family')} model {found['model']}"
    return f"{name}, {len(os.sched_getaffinity(0))} processors"


def commit() -> str | None:
    """Returns the commit of this tree, with "+" if files differ from it. None if there is no git."""
    try:
        found = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty=+"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def versions() -> dict[str, str]:
    import torch

    found = {"python": platform.python_version()}
    for module, distribution in PACKAGES.items():
        if module in sys.modules:
            found[distribution] = importlib.metadata.version(distribution)
    found["torch"] = str(
        torch.__version__
    )  # with the CUDA that it was built for, which its wheel may not say
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found | ELSEWHERE


def command(name: str, arguments: list[str]) -> str:
    """Returns the command as a user types it. Absolute paths belong to another machine, so only their last
    part is kept."""
    words = [Path(a).name if os.path.isabs(a) else a for a in arguments]
    return " ".join(["python benchmarks/run.py", name, *map(shlex.quote, words)])


def new_record(name: str, arguments: list[str]) -> dict[str, Any]:
    return {
        "command": command(name, arguments),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "gpu": gpu_name(),
        "cpu": cpu_name(),
        "versions": versions(),
        "rows": [],
    }


# --- files ---


def rounded(row: Row) -> Row:
    """Rounds numbers to six digits, which is more precise than any measurement here."""
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()}


def write(path: Path, record: dict[str, Any]) -> None:
    """Writes a line for each field and each row, so that differences between versions are readable."""
    head = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in record.items() if k != "rows"]
    rows = ",\n".join("  " + json.dumps(row) for row in record["rows"])
    path.write_text("{\n" + "".join(f" {line},\n" for line in head) + f' "rows": [\n{rows}\n ]\n}}\n')


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


# --- running ---


def parser_of(doc: str | None, add_arguments: Callable[[argparse.ArgumentParser], None]) -> Any:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    return parser


def main(doc: str | None, add_arguments: Callable[[argparse.ArgumentParser], None], rows: Rows) -> None:
    """Prints the rows: the main function of `python benchmarks/NAME.py`."""
    args = parser_of(doc, add_arguments).parse_args()
    print(f"{gpu_name() or cpu_name()}; {', '.join(f'{k} {v}' for k, v in versions().items())}")
    printer = Printer()
    for row in rows(args):
        printer.show(row)
