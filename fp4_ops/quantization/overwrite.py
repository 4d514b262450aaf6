"""Gives weights that are already in 4 bits new values, quantised into the memory of the old ones.

Kernels, compiled graphs and CUDA graphs read that memory, so the next call of each sees the new values.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..experts.packed import deinterleave, interleave
from ..meta.dtensors import split_over_processes
from ..meta.formats import FORMATS
from ..meta.layouts import block_scales, byte_view
from ..runtime.relayout import Operands, relayout
from . import find_method, quantize_weight
from .methods import without_calibration
from .weight import SOURCE_DTYPES, matrices_at_once

LARGEST = 6 * 448
"""The largest magnitude of nvfp4 in units of the global scale: e2m1's largest times e4m3's."""


def copy_into(memory: Tensor, values: Tensor) -> None:
    """Writes values to the memory of a weight, also of a model that was prepared under inference_mode.

    torch lets only inference_mode change what was made in it.
    """
    with torch.inference_mode() if memory.is_inference() else nullcontext():
        memory.copy_(values)


@dataclass(frozen=True)
class Codes:
    """The memory of a weight [E, N, K] in 4 bits, and how to write to it."""

    packed: Tensor
    block_scale: Tensor
    global_scale: Tensor | None
    format: str
    layout: str
    k: int
    interleaved: bool = False
    """True if row 2i is gate i and row 2i + 1 is up i, although the model keeps all gates before all ups."""
    method: str = "rtn"

    @property
    def joint(self) -> bool:
        """Returns whether the codes of gate and up depend on each other: by one global scale, or by a
        search."""
        return FORMATS[self.format].has_global_scale or find_method(self.method, self.format).chooses

    def read(self, expert: int) -> Operands:
        """Returns copies of one expert's operands [1, N, ...] in layout plain, with rows in the model's
        order."""
        at = slice(expert, expert + 1)
        scale = block_scales(self.block_scale[at], self.format, self.layout)
        factor = None if self.global_scale is None else self.global_scale[at].clone()
        operands = self.packed[at].clone(), scale.clone(), factor
        packed, scale, factor = relayout(operands, self.format, self.k, self.layout, "plain")
        if self.interleaved:
            packed, scale = deinterleave(packed), deinterleave(byte_view(scale)).view(scale.dtype)
        return packed, scale, factor

    def write(self, at: slice, operands: Operands) -> None:
        """Writes operands [n, N, ...] of some experts, given in layout plain with rows in the model's
        order."""
        packed, scale, factor = operands
        if self.interleaved:
            packed, scale = interleave(packed), interleave(byte_view(scale)).view(scale.dtype)
        made = relayout((packed, scale, factor), self.format, self.k, "plain", self.layout)
        for to, new in zip((self.packed, self.block_scale, self.global_scale), made, strict=True):
            if to is None or new is None:
                continue
            new = byte_view(new)
            if new.dtype != to.dtype and not torch.equal(new.to(to.dtype).to(new.dtype), new):
                raise ValueError(
                    f"the weight holds block scales in {to.dtype}, and those of the new values, {new.dtype}, "
                    "do not fit into it"
                )
            copy_into(to[at], new.view_as(to[at]))

    def quantize(self, matrices: Tensor, factors: Tensor | None = None) -> Operands:
        """Quantises matrices [n, N, K] as `prepare` does. factors: global scales [n] to use."""
        method = without_calibration(find_method(self.method, self.format))
        if method.name == "rtn" or factors is not None:
            packed, scale, factor = torch.ops.fp4.quantize(matrices, self.format, factors)
            return packed, scale, factor if factor.numel() else None
        return quantize_weight(matrices, self.format, method.name)

    def overwrite(self, at: slice, matrices: Tensor, factors: Tensor | None = None) -> None:
        """Quantises matrices [n, N, K] into some experts, a few at a time."""
        n, k = matrices.shape[1:]
        step = matrices_at_once(matrices.device.type, n, k)
        for start in range(0, len(matrices), step):
            some = slice(start, min(start + step, len(matrices)))
            here = slice(at.start + some.start, at.start + some.stop)
            part = matrices[some].to(self.packed.device).contiguous()
            self.write(here, self.quantize(part, None if factors is None else factors[some]))

    def overwrite_rows(self, expert: int, rows: slice, values: Tensor, largest: Tensor) -> None:
        """Quantises values [n, K] into some rows of one expert; the others keep their values.

        largest [1]: the largest magnitude of the values. The common global scale of all rows changes by a
        power of two, so the block scales of the other rows stay exact as long as e4m3 can represent them.
        """
        packed, scale, factor = self.read(expert)
        values = values.to(self.packed.device)[None].contiguous()
        if factor is not None and FORMATS[self.format].has_global_scale:
            others = scale.float()
            others[:, rows] = 0
            needed = torch.maximum(largest.to(factor) / LARGEST, factor * others.amax((1, 2)) / 448)
            mantissa, exponent = torch.frexp(needed / factor)
            exponent = exponent - (mantissa == 0.5).int()
            exponent = torch.where((needed > 0) & needed.isfinite(), exponent, 0)
            moved = torch.ldexp(factor, exponent)
            unit = torch.ldexp(torch.ones_like(factor), -exponent)
            scale, factor = (scale.float() * unit[:, None, None]).to(scale.dtype), moved
        else:
            factor = None
        new_packed, new_scale, _ = self.quantize(values, factor)
        packed[:, rows] = new_packed
        byte_view(scale)[:, rows] = byte_view(new_scale.to(scale.dtype))
        self.write(slice(expert, expert + 1), (packed, scale, factor))


def check_values(name: str, values: Tensor) -> None:
    """Raises ValueError, naming the weight, if new values cannot be quantised."""
    if words := split_over_processes(values):
        raise ValueError(
            f"fp4: the new values for {name} are {words}; a 4-bit weight takes a plain tensor. Pass "
            ".full_tensor(), all of it"
        )
    if values.dtype not in SOURCE_DTYPES:
        raise ValueError(
            f"fp4: the new values for {name} are {str(values.dtype).removeprefix('torch.')}; they must be "
            "float32, bfloat16 or float16, which are quantised into the 4-bit weight"
        )
    if values.is_meta:
        raise ValueError(f"fp4: the new values for {name} are on the meta device; pass their values")
    step = 1 if values.dim() < 3 else max(1, matrices_at_once(values.device.type, *values.shape[-2:]))
    for part in values.split(step) if values.dim() == 3 else (values,):
        if part.numel() and not torch.stack(torch.aminmax(part)).isfinite().all():
            raise ValueError(
                f"fp4: the new values for {name} hold NaN or infinity, which have no 4-bit code. The weight "
                "keeps its old values"
            )


def check_memory(name: str, memory: Tensor) -> None:
    """Raises ValueError, naming the weight, if its codes are not in this process's memory."""
    if words := split_over_processes(memory):
        raise ValueError(
            f"fp4: {name} is held in 4 bits by {words}, into which nothing can be quantised. Prepare the "
            "model anew, or leave packed_as_parameters out, so that each process holds all of them"
        )
    if memory.is_meta:
        raise ValueError(
            f"fp4: {name} is on the meta device (offloaded, or not loaded yet), so that new values have no "
            "place. Bring the weights back first"
        )
