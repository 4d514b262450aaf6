"""Runs of bytes, of which samples of tensors are made (samples.py), and comparisons of them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

RUN = 64
"""Bytes of one run: a CPU's cache line, two sectors of a GPU's."""


class Runs(Protocol):
    """What a kernel is told of them."""

    device: torch.device
    at: Tensor
    """int64 addresses."""
    sizes: Tensor
    """int64 bytes, at most RUN."""
    held: Tensor
    """uint8 [runs, RUN]: what was there."""
    watches: dict[int, Any]
    """On a GPU: what compares them on each stream."""


class Comparison:
    """Of samples with what is there now."""

    def __init__(self, found: bool) -> None:
        self._found = found

    def differs(self) -> bool:
        return self._found
