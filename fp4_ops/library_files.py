"""Finds the compiled libraries beside this file that register operators."""

from __future__ import annotations

from pathlib import Path


def libraries() -> list[Path]:
    """Lists the libraries in the order to load them. `_C.so` has the schemas."""
    return sorted(Path(__file__).parent.glob("_C*.so"))


def library_path() -> Path | None:
    return next(iter(libraries()), None)
