"""Runs a benchmark and writes its rows into benchmarks/results/, together with command, commit, machine and
versions.

    python benchmarks/run.py NAME [arguments of that benchmark] [--out FILE.json]

NAME is a script of this folder, for example `h200_hopper --models qwen3-30b`. The file is
results/NAME_CARD.json ("h200_" at the beginning of NAME is left out), where CARD is the GPU's short name, or
"cpu". The file is written again after each row, so rows that were measured before a time limit are kept.
`python benchmarks/report.py` makes the tables and pictures of README and docs from these files.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import record


def card(gpu: str | None) -> str:
    """ "NVIDIA H100 80GB HBM3" -> "h100"."""
    words = [w for w in (gpu or "").lower().split() if w not in ("nvidia", "geforce", "rtx")]
    return words[0] if words else "cpu"


def run(name: str, arguments: list[str], out: Path | None = None) -> Path:
    """Runs a benchmark. Returns the file with its record."""
    module = importlib.import_module(name)
    args = record.parser_of(module.__doc__, module.add_arguments).parse_args(arguments)
    told = [] if out is None else ["--out", str(out)]
    found = record.new_record(name, arguments + told)
    file = out or record.RESULTS / f"{name.removeprefix('h200_')}_{card(found['gpu'])}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    printer = record.Printer()
    for row in module.rows(args):
        printer.show(row)
        found["rows"].append(record.rounded(row))
        found["versions"] = record.versions()  # a benchmark may import a peer late
        record.write(file, found)
    if not found["rows"]:
        raise SystemExit(f"{name} yielded no row; nothing was written")
    return file


def main() -> None:
    if sys.argv[1:2] in ([], ["-h"], ["--help"]):
        print(__doc__)
        return
    # An option --help after NAME belongs to the benchmark.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("name")
    parser.add_argument("--out", type=Path)
    given, rest = parser.parse_known_args()
    if not (Path(__file__).parent / f"{given.name}.py").exists():
        names = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if "def rows(" in p.read_text())
        raise SystemExit(f"there is no benchmark {given.name}; there are {', '.join(names)}")
    print(f"\nwritten: {run(given.name, rest, given.out)}")


if __name__ == "__main__":
    main()
