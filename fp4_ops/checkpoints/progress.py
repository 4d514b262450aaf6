"""Shows a progress bar for reading and writing."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm


def progress_bar(total: int, what: str, show: bool) -> Any:
    """Returns a bar that counts bytes. It is visible only on a terminal."""
    return tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=None if show else True)
