"""A folder that is to be quantised: what its experts' weights are called, and what is in 8 bits."""

from __future__ import annotations

import re

from .dialects import StoredWeight, dialects_of, stored_config, stored_weights
from .files import CheckpointError, Folder, TensorInfo

MATRIX = re.compile(r"^(.*experts\.\d+\.)(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")
PARTNER = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}
_STACK = re.compile(r"^(.*experts)\.(gate_up_proj|up_proj|down_proj)$")
_LINEAR = re.compile(r"^(.*block_sparse_moe)\.(input|output)_linear\.weight$")
"""Granite's names for the two."""


def stack_of(info: TensorInfo) -> tuple[str, str] | None:
    """The experts that a tensor is the stacked weights of, and which: gate_up_proj, up_proj or down_proj."""
    if len(info.shape) != 3:
        return None
    if match := _STACK.match(info.name):
        return match[1], match[2]
    if match := _LINEAR.match(info.name):
        return f"{match[1]}.experts", {"input": "gate_up_proj", "output": "down_proj"}[match[2]]
    return None


def eight_bits(folder: Folder) -> dict[str, StoredWeight]:
    """The weights of a folder in 8 bits, by the name of the tensor of their codes.

    Raises CheckpointError for a folder that holds anything in 4 bits, or in what is not known.
    """
    stored = stored_config(folder.path)
    if stored is None:
        return {}
    dialects = dialects_of(stored, str(folder.path / "config.json"))
    if not all(d.is_dense for d in dialects):
        raise CheckpointError(
            f"fp4: {folder.path} is quantised already ({', '.join(d.name for d in dialects)}). "
            "fp4_ops.load_checkpoint loads it as it is"
        )
    return {w.packed.name: w for w in stored_weights(folder.tensors, dialects).values()}
