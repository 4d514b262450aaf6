"""Describes a mixture: one branch for each expert, and the parts of a branch, such as its activation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Generic, TypeVar

from torch import fx

from ...meta.formats import ACTIVATIONS, SMALLEST_SIDE, Activation, activation_name, known_activation
from ..graph.nodes import aten
from ..index.terms import (
    Add,
    Affine,
    Apply,
    Axis,
    Const,
    Mul,
    Ref,
    Size,
    Term,
    affine,
    described,
    flatten,
    free_axes,
    substitute,
    transform,
)
from ..refusal import Kind, need, words
from ..weights.facts import Facts

# --- activations: the function between the gate/up products and the down product ---

GATE, UP = Axis(0, "gate"), Axis(0, "up")
"""In activation terms: the values of the two products. Only UP is used if there is no gate."""


@dataclass(frozen=True)
class Act:
    """The result of an activation, as a term over GATE and UP. `name` is the operators' activation that
    computes the same, if there is one."""

    name: str
    term: Term
    gated: bool


def read_activation(inputs: tuple[Term, ...], leaves: list[Term], site: fx.Node) -> tuple[Act, list[Term]]:
    """Return the activation that enters the down product (the product of `inputs`), and its products, gate
    first."""
    if len(leaves) == 1:
        term = _over(inputs, {leaves[0]: UP}, site)
        return Act("relu2" if _relu2(term) else "", term, False), leaves
    for order in (leaves, leaves[::-1]):
        term = _over(inputs, dict(zip(order, (GATE, UP))), site)
        if name := _name(term):
            return Act(name, term, True), order
    return Act("", _over(inputs, dict(zip(leaves, (GATE, UP))), site), True), leaves


def _over(inputs: tuple[Term, ...], names: dict[Term, Term], site: fx.Node) -> Term:
    term = reduce(Mul, [bare(substitute(t, names)) for t in inputs])
    need(free_axes(term) <= {GATE, UP}, Kind.MORE_IN_ACTIVATION, site)
    return term


def bare(term: Term) -> Term:
    """Return the term without the nodes that compute its parts, so that terms of different experts are
    equal."""
    return transform(term, lambda t: None, with_refs=False)


@dataclass(frozen=True)
class _Gated:
    """The numbers in function(GATE) * (UP + offset)."""

    function: str
    alpha: float
    limit: float | None
    """The upper limit of GATE."""
    up_offset: float
    up_limits: tuple[float | None, float | None]


def _gated(term: Term) -> _Gated | None:
    factors = flatten(term, Mul)
    ups = [f for f in factors if UP in free_axes(f)]
    gates = [f for f in factors if UP not in free_axes(f)]
    if len(ups) != 1 or not all(free_axes(f) == {GATE} for f in gates):
        return None
    offset, up = _offset(ups[0])
    up, low, high = _clamped(up)
    found = _gate(gates)
    return _Gated(*found, offset, (low, high)) if up is UP and found is not None else None


def _name(term: Term) -> str:
    """Return the operators' name of the activation f(GATE) * g(UP), or "" if there is none."""
    if (caps := _situ(term)) is not None:
        return activation_name(Activation("", "situ", caps=caps)) or ""
    g = _gated(term)
    if g is None or g.up_limits != ((None, None) if g.limit is None else (-g.limit, g.limit)):
        return ""
    return name_of_gate(g.function, g.alpha, g.limit, g.up_offset)


@words.register
def in_words(act: Act) -> str:
    """Describe an activation as the model writes it, and by the numbers that the operators' activations
    have."""
    g = _gated(act.term) if act.gated else None
    if g is None:
        return described(act.term)
    numbers = f"{g.function} with alpha={g.alpha}, limit={g.limit}, up_offset={g.up_offset}"
    low, high = g.up_limits
    clamped = "" if (low, high) == (None, None) else f", up clamped at [{low}, {high}]"
    return f"{described(act.term)} ({numbers}{clamped})"


def name_of_gate(function: str, alpha: float, limit: float | None, up_offset: float) -> str:
    """Return the operators' name of a gated activation with these numbers, or "" if there is none."""
    if not all(n is None or isinstance(n, (int, float)) for n in (alpha, limit, up_offset)):
        return ""  # the graph computes it
    limit = None if limit is None else float(limit)
    made = [activation_name(Activation("", function, o, alpha, limit, up_offset)) for o in (False, True)]
    named = [name for name in made if name in ACTIVATIONS]  # names without a limit come first
    return next(iter((*named, *filter(None, made))), "")


