"""Describes how graph inputs are made from a model's weights.

Weights are quantised and reordered, or joined from many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...experts.packed import interleave
from ...meta.formats import FORMATS
from ...meta.layouts import LAYOUTS, packed_spec


@dataclass(frozen=True)
class Piece:
    """A part of parameter `source`, [n, k] or for a bias [n].

    `at` describes each of the parameter's dimensions. ("at", i) is one place. ("n", start, step) and ("k",
    start, step) are slices that become that dimension of the piece. ("both", start, n's step, k's step) is
    the only dimension of a parameter and holds both.
    """

    source: int
    at: tuple[tuple[Any, ...], ...]

    def take(self, weights: tuple[torch.Tensor, ...], sizes: dict[str, int]) -> torch.Tensor:
        w, order = weights[self.source].detach(), list[str]()
        if self.at[0][0] == "both":
            _, start, *steps = self.at[0]
            each = w.stride(0)
            strides = tuple(step * each for step in steps)
            return w.as_strided((sizes["n"], sizes["k"]), strides, w.storage_offset() + start * each)
        for what, *rest in self.at:
            d = len(order)
            if what == "at":
                w = w.select(d, rest[0])
            else:
                start, step = rest
                w = w[(slice(None),) * d + (slice(start, start + step * (sizes[what] - 1) + 1, step),)]
                order.append(what)
        return w.t() if order == ["k", "n"] else w


@dataclass(frozen=True)
class Assembly:
    """A weight [E, parts * n, k] that is put together from many parameters: for each expert its parts, in
    order."""

    experts: tuple[tuple[Piece, ...], ...]
    n: int
    k: int
    interleaved: bool = False
    """True if rows of the parts alternate, as a fused activation may want gate and up."""

    @property
    def shape(self) -> tuple[int, ...]:
        rows = len(self.experts[0]) * self.n
        return (len(self.experts), rows, self.k) if self.k else (len(self.experts), rows)

    def build(self, *weights: torch.Tensor) -> torch.Tensor:
        sizes = {"n": self.n, "k": self.k}
        rows = []
        for parts in self.experts:
            taken = [p.take(weights, sizes) for p in parts]
            rows.append(torch.stack(taken, 1).flatten(0, 1) if self.interleaved else torch.cat(taken))
        return torch.stack(rows)

    def whole(self, shapes: list[tuple[int, ...]]) -> bool | None:
        """Return whether a single unchanged parameter is stored transposed, [E, K, N]. None for anything
        else."""
        count, order = len(self.experts[0]), [what for what, *_ in self.experts[0][0].at[1:]]
        transposed = order == ["k", "n"]
        e, n, *k = self.shape
        if shapes != [(e, *k, n) if transposed else (e, n, *k)]:
            return None
        for i, parts in enumerate(self.experts):
            for p, part in enumerate(parts):
                rows = ("n", p, count) if self.interleaved else ("n", p * self.n, 1)
                both = [rows, ("k", 0, 1)] if k else [rows]
                if part.at != (("at", i), *(both[::-1] if transposed else both)):
                    return None
        return transposed


@dataclass(frozen=True)
class PackSpec:
    """How a weight is packed.

    `transposed`: it is stored as [E, K, N]. `assembly`: how it is put together first. `interleave`: rows of
    all gates, then all ups, become gate 0, up 0, gate 1, ...
    """

    format: str
    layout: str
    transposed: bool
    assembly: Assembly | None = None
    interleave: bool = False

    @property
    def tensors(self) -> int:
        return len(packed_spec(FORMATS[self.format], LAYOUTS[self.layout], (1,), 1, 1))

    def shapes(self, stored: tuple[int, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of the packed tensors of a weight that is stored with this shape."""
        if self.assembly is not None:
            stored = self.assembly.shape
        e, n, k = (stored[0], stored[2], stored[1]) if self.transposed else stored
        return packed_spec(FORMATS[self.format], LAYOUTS[self.layout], (e,), n, k)

    def num_bytes(self, stored: tuple[int, ...]) -> int:
        return sum(torch.Size(s).numel() * d.itemsize for s, d in self.shapes(stored))

    def pack(self, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Quantise and reorder. The result is never an inference tensor, in whatever mode the caller is."""
        with torch.inference_mode(False), torch.no_grad():
            w = self.assembly.build(*weights) if self.assembly is not None else weights[0].detach()
            if self.transposed:
                w = w.transpose(1, 2)
            if self.interleave:
                w = interleave(w)
            packed, scale, global_scale = torch.ops.fp4.quantize(w, self.format)
            if self.layout != "plain":
                packed, scale, global_scale = torch.ops.fp4.prepack(
                    packed, scale, global_scale, self.format, self.layout
                )
        return (packed, scale, global_scale)[: self.tensors]


@dataclass(frozen=True)
class JoinSpec:
    """Joins biases of many parameters to one tensor [E, N], without packing."""

    assembly: Assembly
    dtype: torch.dtype
    layout = "bias"
    transposed = False
    tensors = 1

    def shapes(self, stored: tuple[int, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [(self.assembly.shape, self.dtype)]

    def pack(self, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.inference_mode(False), torch.no_grad():
            return (self.assembly.build(*weights),)


class Spec(Protocol):
    """Describes how graph inputs are made from weights: PackSpec, JoinSpec and prequantized.StoredSpec.
    Serves as a key."""

    @property
    def tensors(self) -> int: ...

    def shapes(self, stored: tuple[int, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each input, for a weight that is stored with this shape."""

    def pack(self, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Make the inputs."""

    def __hash__(self) -> int: ...
