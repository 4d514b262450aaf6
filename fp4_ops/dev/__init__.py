"""Development tools, in no wheel: host-only C++ as Python objects, and a launcher for each product kernel.

`planner` makes the decisions of csrc/cuda without a GPU. `decode`, `gemv`, `prefill` and `int4` launch one
kernel each, for tests and measurements. Their structures come from csrc/dev/module.cpp, a pybind11 module
that `make dev` builds.
"""

try:
    from . import _native as _native
except ImportError as error:
    raise ImportError(
        "fp4_ops.dev needs its C++ module, which only development builds have. Run make dev, or "
        f"python release/dev_module.py in the repository -- {error}",
        name=__name__,
    ) from error
