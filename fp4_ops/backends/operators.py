"""Registers the CUDA operators that are written in Python. They are loaded at the first call on a GPU.

They are `fp4_python::*`, with the schemas of `fp4::*`. If the native runtime is built (native.py), `fp4::*`
are written in C++, and call these if there is no native kernel. Otherwise these are registered as `fp4::*`.
They are loaded late because the import of Triton takes a third of a second.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

from ..meta.fakes import OPERATORS
from ..runtime import native, tuned
from . import BACKENDS, anywhere, available, refuse_layout

LIBRARY = Library("fp4", "IMPL")
PYTHON = Library("fp4_python", "DEF")

ON_EVERY_DEVICE = ("moe_input_grads", "moe_ep", "all_reduce")
"""Operators that are composed of other operators (input_gradients.py, distributed/)."""


@functools.cache
def layout_place(name: str) -> int:
    """Returns the position of `layout` among an operator's arguments, or -1."""
    arguments = getattr(torch.ops.fp4, name).default._schema.arguments
    return next((i for i, a in enumerate(arguments) if a.name == "layout"), -1)


def _layout(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    place = layout_place(name)
    given = kwargs.get("layout", args[place] if 0 <= place < len(args) else "plain")
    return str(given)


def implementation(name: str, layout: str, device_index: int) -> Callable[..., Any]:
    """Returns the function for an operator and layout: the backend's own, or the one for any device."""
    for backend in available("cuda", device_index):
        if layout in backend.layouts and (found := backend.operator(name)):
            return found
    read = any(layout in b.layouts for b in BACKENDS if b.device_type == "cuda")
    found = getattr(anywhere, name, None) if read or name == "unpack" else None
    return found or functools.partial(refuse_layout, name, layout)


def on_cuda(name: str) -> Callable[..., Any]:
    """Returns the operator of that name. It runs on the device of its first argument."""

    def on_device(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device(first.device):
            run = implementation(name, _layout(name, (first, *args), kwargs), first.device.index or 0)
            return run(first, *args, **kwargs)

    return on_device


def reported(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `function` so that the native runtime can repeat its error messages."""

    @functools.wraps(function)
    def report(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            native.loaded().fp4_cuda_set_error(str(error).encode(errors="replace"))
            raise

    return report


def register() -> None:
    runtime = native.library()
    for name in OPERATORS:
        if name in ON_EVERY_DEVICE:
            continue
        PYTHON.define(str(getattr(torch.ops.fp4, name).default._schema).removeprefix("fp4::"))
        if runtime is None:
            LIBRARY.impl(name, on_cuda(name), "CUDA")
        else:
            PYTHON.impl(name, reported(on_cuda(name)), "CUDA")
    if runtime is not None:
        runtime.fp4_cuda_has_fallbacks(True)
        tuned.load()
