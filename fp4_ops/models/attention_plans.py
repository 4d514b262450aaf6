"""Runs attention of few tokens without cuDNN, which prepares a new kernel for each number of keys.

On Hopper and newer GPUs torch asks cuDNN first for scaled_dot_product_attention. cuDNN builds a plan for each
new size, which takes tens of milliseconds on the host. Without compilation, the number of keys grows with
each token, so each step waits for a plan. torch's other kernels need none.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

MOST_TOKENS = 2048
"""The largest number of tokens of a call without cuDNN. For more tokens, cuDNN's kernel may save more time
than its plan costs.

Prompts on an H100 (16 layers of Qwen3-30B-A3B), ms without cuDNN, with a new plan, and with a known one: 27,
59, 18 for 2048 tokens; 36, 73, 32 for 4096.
"""


def avoid_attention_plans(model: nn.Module) -> None:
    """Let a transformers model run attention without cuDNN in uncompiled calls that have few tokens and no
    gradients."""
    # Dynamo traces the hooks of inner modules together with the model, but not those of the outermost one.
    inner = getattr(model, "base_model", model)
    if inner is model or not isinstance(inner, nn.Module):
        return
    if _begin not in inner._forward_pre_hooks.values():
        inner.register_forward_pre_hook(_begin, with_kwargs=True)
        inner.register_forward_hook(_end, always_call=True)


def _begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():  # a compiled graph has fixed sizes and a fixed kernel
        return
    few = not torch.is_grad_enabled() and _has_few_tokens(args, kwargs)
    _open_calls().append(few)
    if few:
        _cudnn.turn_off()


def _end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    calls = _open_calls()
    if calls and calls.pop():
        _cudnn.turn_on()


def _has_few_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    ids = args[0] if args else kwargs.get("input_ids")
    x = ids if ids is not None else kwargs.get("inputs_embeds")
    return isinstance(x, Tensor) and _on_gpu(x) and x.dim() > 1 and x.shape[0] * x.shape[1] <= MOST_TOKENS


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


class _Cudnn:
    """torch's switch for cuDNN's attention, which holds for the whole process. It is off while any thread is
    in a call with few tokens."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls, self._was_on = 0, False

    def turn_off(self) -> None:
        with self._lock:
            if self._calls == 0:
                self._was_on = torch.backends.cuda.cudnn_sdp_enabled()
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._calls += 1

    def turn_on(self) -> None:
        with self._lock:
            self._calls -= 1
            if self._calls == 0 and self._was_on:
                torch.backends.cuda.enable_cudnn_sdp(True)


_cudnn = _Cudnn()
_local = threading.local()


def _open_calls() -> list[bool]:
    """Return whether cuDNN is off for each call that this thread has begun."""
    if not hasattr(_local, "calls"):
        _local.calls = []
    calls: list[bool] = _local.calls
    return calls
