"""Connects the processes over which a model's 4-bit experts are spread."""

from __future__ import annotations

import torch
from torch import nn

from ..distributed.parts import keep_from_ddp
from ..distributed.workspace import MAX_TOKENS, connect
from ..experts.packed import PackedWeight, Recipe


def connect_model(model: nn.Module, dtype: torch.dtype, max_tokens: int = MAX_TOKENS) -> str:
    """Makes workspaces for the process groups over which a model's 4-bit experts are spread. All processes
    call it.

    It also tells DDP around the model which tensors differ between processes. Returns how tokens will reach
    the experts, in words, or "" if no experts are spread.
    """
    found: dict[str, tuple[torch.device, int]] = {}
    parts: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        recipe: Recipe | None = getattr(module, "_fp4_recipe", None)
        if recipe is None or recipe.part is None:
            continue
        parts[name] = module
        if recipe.part.kind != "spread":
            continue
        up: PackedWeight = getattr(module, recipe.form.gate_up)
        _, hidden = found.get(recipe.part.group_name, (None, 0))
        found[recipe.part.group_name] = up.packed.device, max(hidden, up.k)
    keep_from_ddp(model, parts)
    reasons = [
        connect("fp4_ops.prepare", name, device, hidden * dtype.itemsize, max_tokens)
        for name, (device, hidden) in found.items()
    ]
    if not found:
        return ""
    why = next(filter(None, reasons), "")
    return f"torch.distributed ({why})" if why else f"NVLink, up to {max_tokens} tokens a process"
