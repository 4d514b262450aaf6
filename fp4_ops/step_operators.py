"""Registers operators that have no kernel on the CPU. They call other operators of torch or of fp4_ops."""

from __future__ import annotations

from torch.library import Library

from .backends import anywhere

_LIBRARY = Library("fp4", "IMPL")
_LIBRARY.impl("moe_slots", anywhere.moe_slots, "CPU")
