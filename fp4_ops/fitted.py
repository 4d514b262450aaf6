"""Numbers that were fitted to measured times, as data: which device gave them, at which commit, and when.

Each backend has them beside its code, in `constants.json`: groups of named values. `setup.py` writes those of
the native kernels into a C++ header (csrc/generate/constants.py). Neither torch nor the built package is
needed here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

HOME = Path(__file__).parent / "backends"
FILE = "constants.json"

Values = dict[str, Any]
"""Numbers, or lists of them, by name."""


class Group(NamedTuple):
    """Constants of one model of times."""

    device: str
    """The GPU that was measured."""
    commit: str
    date: str
    fit: str
    """The command that fits them again."""
    values: Values


def groups(backend: str) -> dict[str, Group]:
    """Of the backend in this folder; empty where nothing of it was fitted."""
    file = HOME / backend / FILE
    return read(file) if file.exists() else {}


def read(file: Path) -> dict[str, Group]:
    return {name: Group(**group) for name, group in json.loads(file.read_text()).items()}


def flat(values: Values) -> list[float]:
    """All numbers in the order of their names, as the C++ struct has them."""
    return [float(v) for value in values.values() for v in (value if isinstance(value, list) else [value])]


def unflat(numbers: list[float], like: Values) -> Values:
    """The inverse of `flat`."""
    rest = iter(numbers)
    return {
        name: [next(rest) for _ in value] if isinstance(value, list) else next(rest)
        for name, value in like.items()
    }
