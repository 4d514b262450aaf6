"""Builds csrc/ with other flags than the package's own, together with a copy of the package's Python
files."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def read_setup() -> dict[str, Any]:
    """Returns the names that setup.py defines, and `options`, the arguments that it passes to setuptools."""
    import setuptools

    given: dict[str, Any] = {}
    before, setuptools.setup = setuptools.setup, lambda **options: given.update(options=options)
    try:
        return runpy.run_path("setup.py") | given
    finally:
        setuptools.setup = before


def build(
    to: Path, flags: list[str], link: Collection[str] = (), only: Collection[str] | None = None
) -> None:
    """Writes to `to`/fp4_ops: the Python files of the package, and a _C.so that is compiled with these
    additional flags.

    `only`: the names of the sources that need the flags. For the others, the objects of the package's own
    build are used, which must exist. The working directory must be the root of the repository.
    """
    setup = read_setup()
    extension = setup["options"]["ext_modules"][0]
    headers = [*Path("csrc").rglob("*.h"), *setup["generated_headers"](), Path("setup.py"), Path(__file__)]
    include = [f"-I{folder}" for folder in extension.include_dirs]
    own = [flag for flag in extension.extra_compile_args if not flag.startswith(("-O", "-g", "-W"))]
    objects = to / "objects"
    objects.mkdir(parents=True, exist_ok=True)

    def compile_one(source: str) -> str:
        if only is not None and Path(source).name not in only:
            return str(Path("build", source).with_suffix(".o"))
        made = objects / f"{Path(source).stem}.o"
        isa = setup["ISA_FLAGS"].get(setup["isa_of"](Path(source)), [])
        command = ["g++", "-w", "-fPIC", *flags, *include, *own, *isa, "-c", source, "-o"]
        setup["compile_if_older"](
            made, [Path(source), *headers], lambda part: subprocess.run([*command, part], check=True)
        )
        return str(made)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(compile_one, setup["cpp_sources"]()))
    for package in setup["options"]["packages"]:
        from_folder = Path(package.replace(".", "/"))
        folder = to / from_folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for pattern in ("*.py", *setup["options"]["package_data"][""]):
            for file in from_folder.glob(pattern):
                shutil.copy(file, folder)
    libraries = [f"-L{folder}" for folder in extension.library_dirs]
    libraries += [f"-l{name}" for name in extension.libraries if "python" not in name]
    target = str(to / "fp4_ops/_C.so")
    subprocess.run(["g++", "-shared", *link, *made, *libraries, "-o", target], check=True)
