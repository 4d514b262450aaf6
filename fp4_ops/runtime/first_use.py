"""Checks kernels on GPUs on which they were never tested: compares their first use with the dequantised
product.

The result is stored in the user's cache folder, so the check runs once for each device, build and kernel. A
kernel that fails the check is not used. The caller then takes the next kernel, and one warning says so.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

logger = logging.getLogger("fp4_ops")

_known: dict[str, bool] = {}


def cache_file() -> Path:
    """Returns the path of the results: `fp4_ops/first_use.json` in $XDG_CACHE_HOME, by default ~/.cache."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "fp4_ops" / "first_use.json"


def forget() -> None:
    """Forgets the results in this process. The file stays. For tests."""
    _known.clear()


def _stored() -> dict[str, bool]:
    try:
        found = json.loads(cache_file().read_text())
    except (OSError, RuntimeError, ValueError):  # no file yet, no home folder, or a file that is half written
        return {}
    return {k: v for k, v in found.items() if isinstance(v, bool)} if isinstance(found, dict) else {}


def _store(key: str, right: bool) -> None:
    """Stores a result. If processes write at the same time, one file wins; lost results are checked again."""
    try:
        path = cache_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**_stored(), key: right}, indent=0)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except (OSError, RuntimeError) as error:
        logger.debug("fp4: the result of a kernel's first use could not be stored: %s", error)


def capturing() -> bool:
    """True while a CUDA graph is captured. No check can run then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def agrees(
    kernel: str, device: str, build: str, error: Callable[[], float], bound: float, instead: str
) -> bool:
    """True if the kernel's error is within `bound`. `error()` computes it once for each device and build.

    `device` is the GPU's name and capability. `build` holds the versions of fp4_ops and of the kernels'
    library or Triton. `instead` names the kernel that runs if this one is wrong. While a CUDA graph is
    captured, or without memory for the check, an unknown kernel is refused and checked at its next use.
    """
    key = f"{device}; {build}; {kernel}"
    if key not in _known:
        stored = _stored()
        if key in stored:
            _known[key] = stored[key]
        elif capturing():
            return False
        else:
            try:
                found = error()
            except torch.OutOfMemoryError:
                logger.warning(
                    "fp4: too little memory on %s to check %s, so %s is used now", device, kernel, instead
                )
                return False
            _known[key] = found <= bound  # False for NaN
            _store(key, _known[key])
        if not _known[key]:
            logger.warning(
                "fp4: %s is wrong on %s (%s): its first use differs from the dequantised product by more "
                "than %.0e of its norm. %s is used instead. Please report this line; to check again, "
                "delete %s",
                kernel, device, build, bound, instead, cache_file(),
            )  # fmt: skip
    return _known[key]
