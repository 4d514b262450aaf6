"""The operators on CUDA that are written in Python: registered when fp4_ops is imported, loaded with Triton
when a GPU first calls one.

They are `fp4_triton::*`, with the schemas of `fp4::*`. Where the native runtime is built (native.py),
`fp4::*` are C++ and call these for what has no native kernel; elsewhere these are `fp4::*` themselves.
Triton takes a third of a second to import, and a process without work for a GPU needs none of it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch.library import Library

from . import native, trust
from .meta.fakes import OPERATORS
from .meta.formats import FORMATS
from .meta.layouts import prefer

LIBRARY = Library("fp4", "IMPL")
TRITON = Library("fp4_triton", "DEF")


@cache
def _kernels() -> ModuleType:
    return importlib.import_module(".triton.register", __package__)


def multiplies_fp4(format: str | None, a_format: str) -> bool:
    """Whether this GPU's tensor cores multiply FP4 rows and weights as they are, by Triton's kernels."""
    if format is None or format != a_format:
        return False
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return False
    from .triton.scaled import support
    from .triton.tiles import device_of

    return support.takes(FORMATS[format], a_format, device_of(torch.device("cuda")))


def preferred() -> tuple[str, ...]:
    """The layouts that the current GPU reads fastest."""
    device = torch.cuda.current_device()
    family = native.family(device)
    if family == native.HOPPER:
        return "mma_bf16", "sm90", "sm90_int4"
    return ("mma_bf16",) if family == native.MMA and trust.mma_kernels(device) else ()


prefer("cuda", preferred, plain=multiplies_fp4)


def _on_cuda(name: str) -> Callable[..., Any]:
    """The function of that name, run on the device of its first argument."""

    def on_device(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device(first.device):
            return getattr(_kernels(), name)(first, *args, **kwargs)

    return on_device


def reported(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose errors the native runtime, which calls it, tells in their own words."""

    @functools.wraps(function)
    def report(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            native.loaded().fp4_cuda_set_error(str(error).encode(errors="replace"))
            raise

    return report


ON_EVERY_DEVICE = ("moe_input_grads", "moe_ep", "all_reduce")
"""Written over the other operators: input_gradients.py, distributed/."""


def register(with_triton: bool) -> None:
    """The operators, of which those in Python need Triton."""
    runtime = native.library()
    for name in OPERATORS:
        if name in ON_EVERY_DEVICE or not with_triton:
            continue
        TRITON.define(str(getattr(torch.ops.fp4, name).default._schema).removeprefix("fp4::"))
        if runtime is None:
            LIBRARY.impl(name, _on_cuda(name), "CUDA")
        else:
            TRITON.impl(name, reported(_on_cuda(name)), "CUDA")
    if runtime is not None and with_triton:
        runtime.fp4_cuda_has_fallbacks(True)
