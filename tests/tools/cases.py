"""Describes the tools that write 4-bit folders as data: what each tool must write, and the expected result of
reading it.

A file of makers/ is a tool. Its packages are in their own folder (installs.py). The tool has its own process,
in which this folder comes first on the path and which writes all of its folders (writer.py). To add a scheme,
add a line to its SCHEMES.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import installs
from places import HELPERS

HERE = Path(__file__).resolve().parent
ALL = os.environ.get("FP4_TOOLS") == "all"
"""True to run every family of every scheme, instead of random ones."""


@dataclass(frozen=True)
class Scheme:
    """One way that a tool quantises.

    families: the families on which it is tried. draw: how many of them a run takes, at random; None: all.
    refused: a regular expression for the reason why `load_checkpoint` refuses the folders; empty if it reads
    them. requantize: the format with which it reads folders that are refused otherwise. but: families whose
    folders are refused although others are read, each with a regular expression for the reason. rounded: the
    global scales of gate and up may differ, so that folding them may round a block scale. far: the largest
    distance of a matrix from the original, relative to its norm. The distance to another expert is 1.4.
    """

    families: tuple[str, ...]
    draw: int | None = None
    refused: str = ""
    requantize: str = ""
    but: tuple[tuple[str, str], ...] = ()
    rounded: bool = False
    far: float = 0.25

    def drawn(self, seed: str) -> tuple[str, ...]:
        if ALL or self.draw is None:
            return self.families
        return tuple(random.Random(seed).sample(self.families, min(self.draw, len(self.families))))


@dataclass(frozen=True)
class Tool:
    name: str
    """The usual name of the tool."""
    requirements: tuple[str, ...]
    """Its packages, beginning with the tool itself."""
    schemes: dict[str, Scheme]
    write: Callable[[Any, str, Path, Path], None]
    """Writes a folder. Its arguments are a model, the name of a scheme, the folder of the model in bf16, and
    the folder to write."""
    draw: int | None = None
    """How many of its cases a run takes, at random, for a tool that is slow. None: all."""
    second_opinion: Callable[[dict[str, Any], Path], dict[str, Any]] | None = None
    """Computes the values of the weights with the tool's own code, given the tensors of a folder and the
    folder."""

    @property
    def version(self) -> str:
        return self.requirements[0].split("==")[1]


@dataclass(frozen=True)
class Case:
    maker: str
    scheme: str
    family: str

    def __str__(self) -> str:
        return f"{self.maker} {self.scheme} {self.family}"

    @property
    def folder(self) -> str:
        return f"{self.scheme}-{self.family}".replace(":", "_").replace(" ", "_")


def names() -> list[str]:
    return sorted(p.stem for p in (HERE / "makers").glob("*.py"))


@functools.cache
def load(maker: str) -> Tool:
    spec = importlib.util.spec_from_file_location(f"maker_{maker}", HERE / "makers" / f"{maker}.py")
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.TOOL


def cases(maker: str, seed: int) -> list[Case]:
    tool = load(maker)
    found = [
        Case(maker, name, family)
        for name, scheme in tool.schemes.items()
        for family in scheme.drawn(f"{seed} {maker} {name}")
    ]
    if ALL or tool.draw is None:
        return found
    return random.Random(f"{seed} {maker}").sample(found, min(tool.draw, len(found)))


class CannotWrite(Exception):
    """The tool itself failed."""


@functools.cache
def _written(
    maker: str, seed: int, chosen: tuple[Case, ...]
) -> tuple[tempfile.TemporaryDirectory[str], dict[str, dict[str, Any]]]:
    """Returns the folders of one tool, all written by one process, and its outcome for each."""
    tool = load(maker)
    packages = installs.installed(f"tool_{maker}", tool.requirements)
    where = tempfile.TemporaryDirectory(prefix=f"fp4_tools_{maker}_")
    out = Path(where.name)
    (out / "cases.json").write_text(json.dumps([[c.scheme, c.family] for c in chosen]))
    command = [sys.executable, "-m", "writer", maker, str(out)]
    env = {**installs.environment(packages, HERE, HELPERS), "FP4_TEST_SEED": str(seed)}
    done = subprocess.run(command, env=env, cwd=out, capture_output=True, text=True)
    results = out / "results.jsonl"
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    found = {str(Case(maker, r["scheme"], r["family"])): r for r in lines}
    if len(found) != len(chosen):
        raise RuntimeError(f"{maker}: {len(found)} of {len(chosen)} were written\n{done.stderr[-3000:]}")
    return where, found


def written(case: Case, seed: int, chosen: tuple[Case, ...] = ()) -> tuple[Path, float]:
    """Returns the folder that contains `original` and `folder`, and the seconds that the tool took. The first
    call writes all cases of the tool, or those chosen.

    Raises installs.CannotInstall, and CannotWrite.
    """
    where, found = _written(case.maker, seed, chosen or tuple(cases(case.maker, seed)))
    result = found[str(case)]
    if "raised" in result:
        raise CannotWrite(result["raised"])
    return Path(where.name) / case.folder, result["seconds"]
