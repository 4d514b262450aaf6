"""Finds experts modules that are one module under two names, or that hold the same weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ..experts.find import form_of
from ..experts.packed import PackedWeight


def shared_experts(model: nn.Module) -> dict[str, str]:
    """Maps the name of an experts module to the first one with the same weights. Others are left out.

    Weights are the same if they are one object, or if transformers ties them by their names.
    """
    tied = getattr(model, "all_tied_weights_keys", None)
    of_name = {name: source for name, source in tied.items()} if isinstance(tied, dict) else {}
    first: dict[tuple[Any, ...], str] = {}
    found: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        attributes = _weights(module)
        if not attributes:
            continue
        sources = [of_name.get(f"{name}.{attribute}", "").rpartition(".")[0] for attribute in attributes]
        if sources[0] and len({*sources}) == 1:
            found[name] = sources[0]
            continue
        key = tuple(id(getattr(module, attribute)) for attribute in attributes)
        if first.setdefault(key, name) != name:
            found[name] = first[key]
    return found


def _weights(module: nn.Module) -> tuple[str, ...]:
    """Returns the attributes of an experts module's two weights, packed or not."""
    packed = tuple(name for name, child in module._modules.items() if isinstance(child, PackedWeight))
    if packed or (form := form_of(module)) is None:
        return packed
    return form.gate_up, form.down


def shared_by_class(model: Any) -> dict[str, str]:
    """Does the same for a new model of this class and config. A reader of a saved folder builds such a
    model.
    """
    if not shared_experts(model):
        return {}
    try:
        with torch.device("meta"):
            return shared_experts(type(model)(copy.deepcopy(model.config)))
    except Exception:  # the class needs more than its config
        return {}
