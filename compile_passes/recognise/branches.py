"""What a mixture is made of: one branch for each expert, and what is in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from ..index.terms import Axis, Ref, Term
from .activations import Act
from .factors import coordinate_after


@dataclass(frozen=True)
class Matrix:
    """A weight [n, k] of one expert, or its bias [n]: an element is `ref`, over the axes N and K."""

    ref: Ref
    n: int
    k: int


@dataclass(frozen=True)
class Linear:
    """sum over `inner` of weight * input, plus bias."""

    weight: Ref
    inner: Axis
    input: tuple[Term, ...]
    bias: Ref | None


@dataclass(frozen=True)
class Branch:
    """One expert's addend of the output."""

    expert: int
    choice: int | None
    """The one choice j that this branch serves, if it serves not all of them."""
    ids: Ref | None
    masked: Ref | None
    """The ids that a mask over tokens is made of; only where `ids` is None."""
    place: Axis | None
    """Instead of ids: the axis of the output, and of x, that counts the experts."""
    sums_choices: bool
    k: Any
    """Over how many of a token's ids it sums: not all, if read through a slice. None: not over any."""
    chosen: tuple[Term, ...]
    """Further conditions, over tokens, J and E, that a row meets: the expert's capacity is not used up."""
    factors: tuple[Term, ...]
    """What scales the output, over tokens, J and E."""
    after: Term
    """What becomes of a row of the expert's output before that: a norm, over OUT and the hidden axis."""
    x: Ref
    scales: tuple[Term, ...]
    """What scales the input."""
    act: Act
    up: tuple[Matrix, ...]
    up_bias: tuple[Matrix | None, ...]
    down: Matrix
    down_bias: Matrix | None
    gain: Matrix | None = None
    """A vector of the expert's own that scales what enters its down product."""

    @property
    def common(self) -> tuple[Any, ...]:
        """What must be the same for all experts."""
        routing = (self.ids, self.masked, self.place, self.sums_choices, self.chosen, self.factors)
        return (*routing, self.after, self.x, self.scales, self.act)


def branches_by_id(of: Callable[[int], Branch], count: int, conditions: bool) -> list[Branch]:
    """Branches `of` all experts whose ids index the weights; conditions: rows are chosen by more than ids.

    Without such, experts differ in which of the weights' matrices they have: the first two and the last say
    which the others have."""
    if conditions or count < 4:
        return [of(e) for e in range(count)]
    first, second, last = of(0), of(1), of(count - 1)
    found = [first, second]
    for e in range(2, count):
        between = _after(first, second, e)
        if between is None:
            break
        found.append(between)
    return found if found[-1] == last else [of(e) for e in range(count)]


def _after(first: Branch, second: Branch, e: int) -> Branch | None:
    """Branch e, if what each of the first two has is where the one before had it, and so much further on."""

    def at(a: Matrix | None, b: Matrix | None) -> Matrix | None:
        if a is None or b is None:
            return None
        index = [coordinate_after(i, j, e) for i, j in zip(a.ref.index, b.ref.index, strict=True)]
        known = [i for i in index if i is not None]
        if a.ref.node is not b.ref.node or len(known) != len(index):
            return None
        return replace(b, ref=Ref(b.ref.node, known))

    up = [m for a, b in zip(first.up, second.up) if (m := at(a, b)) is not None]
    down = at(first.down, second.down)
    if down is None or len(up) != len(second.up):
        return None
    return replace(
        second, expert=e, up=tuple(up), down=down,
        up_bias=tuple(at(a, b) for a, b in zip(first.up_bias, second.up_bias)),
        down_bias=at(first.down_bias, second.down_bias), gain=at(first.gain, second.gain),
    )  # fmt: skip


@dataclass
class Mixture:
    """The block that `root` computes; `rest` is added to it."""

    root: fx.Node
    tokens: tuple[Axis, ...]
    hidden: Axis
    branches: list[Branch]
    """In the order of the experts `first`, `first` + 1, ..."""
    first: int
    k: int | None
    """Choices a token; None: every expert serves every token."""
    rest: list[Ref] = field(default_factory=list)
    kept: tuple[Term, ...] = ()
    """The factors of what a row is that no expert's rows were written over."""
    downs: int = 0
    """How many down products of the graph it is made of."""
    wraps: bool = False
    """Ids index a tensor of weights, so negative ones count from the end."""
    form: str = ""
    """What its products are, where they are of one kind that has a name."""
    at: fx.Node | None = None
    """Whose line the report names, if not the root's."""

    @property
    def common(self) -> Branch:
        return self.branches[0]
