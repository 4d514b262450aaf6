"""Times products of FP4 and fp8 rows on a GPU, kernel by kernel, for `python -m fp4_ops selftest --bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....meta.formats import FORMATS, FP4_FORMATS
from ....meta.layouts import preferred_layout
from ....runtime import tune
from .. import ops
from ..launch import NoTile
from ..ops import WeightArgs
from ..tiles import device_of
from . import native, support
from . import ops as triton_ops

COPIED = 1 << 29
"""Bytes of the copy that shows the memory's rate."""
DENSE_WEIGHTS = 8
"""Number of dense weights that are used in turn, because one could stay in the L2 cache."""
Timer = Callable[[Callable[[int], object]], float]
"""Function that measures a launch in microseconds. The launch's argument counts the launches."""
PREPARE: dict[str, Any] = {
    "mm": ops.prepare_dense, "grouped_mm": ops.prepare_grouped, "grouped_mm_masked": ops.prepare_masked,
}  # fmt: skip


class Shape(NamedTuple):
    """Products of weights [groups, n, k]. `rows`: of all groups together, if masked of each."""

    operator: str
    groups: int
    n: int
    k: int
    rows: tuple[int, ...]

    def all_rows(self, rows: int) -> int:
        return rows * self.groups if self.operator == "grouped_mm_masked" else rows


SHAPES = (
    Shape("mm", 1, 7168, 7168, (1, 16, 128, 4096)),
    Shape("grouped_mm", 32, 4096, 7168, (8, 64, 512, 16384)),
    Shape("grouped_mm_masked", 32, 7168, 2048, (4, 32, 256)),
)
"""Sizes of DeepSeek-V3: a dense product, gate and up of experts, and down."""


class Time(NamedTuple):
    """A measurement. `weight_bytes`: of the weights of the groups that have rows."""

    shape: Shape
    rows: int
    format: str
    kernel: str
    us: float
    weight_bytes: float

    def line(self) -> str:
        shape = self.shape
        tflops = 2e-6 * shape.all_rows(self.rows) * shape.n * shape.k / self.us
        return (
            f"| {shape.operator} | {shape.groups} | {shape.n} x {shape.k} | {self.rows} | {self.format} | "
            f"{self.kernel} | {self.us:.1f} | {tflops:.1f} | {1e-3 * self.weight_bytes / self.us:.0f} |"
        )


def table(timer: Timer = tune.median_us) -> Iterator[str]:
    """Yields a Markdown table of every product in `SHAPES` by every kernel of the current GPU, and before it
    the rate at which the GPU copies memory."""
    rate = 2e-3 * COPIED / _copy_us(timer)
    yield f"A copy of {COPIED >> 20} MiB reads and writes {rate:.0f} GB/s."
    yield ""
    yield "| product | groups | N x K | rows | weights | kernel | us | TFLOP/s | GB/s of weights |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for shape in SHAPES:
        for format in FP4_FORMATS:
            yield from (time.line() for time in times(shape, format, timer))


def _copy_us(timer: Timer) -> float:
    source = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return timer(lambda _: target.copy_(source))


