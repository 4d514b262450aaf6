"""Lists the backends: their kernels, the layouts that they read, the devices that they run on.

A new architecture takes a folder here and a line in `BACKENDS`. A backend may import `base`, `anywhere` and
`launchers`, but no other backend.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from ..meta.layouts import LAYOUTS, prefer
from .base import Backend
from .cpu import CPU
from .hopper import HOPPER
from .mma import MMA
from .triton import TRITON

BACKENDS = (CPU, HOPPER, MMA, TRITON)
"""All backends. The first one on a device that reads a layout gets weights in that layout."""


def available(device_type: str, device_index: int = 0) -> tuple[Backend, ...]:
    """Returns the backends whose kernels this device runs."""
    return tuple(b for b in BACKENDS if b.device_type == device_type and b.available(device_index))


def reader(layout: str, device_type: str, device_index: int = 0) -> Backend | None:
    """Returns the backend that multiplies weights in this layout on a device, or None."""
    return next((b for b in available(device_type, device_index) if layout in b.layouts), None)


def reader_name(layout: str, device_type: str, device_index: int = 0) -> str:
    """Returns the name of the backend for this layout.

    If no backend on this device reads the layout, this is the first one for the device type.
    """
    here = reader(layout, device_type, device_index)
    return (here or next(b for b in BACKENDS if layout in b.layouts and b.device_type == device_type)).name


def _takers(a_format: str) -> str:
    """Names the kernels of GPUs that take an `a_format` of `fp4::moe`, for an error message."""
    names = (
        b.name.capitalize()
        for b in BACKENDS
        if b.device_type == "cuda" and any(b.takes(a_format, n) for n in b.layouts)
    )
    return f"the {' or '.join(names)} kernels"


def quantises_int8(device_type: str, layout: str) -> bool:
    """True if `fp4::moe` takes `a_format="int8"` on the device with weights in this layout."""
    if device_type != "cuda":
        return device_type == "cpu"
    here = reader(layout, "cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    return here is not None and here.takes("int8", layout)


def check_activation(activation: str, device_type: str, layout: str) -> None:
    """Raises ValueError if the device has no kernel for these 8-bit activations and this layout."""
    if activation == "int8":
        there = quantises_int8(device_type, layout)
    else:
        there = activation != "fp8" or device_type == "cpu" or "fp8" in LAYOUTS[layout].a_formats
    if not there:
        raise ValueError(
            f"fp4: activation={activation!r} needs {_takers(activation)}. This device does not have "
            "them, or they do not read the layout of these weights. Use activation='bf16' or 'auto'."
        )


def refuse_layout(op: str, layout: str, /, *args: object, **kwargs: object) -> NoReturn:
    """Raises the error of an operator whose weights no kernel on this device reads."""
    if layout == "plain":
        raise RuntimeError(
            f"fp4::{op}: layout is 'plain'. On this GPU only Triton's kernels read it, and Triton is not "
            f"installed. Install it (pip install triton), or use {_needs()}"
        )
    needs = next(b.needs for b in reversed(BACKENDS) if layout in b.layouts)
    raise RuntimeError(
        f"fp4::{op}: layout is '{layout}', which only {needs} read; here it must be 'plain' (convert with "
        "torch.ops.fp4.unpack). On a prepared model, .to(device) converts the layout. Some tools, such as "
        "accelerate's cpu_offload, move only the bytes: before you use them, call set_layout('plain') on "
        "each fp4_ops.experts.PackedWeight in the model"
    )


def _needs() -> str:
    """Names the layouts on GPUs that do not need Triton, and their kernels, for an error message."""
    found = [b for b in BACKENDS if b.device_type == "cuda" and "plain" not in b.layouts]
    return ", or ".join(f"a layout that {b.needs} read ({', '.join(b.layouts)})" for b in found)


def _preferred() -> tuple[str, ...]:
    """Returns the layouts of the current GPU, the fastest first."""
    device = torch.cuda.current_device()
    for backend in available("cuda", device):
        if backend.trusted(device):
            return tuple(layout for layout in backend.layouts if layout != "plain")
    return ()


def _reads(layout: str) -> tuple[torch.dtype, ...]:
    """Returns the dtypes of activations that the current GPU's kernels read with a layout."""
    here = reader(layout, "cuda", torch.cuda.current_device())
    return LAYOUTS[layout].a_dtypes if here is None else here.reads(layout)


def multiplies_fp4(format: str | None, a_format: str) -> bool:
    """True if Triton's kernels multiply FP4 rows by FP4 weights on this GPU's tensor cores."""
    if format is None or format != a_format or not torch.cuda.is_available():
        return False
    return any(b.multiplies_fp4(format) for b in available("cuda", torch.cuda.current_device()))


prefer("cpu", lambda: tuple(layout for layout in CPU.layouts if layout != "plain"))
prefer("cuda", _preferred, plain=multiplies_fp4, reads=_reads)
