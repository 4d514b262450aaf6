"""The expert-parallel implementation `fp4` of transformers: `DistributedConfig(ep_implementation="fp4")`.

Once the experts are in 4 bits, `fp4::moe_ep` exchanges the tokens. Until then transformers' own "auto" does.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...experts.packed import IMPLEMENTATION, Recipe, run_experts


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
        """transformers makes one object for each experts module. It passes two meshes: the processes that
        share the experts, and the processes that have the same batch."""

        def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            if not self.shares_batch and tp_mesh.size() > 1:
                raise ValueError(
                    "fp4: ep_implementation 'fp4' takes ep_size == tp_size, or tp_size 1; here "
                    f"{ep_mesh.size()} processes share the experts, and {tp_mesh.size()} of them have each "
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
