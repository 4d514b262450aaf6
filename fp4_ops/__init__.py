"""4-bit Mixture-of-Experts for stock PyTorch.

    torch.compile(model, backend="fp4")

Operators are `torch.ops.fp4.*` (schemas: csrc/schema.cpp); what each argument means is in docs/operators.md.
"""

from typing import Any

from . import _library

_library.load()

# After the operators, which these use.
from .info import Info, info  # noqa: E402
from .prepare import PrepareReport, prepare  # noqa: E402
from .quantize import quantize  # noqa: E402
from .tensor import FP4Tensor  # noqa: E402

__all__ = ["FP4Tensor", "Info", "PrepareReport", "explain", "info", "prepare", "quantize"]


def __getattr__(name: str) -> Any:
    if name == "explain":  # only with the compile passes, which are loaded when they are needed
        from .compile_passes.explain import explain

        return explain
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
