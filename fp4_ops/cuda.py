"""The operators on CUDA: registered when fp4_ops is imported, loaded with Triton when a GPU first calls one.

Triton takes a third of a second to import, and a process without work for a GPU needs none of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch.library import Library

from .meta.fakes import OPERATORS
from .meta.layouts import prefer
from .sm90 import library as sm90_library

LIBRARY = Library("fp4", "IMPL")

prefer(
    "cuda",
    lambda: ("sm90_bf16", "sm90", "sm90_int4") if sm90_library.available(torch.cuda.current_device()) else (),
)


@cache
def _kernels() -> ModuleType:
    return importlib.import_module(".triton.register", __package__)


def _on_cuda(name: str) -> Callable[..., Any]:
    """The function of that name, run on the device of its first argument."""

    def on_device(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device(first.device):
            return getattr(_kernels(), name)(first, *args, **kwargs)

    return on_device


ON_EVERY_DEVICE = ("moe_input_grads", "moe_ep", "all_reduce")
"""Written over the other operators: input_gradients.py, distributed/."""


def register() -> None:
    for name in OPERATORS:
        if name in ON_EVERY_DEVICE:
            continue
        LIBRARY.impl(name, _on_cuda(name), "CUDA")