def _relu2(term: Term) -> bool:
    """Return whether a term is relu(UP), squared."""
    if isinstance(term, Mul):
        return len(term.args) == 2 and all(_relu(t) for t in term.args)
    if not isinstance(term, Apply) or getattr(term.op, "overloadpacket", None) not in (aten.pow, aten.square):
        return False
    return _relu(term.args[0]) and term.args[1:] in ((), (2,), (2.0,))


def _relu(term: Any) -> bool:
    if isinstance(term, Apply) and term.op is aten.relu.default:
        return term.args[0] is UP
    base, low, high = _clamped(term)
    return base is UP and low == 0 and high is None


def _situ(term: Term) -> tuple[float, float] | None:
    """Return the soft limits of GATE and UP if a term is s(GATE) * sigmoid(GATE) * s(UP), with
    s(x) = c * tanh(x / c)."""
    scale, gates = 1.0, 0
    caps: dict[Term, float] = {}
    for f in flatten(term, Mul):
        if isinstance(f, Const) and isinstance(f.value, (int, float)):
            scale *= f.value
            continue
        if not isinstance(f, Apply):
            return None
        packet = getattr(f.op, "overloadpacket", None)
        if packet is aten.sigmoid and f.args[0] is GATE:
            gates += 1
        elif packet is aten.tanh and (found := _divided(f.args[0])) is not None and found[0] not in caps:
            caps[found[0]] = found[1]
        else:
            return None
    if gates != 1 or caps.keys() != {GATE, UP}:
        return None
    both = caps[GATE], caps[UP]
    return both if math.isclose(scale, both[0] * both[1], rel_tol=1e-6) else None


def _divided(term: Term) -> tuple[Term, float] | None:
    """Return (x, c) of x / c or x * (1 / c)."""
    if isinstance(term, Apply) and getattr(term.op, "overloadpacket", None) is aten.div and not term.kwargs:
        x, by = term.args
        number = by.value if isinstance(by, Const) else by
        return (x, float(number)) if isinstance(number, (int, float)) else None
    if isinstance(term, Mul) and len(term.args) == 2:
        for x, by in (term.args, term.args[::-1]):
            if isinstance(by, Const) and isinstance(by.value, (int, float)) and by.value:
                return x, round(1 / by.value, 6)
    return None


def same_function(name: str) -> list[str]:
    """Return the activations that are equal to this one, or that differ only in the order of gate and up."""
    if not name:
        return []
    own = known_activation(name)
    if not own.gated:
        return [name]
    both = [activation_name(replace(own, interleaved=order)) for order in (False, True)]
    return [n for n in both if n is not None]


def _gate(factors: list[Term]) -> tuple[str, float, float | None] | None:
    """Return (kind, alpha, limit) of silu(GATE), gelu(GATE) or GATE * sigmoid(alpha * GATE), clamped or
    not."""
    if len(factors) == 1 and isinstance(factors[0], Apply):
        f = factors[0]
        base, low, high = _clamped(f.args[0])
        if base is not GATE or low is not None:
            return None
        if f.op is aten.silu.default:
            return "silu", 1.0, high
        if f.op is aten.gelu.default:
            approximate = f.kwargs.get("approximate", "none")
            return ("gelu" if approximate == "none" else "gelu_tanh"), 1.0, high
        return None
    if len(factors) != 2:
        return None
    for outer, s in (factors, factors[::-1]):
        if not (isinstance(s, Apply) and s.op is aten.sigmoid.default):
            continue
        inner, alpha = s.args[0], 1.0
        if isinstance(inner, Mul):
            numbers = [a for a in inner.args if isinstance(a, Const)]
            rest = [a for a in inner.args if not isinstance(a, Const)]
            if len(numbers) != 1:
                continue
            inner, alpha = rest[0], float(numbers[0].value)
        if inner is outer:
            base, low, high = _clamped(outer)
            if base is GATE and low is None:
                return "silu", alpha, high
    return None


def _offset(term: Term) -> tuple[float, Term]:
    if isinstance(term, Add) and len(term.args) == 2:
        for a, b in (term.args, term.args[::-1]):
            if isinstance(b, Const):
                return float(b.value), a
    return 0.0, term


def _clamped(term: Term) -> tuple[Term, float | None, float | None]:
    """Return (term, min, max) of a clamp with numbers. The limits are None if there is no clamp."""
    if isinstance(term, Apply) and getattr(term.op, "overloadpacket", None) in (
        aten.clamp,
        aten.clamp_max,
        aten.clamp_min,
    ):
        names = [a.name for a in term.op._schema.arguments]
        given = {**dict(zip(names, term.args)), **term.kwargs}
        return given["self"], given.get("min"), given.get("max")
    return term, None, None


