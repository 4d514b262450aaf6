"""The native CUDA runtime, `_C_cuda.so` (csrc/cuda): operators in C++ for Hopper's layouts, and their
planner.

Loading it registers the operators `fp4::*` for CUDA. What has no native kernel they call as `fp4_triton::*`
(cuda.py).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

FILE = "_C_cuda.so"

KERNELS = ("w4a8", "half", "bf16")
"""Kernel of csrc/cuda/choice.h: fp8 rows; 16-bit rows with weights in layout sm90, or in sm90_bf16."""
ROUTINGS = ("offs", "ids32", "ids64", "masked", "dense")
"""Routing of csrc/device/interface.h."""
A_FORMATS = ("auto", "fp8", "int8", "mxfp4", "none", "nvfp4")
"""AFormat, as csrc/generate/tables.py writes it."""
FAMILIES = ("prefill", "decode", "gemv")


class Product(ctypes.Structure):
    """Of csrc/cuda/choice.h."""

    _fields_ = [(name, ctypes.c_int) for name in ("routing", "groups", "rows", "n", "kp", "block")]


class _Config(ctypes.Structure):
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and bytes(self) == bytes(other)  # type: ignore[call-overload]

    __hash__ = None  # type: ignore[assignment]


class DecodeConfig(_Config):
    """`k_warps` share K in `passes`, `row_warps` tiles of N a step."""

    _fields_ = [(name, ctypes.c_int) for name in ("k_warps", "row_warps", "passes")]

    @property
    def shared_bytes(self) -> int:
        return int(loaded().fp4_cuda_decode_bytes(ctypes.byref(self)))

    def __str__(self) -> str:
        passes = f"{self.passes} pass{'es' * (self.passes > 1)}"
        return f"decode: {self.k_warps} x {self.row_warps} warps (K x rows), {passes}"


class GemvConfig(_Config):
    """Each thread block has at most `tiles` row tiles, of `slices` units each."""

    _fields_ = [(name, ctypes.c_int) for name in ("columns", "slices", "tiles")]

    @property
    def units(self) -> int:
        return int(self.tiles * self.slices)

    @property
    def shared_bytes(self) -> int:
        return int(loaded().fp4_cuda_gemv_bytes(ctypes.byref(self)))

    def __str__(self) -> str:
        return f"gemv: {self.units} units of 16 x 256 a block"


class ProductPlan(ctypes.Structure):
    _fields_ = [("family", ctypes.c_int), ("decode", DecodeConfig), ("gemv", GemvConfig)]

    @property
    def kernel(self) -> str:
        """Of FAMILIES."""
        return FAMILIES[self.family]


class Block(ctypes.Structure):
    _fields_ = [
        ("up", Product),
        ("down", Product),
        ("top_k", ctypes.c_int),
        ("bf16", ctypes.c_bool),
        ("int4", ctypes.c_bool),
        ("a_format", ctypes.c_int),
    ]


class BlockPlan(ctypes.Structure):
    _fields_ = [("few", ctypes.c_bool), ("gemv", ctypes.c_bool), ("up", ProductPlan), ("down", ProductPlan)]


def path() -> Path:
    return Path(__file__).parent / FILE


@functools.cache
def library() -> ctypes.CDLL | None:
    """The runtime, or None where it was not built (setup.py says when it is)."""
    found = path()
    if not found.exists():
        return None
    try:
        torch.ops.load_library(str(found))
        loaded = ctypes.CDLL(str(found))
    except OSError as error:
        raise ImportError(
            f"fp4_ops: {found.name} does not load in torch {torch.__version__}. Rebuild: "
            f"FP4_CUDA_ARCHS=90a pip install --no-build-isolation -e . -- {error}"
        ) from None
    pointer, number = ctypes.c_void_p, ctypes.c_int
    for name, arguments, result in (
        ("only", [number], None),
        ("has_fallbacks", [number], None),
        ("set_error", [ctypes.c_char_p], None),
        ("use_kernels", [ctypes.c_char_p], number),
        ("decode_us", [pointer, number, number], ctypes.c_double),
        ("prefill_us", [pointer, number, number], ctypes.c_double),
        ("plan", [pointer, number, number, pointer], None),
        ("block_plan", [pointer, number, pointer], None),
        ("decode_config", [number] * 5 + [pointer], ctypes.c_bool),
        ("decode_warps", [number, number, pointer], ctypes.c_bool),
        ("gemv_config", [number] * 5 + [ctypes.c_bool, number, pointer], ctypes.c_bool),
        ("decode_bytes", [pointer], number),
        ("gemv_bytes", [pointer], number),
    ):
        function = getattr(loaded, f"fp4_cuda_{name}")
        function.argtypes, function.restype = arguments, result
    return loaded


def loaded() -> ctypes.CDLL:
    found = library()
    if found is None:
        raise RuntimeError(
            "fp4_ops was built without its native CUDA runtime. Build it with: FP4_CUDA_ARCHS=90a "
            "pip install --no-build-isolation -e ."
        )
    return found


def use_kernels(file: str) -> None:
    """From now on operators launch the kernels of this `_sm90.so`: to measure one build beside another."""
    if loaded().fp4_cuda_use_kernels(file.encode()) != 0:
        raise RuntimeError(f"{file} does not load, or is of another interface than this runtime")


def product(routing: str, groups: int, rows: int, n: int, kp: int, block: int = 16) -> Product:
    """`rows` activation rows, of each group where masked, times [groups, n, kp]. `routing`: of ROUTINGS."""
    return Product(ROUTINGS.index(routing), groups, rows, n, kp, block)


def decode_us(of: Product, kernel: str, sms: int) -> float:
    """What the cost model says of decode; infinite where it cannot run. `kernel`: of KERNELS."""
    return float(loaded().fp4_cuda_decode_us(ctypes.byref(of), KERNELS.index(kernel), sms))


def prefill_us(of: Product, kernel: str, sms: int) -> float:
    return float(loaded().fp4_cuda_prefill_us(ctypes.byref(of), KERNELS.index(kernel), sms))


def plan(of: Product, kernel: str, sms: int) -> ProductPlan:
    """The kernel that an operator takes for a product on a GPU of `sms` multiprocessors."""
    made = ProductPlan()
    loaded().fp4_cuda_plan(ctypes.byref(of), KERNELS.index(kernel), sms, ctypes.byref(made))
    return made


def block_plan(
    up: Product, down: Product, top_k: int, a_format: str, sms: int, *, bf16: bool = False, int4: bool = False
) -> BlockPlan:
    """The kernels that `moe` takes. Of both products `rows` are the (token, expert) pairs."""
    made = BlockPlan()
    block = Block(up, down, top_k, bf16, int4, A_FORMATS.index(a_format))
    loaded().fp4_cuda_block_plan(ctypes.byref(block), sms, ctypes.byref(made))
    return made


def decode_config(rows: int, groups: int, n: int, kp: int, sms: int) -> DecodeConfig | None:
    """What decode takes for `rows` activation rows in all, or None where it cannot run them."""
    made = DecodeConfig()
    fits = loaded().fp4_cuda_decode_config(rows, groups, n, kp, sms, ctypes.byref(made))
    return made if fits else None


def decode_warps(kp: int, compute_warps: int) -> DecodeConfig | None:
    """The split of so many warps that keeps most of them busy."""
    made = DecodeConfig()
    return made if loaded().fp4_cuda_decode_warps(kp, compute_warps, ctypes.byref(made)) else None


def gemv_config(
    routing: int, rows: int, columns: int, n: int, kp: int, combined: bool, sms: int
) -> GemvConfig | None:
    """For `rows` rows, which are `columns` rows of x; None where gemv cannot run them, or where they share
    weights. `routing`: an index of ROUTINGS; `combined`: it adds up the experts of a token."""
    made = GemvConfig()
    size = routing, rows, columns, n, kp, combined, sms
    return made if loaded().fp4_cuda_gemv_config(*size, ctypes.byref(made)) else None


_only: str | None = None


@contextmanager
def only(kernel: str) -> Iterator[None]:
    """Whatever the cost model says, "decode", or "gemv" and decode, wherever they can run, or "prefill": for
    tests and measurements."""
    global _only
    names = (None, "decode", "gemv", "prefill")
    before, _only = _only, kernel
    loaded().fp4_cuda_only(names.index(kernel))
    try:
        yield
    finally:
        _only = before
        loaded().fp4_cuda_only(names.index(before))
