"""Conditions that the checks of operators are built from, with their error messages.

csrc/common/checks.h has the same functions in C++; tests/operators/test_bad_input.py compares the two. Each
raises RuntimeError by `torch._check`. The message names the argument, its value, and what it must be. Sizes
may be symbolic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from .formats import ACTIVATION_NAMES, Activation, find_activation

Shape = tuple[int, ...]
Dtypes = tuple[torch.dtype, ...]


def check(condition: bool | torch.SymBool, message: Callable[[], str]) -> None:
    """Calls `torch._check`, which is slow, only if sizes are symbolic or the condition is false."""
    if condition is not True:
        torch._check(condition, message)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_names(dtypes: Dtypes) -> str:
    return " or ".join(map(dtype_name, dtypes))


def listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def shape_text(shape: Iterable[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def leading(t: torch.Tensor, count: int) -> Shape:
    """Returns the first `count` sizes. A negative count drops that many sizes at the end."""
    return tuple(t.shape[:count])


def common(dtypes: Dtypes, others: Dtypes) -> Dtypes:
    """Returns the dtypes of `dtypes` that are also in `others`."""
    return tuple(d for d in dtypes if d in others)


def check_name(what: str, value: str, names: Iterable[str], when: str = "", hint: str = "") -> None:
    check(value in names, lambda: f"{what} is '{value}'; {when}it must be one of: {listed(names)}{hint}")


def check_dtype(name: str, t: torch.Tensor, allowed: Dtypes) -> None:
    check(
        t.dtype in allowed,
        lambda: f"{name} has dtype {dtype_name(t.dtype)}; it must be {dtype_names(allowed)}",
    )


def check_shape(name: str, t: torch.Tensor, shape: Shape) -> None:
    def message() -> str:
        return f"{name} has shape {shape_text(t.shape)}; it must be {shape_text(shape)}"

    check(t.dim() == len(shape), message)
    for got, want in zip(t.shape, shape):
        check(got == want, message)


def check_device(name: str, t: torch.Tensor, like_name: str, like: torch.Tensor) -> None:
    check(
        t.device == like.device,
        lambda: f"{name} is on {t.device} and {like_name} on {like.device}; they must be on one device",
    )


def check_activation(activation: str) -> Activation:
    found = find_activation(activation)
    name, brackets, _ = activation.partition("(")
    if not (brackets and name in ACTIVATION_NAMES):
        check_name("activation", activation, ACTIVATION_NAMES)
    check(
        found is not None,
        lambda: (
            f"activation is '{activation}'; one with a gate may have brackets, and in them limit=L, "
            "L a positive number: what gate and up are clamped to"
        ),
    )
    assert found is not None
    return found