# --- branches ---


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
    """The single choice j that this branch serves. None if it serves all choices."""
    ids: Ref | None
    masked: Ref | None
    """The ids from which a mask over tokens is computed. Set only if `ids` is None."""
    place: Axis | None
    """For an expert that reads its slice of a buffer, instead of `ids`: the axis of the output, and of x,
    that counts the experts."""
    sums_choices: bool
    k: Size | None
    """The number of a token's ids that the branch sums over. It can be smaller than k, if ids are read
    through a slice. None if the branch sums over no ids."""
    chosen: tuple[Term, ...]
    """Further conditions that a row must meet, such as a capacity that is not used up. They are terms over
    tokens, J and E.
    """
    factors: tuple[Term, ...]
    """Factors of the output, as terms over tokens, J and E."""
    after: Term
    """The function that is applied to a row of the expert's output before the factors, such as a norm. A term
    over OUT and the hidden axis."""
    x: Ref
    scales: tuple[Term, ...]
    """Factors of the input."""
    act: Act
    up: tuple[Matrix, ...]
    up_bias: tuple[Matrix | None, ...]
    down: Matrix
    down_bias: Matrix | None
    gain: Matrix | None = None
    """A vector that belongs to the expert and scales the input of its down product."""

    @property
    def matrices(self) -> tuple[Matrix | None, ...]:
        """All matrices and vectors that belong to this expert."""
        return *self.up, self.down, *self.up_bias, self.down_bias, self.gain


Parts = tuple[Matrix, ...]
"""Some of an expert's matrices or vectors. They are stacked along the rows."""
T = TypeVar("T")


@dataclass(frozen=True)
class _Even(Generic[T]):
    """Values of experts 0 to `count` - 1, with equal steps between them. The first two determine all
    others."""

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
    """Parts of experts. From each expert to the next, all indices grow by the same step."""

    def of(self, e: int) -> Parts:
        return tuple(_matrix_after(a, b, e) for a, b in zip(self.first, self.second, strict=True))


Experts = list[Parts] | EvenParts
"""Some parts of each expert."""


@dataclass(frozen=True)
class EvenBranches(_Even[Branch]):
    """Branches of experts that differ only in the indices of their matrices, which grow in even steps."""

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
    """Return the branches of all experts whose ids index the weights; of(e) reads one of them.

    conditions: whether rows are chosen by more than ids. Without conditions, experts differ only in their
    matrices. If the matrices of the first two experts determine those of the last one, they determine all
    others, too, and the others need not be read.
    """
    if not conditions and count >= 4:
        even = EvenBranches(of(0), of(1), count)
        if _lead_on(even.first, even.second) and even.of(count - 1) == of(count - 1):
            return even
    return [of(e) for e in range(count)]


def _lead_on(first: Branch, second: Branch) -> bool:
    """Return whether the matrices of two experts determine those of all others."""
    for a, b in zip(first.matrices, second.matrices, strict=True):
        if a is None or b is None:
            continue
        places = zip(a.ref.index, b.ref.index, strict=True)
        if a.ref.node is not b.ref.node or any(coordinate_after(i, j, 2) is None for i, j in places):
            return False
    return True


def _matrix_after(first: Matrix, second: Matrix, e: int) -> Matrix:
    """Return the matrix of expert e, given those of experts 0 and 1, which determine it."""
    index = [coordinate_after(i, j, e) for i, j in zip(first.ref.index, second.ref.index, strict=True)]
    return replace(second, ref=Ref(second.ref.node, [i for i in index if i is not None]))


