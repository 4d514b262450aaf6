"""Lets `generate` take long prompts in parts, so that their activations fit into a budget of GPU memory."""

from __future__ import annotations

import copy
import types
from typing import Any

from torch import Tensor

from .memory_plan import memory_plan_of

_DIVIDED = frozenset({"past_key_values", "attention_mask", "position_ids", "use_cache", "logits_to_keep"})
"""Arguments of a model that transformers divides together with a prompt."""


def divide_prompts(model: Any) -> None:
    """Makes `generate` divide prompts into parts that fit into the model's memory plan, if this transformers
    reads prompts by `_prefill`. Prompts with arguments other than _DIVIDED stay whole."""
    if hasattr(type(model), "_prefill"):
        model._prefill = types.MethodType(_prefill, model)


def _prefill(
    self: Any, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **how: Any
) -> Any:
    """Runs a prompt as transformers' `_prefill` does. A long prompt runs in parts, which are not compiled."""
    most = _part(self, input_ids, model_kwargs)
    given = getattr(generation_config, "prefill_chunk_size", None)
    if most is not None and (given is None or given > most):
        generation_config = copy.copy(generation_config)
        generation_config.prefill_chunk_size = most
        generation_config.disable_compile = True
    return type(self)._prefill(self, input_ids, generation_config, model_kwargs, *args, **how)


def _part(model: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> int | None:
    """Returns the tokens of each sequence that one part has, None if the prompt stays whole."""
    plan = memory_plan_of(model)
    if plan is None or plan.prompt_tokens is None or input_ids.dim() != 2:
        return None
    sequences, tokens = input_ids.shape
    most = max(1, plan.prompt_tokens // max(1, sequences))
    other = any(value is not None and name not in _DIVIDED for name, value in model_kwargs.items())
    cache = model_kwargs.get("past_key_values")
    if other or cache is None or tokens - int(cache.get_seq_length()) <= most:
        return None
    return most
