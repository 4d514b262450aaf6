"""The expert-parallel implementation `fp4` of transformers: `DistributedConfig(ep_implementation="fp4")`.

Once the experts are in 4 bits, `fp4::moe_ep` exchanges the tokens. Until then transformers' own "auto" does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.parts import keep_from_ddp
from ..distributed.workspace import MAX_TOKENS, connect
from ..experts.packed import IMPLEMENTATION, PackedWeight, Recipe, run_experts


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


def register() -> None:
    """Registers `fp4` in transformers, if it has a registry of such implementations (5.23)."""
    try:
        from transformers.distributed import expert_parallel
    except ImportError:
        return
    registry = getattr(expert_parallel, "EPImplementationInterface", None)
    if registry is None or IMPLEMENTATION in registry():
        return

    class FP4ExpertParallel(expert_parallel.EPImplementation):  # type: ignore[name-defined, misc]
        """transformers makes one for each experts module, with the meshes of experts and of processes with
        equal batches."""

        def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            if not self.shares_batch and tp_mesh.size() > 1:
                raise ValueError(
                    "fp4: ep_implementation 'fp4' takes ep_size == tp_size, or tp_size 1; here the "
                    f"processes of {ep_mesh.size()} experts' shares have {tp_mesh.size()} copies of each "
                    "batch. Use ep_implementation='all_to_all'"
                )
            self.experts = experts
            self.tokens = "same" if self.shares_batch else "own"
            self.before = expert_parallel.AutoEP(experts, ep_mesh, tp_mesh)

        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            recipe: Recipe | None = getattr(self.experts, "_fp4_recipe", None)
            if recipe is None or recipe.part is None:
                return self.before(hidden_states, top_k_index, top_k_weights)
            return run_experts(self.experts, recipe, hidden_states, top_k_index, top_k_weights, self.tokens)

    registry.register(IMPLEMENTATION, FP4ExpertParallel)
