"""Finds parameters that a sharding library gathers anew for each call. In 4 bits each call would pack them
again.

Their memory is reused for other parameters, their versions say nothing, and what a rank packs would depend on
its earlier calls. They keep their original weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def gathered(tensors: Iterable[torch.Tensor]) -> dict[int, str]:
    """Return id -> library for each of these tensors that is gathered for a call."""
    fsdp2 = {id(p): "FSDP" for p in _unsharded()}
    found = {}
    for t in tensors:
        if id(t) in fsdp2 or getattr(t, "_fsdp_flattened", False):
            found[id(t)] = "FSDP"
        elif hasattr(t, "ds_id") and hasattr(t, "ds_tensor"):
            found[id(t)] = "DeepSpeed ZeRO-3"
    return found


def _unsharded() -> Iterable[nn.Parameter]:
    """Yield the gathered parameters of all modules under `fully_shard` that run now."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from ...meta.torch_internals import composable_state

    for module in list(composable_state._module_state_mapping):
        state: Any = composable_state._get_module_state(module)
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # older torch
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for parameter in getattr(group, "fsdp_params", ()):
                unsharded = getattr(parameter, "_unsharded_param", None)
                if unsharded is not None:
                    yield unsharded


def is_flat(source: Any) -> bool:
    """Return whether Dynamo says that an input belongs to a module under FSDP's first version."""
    guard = getattr(source, "guard_source", None)
    guard = guard() if callable(guard) else guard  # a method in older torch
    return guard is not None and guard.is_fsdp_module()
