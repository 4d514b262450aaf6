"""Refuses folders whose config.json has lost its quantization_config, when transformers reads them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from ...checkpoints.folder import headers
from ...checkpoints.unexplained import refuse_codes


def refuse_unexplained() -> None:
    """Makes `from_pretrained` raise a CheckpointError for codes that no config explains, where the model asks
    for a weight.

    transformers would leave the weight at random, or take codes for its values. A second call changes
    nothing.
    """
    original: Any = PreTrainedModel._load_pretrained_model
    if hasattr(original, "_fp4_original"):
        return

    @functools.wraps(original)
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if state_dict is None and getattr(model.config, "quantization_config", None) is None:
            refuse_codes(model, headers(checkpoint_files or ()))
        return original(model, state_dict, checkpoint_files, *args, **kwargs)

    _load_pretrained_model._fp4_original = original  # type: ignore[attr-defined]
    made: Any = staticmethod(_load_pretrained_model)
    PreTrainedModel._load_pretrained_model = made  # type: ignore[method-assign]


@contextmanager
def unexplained_refused() -> Iterator[None]:
    """Applies `refuse_unexplained` inside the context only."""
    before: Any = PreTrainedModel.__dict__["_load_pretrained_model"]
    refuse_unexplained()
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = before  # type: ignore[method-assign]
