"""Keeps torch from copying the weight of the output head in a prefill on a CPU.

A prompt's last tokens, `hidden[:, -1:]`, have strides that F.linear does not fold into one matrix, unless the
weight requires a gradient. It calls bmm instead, which copies the whole weight, transposed. That takes longer
than all the layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def fold_head_rows(model: Any) -> None:
    """Give the rows that enter the model's output head the strides of one matrix. No value changes."""
    found = getattr(model, "get_output_embeddings", None)
    head = found() if found is not None else None
    if type(head) is nn.Linear and _fold not in head._forward_pre_hooks.values():
        head.register_forward_pre_hook(_fold)


def _fold(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if torch.compiler.is_compiling():  # a compiler chooses strides itself, and an export would guard these
        return None
    if not args or not isinstance(args[0], Tensor) or args[0].dim() < 3 or args[0].device.type != "cpu":
        return None
    rows = args[0]
    return (rows.reshape(-1, rows.shape[-1]).contiguous().view(rows.shape), *args[1:])
