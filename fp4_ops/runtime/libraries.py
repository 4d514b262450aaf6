"""Finds the compiled libraries that register operators, and names versions and builds.

The libraries are in the folder of the package.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

REBUILD = "Rebuild both: pip install --no-build-isolation -e . (without a GPU here: with FP4_CUDA_ARCHS=all)."
NOT_INSTALLED = "not installed"


def libraries() -> list[Path]:
    """Lists the libraries in the order to load them. `_C.so` has the schemas."""
    return sorted(Path(__file__).parents[1].glob("_C*.so"))


def library_path() -> Path | None:
    return next(iter(libraries()), None)


def version_of(package: str) -> str:
    """Returns a package's version, NOT_INSTALLED for one without metadata, such as a source tree."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def digest(*files: Path) -> str:
    """Returns 12 hexadecimal digits that name the contents of files."""
    each = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            each.update(hashlib.file_digest(file, "sha256").digest())
    return each.hexdigest()[:12]


def function_of(library: ctypes.CDLL, name: str) -> Any:
    """Returns a function of a library. Raises ImportError if the library, of another build, lacks it."""
    try:
        return getattr(library, name)
    except AttributeError:
        raise ImportError(
            f"fp4_ops: {library._name} has no {name}: it and this Python package come from different builds. "
            f"{REBUILD}"
        ) from None
