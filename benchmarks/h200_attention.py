"""Times attention on Hopper, as models write it and as compile_passes/neighbours/attention.py rewrites it.

    python benchmarks/h200_attention.py

There are 32 query heads, 4 key/value heads and a head size of 128, in bfloat16, as in Qwen3-30B-A3B. A
decoding step has one query for each sequence, the keys of a cache, and a mask. Prefill is causal and has a
mask for all pairs. Both results are compared with float64 first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import record
import torch
import torch.nn.functional as F
from h200_hopper import median_us

HEADS, GROUPS, WIDTH = 32, 4, 128
DECODE = ((1, 104), (1, 4096), (8, 1024), (64, 104), (64, 1024), (64, 4096))
"""(sequences, keys)"""
PREFILL = (512, 2048, 4096)


def repeated(x: torch.Tensor) -> torch.Tensor:
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, HEADS // GROUPS, s, d).reshape(b, HEADS, s, d)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = q.double() @ repeated(k).double().mT / WIDTH**0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ repeated(v).double()


def compare(
    step: str, sequences: int, keys: int, q, k, v, mask: torch.Tensor, rewritten: Callable[[], torch.Tensor]
) -> record.Row:
    def written() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask)

    want = exact(q[:1], k[:1], v[:1], mask[:1])
    errors = [((f()[:1] - want).norm() / want.norm()).item() for f in (written, rewritten)]
    assert max(errors) < 5e-3, errors
    before, after = median_us(lambda i: written()), median_us(lambda i: rewritten())
    return {
        "table": "attention", "step": step, "sequences": sequences, "keys": keys, "written_us": before,
        "rewritten_us": after, "speedup": before / after,
    }  # fmt: skip


def heads(b: int, n: int, s: int) -> torch.Tensor:
    return torch.randn(b, s, n, WIDTH, device="cuda").bfloat16().transpose(1, 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds no arguments."""


@torch.no_grad()
def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    for b, keys in DECODE:
        q, k, v = heads(b, HEADS, 1), heads(b, GROUPS, keys).contiguous(), heads(b, GROUPS, keys).contiguous()
        mask = (torch.arange(keys, device="cuda") < keys - 5).expand(b, 1, 1, keys)
        yield compare(
            "decode", b, keys, q, k, v, mask,
            lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True),  # noqa: B023
        )  # fmt: skip
    for s in PREFILL:
        q, k, v = heads(1, HEADS, s), heads(1, GROUPS, s), heads(1, GROUPS, s)
        mask = torch.ones(s, s, dtype=torch.bool, device="cuda").tril()[None, None]
        yield compare(
            "prefill", 1, s, q, k, v, mask,
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),  # noqa: B023
        )  # fmt: skip


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
