"""Decides which devices run the operators of a step's kernels. On others, torch's own operations are
faster.
"""

from __future__ import annotations

import torch

from ...backends.hopper.trust import linears_kernel
from ...runtime import native


def runs(device: torch.device) -> bool:
    """True for a Hopper GPU on which the kernel of fp4::linears passed the check of its first use."""
    index = device.index or 0
    return device.type == "cuda" and native.family(index) == native.HOPPER and linears_kernel(index)
