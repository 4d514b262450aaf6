"""Names of one expert's matrices, as checkpoints and trainers use them (`3.gate_proj.weight`,
`3.w1.weight`), and names that wrappers add."""

from __future__ import annotations

import re

HALVES = ("gate", "up")
MATRICES = {
    "gate_proj": ("gate_up", "gate"), "w1": ("gate_up", "gate"),
    "up_proj": ("gate_up", "up"), "w3": ("gate_up", "up"),
    "gate_up_proj": ("gate_up", ""), "input_linear": ("gate_up", ""),
    "down_proj": ("down", ""), "w2": ("down", ""), "output_linear": ("down", ""),
}  # fmt: skip
"""For each name of an expert's matrix: the weight of the module that contains it, and which half of it."""

NUMBERED = re.compile(r"^(\d+)\.(\w+?)(\.weight|\.bias|_bias|)$")
"""The name of one expert's tensor within its module: the expert, its matrix, and weight or bias."""

WRAPPERS = frozenset(("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
"""Names of the attributes in which wrappers hold their module. The wrappers are those of torch.compile, data
parallelism, FSDP and activation checkpointing. The trainer's model and the model that runs may be wrapped in
different ways."""


def wrapper_in(name: str) -> str:
    """Returns the name of a wrapper that is part of a tensor's name, or ""."""
    return next((part for part in name.split(".") if part in WRAPPERS), "")
