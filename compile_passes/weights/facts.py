"""Facts about the weights of one graph, in addition to torch's in `node.meta`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor, fx

from ..refusal import Kind, Refusal, Refused
from .prequantized import Prequantized


class Stored(NamedTuple):
    """A weight that the model holds in 4 bits: how it is read, and the graph inputs that hold it."""

    way: Prequantized
    inputs: tuple[fx.Node, ...]


@dataclass
class Facts:
    fixed: set[fx.Node]
    """Parameters, buffers, and weights that are decoded from these: the same tensors in every call."""
    mutated: set[fx.Node] = field(default_factory=set)
    """Inputs that the graph writes to."""
    stored: dict[fx.Node, Stored] = field(default_factory=dict)
    constants: dict[fx.Node, Tensor] = field(default_factory=dict)
    """Values of small tensors: of fixed inputs as they are now, and of what the graph makes of numbers."""
    tables: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    """The inputs by whose values a model decodes a weight, for the `fp4.dequantize` that stands for it."""
    gathered: dict[fx.Node, str] = field(default_factory=dict)
    """The library that gathers a parameter anew for each call."""
    each_alone: dict[fx.Node, Refusal] = field(default_factory=dict)
    """Weights whose products are rewritten one by one, and why."""
    stays: dict[fx.Node, Refusal] = field(default_factory=dict)
    """Weights that are left alone, and why."""

    def in_4_bits(self, weight: fx.Node) -> bool:
        return weight in self.stored

    def format_of(self, weight: fx.Node, format: str) -> str:
        """Return the format of a weight that is already in 4 bits. Any other weight gets `format`."""
        return self.stored[weight].way.format if weight in self.stored else format

    def is_batch_invariant(self, weight: fx.Node) -> bool:
        """True for a weight in 4 bits whose layout is batch invariant, as its owner has asked."""
        return weight in self.stored and self.stored[weight].way.batch_invariant

    def inputs_of(self, weight: fx.Node) -> tuple[fx.Node, ...]:
        """Return the graph inputs that hold a weight: the weight itself, or the inputs from which the
        graph decodes it."""
        return self.stored[weight].inputs if weight in self.stored else (weight,)

    def why_not_own(self, weight: fx.Node, site: fx.Node) -> Refusal | None:
        """Return why a packed copy cannot stand for the weight from call to call, or None if it can."""
        if weight in self.mutated:
            return written_to(weight, site)
        if weight in self.gathered:
            return Refusal(Kind.GATHERED_ANEW, site, (self.gathered[weight], weight))
        return replace(self.stays[weight], node=site) if weight in self.stays else None

    def need_own(self, weight: fx.Node, site: fx.Node) -> None:
        why = self.why_not_own(weight, site)
        if why is not None:
            raise Refused(why)


def written_to(weight: fx.Node, site: fx.Node) -> Refusal:
    return Refusal(Kind.WRITTEN, site, (weight,))
