"""Times attention on Hopper, as models write it and as the backend rewrites it.

    python benchmarks/h200_attention.py

There are 32 query heads, 4 key/value heads and a head size of 128, in bfloat16, as in Qwen3-30B-A3B. A
decoding step has one query for each sequence, the keys of a static cache, and a mask of the first ones. It
becomes fp4::attention (compile_passes/step/attention.py), and is timed with torch's kernel without repeated
keys, too. Prefill is causal and has a mask for all pairs (compile_passes/neighbours/attention.py). All
results are compared with float64 first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import record
import torch
import torch.nn.functional as F
from h200_hopper import median_us

HEADS, GROUPS, WIDTH = 32, 4, 128
DECODE = (
    (1, 104, 99), (1, 4096, 100), (1, 4096, 4091), (8, 1024, 1019), (8, 4096, 100), (8, 4096, 1000),
    (64, 104, 99), (64, 1024, 1019), (64, 4096, 1000), (64, 4096, 4091),
)  # fmt: skip
"""(sequences, keys, keys that are seen)"""
PREFILL = (512, 2048, 4096)


def repeated(x: torch.Tensor) -> torch.Tensor:
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, HEADS // GROUPS, s, d).reshape(b, HEADS, s, d)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = q.double() @ repeated(k).double().mT / WIDTH**0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ repeated(v).double()


def compare(
    step: str, keys: int, seen: int, q, k, v, mask: torch.Tensor, rewritten: Callable[[], torch.Tensor],
    fused: Callable[[], torch.Tensor] | None = None,
) -> record.Row:  # fmt: skip
    def written() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask)

    want = exact(q[:1], k[:1], v[:1], mask[:1])
    calls = {"written_us": written, "torch_us": fused, "rewritten_us": rewritten}
    errors = [((f()[:1] - want).norm() / want.norm()).item() for f in calls.values() if f]
    assert max(errors) < 5e-3, errors
    times = {name: median_us(lambda i: f()) if f else None for name, f in calls.items()}  # noqa: B023
    return {
        "table": "attention", "step": step, "sequences": len(q), "keys": keys, "seen": seen, **times,
        "speedup": times["written_us"] / times["rewritten_us"],
    }  # fmt: skip


def heads(b: int, n: int, s: int) -> torch.Tensor:
    return torch.randn(b, s, n, WIDTH, device="cuda").bfloat16().transpose(1, 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds no arguments."""


@torch.no_grad()
def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    for b, keys, seen in DECODE:
        q, k, v = heads(b, HEADS, 1), heads(b, GROUPS, keys).contiguous(), heads(b, GROUPS, keys).contiguous()
        mask = (torch.arange(keys, device="cuda") < seen).expand(b, 1, 1, keys)
        yield compare(
            "decode", keys, seen, q, k, v, mask,
            lambda: torch.ops.fp4.attention(q.transpose(1, 2), k, v, mask, WIDTH**-0.5).transpose(1, 2),  # noqa: B023
            lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True),  # noqa: B023
        )  # fmt: skip
    for s in PREFILL:
        q, k, v = heads(1, HEADS, s), heads(1, GROUPS, s), heads(1, GROUPS, s)
        mask = torch.ones(s, s, dtype=torch.bool, device="cuda").tril()[None, None]
        yield compare(
            "prefill", s, s, q, k, v, mask,
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),  # noqa: B023
        )  # fmt: skip


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
