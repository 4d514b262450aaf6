"""Checks the arguments of operators that run in several processes. Only Python has their kernels."""

from __future__ import annotations

from typing import Any

import torch

from .check_parts import check, check_dtype, check_name
from .checks import check_moe
from .operand_checks import FLOATING, Experts, check_count

TOKENS = ("own", "same")
"""Values of `tokens`: each process passes its own tokens, or all processes pass the same ones."""


def check_moe_ep(*moe: Any) -> Experts:
    """Checks the arguments of `check_moe`, followed by num_experts, tokens and max_tokens."""
    *args, num_experts, tokens, max_tokens = moe
    experts = check_moe(*args)
    check_name("tokens", tokens, TOKENS)
    check(
        num_experts >= experts.up.groups,
        lambda: (
            f"num_experts is {num_experts}; it counts the experts of all processes, so it must be at least "
            f"{experts.up.groups}, the experts in this process's w13"
        ),
    )
    if max_tokens is not None:
        check_count("max_tokens", max_tokens)
        x = args[0]
        check(
            tokens == "own",
            lambda: (
                f"max_tokens is {max_tokens}; with tokens 'same' it must be None, because nothing is padded"
            ),
        )
        check(
            x.shape[0] <= max_tokens,
            lambda: f"x has {x.shape[0]} tokens; it must have at most max_tokens, {max_tokens}",
        )
    return experts


def check_all_reduce(x: torch.Tensor) -> None:
    check_dtype("x", x, FLOATING)
