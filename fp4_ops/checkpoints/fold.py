"""Joins gate and up to one matrix with one global scale, if each of them has its own in a checkpoint
(nvfp4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..meta.formats import FORMATS
from ..quantization.grid import decode
from .dialects import Codes
from .files import CheckpointError

E4M3_MAX = 448.0
LIMIT = 1 / 16
"""The largest relative change of a matrix by a fold: half a step of e4m3's three bits."""


@dataclass
class Folds:
    """Experts whose gate and up had different global scales and now share one. The ratio went into block
    scales."""

    exact: int = 0
    rounded: int = 0
    worst: float = 0.0
    """Largest relative change of a matrix: the norm of the difference over its norm."""
    where: str = ""
    """The gate or up with that change."""

    def __str__(self) -> str:
        lines = (
            f"gate and up had different global scales in {self.exact + self.rounded} experts: {self.exact} "
            f"folded exactly, {self.rounded} to the nearest block scale"
        )
        return lines + f" (largest change {self.worst:.2%}, of {self.where})" * bool(self.rounded)


@dataclass
class _Half:
    """A gate or an up matrix: the exact values of its block scales, and the weight of an error in each."""

    block_scale: Tensor
    factor: Tensor
    squares: Tensor
    """The sum of squares of each block's codes. An error of the block's scale is weighted by it."""
    largest: Tensor
    """The largest code of each block."""

    @classmethod
    def of(cls, codes: Codes) -> _Half:
        assert codes.global_scale is not None
        # Tables of what a byte, two codes, adds to its block. float32 holds these sums exactly.
        byte = torch.arange(256, dtype=torch.uint8, device=codes.packed.device)
        values = decode(byte.unsqueeze(-1), FORMATS["nvfp4"]).float()
        index = codes.packed.flatten().int()

        def each(table: Tensor) -> Tensor:
            found = table.index_select(0, index)
            return found.view(*codes.block_scale.shape, -1)

        squares = each(values.square().sum(-1)).sum(-1).double()
        largest = each(values.abs().amax(-1)).amax(-1).double()
        return cls(codes.block_scale, codes.global_scale.double(), squares, largest)

    @property
    def scale(self) -> Tensor:
        """Returns the value of code 1 in each block."""
        return self.block_scale.double() * self.factor

    def top(self) -> float:
        """Returns the largest scale among blocks that are not all zeros."""
        return torch.where(self.squares > 0, self.scale, 0.0).amax().item()

    def fold(self, factor: Tensor) -> tuple[Tensor, float, float]:
        """Returns block scales that give the same values with the global scale `factor`. Also returns
        norm(difference) / norm and max(|difference|) / max(|weight|) of the matrix."""
        old = self.scale
        new = (old / factor).clamp(max=E4M3_MAX).float().to(torch.float8_e4m3fn)
        # Compare products of scales. A quotient would be rounded, and an exact fold would look inexact.
        change = (new.double() * factor - old).abs()
        norm = (old.square() * self.squares).sum().sqrt()
        if norm == 0:
            return new, 0.0, 0.0
        whole = (change.square() * self.squares).sum().sqrt() / norm
        single = (change * self.largest).amax() / (old * self.largest).amax()
        return new, whole.item(), single.item()


def join_rows(gate: Codes, up: Codes, folds: Folds, names: tuple[str, str] = ("gate", "up")) -> Codes:
    """Joins gate and up to one matrix [gate; up], with one global scale from `share_scale`."""
    return joined(share_scale(gate, up, folds, names))


def joined(parts: Sequence[Codes]) -> Codes:
    """Joins matrices of one global scale along their rows."""
    packed = torch.cat([part.packed for part in parts])
    return Codes(packed, cat(*(part.block_scale for part in parts)), parts[0].global_scale)


def share_scale(
    gate: Codes, up: Codes, folds: Folds, names: tuple[str, str] = ("gate", "up")
) -> tuple[Codes, Codes]:
    """Returns gate and up with one global scale. Their codes stay the same tensors.

    If the global scales differ, their ratio is multiplied into block scales. This is exact if e4m3 can
    represent every product; otherwise products are rounded to the nearest. Candidates for the common scale
    are the scale of gate and that of up, and these times a power of two if block scales would otherwise leave
    e4m3's range. The candidate that changes the two matrices least is chosen. In this comparison, blocks are
    weighted by their values, so a block that is nearly zero has almost no influence, and may become zero.

    names: names of the two, for errors and reports.

    Raises CheckpointError if this changes gate or up by more than LIMIT in norm, or one weight by more than
    LIMIT of the largest.
    """
    a, b = gate.global_scale, up.global_scale
    if a is None or b is None or a == b:
        return gate, Codes(up.packed, up.block_scale, a)
    halves = _Half.of(gate), _Half.of(up)
    tried = [(c, [half.fold(c.double()) for half in halves]) for c in _candidates(halves)]
    factor, folded = min(tried, key=lambda t: sum(whole**2 for _, whole, _ in t[1]))
    for name, (_, *changes) in zip(names, folded):
        if max(changes) > LIMIT:
            raise CheckpointError(
                f"fp4: the global scales of {names[0]} ({a.item():.4g}) and {names[1]} ({b.item():.4g}) are "
                f"too far apart for one matrix: {name} would change by {max(changes):.1%}; it must be "
                f"{LIMIT:.2%} at most. Export the checkpoint with one global scale for an expert's gate and "
                "up, or quantise the original weights with `python -m fp4_ops quantize`, which gives them one"
            )
    worst, where = max((whole, name) for name, (_, whole, _) in zip(names, folded))
    if worst == 0:
        folds.exact += 1
    else:
        folds.rounded += 1
        if worst > folds.worst:
            folds.worst, folds.where = worst, where
    first, second = (Codes(of.packed, new, factor) for of, (new, *_) in zip((gate, up), folded))
    return first, second


def _candidates(halves: tuple[_Half, _Half]) -> list[Tensor]:
    """Returns global scales to try. The larger of the two is first, because block scales then become smaller
    and none overflows."""
    top = max(half.top() for half in halves)
    found = []
    for half in sorted(halves, key=lambda h: -h.factor.item()):
        factor = half.factor.float()
        found.append(factor)
        if top > 0:
            # With this power of two the largest block scale is just below the largest e4m3.
            steps = math.ceil(math.log2(top / (E4M3_MAX * half.factor.item())))
            shifted = torch.ldexp(factor, torch.tensor(steps, device=factor.device))
            if steps and shifted.isfinite() and shifted > 0:
                found.append(shifted)
    return found


def cat(*tensors: Tensor) -> Tensor:
    """Concatenates like torch.cat, also dtypes that it does not support, and two dtypes that float32 can
    hold."""
    if len({t.dtype for t in tensors}) > 1:
        return torch.cat([t.float() for t in tensors])
    return torch.cat([t.view(torch.uint8) for t in tensors]).view(tensors[0].dtype)
