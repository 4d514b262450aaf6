"""Backend for the CPU: operators in C++ (csrc/cpu). They choose by the instructions that the processor has.

constants.json has their thresholds and sizes. setup.py makes build/cpu_constants.h from it.
"""

from __future__ import annotations

from ..base import Backend

CPU = Backend("cpu", "cpu", ("tile16", "tile16_invariant", "plain"), "the CPU kernels")
