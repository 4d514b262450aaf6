"""Compile time and speed of an unrolled loop over experts: python benchmarks/compile_time.py [EXPERTS ...]

CPU seconds of the first call, C++ compilers included, and milliseconds of the later ones, with Inductor alone
and with backend="fp4". One thread, bfloat16, no caches, a symbolic number of tokens.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

HIDDEN, INTER, TOP, TOKENS = 256, 512, 2, 16


class Loop(nn.Module):
    """A ModuleList of experts, each run on the tokens that chose it."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, experts, bias=False)
        shapes = ((HIDDEN, INTER), (HIDDEN, INTER), (INTER, HIDDEN))
        make = (nn.ModuleList(nn.Linear(*s, bias=False) for s in shapes) for _ in range(experts))
        self.experts = nn.ModuleList(make)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = torch.topk(torch.softmax(self.router(x), -1), TOP)
        out = torch.zeros_like(x)
        for e, (gate, up, down) in enumerate(self.experts):
            token, choice = torch.where(ids == e)
            y = down(F.silu(gate(x[token])) * up(x[token]))
            out.index_add_(0, token, y * weights[token, choice, None])
        return out


def cpu_seconds() -> float:
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in uses)


def measure(model: nn.Module, x: torch.Tensor, backend: str) -> tuple[float, float]:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    start = cpu_seconds()
    compiled(x)
    first = cpu_seconds() - start
    times = []
    for _ in range(20):
        start = time.perf_counter()
        compiled(x)
        times.append(time.perf_counter() - start)
    return first, 1e3 * statistics.median(times)


def main() -> None:
    torch.set_num_threads(1)
    torch._inductor.config.force_disable_caches = True
    print("experts   compile s: inductor   fp4   ratio   step ms: inductor    fp4   ratio")
    with torch.no_grad():
        torch.compile(lambda a: (a @ a).relu() + 1)(torch.randn(8, 8))  # what any first compilation costs
        for experts in map(int, sys.argv[1:] or ["8", "64"]):
            model = Loop(experts).bfloat16()
            x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
            ours, stock = measure(model, x, "fp4"), measure(model, x, "inductor")
            print(
                f"{experts:7d} {stock[0]:20.1f} {ours[0]:5.1f} {stock[0] / ours[0]:7.1f} "
                f"{stock[1]:19.2f} {ours[1]:6.2f} {stock[1] / ours[1]:7.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
