"""Launches csrc/sm100: FP4 or fp8 rows by FP4 weights in layout plain, on GPUs of compute capability 10.x.

`scaled.py` does the same for 12.x, and defines rows, weights and routes.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...meta.formats import FORMATS, FP4_FORMATS
from .library import call
from .scaled import (
    Route,
    Rows,
    ScaledProduct,
    Weights,
    aligned,
    candidate_name,
    has_kernels,
    shared_arguments,
    with_scales_of,
)
from .scaled import takes as scaled_takes

MAJOR = 10
"""Major compute capability of the GPUs whose tensor cores have the instruction."""
KINDS = (*FP4_FORMATS, "fp8")
"""Formats of the rows that the kernels multiply by weights of the same format; fp8 rows by mxfp4 weights."""
FP8_PART = 128
"""K must be a multiple of it with fp8 rows: so many codes the copy engine unpacks."""
ALONG_K, PART_ALONG_K = True, 32
"""Groups along K are multiplied, if K is a multiple of so many codes: 16 bytes."""
CANDIDATES = 5
"""Number of candidates in csrc/sm100/products_host.cuh."""
FEWEST_ROWS = 16
"""Rows of x for each group, on average, from which on the kernels are used. Each call arranges the scales of
all weights: it reads and writes a quarter as many bytes as the weights have. With fewer rows most of them
would be of weights that no row reads."""
SCALE_BYTES = 16
"""Rows of scales begin at multiples of this number of bytes."""
SCALE_BYTES_ALONG_K = 4
"""The same, of both operands, with groups along K."""
TILE, PART = 128, 4
"""Rows and scales of a row that a block of the weights' scales has."""
NAN = 0x7F
"""NaN in e4m3, and the largest byte without a sign."""


@functools.cache
def built(device_index: int) -> bool:
    """True if the GPU has compute capability 10.x and `_sm80.so` has code with the kernels for it."""
    return has_kernels(device_index, MAJOR, "fp4_kernel_products")


def takes(n: int, k: int, a_format: str) -> bool:
    """True if the kernels multiply rows of a format by weights of this shape."""
    return scaled_takes(n, k) and (a_format != "fp8" or k % FP8_PART == 0)


# --- the weights' scales ---


def swizzled(scale: Tensor, nvfp4: bool) -> Tensor:
    """Returns scales [groups, N, S] in blocks of 128 rows by 4, uint8 [groups, bytes].

    Each block has 512 bytes: the scale of row r and column c is at 16 (r % 32) + 4 (r // 32) + c. Blocks
    follow each other along K first. Rows and columns that do not exist have scales 0. This is the order of
    SwizzleType.SWIZZLE_32_4_4 of `torch.nn.functional.scaled_mm`. An e4m3 scale with a sign becomes NaN,
    because tensor cores read scales without signs. Those of mxfp4 are ue8m0, which has none.
    """
    groups, n, columns = scale.shape
    padded = scale.view(torch.uint8)
    if n % TILE or columns % PART:
        padded = pad(padded, (0, -columns % PART, 0, -n % TILE))
    rows = padded.view(groups, -1, 4, TILE // 4, padded.shape[2] // PART, PART).permute(0, 1, 4, 3, 2, 5)
    blocks = torch.empty(rows.shape, dtype=torch.uint8, device=scale.device)
    return torch.clamp(rows, max=NAN if nvfp4 else 0xFF, out=blocks).view(groups, -1)


def scales_along_k(x: Rows, w: Weights) -> tuple[Rows, Tensor]:
    """Returns rows, and the scales of weights [1, N, S] in layout plain. Rows of both have as many bytes."""
    x = with_scales_of(x, SCALE_BYTES_ALONG_K)
    assert x.scale is not None
    missing = x.scale.shape[1] - w.scale.shape[2]
    return x, aligned(pad(w.scale.view(torch.uint8), (0, missing)) if missing else w.scale)


# --- launches ---


def arguments(
    x: Rows, w: Weights, out: Tensor, m: int, route: Route, config: int = -1
) -> tuple[ScaledProduct, tuple[Tensor | None, ...]]:
    """Returns the arguments of a launch, and the tensors that they point to. These must live until the
    launch.

    `m`: rows of the output, or with MASKED rows of each group. `config`: number of a candidate, or -1. The
    route must have no `sorted_rows`.
    """
    if route.k_ends is None:
        scale, scale_bytes = swizzled(w.scale, FORMATS[w.format].has_global_scale), SCALE_BYTES
    else:
        (x, scale), scale_bytes = scales_along_k(x, w), SCALE_BYTES_ALONG_K
    given, alive = shared_arguments(x, w, scale, scale_bytes, out, m, route, config)
    return ScaledProduct(**given), alive


def in_order(x: Rows, route: Route, a_div: int, m: int) -> tuple[Rows, Route, Tensor | None]:
    """Copies packed rows to the order of their groups, and one for each of the `m` rows of results.

    Returns them, the route that they have then, and the row of results at each position. The last is None if
    that is the order of `x` already, which is then not copied.
    """
    if route.sorted_rows is None and a_div == 1:
        return x, route, None
    place = x.packed.device
    order = torch.arange(m, device=place) if route.sorted_rows is None else route.sorted_rows.long()
    read = order // a_div
    factor = None if x.factor is None else x.factor[read]
    scale = None if x.scale is None else x.scale[read]
    packed = x.packed.view(torch.uint8)[read].view(x.packed.dtype)  # torch may not index float8
    return Rows(packed, scale, factor), route._replace(sorted_rows=None), order


def multiply(
    x: Rows, w: Weights, out: Tensor, m: int, route: Route, a_div: int = 1, config: int = -1
) -> None:
    """Computes row r of `out`: row r // a_div of `x`, multiplied by the weights of row r's group, plus the
    bias.

    The other arguments are those of `arguments`. The kernels read and write rows in the order of the groups.
    If the route has another order, rows are copied before (`in_order`), and results after.
    """
    x, route, order = in_order(x, route, a_div, len(out))
    rows = out if order is None else torch.empty_like(out)
    given, _alive = arguments(x, w, rows, m, route, config)
    call("fp4_kernel_products", ctypes.byref(given))
    if order is not None:
        out.index_copy_(0, order, rows)


def name_of(config: int) -> str:
    """Returns the name of a candidate."""
    return candidate_name("fp4_kernel_products_config_name", config)
