"""Tells which devices run the kernels of a step's operators. Elsewhere torch's own operations are faster."""

from __future__ import annotations

import torch

from ... import native


def runs(device: torch.device, *families: int) -> bool:
    """True if the device runs one of these families of native kernels."""
    return device.type == "cuda" and native.family(device.index or 0) in families
