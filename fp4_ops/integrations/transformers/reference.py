"""Loads models with ordinary weights from any folder. `eval` and `report` use them as the reference."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from ...checkpoints.dialects import stored_config
from ...checkpoints.families import model_class, named_class, register_families
from ...checkpoints.folder import check_name
from ...checkpoints.load import check_info
from ...experts.packed import PackedWeight
from ...models.fp8_linear import FP8Linear, to_linear
from ...quantization.evaluation import Stored
from ...tensor import FP4Tensor
from .load_model import load_checkpoint
from .quantizer import registered


def load_reference(
    model: str | os.PathLike[str], device: str | torch.device, dtype: torch.dtype
) -> tuple[Any, dict[str, Stored]]:
    """Loads a model with ordinary weights only. Also returns, by module, which experts were in 4 bits.

    model: a folder or a name for `from_pretrained`. Weights in 4 bits and in fp8 are dequantised to `dtype`.

    Raises CheckpointError if the folder lacks weights, which transformers would fill at random.
    """
    if Path(model).is_dir() and stored_config(Path(model)) is not None:
        loaded: Any = load_checkpoint(None, model, dtype=dtype)
    else:
        register_families()
        check_name(Path(model))
        config = AutoConfig.from_pretrained(model)
        with registered():
            loaded, info = model_class(config).from_pretrained(
                model, config=config, dtype=dtype, output_loading_info=True
            )
        if named_class(config) is None:  # the class is a guess: the folder may lack its head
            info["missing_keys"] = {key for key in info["missing_keys"] if "expert" in key}
        check_info(info, model)
    return loaded.to(device).eval(), dequantize(loaded, dtype)


@torch.no_grad()
def dequantize(model: nn.Module, dtype: torch.dtype) -> dict[str, Stored]:
    """Turns weights in 4 bits and in fp8 into ordinary parameters, in place.

    Returns, by module, how its experts were stored.
    """
    stored: dict[str, Stored] = {}
    modules: dict[str, Any] = dict(model.named_modules())
    for name, module in modules.items():
        recipe = module.__dict__.pop("_fp4_recipe", None)
        if recipe is None:
            continue
        was = Stored(getattr(module, recipe.form.gate_up).format, {})
        for matrix, attribute in recipe.form.weights:
            weight: PackedWeight = getattr(module, attribute)
            was.packed[matrix] = weight.in_layout("plain")
            values = weight.dequantize(dtype)
            del module._modules[attribute]
            module._parameters[attribute] = nn.Parameter(
                values.transpose(1, 2).contiguous() if module.is_transposed else values, requires_grad=False
            )
        module.config._experts_implementation = "eager"
        stored[name] = was
    for module in modules.values():
        if isinstance(module, FP8Linear):
            to_linear(module, dtype)
        for key, p in module._parameters.items():
            if isinstance(p, FP4Tensor):
                module._parameters[key] = nn.Parameter(p.dequantize(dtype).contiguous(), requires_grad=False)
    return stored