@dataclass
class Mixture:
    """The block that `root` computes; `rest` is added to it."""

    root: fx.Node
    tokens: tuple[Axis, ...]
    hidden: Axis
    branches: Branches
    """One branch for each expert, in the order `first`, `first` + 1, ..."""
    first: int
    k: int | None
    """The number of choices of a token. None if every expert serves every token."""
    rest: list[Ref] = field(default_factory=list)
    kept: tuple[Term, ...] = ()
    """Factors of the rows that no expert's output overwrites."""
    downs: int = 0
    """The number of the graph's down products that belong to this block."""
    wraps: bool = False
    """True if ids index a tensor of weights. Negative ids then count from the end."""
    form: str = ""
    """A name for the kind of the products. Empty if they are of several kinds, or the kind has no name."""
    at: fx.Node | None = None
    """The node whose line the report names, if it is not the root's."""

    @property
    def common(self) -> Branch:
        """Return the first branch. The others differ from it only in their matrices."""
        return self.branches.first if isinstance(self.branches, EvenBranches) else self.branches[0]

    @property
    def two(self) -> tuple[Branch, Branch]:
        """Return the first two branches."""
        if isinstance(self.branches, EvenBranches):
            return self.branches.first, self.branches.second
        return self.branches[0], self.branches[1]

    @property
    def weights(self) -> set[fx.Node]:
        """Return the parameters that hold the experts' matrices."""
        branches = [self.common] if isinstance(self.branches, EvenBranches) else self.branches
        return {p.ref.node for b in branches for p in (*b.up, b.down)}

    @property
    def _representatives(self) -> Sequence[Branch]:
        """Return branches that show what differs among all of them."""
        return self.two if isinstance(self.branches, EvenBranches) else self.branches

    @property
    def after_shared(self) -> bool:
        """Return whether all experts have the same up product: a layer before experts of one Linear each."""
        own = self.common.up, self.common.up_bias
        return all((b.up, b.up_bias) == own for b in self._representatives)

    @property
    def part_shared(self) -> Matrix | None:
        """Return a matrix that all experts share, other than a whole layer before them. It is no expert's."""
        before = () if self.after_shared else range(len(self.common.up))
        parts = [[b.up[i] for b in self._representatives] for i in before] + [
            [b.down for b in self._representatives]
        ]
        return next((p[0] for p in parts if len(p) > 1 and all(q == p[0] for q in p)), None)

    def parts(self, of: Callable[[Branch], tuple[Matrix | None, ...]]) -> Experts:
        """Return the parts that `of` gives for each expert, in order. Parts that are None are left out."""

        def own(b: Branch) -> Parts:
            return tuple(p for p in of(b) if p is not None)

        if isinstance(self.branches, EvenBranches):
            return EvenParts(own(self.branches.first), own(self.branches.second), len(self.branches))
        return [own(b) for b in self.branches]


def coordinate_after(first: Term, second: Term, e: int) -> Term | None:
    """Return the coordinate of expert e, given those of experts 0 and 1. None if they do not determine it."""
    if first is second:
        return first
    if isinstance(first, Const) and isinstance(second, Const):
        return Const(first.value + e * (second.value - first.value))
    (base, start, step), (other, further, by) = affine(first), affine(second)
    if base is other and step == by:
        return Affine(base, start + e * (further - start), step)
    return None


# --- conditions on matrices and branches ---


def need_wide(matrices: Iterable[Matrix], site: fx.Node, facts: Facts) -> None:
    """Refuse matrices with a side below SMALLEST_SIDE, such as adapters (LoRA): 4 bits would save little and
    cost accuracy.

    Weights that the model holds in 4 bits may have any size."""
    for m in matrices:
        wide = facts.in_4_bits(m.ref.node) or min(m.n, m.k) >= SMALLEST_SIDE
        need(wide, Kind.NARROW, site, m.ref.node, m.n, m.k)


def in_common(a: Branch, b: Branch) -> Iterator[tuple[Any, ...]]:
    """Yield for each property whether both branches share it, the kind of refusal if not, and its facts."""
    shapes = [tuple((w.n, w.k) for w in (*x.up, x.down)) for x in (a, b)]
    biases = [[x is None for x in (*branch.up_bias, branch.down_bias, branch.gain)] for branch in (a, b)]
    yield a.x is b.x, Kind.INPUTS_DIFFER, a.x, b.x
    yield a.scales == b.scales, Kind.SCALES_DIFFER
    yield a.act == b.act, Kind.ACTIVATIONS_DIFFER
    yield shapes[0] == shapes[1], Kind.SHAPES_DIFFER, *shapes
    yield a.ids is b.ids and a.masked is b.masked, Kind.IDS_DIFFER
    yield a.sums_choices == b.sums_choices and a.k == b.k, Kind.CHOICES_DIFFER
    yield a.chosen == b.chosen, Kind.CONDITIONS_DIFFER, a.chosen, b.chosen
    if a.factors != b.factors:
        by_id = next((f for f in (*a.factors, *b.factors) if _looks_up_a_row(f)), None)
        if by_id is not None:
            yield False, Kind.WEIGHTED_BY_ROW, by_id
        yield False, Kind.WEIGHTED_DIFFERENTLY, a.factors, b.factors
    yield a.after is b.after, Kind.AFTER_DIFFERS, a.after, b.after
    yield biases[0] == biases[1], Kind.BIASES_DIFFER
    yield (a.choice is None) == (b.choice is None), Kind.OTHER_CHOICES


def _looks_up_a_row(factor: Term) -> bool:
    """Return whether a factor is like scores[ids, j], where an id stands in the place of the token."""
    return isinstance(factor, Ref) and len(factor.index) > 1 and isinstance(factor.index[0], Ref)
