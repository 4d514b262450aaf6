"""Loads the native CUDA runtime, `_C_cuda.so` (csrc/cuda), and calls its planner.

Loading it registers the operators `fp4::*` for CUDA. An operator without a native kernel calls
`fp4_python::*` (backends/operators.py).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from .fitted import Values, families, flat, groups, unflat
from .libraries import REBUILD, digest, function_of, libraries, version_of

FILE = "_C_cuda.so"
KERNELS = ("w4a8", "half", "bf16")
"""Names of `Kernel` in csrc/cuda/choice.h: fp8 rows; 16-bit rows with layout sm90; 16-bit rows with mma_bf16.
"""
THREW = -1
"""Value of kThrew in csrc/cuda/planner.cpp: the function threw an exception."""
ROUTINGS = ("offs", "ids32", "ids64", "masked", "dense")
"""Names of `Routing` in csrc/device/interface.h."""


class Product(ctypes.Structure):
    """Sizes of a product: `Product` of csrc/cuda/choice.h."""

    _fields_ = [(name, ctypes.c_int) for name in ("routing", "groups", "rows", "n", "kp", "block")]


class Gpu(ctypes.Structure):
    """Properties of a GPU that the planner uses: `Gpu` of csrc/cuda/gpu.h.

    `copy_rate` is in bytes a microsecond. `constants` chooses the cost model's constants: 0 for the built-in
    ones, else a number that `tuned` returned.
    """

    _fields_ = [(name, ctypes.c_int) for name in ("family", "sms", "shared_bytes", "copy_rate", "constants")]


HOPPER, MMA = 90, 80
FOLDERS = {f.family: f.name for f in families()}
"""Backend folder of each family of kernels: 90 for `_sm90.so`, 80 for `_sm80.so`."""


def path() -> Path:
    return Path(__file__).parents[1] / FILE


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the runtime, or None if it was not built (setup.py says when it is)."""
    found = path()
    if not found.exists():
        return None
    try:
        torch.ops.load_library(str(found))
        loaded = ctypes.CDLL(str(found))
    except OSError as error:
        raise ImportError(
            f"fp4_ops: {found.name} does not load in torch {torch.__version__}. {REBUILD} -- {error}"
        ) from None
    pointer, number, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    for name, arguments, result in (
        ("thrown", [], text),
        ("only", [number], None),
        ("has_fallbacks", [number], None),
        ("set_error", [text], None),
        ("use_kernels", [text, number], number),
        ("family", [number], number),
        ("gpu", [number, pointer], number),
        ("constants", [pointer, pointer], number),
        ("tuned", [text, number, pointer, number], number),
        ("work", [pointer, number, pointer, pointer, pointer], number),
        ("takes_few", [*[number] * 7, text, ctypes.c_bool, number, number], number),
    ):
        function = function_of(loaded, f"fp4_cuda_{name}")
        function.argtypes, function.restype = arguments, result
        if result is number:
            function.errcheck = functools.partial(_raise, loaded)
    return loaded


def _raise(runtime: ctypes.CDLL, result: int, function: object, arguments: object) -> int:
    """Raises the C++ exception of a planner function as a RuntimeError. ctypes calls this after each call."""
    if result == THREW:
        raise RuntimeError(runtime.fp4_cuda_thrown().decode(errors="replace"))
    return result


def loaded() -> ctypes.CDLL:
    found = library()
    if found is None:
        raise RuntimeError(
            "fp4_ops was built without its native CUDA runtime. Build it with: FP4_CUDA_ARCHS=90a "
            "pip install --no-build-isolation -e ."
        )
    return found


used: dict[int, str] = {}
"""File that was passed to `use_kernels`, by family."""


def use_kernels(file: str, shared_bytes: int = 0) -> None:
    """Makes operators launch the kernels of this `_sm90.so` or `_sm80.so` on every GPU, to compare builds.

    `shared_bytes` limits the shared memory of a thread block that the planner counts on (0: the GPU's own).
    """
    its_family = int(loaded().fp4_cuda_use_kernels(file.encode(), shared_bytes))
    used[its_family] = file
    family.cache_clear()
    build.cache_clear()


@functools.cache
def family(device_index: int) -> int:
    """Returns the family of kernels that this GPU runs: HOPPER, MMA, or 0 for none."""
    return 0 if library() is None else int(loaded().fp4_cuda_family(device_index))


def is_hopper(device: torch.device) -> bool:
    """True for a GPU that runs the Hopper kernels."""
    return device.type == "cuda" and family(device.index or 0) == HOPPER


