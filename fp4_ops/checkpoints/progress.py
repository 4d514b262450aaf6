"""The progress bar of reading and writing."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm


def progress_bar(total: int, what: str, show: bool) -> Any:
    """Counts bytes; only on a terminal."""
    return tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=None if show else True)
