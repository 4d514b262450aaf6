"""Multiplies FP4 rows by FP4 weights with the CUDA kernels of csrc/sm100 and csrc/sm120, not with Triton's.
The kernels of csrc/sm100 also multiply fp8 rows by mxfp4 weights.

They run on GPUs of compute capability 10.x and 12.x that `_sm80.so` was built for.
Nobody has run them on a GPU: they were only compiled and emulated. So each format's first use on a GPU is
compared with the dequantised product. Triton's kernels run if that differs. This module does not need Triton.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ....meta.formats import FORMATS
from ....meta.torch_internals import without_modes
from ....runtime import first_use, native
from ....runtime.oracle import dequantize, relative_error
from ...launchers import rows, scaled, scaled_sm100

if TYPE_CHECKING:
    from ..ops import WeightArgs

BOUND = 1e-5
"""Bound of the error at the first use. Products are exact and sums are float32."""
ROUNDING = {torch.float32: 1, torch.bfloat16: 400, torch.float16: 50}
"""Factor on the bound for each dtype of results, which are rounded to it."""
MOST_GROUPS = 1023
"""Most groups that the routing kernel sorts."""


def launcher(device_index: int | None) -> ModuleType | None:
    """Returns the launcher of the kernels that this GPU has, or None: launchers/scaled.py or
    launchers/scaled_sm100.py."""
    return next((each for each in (scaled, scaled_sm100) if each.built(device_index)), None)


def takes(w: WeightArgs, a_format: str, rows: int) -> bool:
    """True if the kernels are used for `rows` rows of `a_format` and this weight."""
    if not multiplies(w, a_format):
        return False
    kernels = launcher(w.codes.device.index)
    return kernels is not None and rows >= w.groups * kernels.FEWEST_ROWS


def weights_of(a_format: str) -> str:
    """Returns the format of the weights by which kernels multiply rows of `a_format`."""
    return "mxfp4" if a_format == "fp8" else a_format


def multiplies(w: WeightArgs, a_format: str) -> bool:
    """True if the kernels can multiply rows of `a_format` by this weight, and passed the check."""
    if not w.codes.is_cuda or weights_of(a_format) != w.fmt.name or w.fmt.element != "e2m1":
        return False
    index = w.codes.device.index
    kernels = launcher(index)
    if kernels is None or not kernels.takes(w.n, w.k, a_format):
        return False
    return w.groups <= MOST_GROUPS and runs(a_format, index)


def takes_along_k(w: WeightArgs, a_format: str) -> bool:
    """True if the kernels multiply groups along K of rows of `a_format` and this weight, and passed the
    check. They need no pass over the weights' scales, so they are used for any number of rows."""
    if not w.codes.is_cuda or a_format != w.fmt.name or w.fmt.element != "e2m1":
        return False
    index = w.codes.device.index
    kernels = launcher(index)
    return (
        kernels is not None and kernels.ALONG_K and w.k % kernels.PART_ALONG_K == 0 and runs(a_format, index)
    )


def runs(format: str, device_index: int) -> bool:
    """True if the GPU has these kernels, and those for rows of the format passed the check."""
    here = launcher(device_index)
    return here is not None and format in here.KINDS and trusted(format, device_index)


def trusted(format: str, device_index: int) -> bool:
    properties, weights = torch.cuda.get_device_properties(device_index), weights_of(format)
    with torch.cuda.device(device_index), without_modes():
        return first_use.agrees(
            f"the CUDA product of {format} rows and {'' if format == weights else weights + ' '}weights",
            f"{properties.name}, compute capability {properties.major}.{properties.minor}",
            native.build(native.MMA), functools.partial(first_error, format), BOUND, "Triton",
        )  # fmt: skip


