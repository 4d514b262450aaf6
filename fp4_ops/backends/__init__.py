"""The backends: which kernels there are, what each reads, and where it runs.

A new architecture is a folder here and a line in `BACKENDS`. A backend imports what all share (`base`,
`anywhere`, `launchers`), never another one.
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
"""Of the backends of one device, the first that reads a layout gets its weights."""


def available(device_type: str, device_index: int = 0) -> tuple[Backend, ...]:
    """Those whose kernels this device runs."""
    return tuple(b for b in BACKENDS if b.device_type == device_type and b.available(device_index))


def reader(layout: str, device_type: str, device_index: int = 0) -> Backend | None:
    """The backend whose kernels multiply weights in this layout there."""
    return next((b for b in available(device_type, device_index) if layout in b.layouts), None)


def reader_name(layout: str, device_type: str, device_index: int = 0) -> str:
    """Of the backend that multiplies weights in this layout; where none does, of the first that would."""
    here = reader(layout, device_type, device_index)
    return (here or next(b for b in BACKENDS if layout in b.layouts and b.device_type == device_type)).name


def takers(a_format: str, device_type: str) -> str:
    """The kernels that read activations of an `a_format` of `fp4::moe`, in the words of an error."""
    names = (
        b.name.capitalize()
        for b in BACKENDS
        if b.device_type == device_type and any(b.takes(a_format, n) for n in b.layouts)
    )
    return f"the {' or '.join(names)} kernels"


def quantises_int8(device_type: str, layout: str) -> bool:
    """Whether `fp4::moe` takes `a_format="int8"` there with weights in this layout."""
    if device_type != "cuda":
        return device_type == "cpu"
    here = reader(layout, "cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    return here is not None and here.takes("int8", layout)


def check_activation(activation: str, device_type: str, layout: str) -> None:
    """Raises ValueError unless 8-bit activations of this name meet weights in this layout there."""
    if activation == "int8":
        there = quantises_int8(device_type, layout)
    else:
        there = activation != "fp8" or device_type == "cpu" or "fp8" in LAYOUTS[layout].a_formats
    if not there:
        raise ValueError(
            f"fp4: activation={activation!r} needs {takers(activation, 'cuda')}, which this device or these "
            "weights do not have. Use activation='bf16' or 'auto'."
        )


def refuse_layout(op: str, layout: str, /, *args: object, **kwargs: object) -> NoReturn:
    """The error of an operator in Python, given its arguments, whose weights no kernel here reads."""
    if layout == "plain":
        raise RuntimeError(
            f"fp4::{op}: layout is 'plain', which on this GPU only Triton's kernels read, and Triton is not "
            f"installed. Install it (pip install triton), or use {_needs('cuda')}"
        )
    needs = next(b.needs for b in reversed(BACKENDS) if layout in b.layouts)
    raise RuntimeError(
        f"fp4::{op}: layout is '{layout}', which only {needs} read; here it must be 'plain' (convert with "
        "torch.ops.fp4.unpack). A prepared model gets it by .to(device); before tools that move its bytes "
        "themselves, such as accelerate's cpu_offload, call set_layout('plain') on each "
        "fp4_ops.experts.PackedWeight in it"
    )


def _needs(device_type: str) -> str:
    """The layouts that need no Triton, and what reads them."""
    found = [b for b in BACKENDS if b.device_type == device_type and "plain" not in b.layouts]
    return ", or ".join(f"a layout that {b.needs} read ({', '.join(b.layouts)})" for b in found)


def _preferred() -> tuple[str, ...]:
    """The layouts that the current GPU reads fastest."""
    device = torch.cuda.current_device()
    for backend in available("cuda", device):
        if backend.trusted(device):
            return tuple(layout for layout in backend.layouts if layout != "plain")
    return ()


def _reads(layout: str) -> tuple[torch.dtype, ...]:
    """The activations that the current GPU's kernels read with a layout."""
    here = reader(layout, "cuda", torch.cuda.current_device())
    return LAYOUTS[layout].a_dtypes if here is None else here.reads(layout)


def multiplies_fp4(format: str | None, a_format: str) -> bool:
    """Whether this GPU's tensor cores multiply FP4 rows and weights as they are, by Triton's kernels."""
    if format is None or format != a_format or not torch.cuda.is_available():
        return False
    return any(b.multiplies_fp4(format) for b in available("cuda", torch.cuda.current_device()))


prefer("cpu", lambda: tuple(layout for layout in CPU.layouts if layout != "plain"))
prefer("cuda", _preferred, plain=multiplies_fp4, reads=_reads)
