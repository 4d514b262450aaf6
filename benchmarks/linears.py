"""Compares `fp4::linears` with torch's F.linear for few rows on one GPU, with norm, bias and residual.

    python benchmarks/linears.py [--models qwen3-30b,...] [--rows 1,2,8,...] [--layers ...]

Each time is the median of CUDA-graph replays. A graph has one launch for each of many weights, so that
weights come from memory, not from L2. `us` is the time of fp4::linears as in a model's step: all weights of a
layer in one operator, with its norm and residual, and weights requested early. For more than NORM_ROWS rows
the norm is another kernel in a step, so `us` is without it. `separate_us` is the time of F.linear of each
weight, without the norm. `bandwidth_ratio` is the rate at which `us` reads the weights, divided by the rate
of a copy in the same process. `fp8_us` is `us` with weights in fp8, which routers never have, and
`fp8_bandwidth_ratio` is its rate. Each shape is compared with float64 first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import record
import torch
import torch.nn.functional as F
from gpu_ops import median_us
from torch import Tensor

import fp4_ops  # noqa: F401  loads torch.ops.fp4
from fp4_ops.runtime.oracle import relative_error

DEVICE, DTYPE = "cuda", torch.bfloat16
NORM_ROWS = 16
COLD_BYTES = 250 << 20
"""The smallest size of a graph's weights, five times an H100's L2."""


class Layer(NamedTuple):
    model: str
    name: str
    sizes: tuple[int, ...]
    """Rows of the weights."""
    k: int
    norm: bool = False
    residual: bool = False
    bias: bool = False


LAYERS = (
    Layer("qwen3-30b", "qkv", (4096, 512, 512), 2048, norm=True),
    Layer("qwen3-30b", "o", (2048,), 4096, residual=True),
    Layer("qwen3-30b", "router", (128,), 2048, norm=True),
    Layer("qwen3-30b", "head", (151936,), 2048, norm=True),
    Layer("gpt-oss-120b", "qkv", (4096, 512, 512), 2880, norm=True, bias=True),
    Layer("gpt-oss-120b", "o", (2880,), 4096, residual=True, bias=True),
    Layer("gpt-oss-120b", "router", (128,), 2880, norm=True, bias=True),
    Layer("mixtral-8x7b", "qkv", (4096, 1024, 1024), 4096, norm=True),
    Layer("mixtral-8x7b", "o", (4096,), 4096, residual=True),
    Layer("mixtral-8x7b", "router", (8,), 4096, norm=True),
)


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(DTYPE)


class Operands:
    """Several copies of a layer's weights, and the other arguments of its operator."""

    def __init__(self, layer: Layer) -> None:
        self.bytes = sum(layer.sizes) * layer.k * DTYPE.itemsize
        count = max(3, min(400, COLD_BYTES // self.bytes + 1))
        self.weights = [[draw(n, layer.k, scale=0.02) for n in layer.sizes] for _ in range(count)]
        self.in_fp8: list[list[Tensor]] = []
        if layer.name != "router":
            self.in_fp8 = [[(w * 2**11).to(torch.float8_e4m3fn) for w in each] for each in self.weights]
        self.scales = [torch.full((n,), 2.0**-11, device=DEVICE) for n in layer.sizes]
        self.biases = [draw(n) if layer.bias else None for n in layer.sizes]
        self.norm = draw(layer.k) if layer.norm else None
        self.layer = layer

    def rows(self, rows: int) -> tuple[Tensor, Tensor | None]:
        return draw(rows, self.layer.k), draw(rows, self.layer.sizes[0]) if self.layer.residual else None

    def fused(self, x: Tensor, residual: Tensor | None, weights: list[Tensor]) -> list[Tensor]:
        scales = self.scales if weights[0].dtype == torch.float8_e4m3fn else None
        return torch.ops.fp4.linears(
            x, weights, self.biases, self.norm_of(x), 1e-6, residual, None, scales, early=True
        )

    def norm_of(self, x: Tensor) -> Tensor | None:
        return self.norm if len(x) <= NORM_ROWS else None

    def separate(self, x: Tensor, weights: list[Tensor]) -> list[Tensor]:
        return [F.linear(x, w, b) for w, b in zip(weights, self.biases)]

    def check(self, x: Tensor, residual: Tensor | None) -> float:
        """Returns the largest relative error of a product, compared with float64 over the normed rows."""
        rows, norm = x, self.norm_of(x)
        if norm is not None:
            values = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
            rows = values.to(DTYPE) * norm
        worst = 0.0
        for weights, factor in ((self.weights[0], 1.0), *((w, 2.0**-11) for w in self.in_fp8[:1])):
            got = self.fused(x, residual, weights)
            for y, w, bias in zip(got, weights, self.biases):
                want = rows.double() @ w.double().T * factor
                want = want if bias is None else want + bias.double()
                want = want if residual is None else want.to(DTYPE).double() + residual.double()
                worst = max(worst, relative_error(y, want))
        assert worst < 4e-3, (self.layer, x.shape, worst)
        return worst


def copy_rate() -> float:
    """Measures the bytes per microsecond that a copy reads and writes."""
    source = torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_us([partial(torch.add, source, 1, out=target)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=",".join(dict.fromkeys(layer.model for layer in LAYERS)))
    parser.add_argument("--layers", default=",".join(dict.fromkeys(layer.name for layer in LAYERS)))
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    models, names = args.models.split(","), args.layers.split(",")
    rate = copy_rate()
    for layer in LAYERS:
        if layer.model not in models or layer.name not in names:
            continue
        operands = Operands(layer)
        for count in map(int, args.rows.split(",")):
            x, residual = operands.rows(count)
            error = operands.check(x, residual)
            us = median_us([partial(operands.fused, x, residual, w) for w in operands.weights])
            separate = median_us([partial(operands.separate, x, w) for w in operands.weights])
            row: record.Row = {
                "table": "linears", "model": layer.model, "layer": layer.name, "rows": count,
                "mb": operands.bytes / 1e6, "us": us, "separate_us": separate, "speedup": separate / us,
                "bandwidth_ratio": operands.bytes / us / rate, "error": error,
            }  # fmt: skip
            if operands.in_fp8:
                fp8 = median_us([partial(operands.fused, x, residual, w) for w in operands.in_fp8])
                row |= {"fp8_us": fp8, "fp8_bandwidth_ratio": operands.bytes / 2 / fp8 / rate}
            yield row


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
