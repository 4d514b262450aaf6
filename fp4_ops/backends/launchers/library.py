"""Loads `_sm90.so` or `_sm80.so`: kernels of csrc/device and csrc/sm90 or csrc/sm80 behind a C interface.

The library uses neither torch nor Python, so one file works with all versions of both. Tensors are passed as
addresses. The callers check them first (meta/checks.py).
"""

from __future__ import annotations

import ctypes
import functools

import torch

from ...meta.formats import Activation
from ...runtime import cuda_errors, native
from ...runtime.fitted import families
from ...runtime.libraries import function_of

FILE = "_sm90.so"

POINTER, INT, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float

GATE = INT, FLOAT, FLOAT, FLOAT
"""Types of the fields of `Gate` in csrc/device/interface.h."""

SIGNATURES = {
    "fp4_kernel_decode": [POINTER, INT, POINTER],
    "fp4_kernel_gemv": [POINTER, INT, POINTER],
    "fp4_kernel_prefill": [INT, POINTER],
    "fp4_kernel_route": [POINTER, INT, INT, INT, POINTER, POINTER, POINTER, POINTER, POINTER],
    "fp4_kernel_rows": [
        *(POINTER, INT, INT, POINTER, INT, POINTER, *GATE, INT),
        *(INT, INT, INT, POINTER, POINTER, INT, POINTER),
    ],
    "fp4_kernel_rows_fp4": [
        *(POINTER, INT, INT, POINTER, INT, *GATE, INT),
        *(INT, INT, POINTER, POINTER, POINTER),
    ],
    "fp4_kernel_combine": [
        *(POINTER, INT, POINTER, POINTER, INT, POINTER, INT, POINTER, INT, POINTER, INT),
        *(INT, INT, INT, INT, POINTER),
    ],
    "fp4_kernel_pack": [POINTER, POINTER, LONG, INT, INT, INT, INT, POINTER, POINTER, POINTER],
    "fp4_kernel_dequantize": [POINTER, POINTER, POINTER, LONG, LONG, INT, INT, INT, POINTER, INT, POINTER],
}
"""Argument types of each launcher. All launchers return 0, a cudaError_t or a LaunchError."""


@functools.cache
def library(family: int = native.HOPPER) -> ctypes.CDLL | None:
    """Returns the kernels of a family, or None if they were not built (setup.py says when they are)."""
    own = FILE if family == native.HOPPER else f"_sm{family}.so"
    path = native.path().parent / native.used.get(family, own)
    if not path.exists():
        return None
    loaded = ctypes.CDLL(str(path))
    for name, arguments in SIGNATURES.items():
        function_of(loaded, name).argtypes = arguments
    return loaded


def available(device_index: int) -> bool:
    """True if this GPU runs the kernels of `_sm90.so` and the operators that launch them are built.

    These kernels use instructions that only compute capability 9.0 has.
    """
    return library() is not None and native.family(device_index) == native.HOPPER


def packs(device_index: int) -> tuple[str, ...]:
    """Returns the layouts that a kernel of this GPU can make from plain weights."""
    here = native.family(device_index)
    read = next((f.layouts for f in families() if f.family == here and library(here) is not None), ())
    return tuple(layout for layout in read if layout in ("sm90", "mma_bf16"))


@functools.cache
def multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Values of `DType` in csrc/device/interface.h for the dtypes that all kernels know."""


FUNCTIONS = {"silu": 1, "gelu": 2, "gelu_tanh": 3}
"""Values of `Act` in csrc/device/interface.h. 0 means no activation."""


def gate_fields(gate: Activation | None) -> tuple[int, float, float, float]:
    """Returns the fields of `Gate` for an activation."""
    if gate is None:
        return 0, 1.0, 0.0, 0.0
    return FUNCTIONS[gate.function], gate.alpha, gate.limit or 0.0, gate.up_offset


def address(t: torch.Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def call(name: str, *args: object) -> None:
    """Launches a kernel on the current GPU."""
    loaded = library(native.family(torch.cuda.current_device()))
    assert loaded is not None
    error = getattr(loaded, name)(*args)
    if error != 0:
        raise cuda_errors.failed(name, error)