def first_error(format: str, repeats: int = 3, shape: tuple[int, int] = (2632, 832)) -> float:
    """The largest error of every candidate and kind of groups, relative to the norm and to `ROUNDING`.

    format: of the rows.
    shape: N and K of the weights; N ends inside a tile, and K inside a step, but with fp8 rows at its end.

    Each candidate runs with float32 results without bias, and in one of the 16-bit dtypes with a bias and two
    rows of results for each row. Groups along K have neither.
    It is infinite if repeats differ in a bit, or if a kernel does not run.
    """
    generator, kernels = torch.Generator().manual_seed(0), launcher(torch.cuda.current_device())
    assert kernels is not None
    weights = weights_of(format)
    fmt, found, place = FORMATS[weights], 0.0, torch.device("cuda", torch.cuda.current_device())
    groups, (n, k) = 3, shape
    if format == "fp8":
        k = -(-k // scaled_sm100.FP8_PART) * scaled_sm100.FP8_PART

    def random(lead: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        low, high = (0x20, 0x50) if fmt.has_global_scale else (118, 132)
        packed = torch.randint(0, 256, (*lead, k // 2), generator=generator, device="cpu").to(torch.uint8)
        scale = torch.randint(low, high, (*lead, k // fmt.block), generator=generator, device="cpu")
        factor = torch.rand(lead[:1], generator=generator, device="cpu", dtype=torch.float32) + 0.5
        return packed.to(place), scale.to(torch.uint8).to(place), factor.to(place)

    def values(packed: Tensor, scale: Tensor, factor: Tensor) -> Tensor:
        typed = scale.view(torch.float8_e4m3fn if fmt.has_global_scale else torch.float8_e8m0fnu)
        return dequantize(packed, typed, factor, weights)

    def random_rows(count: int) -> tuple[scaled.Rows, Tensor]:
        packed, scale, factor = random((count,))
        if format != "fp8":
            return scaled.Rows(packed, scale, factor), values(packed, scale, factor)
        codes = torch.randint(0, 127, (count, k), generator=generator, device="cpu")  # all that are finite
        codes += 128 * torch.randint(0, 2, (count, k), generator=generator, device="cpu")
        e4m3 = codes.to(torch.uint8).to(place).view(torch.float8_e4m3fn)
        factor /= 64  # so that results are no larger than those of FP4 rows, and fit float16
        return scaled.Rows(e4m3, None, factor), e4m3.double() * factor[:, None].double()

    def repeated(*given, out: tuple[tuple[int, int], torch.dtype]) -> Tensor | None:
        """The results of a product, or None if it does not run, or if repeats differ."""
        outs = []
        for _ in range(repeats):
            outs.append(torch.full(out[0], torch.nan, device=place, dtype=out[1]))
            try:
                kernels.multiply(*given[:2], outs[-1], *given[2:])
            except RuntimeError as error:
                logging.getLogger("fp4_ops").warning(
                    "fp4: %s x %s by CUDA does not run: %s", format, weights, error
                )
                return None
        return outs[0] if all(torch.equal(one, outs[0]) for one in outs[1:]) else None

    weight = random((groups, n))
    dense = values(*weight)
    bias = torch.randn((groups, n), generator=generator, device="cpu", dtype=torch.float32).to(place)
    bias *= dense.std() * k**0.5
    counts = torch.tensor([130, 0, 37], device=place, dtype=torch.int32)
    for config in range(kernels.CANDIDATES):
        half = (torch.bfloat16, torch.float16)[config % 2]
        for dtype, a_div in ((torch.float32, 1), (half, 2)):
            for route, m, ids in _routes(counts):
                x, x_values = random_rows(-(-ids.numel() // a_div))
                own = slice(1) if route.mode == scaled.DENSE else slice(None)
                added = bias[own].to(dtype) if a_div > 1 else None
                codes, scales, factor = (t[own] for t in weight)
                w = scaled.Weights(codes, scales, factor, added, weights)
                got = repeated(x, w, m, route, a_div, config, out=((ids.numel(), n), dtype))
                if got is None:
                    return math.inf
                exact = x_values.repeat_interleave(a_div, 0)[: ids.numel()]
                want = torch.zeros_like(got, dtype=torch.float64)
                for e in range(groups):
                    want[ids == e] = exact[ids == e] @ dense[e].mT
                    if added is not None:
                        want[ids == e] += added[e].double() if e < len(added) else 0
                found = max(found, relative_error(got, want) / ROUNDING[dtype])
            if not kernels.ALONG_K or format == "fp8":
                continue
            ends = _ends(k, fmt.block).to(place)
            parts = [slice(*pair) for pair in itertools.pairwise([0, *ends.tolist()])]
            x, x_values = random_rows(m := 37)
            codes, scales, factor = (t[:1] for t in weight)
            w = scaled.Weights(codes, scales, factor, None, weights)
            route = scaled.Route(scaled.DENSE, k_ends=ends)
            got = repeated(x, w, m, route, 1, config, out=((len(parts) * m, n), dtype))
            if got is None:
                return math.inf
            for one, part in zip(got.view(-1, m, n), parts, strict=True):
                want = x_values[:, part] @ dense[0][:, part].mT
                found = max(found, relative_error(one, want) / ROUNDING[dtype])
    return found


def _ends(k: int, block: int) -> Tensor:
    """Returns ends of groups along K that lie inside of words of scales and of instructions; one is empty."""
    ends = [block, 4 * block, 4 * block, 5 * block, k - 3 * block, k - block]
    return torch.tensor(ends, dtype=torch.int32, device="cpu")


def _routes(counts: Tensor) -> list[tuple[scaled.Route, int, Tensor]]:
    """Returns each kind of groups with its `m`, and the group of each row, -1 for none."""
    groups, most, m = counts.numel(), int(counts.max()), int(counts.sum()) + 3
    ends = counts.cumsum(0).int()
    place = torch.arange(m, device=counts.device)
    sorted_ids = torch.bucketize(place, ends, right=True)
    sorted_ids = torch.where(sorted_ids < groups, sorted_ids, -1)
    order = (place * 7 % m).int() if m % 7 else place.int()
    of_row = torch.empty_like(sorted_ids)
    of_row[order.long()] = sorted_ids
    there = torch.arange(most, device=counts.device) < counts[:, None]
    masked = torch.where(there, torch.arange(groups, device=counts.device)[:, None], -1).flatten()
    return [
        (scaled.Route(scaled.DENSE), most, torch.zeros(most, device=counts.device, dtype=torch.long)),
        (scaled.Route(scaled.CONTIGUOUS, ends), m, sorted_ids),
        (scaled.Route(scaled.CONTIGUOUS, ends, order), m, of_row),
        (scaled.Route(scaled.MASKED, counts), most, masked),
    ]


def by_ids(ids: Tensor, groups: int) -> scaled.Route:
    """Returns the route of rows by their experts' ids."""
    offs, sorted_rows, _ = rows.route(ids.contiguous(), groups)
    return scaled.Route(scaled.CONTIGUOUS, offs, sorted_rows)


def in_order(
    a: scaled.Rows, route: scaled.Route, a_div: int, m: int
) -> tuple[scaled.Rows, scaled.Route, int, Tensor | None]:
    """Returns rows, route and a_div for several products by the same route, and the row of results at each
    position. The last is None if that is the order of the results: kernels for 12.x need no other."""
    if launcher(a.packed.device.index) is not scaled_sm100:
        return a, route, a_div, None
    a, route, order = scaled_sm100.in_order(a, route, a_div, m)
    return a, route, 1, order


def multiply(
    a: scaled.Rows, w: WeightArgs, out: Tensor, m: int, route: scaled.Route, a_div: int = 1, config: int = -1
) -> None:
    """Computes `out` as `multiply` of launchers/scaled.py does, with the kernels of the GPU."""
    shape = w.groups, w.n
    weights = scaled.Weights(
        w.codes.view(*shape, -1), w.scale.view(*shape, -1), w.global_scale, w.bias, w.fmt.name
    )
    kernels = launcher(a.packed.device.index)
    assert kernels is not None
    kernels.multiply(a, weights, out, m, route, a_div, config)
