"""For development, in no wheel: host-only C++ as Python objects, and a launcher for each product's kernels.

`planner` is what csrc/cuda decides, without a GPU. `decode`, `gemv`, `prefill` and `int4` launch one kernel
each, for tests and measurements; operators launch them in C++ (csrc/cuda). All take their structures from
csrc/dev/module.cpp, a module of pybind11, which `make dev` builds.
"""

try:
    from . import _native as _native
except ImportError as error:
    raise ImportError(
        "fp4_ops.dev needs its module of C++, which is built for development alone: make dev, or "
        f"python release/dev_module.py in the repository -- {error}",
        name=__name__,
    ) from error
