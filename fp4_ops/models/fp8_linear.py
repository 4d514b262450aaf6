"""Defines `FP8Linear`, a linear layer with its weight in fp8 (e4m3) and one scale for each row.

The scale of a row is its largest magnitude divided by 448, the largest e4m3. A power of two above that would
make codes times scales exact in bfloat16. But the largest value of a row then has an error, too, which counts
in short rows and in rows with outliers. docs/accuracy.md compares both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..meta.dtensors import split_over_processes
from ..quantization.overwrite import copy_into
from ..quantization.weight import SOURCE_DTYPES
from ..runtime import native

FP8 = "fp8"
"""Name of the format in `prepare(attention=..., dense=..., head=...)`."""
CODES = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest e4m3."""
_AT_ONCE = 1 << 22
"""Elements quantised at a time, so that float32 copies are small."""


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (codes float8_e4m3fn [N, K], scales float32 [N]) of a finite weight [N, K].

    A row of zeros has scale 1. Codes are rounded to nearest, ties to even.
    """
    n, k = weight.shape
    codes = torch.empty((n, k), dtype=CODES, device=weight.device)
    scales = torch.ones(n, dtype=torch.float32, device=weight.device)
    step = max(1, _AT_ONCE // max(k, 1))
    for start in range(0, n if k else 0, step):
        rows = weight[start : start + step].float()
        largest = rows.abs().amax(1)
        scale = (largest / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        scale = torch.where(largest > 0, scale, 1)
        codes[start : start + step] = (rows / scale[:, None]).clamp(-LARGEST, LARGEST).to(CODES)
        scales[start : start + step] = scale
    return codes, scales


class FP8Linear(nn.Linear):
    """Computes y = (x @ weight.T) * weight_scale + bias by `torch.ops.fp4.fp8_linear`.

    weight: float8_e4m3fn [N, K], without gradient.
    weight_scale: float32 [N], a buffer.

    Casts of the model (`.half()`, `.to(torch.bfloat16)`) cast the bias, not the codes or the scales. x may be
    float32, bfloat16 or float16, and a bias must have the same dtype. Under autocast both get its dtype, as
    in nn.Linear. No gradient passes through the layer. `load_state_dict` also takes a weight in float32,
    bfloat16 or float16, without a scale, and quantises it.
    """

    weight: nn.Parameter
    weight_scale: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        codes, scale = quantize_rows(self.weight.detach())
        self._hold(nn.Parameter(codes, requires_grad=False), scale)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x = x.to(dtype)
            bias = None if bias is None else bias.to(dtype)  # type: ignore[assignment]
        y: Tensor = torch.ops.fp4.fp8_linear(x, self.weight, self.weight_scale, bias)
        return y

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the values of the weight, rounded once."""
        return (self.weight.detach().double() * self.weight_scale[:, None]).to(dtype)

    @torch.no_grad()
    def overwrite(self, values: Tensor) -> None:
        """Quantises new values [N, K] into the memory of the old ones.

        Raises ValueError if they do not fit.
        """
        if why := self._unfit(values):
            raise ValueError(f"fp4: the new values for a weight in fp8 {why}")
        for memory, new in zip((self.weight, self.weight_scale), quantize_rows(values.detach())):
            copy_into(memory, new)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state with codes as bytes: torch 2.13 writes a pickle of fp8 tensors that it cannot
        read."""
        codes = nn.Parameter(self.weight.detach().view(torch.uint8), requires_grad=False)
        return {**self.__dict__, "_parameters": {**self._parameters, "weight": codes}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.weight.dtype != CODES:
            self.weight = nn.Parameter(self.weight.detach().view(CODES), requires_grad=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> FP8Linear:
        """Copies the tensors themselves, not the state above, so that a shared weight stays shared."""
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__dict__, memo))
        return made

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weight in fp8"

    def _hold(self, codes: nn.Parameter, scale: Tensor) -> None:
        self.weight = codes
        self.register_buffer("weight_scale", scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FP8Linear:
        """Applies `fn` to the layer's tensors, and only moves the codes and the scales."""

        def applied(t: Tensor) -> Tensor:
            if t is not self.weight and t is not self.weight_scale:
                return fn(t)
            made = fn(t.new_empty(1))
            return fn(t) if made.dtype == t.dtype else t.to(made.device)

        super()._apply(applied, recurse)
        return self

    def _unfit(self, values: Tensor) -> str:
        """Returns why values cannot become the weight, "" if they can."""
        if words := split_over_processes(values):
            return f"are {words}; pass .full_tensor(), all of it"
        if values.dtype not in SOURCE_DTYPES:
            return f"are {values.dtype}; they must be float32, bfloat16 or float16"
        if values.shape != self.weight.shape:
            return f"have shape {list(values.shape)}; it must be {list(self.weight.shape)}"
        if not values.isfinite().all():
            return "hold NaN or infinity, which have no fp8 code. The weight keeps its old values"
        return ""

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        name, scale = f"{prefix}weight", f"{prefix}weight_scale"
        values = state_dict.get(name)
        if isinstance(values, Tensor) and values.dtype != CODES:
            held = {name: self.weight.detach(), scale: self.weight_scale}
            if scale in state_dict:
                error_msgs.append(
                    f"fp4: {name} is {values.dtype}, and {scale} is beside it; it must be {CODES}"
                )
            elif why := self._unfit(values):
                error_msgs.append(f"fp4: the new values for {name} {why}")
            else:
                held = dict(zip(held, quantize_rows(values.to(self.weight.device))))
            state_dict = {**state_dict, **held}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def has_kernel(device: torch.device) -> bool:
    """Returns whether a device has a kernel for weights in fp8. On others each call dequantises them."""
    return device.type == "cpu" or native.is_hopper(device)


def put_fp8(linear: nn.Linear, like: FP8Linear | None = None) -> FP8Linear:
    """Turns an nn.Linear into an FP8Linear, in place: hooks and references to the module stay.

    like: a layer that had the same weight, whose codes and scales it then shares.
    """
    if like is not None:
        return put_codes(linear, like.weight, like.weight_scale)
    codes, scale = quantize_rows(linear.weight.detach())
    return put_codes(linear, nn.Parameter(codes, requires_grad=False), scale)


def to_linear(layer: FP8Linear, dtype: torch.dtype) -> nn.Linear:
    """Turns an FP8Linear into an nn.Linear with the same values in `dtype`, in place."""
    made: Any = layer
    values = layer.dequantize(dtype)
    del made._buffers["weight_scale"]
    made.__class__ = nn.Linear
    made.weight = nn.Parameter(values, requires_grad=False)
    plain: nn.Linear = made
    return plain


def put_codes(linear: nn.Linear, weight: nn.Parameter, scale: Tensor) -> FP8Linear:
    """Turns an nn.Linear into an FP8Linear with these codes and scales, in place."""
    made: Any = linear
    made.__class__ = FP8Linear
    made._hold(weight, scale)
    for name, held in [*vars(made).items()]:
        if getattr(held, "__func__", None) is nn.Linear.forward:
            # accelerate keeps the method as `_old_forward`, and calls it.
            setattr(made, name, FP8Linear.forward.__get__(made))
    packed: FP8Linear = made
    return packed
