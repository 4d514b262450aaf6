"""Handles indexes that transformers cannot read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import modeling_utils

from ...checkpoints.files import read_json
from ...checkpoints.folder import weight_map

_Found = tuple[list[str], dict[str, Any]]


def read_any_index() -> None:
    """Makes transformers read a local folder whose index has no "metadata". Other programs read such folders.

    An index that names no files then raises a CheckpointError. A second call changes nothing.
    """
    original: Callable[..., _Found] = modeling_utils.get_checkpoint_shard_files
    if hasattr(original, "_fp4_original"):
        return

    @functools.wraps(original)
    def get_checkpoint_shard_files(path: Any, index_filename: Any, *args: Any, **kwargs: Any) -> _Found:
        folder = Path(path, kwargs.get("subfolder") or "")
        if not folder.is_dir():
            return original(path, index_filename, *args, **kwargs)
        files = {name: str(file) for name, file in weight_map(folder, Path(index_filename)).items()}
        metadata = read_json(Path(index_filename)).get("metadata")
        metadata = dict(metadata) if isinstance(metadata, dict) else {}
        names = {name: str(Path(file).relative_to(folder)) for name, file in files.items()}
        metadata |= {"all_checkpoint_keys": list(files), "weight_map": names}
        return sorted(set(files.values())), metadata

    get_checkpoint_shard_files._fp4_original = original  # type: ignore[attr-defined]
    modeling_utils.get_checkpoint_shard_files = get_checkpoint_shard_files  # type: ignore[assignment]


@contextmanager
def any_index() -> Iterator[None]:
    """Applies `read_any_index` inside the context only."""
    before = modeling_utils.get_checkpoint_shard_files
    read_any_index()
    try:
        yield
    finally:
        modeling_utils.get_checkpoint_shard_files = before
