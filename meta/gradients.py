"""Refuses gradients: operators have none, and asking for one is an error, never a silent zero.

fp4_ops/runtime/input_gradients.py gives the inputs of `moe` a gradient, if the user asks for it.

- Reverse mode: a call with a tensor that requires a gradient works; `backward` raises.
- `torch.func.grad`, `vjp`, `jacrev`: the call raises, because torch asks for the gradient at no later time.
- Forward mode (`torch.func.jvp`, `jacfwd`, dual tensors): the call raises, because a result without a tangent
  would mean a derivative of zero.

Importing this module registers the rule for every schema of csrc/schema.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import torch
from torch.autograd import forward_ad
from torch.library import Library

from .fakes import OPERATORS
from .torch_internals import (
    AFTER_AUTOGRAD,
    BelowAutograd,
    asks_for_gradient,
    in_forward_ad,
    in_functorch,
    pytree,
)

LIBRARY = Library("fp4", "IMPL")

ADAPTERS = {
    "moe": " For gradients of its inputs (adapters beside frozen experts, embeddings): "
    "fp4_ops.prepare(model, trainable_inputs=True)."
}


class Reason(NamedTuple):
    """Why an operator has no gradient, and what to compute in its place."""

    why: str
    instead: str


INFERENCE = Reason("4-bit weights are for inference", "train with the original weights")
_ROUNDS = Reason(
    "it rounds, and rounding has a gradient of zero", "differentiate something else than the rounded values"
)


def _with(torchs: str) -> Reason:
    return Reason("it is for inference", f"compute the same with {torchs}")


REASONS = {
    **dict.fromkeys(("quantize", "quantize_int8", "quantize_fp8"), _ROUNDS),
    "linears": _with("torch.nn.functional.linear and rms_norm"),
    "fp8_linear": _with("torch.nn.functional.linear"),
    "update_cache": _with("torch's own operators and Tensor.index_copy"),
    "attention": _with("torch.nn.functional.scaled_dot_product_attention"),
    "cached_attention": _with("Tensor.index_copy and torch.nn.functional.scaled_dot_product_attention"),
    "top_experts": _with("torch.softmax and torch.topk"),
    "router": _with("torch.nn.functional.linear, rms_norm, softmax and topk"),
    "all_reduce": _with("torch.distributed.nn.functional.all_reduce"),
    **dict.fromkeys(("to_masked", "from_masked"), _with("torch.Tensor.index_copy and index_select")),
}
"""Reasons of the operators without 4-bit weights, by name."""


def has_tangent(tensors: Iterable[Any]) -> bool:
    """True if one of `tensors` is a dual tensor of forward-mode differentiation at the current level."""
    if not in_forward_ad():
        return False
    # make_dual refuses other dtypes, and so does unpack_dual.
    every = pytree.tree_leaves(list(tensors))
    found = (t for t in every if isinstance(t, torch.Tensor) and t.dtype.is_floating_point)
    return any(forward_ad.unpack_dual(t).tangent is not None for t in found)


def refuse_tangent(what: str, reason: Reason) -> NoReturn:
    raise RuntimeError(
        f"{what} has no forward-mode derivative (torch.func.jvp, jacfwd, dual tensors): {reason.why}. Give "
        f"it x.detach() if its result does not count for the derivative, or {reason.instead}."
    )


class _Call(torch.autograd.Function):
    """Autograd function that returns the operator's result and raises in `backward`."""

    @staticmethod
    def forward(ctx: Any, name: str, call: Callable[..., Any], *args: Any) -> Any:
        ctx.name = name
        made = call(*args)
        return tuple(made) if isinstance(made, list) else made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        reason = REASONS.get(ctx.name, INFERENCE)
        raise RuntimeError(
            f"fp4::{ctx.name} has no gradient: {reason.why}. Run it under torch.no_grad(), or "
            f"{reason.instead}.{ADAPTERS.get(ctx.name, '')}"
        )


def call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns op(*args, **kwargs), skipping the autograd kernel below if nobody can ask for a derivative.

    Under `no_grad` that Python kernel is most of the host's time for a small call.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or in_forward_ad() or in_functorch():
        return op(*args, **kwargs)
    with BelowAutograd():
        return op(*args, **kwargs)


def _autograd_kernel(name: str) -> Callable[..., Any]:
    redispatch = getattr(torch.ops.fp4, name).default._handle.redispatch_boxed
    reason = REASONS.get(name, INFERENCE)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        asked = torch.is_grad_enabled() and asks_for_gradient(*args)
        if not asked and not in_forward_ad():  # every call under no_grad: keep this path short
            return redispatch(keyset & AFTER_AUTOGRAD, *args, **kwargs)
        if has_tangent(args):
            refuse_tangent(f"fp4::{name}", reason)

        def below(*args: Any) -> Any:
            with BelowAutograd():
                return redispatch(keyset & AFTER_AUTOGRAD, *args, **kwargs)

        if not asked:
            return below(*args)
        if in_functorch():
            raise RuntimeError(
                f"fp4::{name} has no gradient (torch.func.grad, vjp, jacrev): {reason.why}. Give it "
                f"x.detach() if its result does not count for the gradient, or {reason.instead}."
            )
        # torch.autograd.Function sees no tensor in a list, of arguments or of results.
        flat, spec = pytree.tree_flatten(args)
        return _Call.apply(name, lambda *flat: below(*pytree.tree_unflatten(flat, spec)), *flat)

    return kernel


for _name in OPERATORS:
    LIBRARY.impl(_name, _autograd_kernel(_name), "Autograd", with_keyset=True)
