"""Reads from a folder whether its weights are quantised, and the names of its experts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from .dialects import DIALECTS, Dialect, StoredWeight, dialects_of, stored_config, stored_weights
from .files import INCOMPLETE, CheckpointError, TensorInfo, unexplained
from .folder import INDEX, SINGLE, Folder
from .foreign import of_config, of_tensors

MATRIX = re.compile(r"^(.*experts\.\d+\.)(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")
PARTNER = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}
_STACK = re.compile(r"^(.*experts)\.(gate_up_proj|up_proj|down_proj)$")
_LINEAR = re.compile(r"^(.*block_sparse_moe)\.(input|output)_linear\.weight$")
"""Granite's names for the two matrices."""


def stack_of(info: TensorInfo) -> tuple[str, str] | None:
    """Returns the experts whose stacked weights a tensor is, and which of gate_up_proj, up_proj or
    down_proj."""
    if len(info.shape) != 3:
        return None
    if match := _STACK.match(info.name):
        return match[1], match[2]
    if match := _LINEAR.match(info.name):
        return f"{match[1]}.experts", {"input": "gate_up_proj", "output": "down_proj"}[match[2]]
    return None


def storage(folder: Folder) -> dict[str, Any] | None:
    """Reads from a folder how its weights are stored. Returns None for ordinary weights.

    Raises CheckpointError for another tool's folder, and for codes that no config explains.
    """
    stored = stored_config(folder.path)
    kind = of_config(folder.config, stored)
    if kind is not None:
        method = (stored or {}).get("quant_method")
        by = f"quant_method {method!r}" if method else repr(kind.config_key)
        raise CheckpointError(
            f"fp4: {folder.path} is quantised by {kind.what} ({by} in its config.json), which is not read. "
            f"{kind.advice}"
        )
    if stored is not None:
        return stored
    if (found := of_tensors(folder.tensors)) is not None:
        kind, name = found
        raise CheckpointError(kind.refusal(folder.path, name))
    ends = tuple(d.packed for d in DIALECTS.values() if d.packed)
    for info in folder.tensors.values():
        if info.name.endswith(ends) and not info.is_ordinary:
            raise unexplained(info)
    return None


def four_bit_weights(folder: Folder, dialects: Iterable[Dialect]) -> dict[str, StoredWeight]:
    """Returns the weights of a folder in its dialects. Raises CheckpointError if none is in 4 bits."""
    dialects = tuple(dialects)
    weights = stored_weights(folder.tensors, dialects)
    if all(w.dialect.is_dense for w in weights.values()):
        names = " and ".join(d.name for d in dialects if not d.is_dense)
        more = f"{INCOMPLETE}, or take the config.json that was written with the files"
        if folder.index is None and (folder.path / INDEX).is_file():
            more = (
                f"The folder has {INDEX}, too. Where both are there, {SINGLE} counts, as in transformers: "
                "remove the one that an earlier save left"
            )
        raise CheckpointError(
            f"fp4: config.json of {folder.path} says that weights are in 4 bits ({names}); none of "
            f"{folder.name(folder.files[0])}{' and the other shards' * (len(folder.files) > 1)} is. {more}"
        )
    return weights


def eight_bits(folder: Folder) -> dict[str, StoredWeight]:
    """Returns the weights of a folder in 8 bits, by the tensor of their codes.

    Raises CheckpointError for a folder that holds anything in 4 bits, or in an unknown form.
    """
    stored = storage(folder)
    if stored is None:
        return {}
    dialects = dialects_of(stored, str(folder.path / "config.json"))
    if not all(d.is_dense for d in dialects):
        raise CheckpointError(
            f"fp4: {folder.path} is quantised already ({', '.join(d.name for d in dialects)}). "
            "fp4_ops.load_checkpoint loads it as it is"
        )
    return {w.packed.name: w for w in stored_weights(folder.tensors, dialects).values()}
