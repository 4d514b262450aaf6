"""Describes other people's code as data: which packages are installed together, and which of their modules
run.

A file of packages/ is a group. It has its own folder (installs.py), and its own process, in which this folder
comes first on the path. To add a case, write a function in such a file that builds the module:

    @GROUP.case("mixture-of-experts", "MoE")
    def moe():
        from mixture_of_experts import MoE
        return MoE(dim=H, num_experts=4)
"""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from types import ModuleType
from typing import Any

import installs
from installs import CannotInstall
from places import HELPERS

HERE = Path(__file__).resolve().parent
H = 64
"""The hidden size of most cases."""


@dataclass(frozen=True)
class Case:
    package: str
    what: str
    make: Callable[[], Any]
    """Builds the module. Afterwards all of its weights are replaced by random ones."""
    takes: str | Callable[[int, int], Any] = "hidden"
    """Its input: "hidden" [B, T, H], "rows" [B * T, H], "ids" [B, T]; or a function of B and T."""
    experts: str = r"expert"
    """A pattern for the names of experts' matrices. Their last dimension is k."""
    but: str = r"shared|router|expert_gate"
    """A pattern for names among those that are not experts' matrices."""
    transposed: str = r"^$"
    """A pattern for weights whose second to last dimension is the input."""
    std: float = 0.25
    tolerance: float = 1e-4
    """The largest allowed difference between the results and the twin's."""
    becomes: tuple[str, ...] = ("fp4::moe",)
    """The operators that the experts become. Empty if the code stays as it is."""
    because: str = ""
    """A part of the reason why the code stays as it is. The report must contain it."""
    sizes: tuple[tuple[int, int], ...] = ((2, 9), (3, 5), (4, 11))
    """B and T of each call."""

    def __str__(self) -> str:
        return f"{self.package} {self.what}"


@dataclass
class Group:
    requirements: tuple[str, ...]
    cases: list[Case] = field(default_factory=list)
    name: str = ""

    def case(self, package: str, what: str, **how: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
        def add(make: Callable[[], Any]) -> Callable[[], Any]:
            self.cases.append(Case(package, what, make, **how))
            return make

        return add

    def version(self, package: str) -> str:
        return next(
            r.split("==")[1] for r in self.requirements if r.split("==")[0].lower() == package.lower()
        )


def alone(path: str) -> ModuleType:
    """Imports a file of a package without the package, whose own imports the file does not need."""
    file = next(Path(p) / path for p in sys.path if (Path(p) / path).exists())
    return _module(f"alone_{file.stem}", file)


def _module(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dynamo looks modules up by name
    spec.loader.exec_module(module)
    return module


def names() -> list[str]:
    return sorted(p.stem for p in (HERE / "packages").glob("*.py"))


def load(name: str) -> Group:
    module = _module(f"real_{name}", HERE / "packages" / f"{name}.py")
    module.GROUP.name = name
    return module.GROUP


def worker(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "worker", *arguments]


@functools.cache
def _run(name: str, chosen: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Run a group's cases, all or those chosen, in one process. Return the outcomes by name."""
    group = load(name)
    folder = installs.installed(name, group.requirements)
    env = installs.environment(folder, HERE, HELPERS)
    done = subprocess.run(worker(name, *chosen), env=env, cwd=folder, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {f"{r['package']} {r['what']}": {**r, "log": done.stderr} for r in lines}
    wanted = len(chosen or group.cases)
    if len(found) != wanted:
        raise RuntimeError(f"{name}: {len(found)} of {wanted} cases ran\n{done.stderr[-3000:]}")
    return found


def result(group: Group, case: Case, chosen: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the outcome of a case. The first call runs all cases, or those chosen. Raises CannotInstall."""
    return _run(group.name, chosen)[str(case)]


def table() -> Iterator[str]:
    """Yields the lines of docs/support.md: a summary, then a row for each case."""
    rows: list[str] = []
    counts: Counter[str] = Counter()
    packages: set[str] = set()
    for name in names():
        group = load(name)
        for case in group.cases:
            try:
                r = result(group, case)
            except CannotInstall as why:
                r = {"raised": str(why)}
            became, how = _became(case, r)
            error = f"{r['error']:.0e}" if how == "rewritten" else ""
            rows.append(
                f"| {case.package} {group.version(case.package)} | {case.what} | {became} | {error} |"
            )
            counts[how] += 1
            packages.add(case.package)
    yield f"{len(packages)} packages, {len(rows)} layers and models: " + ", ".join(
        f"{counts[how]} {how}" for how in ("rewritten", "left alone", "not run")
    )
    yield ""
    yield "| package | layer or model | becomes | error |\n|---|---|---|---|"
    yield from rows


def _became(case: Case, r: dict[str, Any]) -> tuple[str, str]:
    if "raised" in r:
        return f"not run: {r['raised'][:100]}", "not run"
    if r["ops"]:
        return ", ".join(f"`{op}`" for op in sorted(r["ops"])), "rewritten"
    why = [*r["reasons"], *(b.split("\n  Hint")[0] for b in r["breaks"]), "Dynamo captures no experts"]
    told = next((w for w in why if case.because in w), why[0])
    return f"left alone: {shorten(told.replace('Explanation:', ''), 160, placeholder=' ...')}", "left alone"
