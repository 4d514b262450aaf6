"""Registers the CPU's operators of a decoding step beside the experts: torch's own operations."""

from __future__ import annotations

from torch.library import Library

from .backends import anywhere

_LIBRARY = Library("fp4", "IMPL")
_LIBRARY.impl("linears", anywhere.linears, "CPU")
