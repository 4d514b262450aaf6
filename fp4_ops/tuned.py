"""What `python -m fp4_ops tune` measured on this machine's GPUs: kept in the user's cache, read at import.

A file for each GPU's name, so that processes that tune different ones do not disturb each other. One that
is damaged, or that another build of fp4_ops wrote, is ignored with one warning, and built-in constants serve.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import first_use, native
from .fitted import Values, flat

logger = logging.getLogger("fp4_ops")


@dataclass(frozen=True)
class Tuned:
    device: str
    """The GPU's name, as its driver has it."""
    family: int
    """Of native.FOLDERS."""
    build: str
    """As `native.build` names it."""
    date: str
    values: Values


in_use: dict[tuple[str, int], tuple[Tuned, Path]] = {}
"""What the planner was given, by the GPU's name and the family of kernels, and from which file."""


def folder() -> Path:
    """`tuned` beside the results of first uses: of fp4_ops in $XDG_CACHE_HOME, by default ~/.cache."""
    return first_use.cache_file().parent / "tuned"


def file_of(device: str, family: int) -> Path:
    name = "".join(c if c.isalnum() else "-" for c in device)
    return (
        folder() / f"{name}-{native.FOLDERS[family]}-{hashlib.sha256(device.encode()).hexdigest()[:8]}.json"
    )


def store(tuned: Tuned) -> Path:
    """Writes its file whole, whoever else writes it."""
    path = file_of(tuned.device, tuned.family)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
        json.dump(asdict(tuned), file, indent=1)
    os.replace(file.name, path)
    return path


def read(path: Path) -> Tuned:
    """Raises ValueError, with the reason, for a file that this build does not take."""
    try:
        found: Any = json.loads(path.read_text())
        tuned = Tuned(**found)
        like = native.built_in(tuned.family)
    except (TypeError, ValueError, KeyError):
        raise ValueError("it is damaged") from None
    if not native.kernels_file(tuned.family).exists():
        raise ValueError("the kernels that it is of are not built")
    if tuned.build != native.build(tuned.family):
        raise ValueError(f"{tuned.build} measured it, and this is {native.build(tuned.family)}")
    if not isinstance(tuned.values, dict) or not _alike(tuned.values, like):
        raise ValueError("it is damaged")
    return tuned


def _alike(values: Values, like: Values) -> bool:
    """Whether these are numbers that the cost model can have, by the same names."""
    if list(values) != list(like):
        return False
    for name, value in like.items():
        if isinstance(value, list) != isinstance(values[name], list):
            return False
        if isinstance(value, list) and len(value) != len(values[name]):
            return False
    try:
        numbers = flat(values)
    except (TypeError, ValueError):
        return False
    return all(math.isfinite(n) and n >= 0 for n in numbers)


def use(tuned: Tuned, path: Path) -> None:
    """From now on the planner has these constants for GPUs of this name."""
    native.tuned(tuned.device, tuned.family, tuned.values)
    in_use[tuned.device, tuned.family] = tuned, path


def load() -> None:
    """Gives the planner what is in the user's cache."""
    try:
        files = sorted(folder().glob("*.json"))
    except (OSError, RuntimeError):  # no such folder, or no home
        return
    for path in files:
        try:
            tuned = read(path)
            use(tuned, path)
        except (OSError, ValueError) as error:
            logger.warning(
                "fp4: constants in %s are not used: %s. Built-in ones serve; python -m fp4_ops tune measures "
                "this machine's again",
                path, error,
            )  # fmt: skip
