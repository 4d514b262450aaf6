"""Finds the tensors of linear layers outside the experts in a folder that is being quantised."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..outside_experts import KEEP, Kind, chosen_formats, kind_of
from .files import CheckpointError
from .folder import Folder
from .source import MATRIX


def kinds_of_format(wanted: Mapping[Kind, str], format: str) -> list[Kind]:
    """Return the kinds that are quantised. Raises ValueError for a format other than the experts'."""
    chosen = chosen_formats(wanted)
    for kind, own in chosen.items():
        if own != format:
            raise ValueError(
                f"fp4: {kind} is {own!r} and format is {format!r}; a folder has one format. Use {format!r} "
                f"or {KEEP!r}"
            )
    return list(chosen)


def is_linear(folder: Folder, name: str) -> bool:
    """True for the weight of a linear layer outside the experts."""
    matrix = name.endswith(".weight") and len(folder.tensors[name].shape) == 2
    return matrix and not MATRIX.match(name) and "embed" not in name


def find_outside(folder: Folder, kinds: Collection[Kind]) -> list[str]:
    """Return the names of the weights of these kinds. Raises CheckpointError for a kind that has none."""
    linears = {name: kind_of(name) for name in folder.tensors if is_linear(folder, name)}
    for kind in kinds:
        if kind not in linears.values():
            tied = " (one that shares the embeddings' weight has none of its own)" * (kind == "head")
            raise CheckpointError(
                f"fp4: {folder.path} has no linear layer of kind {kind!r}{tied}. Leave it out"
            )
    return [name for name, kind in linears.items() if kind in kinds]
