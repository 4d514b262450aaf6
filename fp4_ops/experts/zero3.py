"""Detects parameters that DeepSpeed's ZeRO-3 holds. They are empty here; their values are spread over
processes."""

from __future__ import annotations

import math

from torch import nn

GATHER = (
    "Call it before deepspeed.initialize, load the model without deepspeed.zero.Init, or call it within "
    "deepspeed.zero.GatheredParameters(model.parameters())"
)


def emptied(parameter: object) -> str:
    """Returns a text that says that ZeRO-3 holds the values of a parameter, or "" if it does not."""
    shape = getattr(parameter, "ds_shape", None)
    if not isinstance(parameter, nn.Parameter) or shape is None or parameter.numel() or not math.prod(shape):
        return ""
    return f"empty here: DeepSpeed ZeRO-3 holds its values, of shape {list(shape)}. {GATHER}"


def refuse_emptied(model: nn.Module) -> None:
    """Raises ValueError, for `explain`, if ZeRO-3 holds the values of a parameter."""
    for name, parameter in model.named_parameters():
        if words := emptied(parameter):
            raise ValueError(f"fp4: explain: {name} is {words}")
