"""Runs the operators' tests on a build of csrc/ with gcc's AddressSanitizer and UndefinedBehaviorSanitizer.

    make test-sanitized
    python release/sanitized.py -m pytest ...     Python with such a build of the package, in build/sanitized

Code that reads or writes outside of a tensor, overflows a signed number, or uses a null or misaligned pointer
ends the process with a stack trace. Leaks are not detected, because Python and torch never free much of their
memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import variants

ROOT = Path(__file__).parent.parent
HERE = ROOT / "build/sanitized"
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
UNAVAILABLE = 75
"""The status of a process for want of something outside of this repository (EX_TEMPFAIL)."""


def environment() -> dict[str, str]:
    # Python is linked with neither library. libasan.so must be loaded first, and looks for libstdc++'s
    # functions when it starts.
    runtimes = [find(name) for name in ("libasan.so", "libstdc++.so")]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "PYTHONPATH": str(HERE),
    }


def find(library: str) -> str:
    command = ["g++", f"-print-file-name={library}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        print(f"g++ has no {library}")
        sys.exit(UNAVAILABLE)
    return found


OUTSIDE = """
import ctypes, fp4_ops
from fp4_ops.runtime.libraries import library_path
malloc = ctypes.CDLL(None).malloc
malloc.restype = ctypes.c_void_p
address, number = (ctypes.c_void_p * 1)(malloc(16)), (ctypes.c_uint64 * 1)()
ctypes.CDLL(str(library_path())).fp4_runs_read(address, None, ctypes.c_int64(1), number)
"""
"""A program that reads 64 bytes of a block of 16."""


def check_that_it_notices(env: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", OUTSIDE], env=env, cwd=HERE, capture_output=True, text=True)
    if done.returncode == 0 or "heap-buffer-overflow" not in done.stderr:
        sys.exit(f"a read outside of its memory was not noticed\n{done.stderr[-2000:]}")


def main() -> None:
    os.chdir(ROOT)
    if shutil.which("g++") is None:
        print("there is no g++")
        sys.exit(UNAVAILABLE)
    env = environment()
    variants.build(HERE, ["-O1", "-g1", *SANITIZE], link=SANITIZE)
    check_that_it_notices(env)
    sys.exit(subprocess.run([sys.executable, *sys.argv[1:]], env=env, cwd=HERE).returncode)


if __name__ == "__main__":
    main()
