"""Launches csrc/sm120: FP4 rows by FP4 weights, both in layout plain, on GPUs of compute capability 12.x.

`scaled_sm100.py` has the launches for 10.x.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...meta.formats import FORMATS, FP4_FORMATS
from ...runtime import native
from .library import DTYPE_CODES, address, call, library, stream

MAJOR = 12
"""Major compute capability of the GPUs whose tensor cores have the instruction."""
KINDS = FP4_FORMATS
"""Formats of the rows and weights that the kernels multiply."""
PART, COLUMNS, SCALE_BYTES = 64, 8, 4
"""K must be a multiple of PART, N of COLUMNS, and rows of scales begin at multiples of SCALE_BYTES."""
ALONG_K = False
"""True if the kernels multiply groups along K."""
DENSE, CONTIGUOUS, MASKED = range(3)
"""Values of `RowMode` in csrc/device/interface.h."""
CANDIDATES = 4
"""Number of candidates in csrc/sm120/scaled_host.cuh."""
FEWEST_ROWS = 0
"""Rows of x for each group, on average, from which on the kernels are used."""

_POINTERS = (
    *("x", "x_scales", "x_factor", "codes", "scales", "global_scale", "bias", "out", "group_rows"),
    *("k_ends", "stream"),
)
_NUMBERS = (
    *("m", "groups", "n", "k", "x_scale_bytes", "nvfp4", "config", "mode", "out_type", "bias_type"),
    "x_fp8",
)


class ScaledProduct(ctypes.Structure):
    """`ScaledProduct` of csrc/device/scaled.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in _POINTERS] + [(name, ctypes.c_int) for name in _NUMBERS]


class ScaledArguments(ScaledProduct):
    """`ScaledArguments` of csrc/sm120/scaled.h."""

    _fields_ = [("sorted_rows", ctypes.c_void_p), ("a_div", ctypes.c_int)]


class Rows(NamedTuple):
    """Quantised rows: e2m1 code * block scale * factor, or e4m3 * factor."""

    packed: Tensor
    """uint8 [rows, K/2], or float8_e4m3fn [rows, K]."""
    scale: Tensor | None
    """Bytes [rows, S], of which the first ceil(K/block) count. None for e4m3."""
    factor: Tensor | None
    """float32 [rows], or None for ones."""


class Weights(NamedTuple):
    """Weights [groups, N, K] in layout plain."""

    packed: Tensor
    """uint8 [groups, N, K/2]."""
    scale: Tensor
    global_scale: Tensor | None
    """float32 [groups], or None for ones."""
    bias: Tensor | None
    format: str


class Route(NamedTuple):
    """Assigns rows to groups. Rows that belong to no group become zeros."""

    mode: int
    group_rows: Tensor | None = None
    """int32 [groups]: ends of the groups, or with MASKED the number of rows in each."""
    sorted_rows: Tensor | None = None
    """int32 [m], with CONTIGUOUS: the row at each sorted position. None: the identity."""
    k_ends: Tensor | None = None
    """int32 [groups], with DENSE: the end of each group along K, if groups lie along K. The weights are one
    matrix then, and results are [groups * m, N]."""


def has_kernels(device_index: int, major: int, function: str) -> bool:
    """True if the GPU has this major compute capability, and `_sm80.so` has code for it and this function."""
    if native.family(device_index) != native.MMA:
        return False
    if torch.cuda.get_device_capability(device_index)[0] != major:
        return False
    return hasattr(library(native.MMA), function)


def candidate_name(function: str, config: int) -> str:
    named = getattr(library(native.MMA), function)
    named.restype = ctypes.c_char_p
    return bytes(named(config)).decode()


@functools.cache
def built(device_index: int) -> bool:
    """True if the GPU has compute capability 12.x and `_sm80.so` has code with the kernels for it."""
    return has_kernels(device_index, MAJOR, "fp4_kernel_scaled")


def takes(n: int, k: int, a_format: str = "") -> bool:
    """True if the kernels multiply rows of one of `KINDS` by weights of this shape."""
    return n > 0 and k > 0 and n % COLUMNS == 0 and k % PART == 0


def aligned(t: Tensor, size: int = 16) -> Tensor:
    """Returns `t`, or a copy if its address is not a multiple of `size`: the kernels copy so many bytes at a
    time."""
    return t.clone() if t.data_ptr() % size else t


def with_scales_of(x: Rows, size: int) -> Rows:
    """Returns rows whose scales begin at multiples of `size` bytes."""
    scale = x.scale
    if scale is None:
        return x
    if scale.shape[1] % size:
        scale = pad(scale.view(torch.uint8), (0, -scale.shape[1] % size))
    return x._replace(scale=aligned(scale))


def shared_arguments(
    x: Rows, w: Weights, w_scale: Tensor, scale_bytes: int, out: Tensor, m: int, route: Route, config: int
) -> tuple[dict[str, int | None], tuple[Tensor | None, ...]]:
    """Returns the fields of `ScaledProduct` and the tensors that they point to.

    `w_scale`: the weights' scales in the order that the kernels take. `scale_bytes`: rows of scales of x
    begin at multiples of it.
    """
    x = with_scales_of(x._replace(packed=aligned(x.packed)), scale_bytes)
    fp8 = x.packed.dtype == torch.float8_e4m3fn
    codes = aligned(w.packed, 32 if fp8 else 16)
    groups, n, bytes_of_k = codes.shape
    if route.k_ends is not None:
        groups = len(route.k_ends)
    return dict(
        x=address(x.packed), x_scales=address(x.scale), x_factor=address(x.factor), codes=address(codes),
        scales=address(w_scale), global_scale=address(w.global_scale), bias=address(w.bias),
        out=address(out), group_rows=address(route.group_rows), k_ends=address(route.k_ends),
        stream=stream(), m=m, groups=groups, n=n, k=2 * bytes_of_k,
        x_scale_bytes=0 if x.scale is None else x.scale.shape[1],
        nvfp4=FORMATS[w.format].has_global_scale, x_fp8=fp8, config=config,
        mode=route.mode, out_type=DTYPE_CODES[out.dtype],
        bias_type=0 if w.bias is None else DTYPE_CODES[w.bias.dtype],
    ), (x.packed, x.scale, codes, w_scale)  # fmt: skip


def arguments(
    x: Rows, w: Weights, out: Tensor, m: int, route: Route, a_div: int = 1, config: int = -1
) -> tuple[ScaledArguments, tuple[Tensor | None, ...]]:
    """Returns the arguments of a launch, and the tensors that they point to. These must live until the
    launch.

    `m`: rows of the output, or with MASKED rows of each group. `config`: number of a candidate, or -1.
    """
    given, alive = shared_arguments(x, w, aligned(w.scale), SCALE_BYTES, out, m, route, config)
    return ScaledArguments(**given, sorted_rows=address(route.sorted_rows), a_div=a_div), alive


def multiply(
    x: Rows, w: Weights, out: Tensor, m: int, route: Route, a_div: int = 1, config: int = -1
) -> None:
    """Computes row r of `out`: row r // a_div of `x`, multiplied by the weights of row r's group, plus the
    bias.

    The other arguments are those of `arguments`.
    """
    given, _kept = arguments(x, w, out, m, route, a_div, config)
    call("fp4_kernel_scaled", ctypes.byref(given))


def name_of(config: int) -> str:
    """Returns the name of a candidate."""
    return candidate_name("fp4_kernel_scaled_config_name", config)
