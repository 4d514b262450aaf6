"""Packs the experts of 16-bit folders to 4 bits while transformers reads them, one weight at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps

from ...checkpoints.files import NO_CONFIG, OTHER_MODEL, PREFIXED, CheckpointError
from ...checkpoints.folder import headers
from ...experts.find import form_of, is_experts
from ...experts.names import wrapper_in
from ...models.arriving import ArrivingExperts
from ...models.expert_lists import find_lists


class PackOnLoad(ConversionOps):
    """A conversion that transformers calls with each complete weight, for `ArrivingExperts`."""

    def __init__(self, arriving: ArrivingExperts) -> None:
        self.arriving = arriving
        self.error: Exception | None = None
        """The first error. transformers would only log it, and raise another error without the cause."""

    def convert(self, input_dict: dict[str, Any], *_: Any, **kwargs: Any) -> dict[str, Any]:
        """Packs a weight. Returns nothing for transformers to put into the model."""
        for name in list(input_dict):
            value = input_dict.pop(name)
            weight: Tensor = value[0] if isinstance(value, list) else value
            missing = kwargs.get("missing_keys")
            if missing is not None:
                missing.difference_update(self.arriving.names_of(name))
            try:
                if self.error is None:
                    self.arriving.pack(name, weight)
            except (RuntimeError, ValueError) as error:
                self.error = error
        return {}


def check_read(model: nn.Module, files: Iterable[str]) -> None:
    """Raises CheckpointError for experts that no tensor of the files fills, because they would be random.

    transformers marks the parameters that it has filled.
    """
    owners = {n: m for n, m in model.named_modules() if is_experts(m) or form_of(m)}
    lists = {f"{n}.{i}": m for n, experts in find_lists(model)[0].items() for i, m in enumerate(experts)}
    missing = [
        f"{name}.{attribute}"
        for name, module in (owners | lists).items()
        for attribute, p in module.named_parameters(recurse=name in lists)
        if p.dim() > 1 and not getattr(p, "_is_hf_initialized", False)
    ]
    if not missing:
        return
    more = f" and {len(missing) - 1} more expert weights" * (len(missing) > 1)
    raise CheckpointError(
        f"fp4: the folder has no values for {missing[0]}{more}: no key of its files fits, and they would "
        f"stay as drawn at random. {_prefix(missing[0], files)}"
    )


def _prefix(parameter: str, files: Iterable[str]) -> str:
    """Says how the files name the layer's experts, and how to load them by these names."""
    owner = parameter.rpartition(".")[0]
    infos = headers(files)
    keys = [name for name in infos if "expert" in name]
    parts = owner.split(".")
    for start in range(len(parts)):
        tail = ".".join(parts[start:])
        key = next((k for k in keys if f".{tail}." in f".{k}."), None)
        if key is None or len(parts) - start < 2:
            continue
        own, theirs = owner.removesuffix(tail), f".{key}".partition(f".{tail}.")[0]
        theirs = f"{theirs}.".removeprefix(".")
        if own == theirs:
            beside = [infos[k] for k in keys if k.startswith(f"{owner}.")]
            if codes := next((info for info in beside if info.dtype.itemsize == 1), None):
                return f"The files have {codes}, codes or scales of a quantised weight, {NO_CONFIG}"
            return f"The files have {key} and the like, but not all of them. Get the whole folder"
        if re.sub(r"\d+", "", own) == re.sub(r"\d+", "", theirs):
            return f"The files have {key}, but no such layer. {OTHER_MODEL}"
        old = theirs.replace(".", r"\.")
        return (
            f"The files have {key}: the prefix is {theirs!r}, where the model has {own!r}. Use the model "
            f"class of that prefix, or from_pretrained(..., key_mapping={{'^{old}': {own!r}}})"
        )
    if (wrapped := next(filter(wrapper_in, keys), None)) is not None:
        return f"The files have {wrapped}, with {wrapper_in(wrapped)!r} in its name. {PREFIXED}"
    some = f"The files have {keys[0]} and the like" if keys else "No key of the files names experts"
    return f"{some}. Use the model class that the folder was saved from"


def shared_names(model: Any) -> set[str]:
    """Returns the names of parameters that transformers ties to each other."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {*tied, *tied.values()} if isinstance(tied, dict) else set()
