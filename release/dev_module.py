"""Builds the module of fp4_ops.dev, which binds host-only C++ (csrc/dev) for tests, benchmarks and tools.

    make dev            or      python release/dev_module.py

It needs pybind11, but neither nvcc nor a GPU. The module contains its own planner, which finds the kernels'
libraries in fp4_ops/, if there are any. It works with one version of Python and is in no wheel.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pybind11
import variants

ROOT = Path(__file__).parent.parent
SOURCES = [
    "dev/module.cpp",
    *(f"cuda/{name}.cpp" for name in ("choice", "configs", "constants", "gpu", "library")),
]


def build() -> Path:
    os.chdir(ROOT)
    setup = variants.read_setup()
    setup["generated_headers"]()
    target = Path(f"fp4_ops/dev/_native{sysconfig.get_config_var('EXT_SUFFIX')}")
    sources = [Path("csrc", name) for name in SOURCES]
    headers = [*setup["runtime_headers"](), Path(__file__)]
    compiler, *flags = setup["compiler"]()
    command = [
        compiler,
        # These come first, because some versions of torch contain a pybind11 that does not support torch's
        # stable ABI.
        *(f"-I{folder}" for folder in (pybind11.get_include(), sysconfig.get_path("include"))),
        *flags,
        "-O1",  # compiles in two thirds of the time
        '-DFP4_KERNELS_FOLDER="../"',
    ]
    # Objects belong to one version of Python, like the module.
    folder = Path("build/dev", sysconfig.get_config_var("SOABI"))
    objects = setup["compile_all"](command, sources, headers, folder)
    setup["compile_if_older"](
        target,
        [Path(object) for object in objects],
        lambda part: subprocess.run([compiler, "-shared", *objects, "-ldl", "-o", part], check=True),
    )
    return target


if __name__ == "__main__":
    print(f"fp4_ops: {build()}")
