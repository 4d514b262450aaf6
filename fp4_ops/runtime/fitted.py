"""Reads the data files of backends with native kernels.

`kernels.json` names the library, the GPUs that run it, and the layouts and rows that it reads.
`constants.json` has numbers that were fitted to measured times. Each group names the device, commit and date.

This module needs neither torch nor the built package, because `setup.py` writes the same data into a C++
header (csrc/generate/constants.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

HOME = Path(__file__).parents[1] / "backends"
FILE = "constants.json"

KERNELS_FILE = "kernels.json"

Values = dict[str, Any]
"""Numbers, or lists of numbers, by name."""


class Group(NamedTuple):
    """Constants of one cost model."""

    device: str
    """Name of the GPU that was measured."""
    commit: str
    date: str
    fit: str
    """Command that fits the constants again."""
    values: Values


class Family(NamedTuple):
    """A family of native kernels: csrc/sm{family}, built into the library `_sm{family}.so`."""

    name: str
    """Name of the backend's folder."""
    family: int
    capability: tuple[int, int]
    """Lowest compute capability of the GPUs that run these kernels."""
    and_later: bool
    """True if GPUs of later compute capabilities run them, too."""
    layouts: tuple[str, ...]
    """Layouts that the kernels read, the fastest first."""
    rows: dict[str, list[str]]
    """Dtypes of unquantised rows by layout, where the kernels read fewer than the layout allows."""
    a_formats: dict[str, list[str]]
    """Values of `a_format` by layout, where `fp4::moe` takes fewer than the layout allows."""

    @property
    def capability_words(self) -> str:
        return "{}.{}".format(*self.capability) + " or later" * self.and_later


def families() -> tuple[Family, ...]:
    """Lists the families of native kernels. A GPU uses the first one that it can run."""
    found = []
    for file in HOME.glob(f"*/{KERNELS_FILE}"):
        data = json.loads(file.read_text())
        major, minor = data.pop("capability")
        layouts = tuple(data.pop("layouts"))
        found.append(Family(file.parent.name, capability=(major, minor), layouts=layouts, **data))
    return tuple(sorted(found, key=lambda f: f.family, reverse=True))


def groups(backend: str) -> dict[str, Group]:
    """Returns the fitted constants of a backend; empty if there are none."""
    file = HOME / backend / FILE
    return read(file) if file.exists() else {}


def read(file: Path) -> dict[str, Group]:
    return {name: Group(**group) for name, group in json.loads(file.read_text()).items()}


def flat(values: Values) -> list[float]:
    """Returns all numbers in the order of their names, as in the C++ struct."""
    return [float(v) for value in values.values() for v in (value if isinstance(value, list) else [value])]


def unflat(numbers: list[float], like: Values) -> Values:
    """Undoes `flat`."""
    rest = iter(numbers)
    return {
        name: [next(rest) for _ in value] if isinstance(value, list) else next(rest)
        for name, value in like.items()
    }
