"""Compares builds of the Hopper kernels: products and blocks, which take turns in one process.

    python benchmarks/h200_builds.py before.so after.so [...] [--models qwen3-30b,...] [--tokens 128,2048]

Each argument is the `_sm90.so` of a build (`python setup.py build_ext --inplace` leaves it in fp4_ops/). The
script prints microseconds, measured as in h200_hopper.py; the time divided by the first build's; and the
difference of the results from the first build's (relative norm; 0 means the same bits). The operators launch
all kernels of each build. Points for which decode runs are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import hopper_operators as ops
import record
import torch
from h200_hopper import MODELS, ROUTINGS, Model, median_us, random_weight, routing

from fp4_ops.backends.launchers import rows as row_kernels
from fp4_ops.dev.product import NativeWeight, Routing
from fp4_ops.runtime import native

PAUSE_SECONDS = 0.1
LAYOUTS = {"fp8": "sm90", "none": "mma_bf16"}
"""Layout of the weights for each format of activations."""


class Build:
    """The kernels of a build."""

    def __init__(self, path: str) -> None:
        self.name, self.path = Path(path).name, str(Path(path).absolute())

    def use(self) -> None:
        native.use_kernels(self.path)


def compare(
    builds: list[Build], what: record.Row, run: Callable[[int], torch.Tensor]
) -> Iterator[record.Row]:
    times, results = [], []
    for build in builds:
        build.use()
        times.append(median_us(run, pause=PAUSE_SECONDS))
        results.append(run(0).float())
    for build, us, result in zip(builds, times, results, strict=True):
        same = torch.equal(result, results[0])
        error = 0.0 if same else float((result - results[0]).norm() / results[0].norm())
        yield {**what, "build": build.name, "us": us, "ratio": us / times[0], "error": error}


def products(
    builds: list[Build], model: Model, weight: NativeWeight, k: int, how: str, tokens: int
) -> Iterator[record.Row]:
    ids = [routing(model, tokens).flatten() for _ in range(ROUTINGS)]
    offs = [torch.bincount(i, minlength=model.experts).cumsum(0).int() for i in ids]
    x, scale = torch.randn(ids[0].numel(), k, device="cuda").bfloat16(), None
    if how == "fp8":
        x, scale = row_kernels.quantize_fp8(x)
    if ops.decodes(x, weight, Routing.OFFS, len(x)):
        return
    what = {
        "table": "product", "model": model.name, "n": weight.n, "k": k, "a_format": how, "tokens": tokens,
    }  # fmt: skip
    yield from compare(builds, what, lambda i: ops.grouped_mm(x, scale, weight, offs[i], torch.bfloat16))


def block(
    builds: list[Build], model: Model, up: NativeWeight, down: NativeWeight, how: str, tokens: int
) -> Iterator[record.Row]:
    ids = [routing(model, tokens) for _ in range(ROUTINGS)]
    x = torch.randn(tokens, model.hidden, device="cuda").bfloat16()
    scores = torch.rand(tokens, ids[0].shape[1], device="cuda")
    if ops.block_decodes(up, down, ids[0].numel(), how, x.device):
        return
    run = lambda i: ops.moe(x, ids[i], scores, up, down, "silu_interleaved", how, torch.bfloat16)  # noqa: E731
    what = {"table": "block", "model": model.name, "a_format": how, "tokens": tokens}
    yield from compare(builds, what, run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("builds", nargs="+")
    parser.add_argument("--models", default=",".join(m.name for m in MODELS))
    parser.add_argument("--tokens", default="32,128,512,2048,3000,8192")


def rows(given: argparse.Namespace) -> Iterator[record.Row]:
    builds = [Build(path) for path in given.builds]
    for model in MODELS:
        if model.name not in given.models.split(","):
            continue
        for how, layout in LAYOUTS.items():
            shapes = (2 * model.inter, model.hidden), (model.hidden, model.inter)
            up, down = (random_weight(model.experts, *shape, layout) for shape in shapes)
            for tokens in (int(t) for t in given.tokens.split(",")):
                for weight, (_, k) in zip((up, down), shapes, strict=True):
                    yield from products(builds, model, weight, k, how, tokens)
                yield from block(builds, model, up, down, how, tokens)
            del up, down
            torch.cuda.empty_cache()


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
