"""4-bit Mixture-of-Experts for stock PyTorch.

    torch.compile(model, backend="fp4")

The operators are `torch.ops.fp4.*`. csrc/schema.cpp has their schemas, docs/operators.md their arguments.
"""

import importlib
from typing import Any

from . import _library

_library.load()
_library.register_backend()

# These modules use the operators, so they are imported after them.
from .info import Info, info  # noqa: E402
from .prepare import PrepareReport, prepare  # noqa: E402
from .quantize import quantize  # noqa: E402
from .tensor import FP4Tensor  # noqa: E402

__all__ = [
    "FP4Tensor",
    "Info",
    "PrepareReport",
    "decoding_loop",
    "explain",
    "info",
    "load_checkpoint",
    "packed_as_parameters",
    "prepare",
    "quantize",
    "refresh",
    "register_with_transformers",
    "rewrite",
    "update",
]

# Loaded on first use: the compile passes, and modules that import transformers or safetensors.
_LAZY = {
    "explain": ".compile_passes.explain",
    "decoding_loop": ".integrations.transformers.generation",
    "load_checkpoint": ".integrations.transformers.load_model",
    "packed_as_parameters": ".models.sharding",
    "refresh": ".compile_passes.weights.packed",
    "register_with_transformers": ".integrations.transformers.quantizer",
    "rewrite": ".compile_passes.program",
    "update": ".updates",
}

_LAZY_MODULES = ("checkpoints", "generation")


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
