"""Prints the table of docs/checkpoints.md, from folders that the tools write while it runs: FP4_TOOLS=all
OMP_NUM_THREADS=1 python tests/tools/table.py [MAKER ...]

Each row is a tool and a scheme, with the families whose folders were read and the outcome.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("helpers", "", "tools")]

import cases
import torch
from conftest import SEED
from installs import CannotInstall
from test_tools import read

HEAD = "| tool | scheme | families | loaded |\n|---|---|---|---|"


def outcome(case: cases.Case) -> str:
    try:
        return read(case)
    except cases.CannotWrite as why:
        return f"not written: {str(why).partition(chr(10))[0][:80]}"


def main(*makers: str) -> None:
    torch.set_num_threads(1)
    print(HEAD)
    for maker in makers or cases.names():
        tool, found = cases.load(maker), defaultdict(lambda: defaultdict(list))
        for case in cases.cases(maker, SEED):
            try:
                found[case.scheme][outcome(case)].append(case.family)
            except CannotInstall as why:
                print(f"| {tool.name} {tool.version} | | | cannot be had: {why} |")
                break
        for scheme, outcomes in found.items():
            for what, families in outcomes.items():
                names = f"{len(families)}: {', '.join(families)}"
                print(f"| {tool.name} {tool.version} | {scheme} | {names} | {what} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
