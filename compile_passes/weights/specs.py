"""Describes how graph inputs are made from a model's weights.

Weights are quantised and reordered, or joined from many parameters. If a model already holds weights in 4
bits (`FP4Tensor`, or torchao's `NVFP4Tensor` and `MXTensor`), their codes and block scales are used bit for
bit. These tensors are graph inputs. The passes see an ordinary tensor of the same shape in their place. When
a product is rewritten, its operands come from the 4-bit tensor. facts.py finds weights that the graph itself
decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from ...experts.packed import interleave
from ...meta.formats import FORMATS
from ...meta.layouts import LAYOUTS, packed_spec, same_bytes
from ...meta.torch_internals import is_traceable_wrapper_subclass
from ...runtime.relayout import relayout
from ...tensor import FP4Tensor
from ..refusal import Kind, need


@dataclass(frozen=True)
class Piece:
    """A part of parameter `source`, [n, k] or for a bias [n].

    `at` describes each dimension of the parameter. ("at", i) is the single index i. ("n", start, step) and
    ("k", start, step) are slices that become dimension n or k of the piece. ("both", start, step of n, step
    of k) describes a parameter with one dimension, which holds both n and k.
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
    """A weight [E, parts * n, k] that is joined from many parameters. Each expert has its parts in order."""

    experts: tuple[tuple[Piece, ...], ...]
    n: int
    k: int
    interleaved: bool = False
    """True if rows of the parts alternate. A fused activation may need gate and up in this order."""

    @property
    def shape(self) -> tuple[int, ...]:
        rows = len(self.experts[0]) * self.n
        return (len(self.experts), rows, self.k) if self.k else (len(self.experts), rows)

    def build(self, *weights: torch.Tensor) -> torch.Tensor:
        sizes = {"n": self.n, "k": self.k}
        rows = []
        for parts in self.experts:
            rows.append(self.joined([p.take(weights, sizes) for p in parts]))
        return torch.stack(rows)

    def joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Join the parts of one expert."""
        return torch.stack(parts, 1).flatten(0, 1) if self.interleaved else torch.cat(parts)

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

    `transposed`: the weight is stored as [E, K, N]. `assembly`: how it is joined first. `interleave`: rows in
    the order of all gates, then all ups, are reordered to gate 0, up 0, gate 1, ...
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
        """Return shape and dtype of each packed tensor, given the shape in which the weight is stored."""
        if self.assembly is not None:
            stored = self.assembly.shape
        e, n, k = (stored[0], stored[2], stored[1]) if self.transposed else stored
        return packed_spec(FORMATS[self.format], LAYOUTS[self.layout], (e,), n, k)

    def pack(self, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Quantise and reorder. The result is never an inference tensor, even if the caller is in inference
        mode."""
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


Parts = tuple[Tensor, Tensor, Tensor | None]
"""packed [..., N, K/2], block_scale [..., N, blocks], global_scale [...] or [] (None: 1)."""


@dataclass(frozen=True)
class Prequantized:
    """Describes how the graph inputs of one weight are read."""

    kind: str
    format: str
    parts: Callable[..., Parts]
    """Converts the `inputs` tensors to the plain layout."""
    transposed: bool = False
    """True if the weight is quantised along its second to last dimension."""
    inputs: int = 1
    scale_dtype: torch.dtype | None = None
    """The dtype of the block scales, if the format allows several."""
    batch_invariant: bool = False
    """True if the layout of the weight is batch invariant."""


def prequantized(x: Any) -> Prequantized | None:
    """Return how a tensor subclass is read. None if it is not a known 4-bit tensor.

    Raises Refused if reading it would change its values.
    """
    if isinstance(x, FP4Tensor):
        choice = len(FORMATS[x.format].scale_dtypes) > 1
        return Prequantized(
            "FP4Tensor", x.format, _fp4, x.transposed, scale_dtype=x.block_scale.dtype if choice else None,
            batch_invariant=LAYOUTS[x.weight_layout].batch_invariant,
        )  # fmt: skip
    if type(x).__module__.startswith("torchao.") and type(x).__name__ in ("NVFP4Tensor", "MXTensor"):
        return Prequantized(_kind(x), _format(x), _torchao_plain, _is_transposed(x))
    return None


