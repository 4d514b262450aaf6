"""Registers operators that the CPU has no kernel for: they are other operators, torch's or ours."""

from __future__ import annotations

from torch.library import Library

from .backends import anywhere

_LIBRARY = Library("fp4", "IMPL")
_LIBRARY.impl("attention", anywhere.attention, "CPU")
_LIBRARY.impl("linears", anywhere.linears, "CPU")
_LIBRARY.impl("moe_slots", anywhere.moe_slots, "CPU")
_LIBRARY.impl("top_experts", anywhere.top_experts, "CPU")
_LIBRARY.impl("update_cache", anywhere.update_cache, "CPU")
