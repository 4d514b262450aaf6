"""Finds the compiled libraries that register operators. They are in the folder of the package."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

REBUILD = "Rebuild both: pip install --no-build-isolation -e . (without a GPU here: with FP4_CUDA_ARCHS=all)."


def libraries() -> list[Path]:
    """Lists the libraries in the order to load them. `_C.so` has the schemas."""
    return sorted(Path(__file__).parents[1].glob("_C*.so"))


def library_path() -> Path | None:
    return next(iter(libraries()), None)


def function_of(library: ctypes.CDLL, name: str) -> Any:
    """Returns a function of a library. Raises ImportError if the library, of another build, lacks it."""
    try:
        return getattr(library, name)
    except AttributeError:
        raise ImportError(
            f"fp4_ops: {library._name} has no {name}: it and this Python package come from different builds. "
            f"{REBUILD}"
        ) from None