def stand_in(x: Tensor) -> Tensor:
    """Return an ordinary tensor of the same shape and dtype. It is made under a fake mode, so it holds no
    data."""
    return torch.empty(tuple(x.shape), dtype=x.dtype, device=x.device)


def _fp4(w: FP4Tensor) -> Parts:
    return relayout(w._operands(), w.format, w.k, w.weight_layout, "plain")


# --- torchao. Its classes are recognised by name, because it need not be installed. ---


def _torchao_plain(w: Any) -> Parts:
    """Return (packed, block_scale, per_tensor_scale) in row-major order, whether or not the scales are
    swizzled."""
    packed, scale = w.qdata, w.scale
    if _is_transposed(w):
        packed, scale = packed.transpose(-2, -1), scale.transpose(-2, -1)
    packed = packed.view(torch.uint8)
    if w.is_swizzled_scales:
        *lead, n, half = packed.shape
        rows, blocks = torch.Size(lead).numel() * n, half * 2 // w.block_size
        scale = unswizzled(scale, rows, blocks).view(*lead, n, blocks)
    return packed.contiguous(), scale.contiguous(), getattr(w, "per_tensor_scale", None)


def unswizzled(scale: Tensor, rows: int, blocks: int) -> Tensor:
    """Return block scales [rows, blocks] from cuBLAS' order: tiles of 128 x 4, in which row 32 i + j is at
    (j, i)."""
    tall, wide = -(-rows // 128), -(-blocks // 4)
    tiles = scale.reshape(tall, wide, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(tall * 128, wide * 4)[:rows, :blocks]


def _is_transposed(w: Any) -> bool:
    return w.qdata.stride(-2) < w.qdata.stride(-1)


def _kind(w: Any) -> str:
    """Return the kind of a tensor. It leaves out how activations are quantised, which an option of the
    backend decides."""
    own = " (its act_quant_kwargs give way to the option `activation`)" if w.act_quant_kwargs else ""
    return f"torchao {type(w).__name__}{own}"


def _format(w: Any) -> str:
    """Return the format of one of torchao's tensors."""
    if type(w).__name__ == "NVFP4Tensor":
        return "nvfp4"
    elements = str(w.elem_dtype).removeprefix("torch.")
    need(w.elem_dtype == torch.float4_e2m1fn_x2, Kind.MX_ELEMENTS, None, elements)
    need(w.block_size == FORMATS["mxfp4"].block, Kind.MX_BLOCKS, None, w.block_size)
    return "mxfp4"


# --- the inputs of a rewritten graph ---


@dataclass(frozen=True)
class StoredSpec:
    """Operands [E, parts * n, k] that are joined from weights in 4 bits. The weights are stacked and
    reordered, but never decoded.

    If the parts of an expert (gate and up) have different global scales, the scale of the first part is
    stored for both. The down weight's `rescale` then has the pair (gate, up) of scales for each expert, and
    the missing factor up / gate is multiplied into down's global scale. This is exact as long as the
    activation is linear in up.
    """

    format: str
    layout: str
    assembly: Assembly
    sources: tuple[Prequantized, ...]
    rescale: tuple[tuple[Piece, Piece], ...] = ()
    transposed = False

    @property
    def tensors(self) -> int:
        return len(self.shapes(()))

    def shapes(self, stored: tuple[int, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        e, n, k = self.assembly.shape
        dtypes = {h.scale_dtype for h in self.sources}  # if there are several dtypes, take the widest
        scale_dtype = dtypes.pop() if len(dtypes) == 1 else FORMATS[self.format].wide_scale_dtype
        return packed_spec(FORMATS[self.format], LAYOUTS[self.layout], (e,), n, k, scale_dtype)

    def pack(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.inference_mode(False), torch.no_grad():
            if (held := self._held_by(inputs)) is not None:
                return held
            given, parts = iter(inputs), []
            for h in self.sources:
                parts.append(h.parts(*(next(given) for _ in range(h.inputs))))
            experts = [[self._piece(parts, p) for p in pieces] for pieces in self.assembly.experts]
            packed, scale = (
                torch.stack([self.assembly.joined([p[i] for p in e]) for e in experts]) for i in (0, 1)
            )
            global_scale = None
            if FORMATS[self.format].has_global_scale:
                global_scale = torch.stack([e[0][2] for e in experts])
                if self.rescale:
                    gate, up = (
                        torch.stack([self._piece(parts, pair[i])[2] for pair in self.rescale]) for i in (0, 1)
                    )
                    # A gate of zeros makes the whole expert zero.
                    global_scale = torch.where(gate == 0, 0.0, global_scale * (up / gate))
            operands = (packed, scale, global_scale)
            operands = relayout(operands, self.format, self.assembly.k, "plain", self.layout)
        return tuple(t for t in operands if t is not None)

    def _held_by(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Return the operands that a whole weight already holds in this layout. A copy would hold the model's
        weights twice. None for all other weights."""
        if len(inputs) != 1 or self.rescale:
            return None
        (w,) = inputs
        if type(w) is not FP4Tensor or not same_bytes(w.weight_layout, self.layout) or not self._is_whole(w):
            return None
        held, wanted = [t for t in w._operands() if t is not None], self.shapes(())
        if [(t.numel(), t.dtype) for t in held] != [(prod(shape), dtype) for shape, dtype in wanted]:
            return None
        if any(t.is_inference() or not t.is_contiguous() for t in held):
            return None
        return tuple(t.detach().view(shape) for t, (shape, _) in zip(held, wanted, strict=True))

    def _is_whole(self, w: FP4Tensor) -> bool:
        if w.dim() == 3:
            return self.assembly.whole([tuple(w.shape)]) is w.transposed
        ((first, *others), *more) = self.assembly.experts
        order, sizes = [("n", 0, 1), ("k", 0, 1)], self.assembly.shape[1:]
        step = -1 if w.transposed else 1
        return not others and not more and first.at == tuple(order[::step]) and sizes[::step] == w.shape

    def _piece(self, parts: list[Parts], piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
        """Return (codes [n, K/2], block scales, global scale []) of one part of one expert."""
        packed, scale, global_scale = parts[piece.source]
        lead = tuple(i for what, i, *_ in piece.at if what == "at")
        ((start, step),) = [rest for what, *rest in piece.at if what == "n"]
        rows = slice(start, start + step * (self.assembly.n - 1) + 1, step)
        if global_scale is None:
            global_scale = packed.new_ones((), dtype=torch.float32)
        if global_scale.dim() > 0:
            global_scale = global_scale.reshape(packed.shape[: len(lead)])[lead]
        return packed[lead][rows], scale[lead][rows], global_scale.float()


Spec = PackSpec | JoinSpec | StoredSpec
"""Says how graph inputs are made from weights. Specs are hashable and are used as keys."""


def stored_spec(
    sources: Sequence[fx.Node], ways: tuple[Prequantized, ...], assembly: Assembly, layout: str, site: fx.Node
) -> StoredSpec:
    """Return the spec for weights in 4 bits. All must have one format, and must be used along the dimension
    in which they are quantised.

    ways: how to read the sources that are in 4 bits.
    """
    need(len(ways) == len(sources), Kind.SOME_IN_4_BITS, site)
    formats = sorted({h.format for h in ways})
    need(len(formats) == 1, Kind.FORMATS_DIFFER, site, tuple(formats))
    for pieces in assembly.experts:
        for p in pieces:
            order = [what for what, *_ in p.at][-2:]
            along = ["k", "n"] if ways[p.source].transposed else ["n", "k"]
            need(order == along, Kind.PART_QUANTISED_ALONG_N, site)
            stored = sources[p.source].meta["val"].shape[-2 if ways[p.source].transposed else -1]
            whole = ("k", 0, 1) in p.at and stored == assembly.k
            need(whole, Kind.SOME_COLUMNS, site)
    return StoredSpec(formats[0], layout, assembly, ways)


def own_scales(spec: StoredSpec) -> bool:
    """Return whether the parts of an expert may have different global scales."""
    if not FORMATS[spec.format].has_global_scale:
        return False

    def scale(p: Piece) -> Any:
        return p.source, [i for what, i, *_ in p.at if what == "at"]

    return any(scale(p) != scale(pieces[0]) for pieces in spec.assembly.experts for p in pieces)


def is_subclass(x: Any) -> bool:
    return isinstance(x, Tensor) and is_traceable_wrapper_subclass(x)