def times(shape: Shape, format: str, timer: Timer) -> Iterator[Time]:
    """Yields the times of a shape's products with weights of a format. The first are for bfloat16 rows, as
    the operator runs them."""
    operator, groups, n, k, _ = shape
    fmt, place = FORMATS[format], torch.device("cuda", torch.cuda.current_device())
    lead = (DENSE_WEIGHTS if operator == "mm" else 1), groups, n
    low, high = (0x20, 0x50) if fmt.has_global_scale else (118, 132)
    codes = torch.randint(0, 256, (*lead, k // 2), device=place, dtype=torch.uint8)
    scales = torch.randint(low, high, (*lead, k // fmt.block), device=place).to(torch.uint8)
    factor = torch.full((groups,), 1e-3, device=place) if fmt.has_global_scale else None
    weights = [WeightArgs(c, s, factor, None, groups, n, k, fmt) for c, s in zip(codes, scales)]
    bytes_of_one = (codes[0].nbytes + scales[0].nbytes) / groups
    layout = preferred_layout("cuda", (n, k), dtype=torch.bfloat16, format=format, a_format="none")
    packed = [_packed(w, layout, dense=operator == "mm") for w in weights]
    for rows in shape.rows:
        routes = [_route(shape, rows, place) for _ in range(tune.ROUTINGS)]
        x = torch.randn(shape.all_rows(rows), k, device=place, dtype=torch.bfloat16)
        used = [1.0 if not args else float(hit) for args, hit in routes]
        weight_bytes = bytes_of_one * sum(used) / len(used)

        def bfloat16(i: int) -> None:
            args, _ = routes[i % len(routes)]  # noqa: B023
            a = x.view(groups, rows, k) if operator == "grouped_mm_masked" else x  # noqa: B023
            getattr(torch.ops.fp4, operator)(a, *packed[i % len(packed)], *args, format=format, layout=layout)

        yield Time(shape, rows, format, f"bf16 rows, layout {layout}", timer(bfloat16), weight_bytes)
        for a_format in (format, "fp8"):
            for name, launch in _launches(shape, rows, x, a_format, weights, routes):
                try:
                    us = timer(launch)
                except NoTile as error:
                    support.no_tile(error, format, device_of(place))
                    continue
                yield Time(shape, rows, format, f"{a_format} rows, {name}", us, weight_bytes)


def _packed(w: WeightArgs, layout: str, dense: bool) -> tuple[Tensor | None, ...]:
    """Returns a weight as the operators take it. `dense`: without the dimension of the groups."""
    typed = w.scale.view(torch.float8_e4m3fn if w.fmt.has_global_scale else torch.float8_e8m0fnu)
    plain = [None if t is None else t[0] if dense else t for t in (w.codes, typed, w.global_scale)]
    if layout == "plain":
        return tuple(plain)
    packed, scale, factor = torch.ops.fp4.prepack(*plain, w.fmt.name, layout)
    return packed, scale, factor if factor.numel() else None


def _route(shape: Shape, rows: int, place: torch.device) -> tuple[tuple[Tensor, ...], int]:
    """Returns what the operator takes beside rows and weights, and the number of groups that have rows."""
    if shape.operator == "mm":
        return (), 1
    if shape.operator == "grouped_mm_masked":
        counts = torch.randint(0, rows + 1, (shape.groups,), device=place)
        return (counts.int(),), int((counts > 0).sum())
    counts = torch.randint(0, shape.groups, (rows,), device=place).bincount(minlength=shape.groups)
    return (counts.cumsum(0).int(),), int((counts > 0).sum())


def _launches(
    shape: Shape, rows: int, x: Tensor, a_format: str, weights: list[WeightArgs], routes: list[Any]
) -> Iterator[tuple[str, Callable[[int], object]]]:
    """Yields the name and the launch of each kernel for rows of `a_format` that this GPU has and that passed
    its check."""
    place, prepare, m = x.device, PREPARE[shape.operator], shape.all_rows(rows)
    by_triton = support.takes(weights[0].fmt, a_format, device_of(place))
    by_cuda = native.multiplies(weights[0], a_format)
    if not by_triton and not by_cuda:
        return
    a, out = triton_ops.quantized(x, a_format), torch.empty((m, shape.n), device=place, dtype=torch.bfloat16)
    if by_triton:
        yield (
            "Triton",
            lambda i: triton_ops.run_triton(
                prepare, a, m, weights[i % len(weights)], out, *routes[i % len(routes)][0]
            ),
        )
    if not by_cuda:
        return
    kernels = native.launcher(place.index)
    assert kernels is not None
    for config in range(-1, kernels.CANDIDATES):

        def launch(i: int) -> None:
            each, route = triton_ops.native_route(prepare, m, *routes[i % len(routes)][0])
            native.multiply(a, weights[i % len(weights)], out, each, route, config=config)  # noqa: B023

        yield "CUDA" if config < 0 else f"CUDA, {kernels.name_of(config)}", launch
