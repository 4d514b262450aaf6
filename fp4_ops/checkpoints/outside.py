"""Finds the tensors of linear layers outside the experts in a folder that is being quantised."""

from __future__ import annotations

from collections.abc import Mapping

from ..models.outside_experts import Kind, kind_of
from .files import CheckpointError
from .folder import Folder
from .source import MATRIX


def is_linear(folder: Folder, name: str) -> bool:
    """True for the weight of a linear layer outside the experts."""
    matrix = name.endswith(".weight") and len(folder.tensors[name].shape) == 2
    return matrix and not MATRIX.match(name) and "embed" not in name


def find_outside(folder: Folder, formats: Mapping[Kind, str]) -> dict[str, str]:
    """Map the names of the weights of some kinds to their formats.

    Raises CheckpointError for a kind that has no weight.
    """
    linears = {name: kind_of(name) for name in folder.tensors if is_linear(folder, name)}
    for kind in formats:
        if kind not in linears.values():
            tied = " (one that shares the embeddings' weight has none of its own)" * (kind == "head")
            raise CheckpointError(
                f"fp4: {folder.path} has no linear layer of kind {kind!r}{tied}. Leave it out"
            )
    return {name: formats[kind] for name, kind in linears.items() if kind is not None and kind in formats}
