"""What the operators of several processes ask of their arguments. Their kernels are Python, so no C++ is
made."""

from __future__ import annotations

from typing import Any

import torch

from .check_parts import check, check_dtype, check_name
from .checks import FLOATING, Experts, check_count, check_moe

TOKENS = ("own", "same")
"""Whether each process brings tokens of its own, or all bring the same ones."""


def check_moe_ep(*moe: Any) -> Experts:
    """As `check_moe`, and num_experts, tokens, max_tokens behind its arguments."""
    *args, num_experts, tokens, max_tokens = moe
    experts = check_moe(*args)
    check_name("tokens", tokens, TOKENS)
    check(
        num_experts >= experts.up.groups,
        lambda: (
            f"num_experts is {num_experts}, those of all processes; w13 of this one alone has "
            f"{experts.up.groups}"
        ),
    )
    if max_tokens is not None:
        check_count("max_tokens", max_tokens)
        x = args[0]
        check(
            tokens == "own",
            lambda: f"max_tokens is {max_tokens}; with tokens 'same' it must be None, for nothing is padded",
        )
        check(
            x.shape[0] <= max_tokens,
            lambda: (
                f"x has {x.shape[0]} tokens; max_tokens is {max_tokens}, the most that a process may have"
            ),
        )
    return experts


def check_all_reduce(x: torch.Tensor) -> None:
    check_dtype("x", x, FLOATING)
