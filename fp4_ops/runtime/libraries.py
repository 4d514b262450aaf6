"""Finds the compiled libraries that register operators. They are in the folder of the package."""

from __future__ import annotations

from pathlib import Path


def libraries() -> list[Path]:
    """Lists the libraries in the order to load them. `_C.so` has the schemas."""
    return sorted(Path(__file__).parents[1].glob("_C*.so"))


def library_path() -> Path | None:
    return next(iter(libraries()), None)
