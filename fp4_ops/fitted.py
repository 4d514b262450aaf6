"""What is data about native kernels, beside the code of their backend. Neither torch nor the built package is
needed here: `setup.py` writes it into a C++ header, too (csrc/generate/constants.py).

`kernels.json`: which library, which GPUs run it, which layouts it reads, with which rows. `constants.json`:
numbers that were fitted to measured times, in groups that say which device gave them, at which commit, and
when.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

HOME = Path(__file__).parent / "backends"
FILE = "constants.json"

KERNELS_FILE = "kernels.json"

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


class Family(NamedTuple):
    """Native kernels: those of csrc/sm{family}, in the library `_sm{family}.so`."""

    name: str
    """Of the backend's folder."""
    family: int
    capability: tuple[int, int]
    """The compute capability of the GPUs that run them, ..."""
    and_later: bool
    """... and whether later ones do, too."""
    layouts: tuple[str, ...]
    """Those that they read, the fastest first."""
    rows: dict[str, list[str]]
    """Of a layout with which they read fewer dtypes of unquantised rows than it allows, those dtypes."""
    a_formats: dict[str, list[str]]
    """Of a layout with which `fp4::moe` takes fewer of those that it allows, the ones it takes."""

    @property
    def capability_words(self) -> str:
        return "{}.{}".format(*self.capability) + " or later" * self.and_later


def families() -> tuple[Family, ...]:
    """Of the backends that have native kernels; of those that a GPU runs it takes the first."""
    found = []
    for file in HOME.glob(f"*/{KERNELS_FILE}"):
        data = json.loads(file.read_text())
        major, minor = data.pop("capability")
        layouts = tuple(data.pop("layouts"))
        found.append(Family(file.parent.name, capability=(major, minor), layouts=layouts, **data))
    return tuple(sorted(found, key=lambda f: f.family, reverse=True))


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
