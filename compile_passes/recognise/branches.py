"""Describes a mixture: one branch for each expert, and its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from torch import fx

from ..index.terms import Axis, Ref, Size, Term
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
    k: Size | None
    """Over how many of a token's ids it sums: not all, if read through a slice. None: not over any."""
    chosen: tuple[Term, ...]
    """Further conditions, over tokens, J and E, that a row meets: the expert's capacity is not used up."""
    factors: tuple[Term, ...]
    """Factors of the output, over tokens, J and E."""
    after: Term
    """Function of a row of the expert's output before that: a norm, over OUT and the hidden axis."""
    x: Ref
    scales: tuple[Term, ...]
    """Factors of the input."""
    act: Act
    up: tuple[Matrix, ...]
    up_bias: tuple[Matrix | None, ...]
    down: Matrix
    down_bias: Matrix | None
    gain: Matrix | None = None
    """A vector of the expert's own that scales what enters its down product."""

    @property
    def matrices(self) -> tuple[Matrix | None, ...]:
        """All that is of the expert's own."""
        return *self.up, self.down, *self.up_bias, self.down_bias, self.gain


Parts = tuple[Matrix, ...]
"""Some of an expert's matrices or vectors, one below the other."""
T = TypeVar("T")


@dataclass(frozen=True)
class _Even(Generic[T]):
    """Values of experts 0 to `count` - 1 at equal distances. The first two say where the others are."""

    first: T
    second: T
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[T]:
        return map(self.of, range(self.count))

    def of(self, e: int) -> T:
        raise NotImplementedError


@dataclass(frozen=True)
class EvenParts(_Even[Parts]):
    """Parts of experts: each has them where the one before has its, and as much further on."""

    def of(self, e: int) -> Parts:
        return tuple(_matrix_after(a, b, e) for a, b in zip(self.first, self.second, strict=True))


Experts = list[Parts] | EvenParts
"""For each expert some parts of it."""


@dataclass(frozen=True)
class EvenBranches(_Even[Branch]):
    """Branches of experts, which differ in nothing but where their matrices are, evenly."""

    def of(self, e: int) -> Branch:
        a, b = self.first, self.second

        def at(x: Matrix | None, y: Matrix | None) -> Matrix | None:
            return _matrix_after(x, y, e) if x is not None and y is not None else None

        return replace(
            b, expert=e, up=EvenParts(a.up, b.up, self.count).of(e), down=_matrix_after(a.down, b.down, e),
            up_bias=tuple(map(at, a.up_bias, b.up_bias)), down_bias=at(a.down_bias, b.down_bias),
            gain=at(a.gain, b.gain),
        )  # fmt: skip


Branches = list[Branch] | EvenBranches


def branches_by_id(of: Callable[[int], Branch], count: int, conditions: bool) -> Branches:
    """Branches `of` all experts whose ids index the weights; conditions: rows are chosen by more than ids.

    Without such, experts differ in which of the weights' matrices they have. If the last one has those that
    the first two lead to, so have the others, and there is no need to read them one by one."""
    if not conditions and count >= 4:
        even = EvenBranches(of(0), of(1), count)
        if _lead_on(even.first, even.second) and even.of(count - 1) == of(count - 1):
            return even
    return [of(e) for e in range(count)]


def _lead_on(first: Branch, second: Branch) -> bool:
    """Whether where these have their matrices says where others have theirs."""
    for a, b in zip(first.matrices, second.matrices, strict=True):
        if a is None or b is None:
            continue
        places = zip(a.ref.index, b.ref.index, strict=True)
        if a.ref.node is not b.ref.node or any(coordinate_after(i, j, 2) is None for i, j in places):
            return False
    return True


def _matrix_after(first: Matrix, second: Matrix, e: int) -> Matrix:
    """Expert e's matrix, where those of experts 0 and 1 are these and lead on."""
    index = [coordinate_after(i, j, e) for i, j in zip(first.ref.index, second.ref.index, strict=True)]
    return replace(second, ref=Ref(second.ref.node, [i for i in index if i is not None]))


@dataclass
class Mixture:
    """The block that `root` computes; `rest` is added to it."""

    root: fx.Node
    tokens: tuple[Axis, ...]
    hidden: Axis
    branches: Branches
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
    """Kind of the products, if all are of one kind that has a name."""
    at: fx.Node | None = None
    """Whose line the report names, if not the root's."""

    @property
    def common(self) -> Branch:
        """The first branch: in all but its matrices it is like any other."""
        return self.branches.first if isinstance(self.branches, EvenBranches) else self.branches[0]

    @property
    def weights(self) -> set[fx.Node]:
        """The parameters that the experts' matrices are in."""
        branches = [self.common] if isinstance(self.branches, EvenBranches) else self.branches
        return {p.ref.node for b in branches for p in (*b.up, b.down)}

    def parts(self, of: Callable[[Branch], tuple[Matrix | None, ...]]) -> Experts:
        """For each expert, in order, these parts of it, without those that it has not."""

        def own(b: Branch) -> Parts:
            return tuple(p for p in of(b) if p is not None)

        if isinstance(self.branches, EvenBranches):
            return EvenParts(own(self.branches.first), own(self.branches.second), len(self.branches))
        return [own(b) for b in self.branches]
