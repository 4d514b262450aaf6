"""Checks the device argument of a command or a function, before any work."""

from __future__ import annotations

import torch


def usable_device(device: str | torch.device) -> torch.device:
    """Return a device that this torch and this machine have. Raises ValueError for others."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"fp4: device is {str(device)!r}, which is not there (torch {torch.__version__}: {reason}). Use "
            "'cpu', or a device that `python -m fp4_ops info` names"
        ) from None
    return found
