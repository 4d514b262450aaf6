"""Installs other people's packages, each set of packages once, into a folder of its own."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path


def cache() -> Path:
    base = os.environ.get("FP4_REAL_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "fp4_ops_real"


class CannotInstall(Exception):
    """pip could not get some packages: no network, no compiler, or not for this Python."""


_missing: dict[str, CannotInstall] = {}
"""Packages that pip could not get. pip is asked only once, because without a network it tries for a long
time."""


def installed(name: str, requirements: tuple[str, ...]) -> Path:
    """Return the folder with these packages. They are installed at the first use."""
    if name in _missing:
        raise _missing[name]
    key = hashlib.sha256("\n".join((sys.version[:4], *requirements)).encode()).hexdigest()[:10]
    folder = cache() / f"{name}-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(cache() / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
        # Python compiles to bytecode what is imported, which is a small part of these packages.
        install = [*pip, "install", "--no-deps", "--no-compile", "--target", str(part), *requirements]
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(part, ignore_errors=True)
            errors = [line for line in done.stderr.splitlines() if "ERROR" in line]
            _missing[name] = CannotInstall((errors or [done.stderr[-300:]])[-1])
            raise _missing[name]
        part.rename(folder)
    return folder


def environment(*paths: Path) -> dict[str, str]:
    """Return the environment of a process in which these folders come first."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
