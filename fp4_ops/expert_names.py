"""Names of one expert's matrices, as files and trainers have them: `3.gate_proj.weight`, `3.w1.weight`."""

from __future__ import annotations

import re

HALVES = ("gate", "up")
MATRICES = {
    "gate_proj": ("gate_up", "gate"), "w1": ("gate_up", "gate"),
    "up_proj": ("gate_up", "up"), "w3": ("gate_up", "up"),
    "gate_up_proj": ("gate_up", ""), "input_linear": ("gate_up", ""),
    "down_proj": ("down", ""), "w2": ("down", ""), "output_linear": ("down", ""),
}  # fmt: skip
"""An expert's matrix, by the name that tools give it: which weight of the module it is in, and which half."""

NUMBERED = re.compile(r"^(\d+)\.(\w+?)(\.weight|\.bias|_bias|)$")
"""One expert's tensor within its module: the expert, its matrix, and what of it."""
