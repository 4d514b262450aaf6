"""Stores and loads the constants that `python -m fp4_ops tune` measured. They are read at import.

The user's cache has one file for each GPU name, so processes that tune different GPUs do not disturb each
other. A damaged file, or one of another build of fp4_ops, is ignored with one warning.
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
    """Name of the GPU, from its driver."""
    family: int
    """Family of kernels, a key of native.FOLDERS."""
    build: str
    """Build of the kernels, from `native.build`."""
    date: str
    values: Values


in_use: dict[tuple[str, int], tuple[Tuned, Path]] = {}
"""Constants that the planner uses and their file, by GPU name and family of kernels."""


def folder() -> Path:
    """Returns the folder of the files: `fp4_ops/tuned` in $XDG_CACHE_HOME, by default ~/.cache."""
    return first_use.cache_file().parent / "tuned"


def file_of(device: str, family: int) -> Path:
    name = "".join(c if c.isalnum() else "-" for c in device)
    return (
        folder() / f"{name}-{native.FOLDERS[family]}-{hashlib.sha256(device.encode()).hexdigest()[:8]}.json"
    )


def store(tuned: Tuned) -> Path:
    """Writes the file in one step, so that no reader sees half of it."""
    path = file_of(tuned.device, tuned.family)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
        json.dump(asdict(tuned), file, indent=1)
    os.replace(file.name, path)
    return path


def read(path: Path) -> Tuned:
    """Reads a file. Raises ValueError with the reason if this build cannot use it."""
    try:
        found: Any = json.loads(path.read_text())
        tuned = Tuned(**found)
        like = native.built_in(tuned.family)
    except (TypeError, ValueError, KeyError):
        raise ValueError("it is damaged") from None
    if not native.kernels_file(tuned.family).exists():
        raise ValueError("its kernels are not built")
    if tuned.build != native.build(tuned.family):
        raise ValueError(f"it was measured with {tuned.build}; this is {native.build(tuned.family)}")
    if not isinstance(tuned.values, dict) or not _alike(tuned.values, like):
        raise ValueError("it is damaged")
    return tuned


def _alike(values: Values, like: Values) -> bool:
    """True if `values` has the names of `like`, and numbers that the cost model can use."""
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
    """Makes the planner use these constants for GPUs of this name."""
    native.tuned(tuned.device, tuned.family, tuned.values)
    in_use[tuned.device, tuned.family] = tuned, path


def load() -> None:
    """Gives the planner the constants in the user's cache."""
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
                "fp4: constants in %s are not used: %s. The built-in constants are used; to measure this "
                "machine again: python -m fp4_ops tune",
                path, error,
            )  # fmt: skip
