"""Estimates from a block's sizes whether its experts run faster spread or split.

Each spread expert is read by one process. One process has more of the chosen experts than the others, and the
block waits for it. Split experts are read by all processes in equal parts, but each process then handles the
rows of all experts. So splitting is better for few tokens, especially if experts are large. Spreading is
better for many tokens.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from ..runtime.fitted import FILE, read

TOKENS = 1, 8, 32, 128
"""Numbers of tokens in the report."""
FITTED = read(Path(__file__).parent / FILE)["division"].values
LATENCY_US, BYTES_A_US, FLOPS_A_US = (FITTED[n] for n in ("latency_us", "bytes_a_us", "flops_a_us"))
"""Constants of the estimate. The reported ratios hardly depend on them."""
TOP_K = "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k_experts"
"""Names of top_k in models' configurations."""


@dataclass(frozen=True)
class Division:
    """Sizes of an expert block.

    `experts` counts all processes; the other sizes are those of one whole expert.
    """

    experts: int
    top_k: int
    processes: int
    hidden: int
    inner: int
    weight_bytes: float

    def microseconds(self, kind: str, tokens: int) -> float:
        """Estimates the time of a block whose tokens choose experts at random: max(weights, products) + rows.

        The estimate is valid for up to 512 tokens. With more tokens, rows are in fp8 and are sent while
        products run. In both ways, a process reads on average the bytes of chosen * experts / processes whole
        experts.
        """
        chosen = 1 - (1 - self.top_k / self.experts) ** tokens
        here, pairs = self.experts / self.processes, tokens * self.top_k
        read, handled = chosen * here, float(pairs)
        if kind == "spread":
            deviation = (here * chosen * (1 - chosen)) ** 0.5
            read = min(here, read + largest(self.processes) * deviation)
            handled /= self.processes
        rows = 6 * (
            handled * self.hidden + pairs / self.processes * self.inner
        )  # written or read, 2 bytes each
        products = 6 * pairs / self.processes * self.hidden * self.inner
        weights = read * self.weight_bytes
        return LATENCY_US + max(weights / BYTES_A_US, products / FLOPS_A_US) + rows / BYTES_A_US

    def told(self, kind: str) -> str:
        """Returns a line of the report: the cost of `kind` compared with the other way."""
        other, how = (
            ("split", f"DistributedConfig(tp_size={self.processes}) alone")
            if kind == "spread"
            else ("spread", f"ep_size={self.processes}")
        )
        ratios = [self.microseconds(other, t) / self.microseconds(kind, t) for t in TOKENS]
        shown = ", ".join(f"{r:.2f}" for r in ratios)
        counts = ", ".join(map(str, TOKENS))
        return (
            f"experts are {kind}; by an estimate from sizes, {other} ones ({how}) take {shown} times as long "
            f"with {counts} tokens"
        )


@functools.cache
def largest(count: int) -> float:
    """Returns the expected maximum of `count` standard normal numbers."""
    normal, steps = NormalDist(), 2000
    width = 12 / steps
    return sum(
        x * count * normal.pdf(x) * normal.cdf(x) ** (count - 1) * width
        for x in (width * (i + 0.5) - 6 for i in range(steps))
    )


def top_k_of(model: Any) -> int | None:
    """Reads top_k from the model's configuration."""
    config = getattr(model, "config", None)
    found = (getattr(config, name, None) for name in TOP_K)
    return next((k for k in found if isinstance(k, int) and k > 0), None)
