"""The CPU: operators in C++ (csrc/cpu), which choose by what the processor has."""

from __future__ import annotations

from .base import Backend

CPU = Backend("cpu", "cpu", ("tile16", "plain"), "the CPU kernels")
