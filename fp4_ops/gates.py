"""The gated activations of fp4::moe in plain torch, as meta.formats.Activation defines them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .meta.formats import Activation

_CURVES = {
    "gelu": F.gelu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}


def apply_gate(x: Tensor, activation: Activation) -> Tensor:
    """f(gate) * (up + up_offset) in plain torch, as meta.formats.Activation defines it."""
    gate, up = (x[..., ::2], x[..., 1::2]) if activation.interleaved else x.chunk(2, dim=-1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    curve = _CURVES.get(activation.function, lambda gate: gate * torch.sigmoid(activation.alpha * gate))
    return curve(gate) * (up + activation.up_offset)
