"""`python -m fp4_ops tune`: measures the cost model's constants on this machine's GPU.

Decode and prefill run products of random weights, and `cost_fit` fits the constants to their times.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ..meta.layouts import LAYOUTS
from . import native, tuned
from .cost_fit import Point, better, losses
from .fitted import Values, families

ROUTINGS = 4
"""Number of random routings of each product."""
LAUNCH_US = 2000
"""The approximate duration of one timed run, in microseconds."""

SHAPES = ((64, 1536, 2048), (32, 5760, 2944), (16, 4096, 7168), (8, 4096, 14336))
"""Experts, N and padded K."""
ROWS = (0.25, 0.5, 1, 2, 4, 8, 12, 16, 32, 64, 128)
"""Activation rows for each expert."""
BYTES_A_WEIGHT = 0.5 + 1 / 16
LAYOUT = {"w4a8": "sm90", "half": "sm90", "bf16": "mma_bf16"}
"""Weight layout of each of native.KERNELS."""

NEEDS = (
    "fp4_ops tune measures the kernels of this machine's GPU. It needs an NVIDIA GPU of compute capability "
    "8.0 or later, a torch built for CUDA, and fp4_ops built with kernels for that GPU (FP4_CUDA_ARCHS=all "
    "pip install --no-build-isolation -e .). {}. CPU kernels have no such constants: they are chosen by what "
    "the processor has."
)


class Product(NamedTuple):
    """A grouped product of `rows` activation rows."""

    kernel: str
    groups: int
    n: int
    kp: int
    rows: int

    @property
    def planned(self) -> native.Product:
        return native.product("offs", self.groups, self.rows, self.n, self.kp)


Timer = Callable[[Product, str], float]
"""Function that measures a product with "decode" or "prefill" in microseconds."""


def products(family: int) -> Iterator[Product]:
    read = next(f.layouts for f in families() if f.family == family)
    kernels = [kernel for kernel in native.KERNELS if LAYOUT[kernel] in read]
    for groups, n, kp in SHAPES:
        for kernel in kernels:
            for each in ROWS:
                yield Product(kernel, groups, n, kp, max(round(each * groups), 1))


def measure(gpu: native.Gpu, timer: Timer) -> list[Point]:
    """Measures both times of each product, if both kernels can run it."""
    points = []
    for p in products(gpu.family):
        work = native.work(p.planned, p.kernel, gpu)
        if work.weights != work.weights:
            continue  # decode cannot run it
        points.append(Point(p.kernel, p.groups, work, timer(p, "decode"), timer(p, "prefill")))
    return points


class OnGpu:
    """Measures by replaying captured launches on a GPU. Takes the median."""

    def __init__(self) -> None:
        self._weight: tuple[tuple[Any, ...], tuple[torch.Tensor, ...]] | None = None

    def __call__(self, p: Product, kernel: str) -> float:
        packed, scale, factor = self._weights(p)
        layout = LAYOUTS[LAYOUT[p.kernel]]
        x, x_scale = torch.randn(p.rows, p.kp, device="cuda").bfloat16(), None
        if p.kernel == "w4a8":
            x, x_scale = torch.ops.fp4.quantize_fp8(x, layout=layout.a_layout)
        ids = [torch.randint(0, p.groups, (p.rows,), device="cuda") for _ in range(ROUTINGS)]
        offs = [torch.bincount(i, minlength=p.groups).cumsum(0).int() for i in ids]

        def launch(i: int) -> None:
            torch.ops.fp4.grouped_mm(
                x, packed, scale, factor, offs[i % ROUTINGS], x_scale,
                format="nvfp4", layout=layout.name, out_dtype=torch.bfloat16,
            )  # fmt: skip

        with native.only(kernel), torch.no_grad():
            return median_us(launch)

    def _weights(self, p: Product) -> tuple[torch.Tensor, ...]:
        """Returns random codes and scales. Keeps them if the next product has the same sizes."""
        key = p.kernel == "bf16", p.groups, p.n, p.kp
        if self._weight is None or self._weight[0] != key:
            self._weight = None  # free it before the next one is made
            packed = torch.randint(0, 256, (p.groups, p.n, p.kp // 2), dtype=torch.uint8, device="cuda")
            scale = torch.randint(40, 120, (p.groups, p.n, p.kp // 16), dtype=torch.uint8, device="cuda")
            if p.kernel != "bf16":  # csrc/common/sm90_layout.h: a bit beside the mantissas 0 and 7
                scale |= (((scale & 7) == 0) | ((scale & 7) == 7)).byte() << 7
            self._weight = key, (packed, scale, torch.full((p.groups,), 1e-3, device="cuda"))
        return self._weight[1]


def median_us(launch: Callable[[int], object]) -> float:
    """Measures a launch in microseconds, by replaying a CUDA graph of many. `launch` gets their number."""
    rough = _replay_us(_captured(launch, ROUTINGS)) / ROUTINGS
    count = max(ROUTINGS, round(LAUNCH_US / rough / ROUTINGS) * ROUTINGS)
    graph = _captured(launch, count)
    return statistics.median(_replay_us(graph) for _ in range(5)) / count


def _captured(launch: Callable[[int], object], count: int) -> torch.cuda.CUDAGraph:
    for i in range(ROUTINGS):
        launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            launch(i)
    graph.replay()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def report(points: list[Point], before: Values, found: Values) -> str:
    """Lists the constants that changed, and the loss of the choice with each set."""
    if found == before:
        return (
            f"The built-in constants choose as well as constants fitted to {len(points)} products here, so "
            "they stay."
        )
    lines = [f"{'constant':<20}{'built in':>32}{'measured here':>32}"]
    for name, value in before.items():
        if found[name] != value:
            lines.append(f"{name:<20}{_text(value):>32}{_text(found[name]):>32}")
    lines.append(f"\nloss of the chosen kernel against the faster one, over {len(points)} products")
    for what, values in (("built in", before), ("measured here", found)):
        lost = losses(points, values)
        lines.append(f"  {what:<16}mean {sum(lost) / len(lost):7.2%}   largest {max(lost):7.2%}")
    return "\n".join(lines)


def _text(value: Any) -> str:
    return " ".join(map(_text, value)) if isinstance(value, list) else f"{value:.4g}"


def built_in(gpu: native.Gpu) -> Values:
    """Returns the built-in constants, with absolute rates in place of shares of the memory rate."""
    values = native.constants(native.Gpu(gpu.family, gpu.sms, gpu.shared_bytes, gpu.copy_rate))
    derived = values["decode_share"] * gpu.copy_rate / BYTES_A_WEIGHT
    return {**values, "decode_rate": [rate or derived for rate in values["decode_rate"]]}


def tune(gpu: native.Gpu, name: str, timer: Timer) -> tuple[tuned.Tuned, list[Point]]:
    """Measures a GPU and fits its constants."""
    points = measure(gpu, timer)
    date = datetime.date.today().isoformat()
    found = better(points, built_in(gpu))
    return tuned.Tuned(name, gpu.family, native.build(gpu.family), date, found), points


def main(args: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        sys.exit(NEEDS.format("Torch sees no GPU here"))
    device = torch.cuda.current_device()
    name = torch.cuda.get_device_name(device)
    if not native.family(device):
        sys.exit(NEEDS.format(f"This build has no kernels for {name}"))
    begin, gpu = time.perf_counter(), native.gpu(device)
    made, points = tune(gpu, name, OnGpu())
    path = tuned.store(made)
    tuned.use(made, path)
    print(report(points, built_in(gpu), made.values))
    print(f"\n{name}: stored in {path}, {time.perf_counter() - begin:.0f} s. Delete the file to undo this.")


def add_commands(commands: Any) -> None:
    command = commands.add_parser(
        "tune", help="measure this GPU's kernels, in under a minute, for the choice of kernels"
    )
    command.set_defaults(run=main)
