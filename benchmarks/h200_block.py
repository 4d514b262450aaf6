"""Times each kernel of one qwen3-30b expert block on a Hopper GPU with torch.profiler, in microseconds, by
tokens and a_format.

    python benchmarks/h200_block.py [--tokens 1,8,32,128,512,2048,8192] [--activation silu_interleaved]

Each call has another routing. h200_hopper.py times whole blocks; this script shows how the time is divided
among kernels. The kernel `all` is their sum.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator

import record
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import fp4_ops  # noqa: F401  loads the operators

EXPERTS, HIDDEN, INTER, TOP_K = 128, 2048, 768, 8
CALLS = 12


def weight(n: int, k: int) -> tuple[torch.Tensor, ...]:
    """Returns a weight whose outputs are about as large as its inputs, so that gates have realistic
    values."""
    values = torch.randn(EXPERTS, n, k, device="cuda") / k**0.5
    plain = torch.ops.fp4.quantize(values, "nvfp4")
    return torch.ops.fp4.prepack(*plain, "nvfp4", "sm90")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", default="1,8,32,128,512,2048,8192")
    parser.add_argument("--activation", default="silu_interleaved")


def rows(given: argparse.Namespace) -> Iterator[record.Row]:
    up, down = weight(2 * INTER, HIDDEN), weight(HIDDEN, INTER)
    for a_format in ("none", "fp8"):
        for tokens in map(int, given.tokens.split(",")):
            x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
            ids = [torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K).indices for _ in range(CALLS)]
            weights = torch.rand(tokens, TOP_K, device="cuda")

            def run() -> None:
                for routing in ids:  # noqa: B023
                    torch.ops.fp4.moe(
                        x, routing, weights, *up, *down, activation=given.activation, a_format=a_format,  # noqa: B023
                        format="nvfp4", layout="sm90",
                    )  # fmt: skip
                torch.cuda.synchronize()

            run()
            with profile(activities=[ProfilerActivity.CUDA]) as prof:
                run()
            us: Counter[str] = Counter()
            for event in prof.events():
                if event.device_type == DeviceType.CUDA:
                    name = (
                        event.name.replace("(anonymous namespace)::", "")
                        .replace("fp4::sm90::", "")
                        .replace("fp4::device::", "")
                    )
                    us[name.removeprefix("void ")[:60]] += (
                        event.time_range.end - event.time_range.start
                    ) / CALLS
            of = {"table": "kernels", "activation": given.activation, "a_format": a_format, "tokens": tokens}
            for name, time in (("all", sum(us.values())), *us.most_common()):
                yield {**of, "kernel": name, "us": time}


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
