"""Kernels on GPUs where nobody has run them: the first use of each is compared with the dequantised product.

What a check found is kept in the user's cache folder, so that one process makes it once for each device,
build and kernel, and others read it. A kernel that fails is not used: the caller takes what comes next, and
one warning says so.
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
    """`first_use.json` in the folder of fp4_ops in $XDG_CACHE_HOME, by default ~/.cache."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "fp4_ops" / "first_use.json"


def forget() -> None:
    """What this process knows; the file stays. For tests."""
    _known.clear()


def _stored() -> dict[str, bool]:
    try:
        found = json.loads(cache_file().read_text())
    except (OSError, RuntimeError, ValueError):  # none yet, no home folder, or half of a file
        return {}
    return {k: v for k, v in found.items() if isinstance(v, bool)} if isinstance(found, dict) else {}


def _store(key: str, right: bool) -> None:
    """Others may write at the same time: one of the files stays whole, and what it lacks is checked again."""
    try:
        path = cache_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**_stored(), key: right}, indent=0)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except (OSError, RuntimeError) as error:
        logger.debug("fp4: what the first use of a kernel gave is not kept: %s", error)


def capturing() -> bool:
    """Whether a CUDA graph is being captured, so that no check can run."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def agrees(
    kernel: str, device: str, build: str, error: Callable[[], float], bound: float, instead: str
) -> bool:
    """Whether the kernel's error is within `bound`, computed by `error()` once for each device and build.

    `device` and `build` say on what the result depends: the GPU's name and capability; the versions of
    fp4_ops, of the kernel's library or of Triton. `instead`: what will run if the kernel is wrong. While a
    CUDA graph is captured nothing can be computed: an unknown kernel is not used, and is asked about again.
    """
    key = f"{device}; {build}; {kernel}"
    if key not in _known:
        stored = _stored()
        if key in stored:
            _known[key] = stored[key]
        elif capturing():
            return False
        else:
            found = error()
            _known[key] = found <= bound  # NaN is not
            _store(key, _known[key])
        if not _known[key]:
            logger.warning(
                "fp4: %s is wrong on %s (%s): its first use differs from the dequantised product by more "
                "than %.0e of its norm. %s is used instead. Please report this line; to check again, "
                "delete %s",
                kernel, device, build, bound, instead, cache_file(),
            )  # fmt: skip
    return _known[key]