def gpu(device_index: int) -> Gpu:
    made = Gpu()
    loaded().fp4_cuda_gpu(device_index, ctypes.byref(made))
    return made


def _gpu(sms: int | Gpu) -> ctypes._Pointer[Gpu]:
    return ctypes.pointer(sms if isinstance(sms, Gpu) else Gpu(HOPPER, sms, 227 * 1024, 0))


def constants(of: Gpu) -> Values:
    """Returns the cost model's constants that the planner uses for a GPU."""
    like = built_in(of.family)
    made = (ctypes.c_double * len(flat(like)))()
    loaded().fp4_cuda_constants(ctypes.byref(of), made)
    return unflat(list(made), like)


def built_in(of_family: int) -> Values:
    """Returns a family's built-in constants, from fp4_ops/backends/*/constants.json."""
    return groups(FOLDERS[of_family])["planner"].values


def tuned(device: str, of_family: int, values: Values) -> int:
    """Sets the cost model's constants for GPUs of this name and a family of kernels.

    Returns their number for `Gpu.constants`.
    """
    numbers = flat(values)
    made = (ctypes.c_double * len(numbers))(*numbers)
    number = int(loaded().fp4_cuda_tuned(device.encode(), of_family, made, ctypes.sizeof(made)))
    if number == 0:
        raise ValueError(f"{len(numbers)} constants do not fit this build of {FILE}. {REBUILD}")
    return number


@functools.cache
def build(of_family: int) -> str:
    """Returns a text that names this build: the package's version and hashes of the files.

    The libraries of operators choose kernels and arrange their operands, so a kernel can be right with one
    build of them and wrong with the next.
    """
    own = f"operators {digest(*libraries())}, kernels {digest(kernels_file(of_family))}"
    return f"fp4_ops {version_of('fp4_ops')}, {own}"


def kernels_file(of_family: int) -> Path:
    """Returns the path of the kernels that operators launch."""
    return Path(used.get(of_family, path().parent / f"_sm{of_family}.so"))


class Work(NamedTuple):
    """Work of a product, the input of the cost model.

    decode (NaN if it cannot run): `weights` that are read, `passes` over K, and `values` of rows after the
    first row of each expert. prefill: `seconds` by the kernels' own model, `shares` is 1 if SMs share tiles,
    and `ordered` counts the 16-bit values that are put in the kernel's order.
    """

    weights: float
    passes: float
    values: float
    seconds: float
    shares: float
    ordered: float


def work(of: Product, kernel: str, sms: int | Gpu) -> Work:
    decode, prefill = (ctypes.c_double * 3)(), (ctypes.c_double * 3)()
    loaded().fp4_cuda_work(ctypes.byref(of), KERNELS.index(kernel), _gpu(sms), decode, prefill)
    return Work(*decode, *prefill)


def product(routing: str, groups: int, rows: int, n: int, kp: int, block: int = 16) -> Product:
    """Describes the product of `rows` activation rows (in each group if masked) and [groups, n, kp]."""
    return Product(ROUTINGS.index(routing), groups, rows, n, kp, block)


def takes_few(
    groups: int, rows: int, block: int, up: tuple[int, int], down: tuple[int, int], a_format: str, sms: int,
    *, prefill_alone: bool = False, expected: int = 0,
) -> bool:  # fmt: skip
    """True if decode or gemv run an expert block on a Hopper GPU with `sms` SMs, False if prefill runs it.

    rows: number of (token, expert) pairs.
    block: number of k that share a scale.
    up, down: N and K of the products.
    prefill_alone: the layout is sm90_int4 or batch invariant.
    expected: number of pairs whose expert is here (0: all).
    """
    size = groups, rows, *up, *down, block, a_format.encode(), prefill_alone, sms
    return bool(loaded().fp4_cuda_takes_few(*size, expected))


class Only:
    """Context manager that overrides the cost model: `with only("prefill")`. For tests and measurements.

    "decode" forces decode and "gemv" forces gemv or decode, wherever they can run. "prefill" forces prefill.
    """

    NAMES = (None, "decode", "gemv", "prefill")

    def __init__(self, tell: Callable[[int], object]) -> None:
        self._tell = tell
        self._now: str | None = None

    @contextmanager
    def __call__(self, kernel: str) -> Iterator[None]:
        before = self._now
        self._set(kernel)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, kernel: str | None) -> None:
        self._tell(self.NAMES.index(kernel))
        self._now = kernel


only = Only(lambda which: loaded().fp4_cuda_only(which))
"""Forces one kernel family for every operator call."""
