"""Refuses folders whose config.json has lost its quantization_config, after transformers has read them."""

from __future__ import annotations

import functools
from typing import Any

from transformers import modeling_utils

from ...checkpoints.dialects import DIALECTS
from ...checkpoints.files import NO_CONFIG, CheckpointError

_OF_CODES = tuple(
    {d.packed for d in DIALECTS.values() if d.packed not in ("", ".weight")}
    | {
        d.block_scale
        for d in DIALECTS.values()
        if "weight_" in d.block_scale or "_scale_inv" in d.block_scale
    }
)
"""Endings of names that only tensors of quantised weights have."""


def refuse_unexplained() -> None:
    """Makes `from_pretrained` raise a CheckpointError for codes and scales that no config explains.

    transformers would only list them as UNEXPECTED, and leave the weights at random. A second call changes
    nothing.
    """
    original: Any = modeling_utils.log_state_dict_report
    if hasattr(original, "_fp4_original"):
        return

    @functools.wraps(original)
    def log_state_dict_report(
        model: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any
    ) -> Any:
        info = kwargs.get("loading_info")
        if info is not None and getattr(model.config, "quantization_config", None) is None:
            names = sorted(name for name in info.unexpected_keys if name.endswith(_OF_CODES))
            if names:
                more = f" and {len(names) - 1} more tensors" * (len(names) > 1)
                raise CheckpointError(
                    f"fp4: {pretrained_model_name_or_path} has {names[0]}{more}, codes or scales of "
                    f"quantised weights, {NO_CONFIG}"
                )
        return original(model, pretrained_model_name_or_path, *args, **kwargs)

    log_state_dict_report._fp4_original = original  # type: ignore[attr-defined]
    modeling_utils.log_state_dict_report = log_state_dict_report
