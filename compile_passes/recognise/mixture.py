"""A mixture of experts in index notation, however its program was written:

    out[t] = sum over e of c(t, e) * down_e(act(up_e(s(t, e) * x[t])))

`Matcher.match` splits a node's term (index/reader.py) into one branch for each expert. It proves that the
branches differ only in the expert: same x, same activation, same routing, and each expert exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ..graph.nodes import shape, static_int, value
from ..index.conditions import INDICATOR, is_indicator
from ..index.reader import Reader, same
from ..index.terms import (
    Add,
    AnyOf,
    Apply,
    Axis,
    Const,
    Mul,
    NoneOf,
    Ref,
    Size,
    Term,
    flatten,
    free_axes,
    is_eq,
    parts_of,
    substitute,
    walk,
)
from ..refusal import Kind, need, refuse
from .block import (
    Act,
    Branch,
    Branches,
    EvenBranches,
    Linear,
    Matrix,
    Mixture,
    branches_by_id,
    in_common,
    read_activation,
)
from .pieces import (
    J,
    K,
    N,
    Pieces,
    along,
    demote,
    eq,
    expert_column,
    fixed_choice,
    has_masks,
    in_general,
    indexed_size,
    indices,
    is_implied,
    looked_up,
    open_sums,
    product_ref,
    split_after,
    without_other_masks,
)
from .unread import kind_of


@dataclass(frozen=True)
class _Up:
    """One of the input products of the activation: its weight, and the rows that it multiplies."""

    matrix: Matrix
    bias: Matrix | None
    x: Ref
    scales: tuple[Term, ...]


@dataclass(frozen=True)
class _Input:
    """The input of a down product. The fields are those of a Branch."""

    x: Ref
    scales: tuple[Term, ...]
    act: Act
    up: tuple[Matrix, ...]
    up_bias: tuple[Matrix | None, ...]
    gain: Matrix | None


@dataclass
class _Selection:
    """The rows of an expert, read from the factors of its output. Most fields are those of a Branch."""

    expert: int | None
    ids: Ref | None = None
    masked: Ref | None = None
    place: Axis | None = None
    chosen: list[Term] = field(default_factory=list)
    weights: list[Term] = field(default_factory=list)
    k: Size | None = None


class Matcher(Pieces):
    def __init__(self, reader: Reader) -> None:
        super().__init__(reader)
        self.branches = 0
        self.most: Branches = []
        """The longest list of branches that `match` has found since the caller last emptied it."""

    def match(self, root: fx.Node, allow_rest: bool, has_experts: Callable[[fx.Node], bool]) -> Mixture:
        """Return the mixture that `root` computes. Raise Refused if it computes none.

        allow_rest: whether something may be added to the mixture. Nodes for which `has_experts` is true may
        never be added.
        """
        self.branches = 0
        v = self.reader.value(root, 2)
        need(len(v.dims) >= 1 and len(v.dims[-1]) == 1, Kind.HIDDEN_NOT_LAST, root)
        hidden, tokens = v.dims[-1][0], tuple(a for g in v.dims[:-1] for a in g)
        mixture = Mixture(root, tokens, hidden, [], 0, None)
        addends: list[Branches] = []
        kept: list[tuple[Term, ...]] = []
        for axes, factors, core in self.expand(v.term):
            if core is None:
                row = tuple(f for each in factors for f in flatten(each, Mul))
                if any(isinstance(f, NoneOf) for f in row):
                    kept.append(row)
                    continue
                if all(isinstance(f, Const) and not f.value for f in factors):
                    continue
                whole = product_ref(factors)
                if whole is not None and whole.node is root:
                    refuse(Kind.OPAQUE, root, root, kind_of(root))
                if axes and not any(map(has_masks, factors)):
                    refuse(Kind.SHARED_BIAS, root, factors)
                need(allow_rest and whole is not None and not axes, Kind.SOMETHING_ADDED, root)
                assert whole is not None
                if has_experts(whole.node):
                    refuse(Kind.OPAQUE_WITH_EXPERTS, whole.node, whole.node, kind_of(whole.node))
                mixture.rest.append(whole)
                continue
            mixture.downs += 1
            for found in self._branches(axes, factors, core, mixture):
                addends.append(found)
                self.branches += len(found)
        branches = addends[0] if len(addends) == 1 else [b for found in addends for b in found]
        if len(branches) > len(self.most):
            self.most = branches
        need(len(branches) > 1, Kind.ONE_EXPERT, root)
        self._prove(branches, mixture)
        if kept:
            need(len(kept) == 1, Kind.SEVERAL_TENSORS, root)
            kept_by = [(b.expert, b.ids, b.choice, b.chosen) for b in branches]
            mixture.kept = _kept_row(kept[0], kept_by, mixture, has_experts)
        return mixture

    def _branches(
        self, axes: tuple[Axis, ...], factors: tuple[Term, ...], core: Term, m: Mixture
    ) -> Iterator[Branches]:
        """Read one addend. It belongs to one expert, or to all experts at once. In the second case an axis
        ranges over the experts, or ids index the weights."""
        down = self.inside(core)
        lin = self.linear(down) if down is not None else None
        assert down is not None and lin is not None
        after, factors = split_after(down, core, lin.weight.node, factors, m.hidden, m.root)
        core = down
        ids = [i for i in indices(lin.weight) if isinstance(i, Ref)]
        over = [a for a in axes if a in free_axes(lin.weight) and a is not lin.inner]
        if ids:
            need(len(ids) == 1, Kind.INDEXED_TWICE, m.root)
            count = indexed_size(lin.weight, ids[0])
            need(count is not None, Kind.NOT_INDEXED, m.root)
            m.wraps = True

            def of(e: int) -> Branch:
                at = substitute(core, {ids[0]: Const(e)})
                return self._branch(axes, (*factors, eq(ids[0], e)), at, after, m)

            conditions = any(isinstance(t, Apply) and t.op in INDICATOR for f in factors for t in walk(f))
            yield branches_by_id(of, count or 0, conditions)
        elif over:
            need(len(over) == 1 and isinstance(over[0].size, int), Kind.EXPERTS_AXES, m.root)
            rest = tuple(a for a in axes if a is not over[0])
            for e in range(over[0].size):
                at = {over[0]: Const(e)}
                own = tuple(substitute(f, at) for f in factors)
                yield [self._branch(rest, own, substitute(core, at), after, m, e)]
        else:
            yield [self._branch(axes, factors, core, after, m)]

    def _branch(
        self,
        axes: tuple[Axis, ...],
        factors: tuple[Term, ...],
        core: Term,
        after: Term,
        m: Mixture,
        e: int | None = None,
    ) -> Branch:
        lin = self.linear(core)
        if lin is None:  # its matrix is one row: the expert has one output
            refuse(Kind.NOT_OWN_MATRIX, m.root, core)
        down, down_bias = self._matrix(lin, m.hidden, m.root)
        inner = self._input(lin, m)
        x = inner.x

        axes, factors = open_sums(axes, factors)
        need(not free_axes(x) & set(axes), Kind.NOT_OVER_CHOICES, m.root)
        rows = self._selection(without_other_masks(factors), e, m)
        ids, masked, place = rows.ids, rows.masked, rows.place
        # The input of a row may be masked, too. Where it is masked, so is everything computed from it.
        scales = tuple(demote(s, masks=place is not None) for s in inner.scales)
        scales = tuple(s for s in scales if not (s in rows.weights and _is_mask(s)))
        expert = rows.expert
        if expert is None:  # a condition such as `scores[:, e] > 0.5` names a column, too
            of = (r for f in rows.chosen for r in walk(f) if isinstance(r, Ref))
            expert = expert_column((*rows.weights, *scales, *of), m.tokens)
        for f in rows.chosen:
            column = expert is not None and rows.place is None
            if not isinstance(f, Apply) or (rows.ids is None and not column):
                refuse(Kind.SELECTED_BY, m.root, f)
        if expert is None:
            refuse(Kind.WHOSE_OUTPUT, m.root)
        choice = fixed_choice(ids)
        other = next(filter(None, (looked_up(t, ids) for t in (after, *rows.weights))), None)
        if other is not None:  # an earlier node, without this other scale, may be a block
            refuse(Kind.SCALED_BY_OTHER, m.root, other)
        need(len(axes) <= 1, Kind.SEVERAL_AXES, m.root)
        names: dict[Term, Term] = {a: J for a in axes}
        k = axes[0].size if axes else rows.k
        if place is not None:
            need(masked is None and not axes, Kind.TWO_MASKS, m.root)
            x, k = along(x, expert, place), 1
        elif ids is not None:
            need(not axes or axes[0] in _coordinates(ids), Kind.OTHER_AXIS, m.root)
            masked = None  # the mask over choices implies the mask over tokens
            ids = substitute(ids, names) if choice is None else Ref(ids.node, (*ids.index[:-1], J))
        else:
            need(not axes, Kind.NO_MASK, m.root)

        def one(term: Term, choice: int | None) -> Term:
            term = substitute(term, names)
            return in_general(term, expert, choice) if place is None else along(term, expert, place)

        def general(terms: list[Term]) -> tuple[Term, ...]:
            return tuple(sorted((one(t, choice) for t in terms), key=repr))

        return Branch(
            expert, choice, ids, masked, place, bool(axes) or choice is not None, k, general(rows.chosen),
            general(rows.weights), after, x, tuple(one(s, None) for s in scales), inner.act, inner.up,
            inner.up_bias, down, down_bias, inner.gain,
        )  # fmt: skip

    def _selection(self, factors: tuple[Term, ...], e: int | None, m: Mixture) -> _Selection:
        """Read which rows an expert computes, and the weights of these rows. `e`: the expert, if it is
        known."""
        rows = _Selection(e)
        for f in factors:
            inside = f.body if isinstance(f, AnyOf) else f
            if is_eq(inside):
                at, expert = inside.args
                of_ids = (isinstance(at, Ref) or at in m.tokens) and isinstance(expert, Const)
                need(of_ids, Kind.MASK_OF_OTHERS, m.root)
                known = rows.expert is None or rows.expert == expert.value
                need(known, Kind.MASKED_FOR_ANOTHER, m.root, rows.expert)
                rows.expert = int(expert.value)
                if isinstance(f, AnyOf):
                    rows.masked, rows.k = substitute(at, {a: J for a in f.axes}), f.axes[0].size
                else:
                    alone = at is rows.ids or at is rows.place or (rows.ids is None and rows.place is None)
                    need(alone, Kind.TWO_MASKS, m.root)
                    rows.ids, rows.place = (at, None) if isinstance(at, Ref) else (None, at)
            elif is_indicator(f):
                rows.chosen.append(f)
            else:
                rows.weights.append(f)
        if rows.expert is not None:
            rows.chosen = [f for f in rows.chosen if not is_implied(f, rows.ids, rows.expert)]
        known = rows.ids is not None
        rows.weights = [
            demote(f, masks=(known or isinstance(f, (Add, Apply))) and not self.has_experts(f))
            for f in rows.weights
        ]
        return rows

    def _input(self, lin: Linear, m: Mixture) -> _Input:
        """Read the input of a down product: an activation of gate and up, or of up alone, of rows of x."""
        inputs, gains = self.without_gains(lin)
        leaves = self.leaves(inputs)
        need(len(leaves) in (1, 2), Kind.PRODUCTS_IN_ACTIVATION, m.root, len(leaves))
        need(len(gains) <= 1, Kind.SEVERAL_GAINS, m.root)
        act, leaves = read_activation(inputs, leaves, m.root)
        ups = [self._up(leaf, lin, m) for leaf in leaves]
        first = ups[0]
        for up in ups[1:]:
            alike = (up.matrix.n, up.matrix.k) == (first.matrix.n, first.matrix.k)
            need((up.x, up.scales) == (first.x, first.scales), Kind.GATE_UP_ROWS, m.root)
            need(alike, Kind.GATE_UP_SHAPES, m.root)
        k = static_int(lin.inner.size)
        if k is None:
            refuse(Kind.SYMBOLIC_SHAPE, m.root)
        gain = Matrix(substitute(gains[0], {lin.inner: N}), k, 0) if gains else None
        if gain is not None and free_axes(gain.ref) != {N}:
            refuse(Kind.NOT_OWN_GAIN, m.root, gains[0])
        matrices, biases = tuple(up.matrix for up in ups), tuple(up.bias for up in ups)
        return _Input(first.x, first.scales, act, matrices, biases, gain)

    def _up(self, leaf: Term, lin: Linear, m: Mixture) -> _Up:
        """Reads one of the two input products, gate or up, from `leaf`."""
        up = self.linear(leaf)
        assert up is not None
        matrix, bias = self._matrix(up, lin.inner, m.root)
        whole = [demote(substitute(f, {up.inner: K})) for f in up.input]
        rows: list[Term] = [f for r in whole for f in flatten(r, Mul)]
        xs = [f for f in rows if K in free_axes(f)]
        if len(xs) != 1 or not isinstance(xs[0], Ref):
            refuse(Kind.NOT_ROWS_OF_X, m.root)
        x = xs[0]
        part = any(i is K and not same(s, matrix.k) for i, s in zip(x.index, shape(x.node)))
        need(not part, Kind.COLUMNS_OF_X, m.root)
        return _Up(matrix, bias, x, tuple(f for f in rows if f is not x))

    def _matrix(self, lin: Linear, out: Axis, site: fx.Node) -> tuple[Matrix, Matrix | None]:
        n, k = static_int(out.size), static_int(lin.inner.size)
        if n is None or k is None:
            refuse(Kind.SYMBOLIC_SHAPE, site)
        ref = substitute(lin.weight, {out: N, lin.inner: K})
        by_ids = any(isinstance(i, Ref) for i in indices(ref))
        need(not by_ids, Kind.ROUTED_DIFFERENTLY, site)
        if free_axes(ref) != {N, K}:
            refuse(Kind.NOT_OWN_MATRIX, site, lin.weight)
        at = [(i.value, static_int(s)) for i, s in zip(ref.index, shape(ref.node)) if isinstance(i, Const)]
        inside = all(s is None or i < s for i, s in at)
        need(inside, Kind.FEWER_EXPERTS, site)
        bias = None
        if lin.bias is not None:
            bias = Matrix(substitute(lin.bias, {out: N}), n, 0)
            if free_axes(bias.ref) != {N}:
                refuse(Kind.NOT_OWN_BIAS, site, lin.bias)
        return Matrix(ref, n, k), bias

    # --- the proof ---

    def _prove(self, branches: Branches, m: Mixture) -> None:
        """Prove that the branches are those of `m`: they differ only in the expert, and each expert occurs
        once."""
        if isinstance(branches, EvenBranches):
            branches = replace(
                branches, first=_of_one_choice(branches.first), second=_of_one_choice(branches.second)
            )
            self._prove_alike([branches.first, branches.second], m)
            m.first, m.branches = 0, branches
            m.k = self._choices(m.common, m)
        else:
            one_choice = len({b.choice for b in branches}) == 1
            if one_choice and len({b.expert for b in branches}) == len(branches):
                branches = [_of_one_choice(b) for b in branches]
            self._prove_alike(branches, m)
            self._prove_each_once(branches, m)
        x = m.common.x
        x_tokens = set(m.tokens) & free_axes(x)
        need(free_axes(x) == x_tokens | {K}, Kind.ROW_A_TOKEN, m.root)

    @staticmethod
    def _prove_alike(branches: list[Branch], m: Mixture) -> None:
        first = branches[0]
        for b in branches:
            other = _other_slice(b)
            need(other is None, Kind.OTHER_SLICE, m.root, b.expert, other)
        for b in branches[1:]:
            for fine, kind, *facts in in_common(first, b):
                need(fine, kind, m.root, first.expert, b.expert, *facts)
        own = first.place is None or any(first.place in free_axes(t) for t in (first.x, *first.scales))
        need(own, Kind.WHOSE_OUTPUT, m.root)

    def _prove_each_once(self, branches: list[Branch], m: Mixture) -> None:
        """Prove that each expert has one branch, or one for each of a token's choices."""
        of: dict[int, list[Branch]] = {}
        for b in branches:
            of.setdefault(b.expert, []).append(b)
        experts = sorted(of)
        m.first = experts[0]
        in_order = experts == list(range(m.first, m.first + len(experts)))
        need(in_order, Kind.NOT_CONSECUTIVE, m.root, experts)
        m.k = self._choices(branches[0], m)
        for e, own in of.items():
            choices = sorted(b.choice for b in own if b.choice is not None)
            if branches[0].choice is None:
                need(len(own) == 1, Kind.ADDED_AGAIN, m.root, e, len(own))
            else:
                complete = choices == list(range(m.k or 0))
                need(complete, Kind.SOME_CHOICES, m.root, e, choices, m.k)
            alike = all(b.matrices == own[0].matrices for b in own)
            need(alike, Kind.CHOICES_WEIGHTS, m.root)
        m.branches = [replace(of[e][0], choice=None) for e in experts]

    def _choices(self, b: Branch, m: Mixture) -> int | None:
        """Return the number of ids of each token. None if the routing weights are a matrix over all
        experts."""
        if b.place is not None:
            return 1
        ids = b.ids if b.ids is not None else b.masked
        if ids is None:
            return None
        at = set(m.tokens)
        if not b.sums_choices and b.masked is None:  # each row of the output is one choice
            need(free_axes(ids) <= at, Kind.NOT_AN_ID_A_ROW, m.root)
            return 1
        # Ids may be the same for many tokens, such as the ids of a sequence or of a task.
        need(J in free_axes(ids) and free_axes(ids) <= at | {J}, Kind.NOT_IDS_A_TOKEN, m.root)
        at_j = _coordinates(ids).count(J)
        need(at_j == 1, Kind.CHOICES_DIMENSIONS, m.root)
        k = static_int(b.k if b.k is not None else shape(ids.node)[ids.index.index(J)])
        need(k is not None, Kind.SYMBOLIC_K, m.root)
        return k


def _coordinates(ref: Ref) -> list[Term]:
    """Return the coordinates of an element. A dimension that a view has split has several coordinates."""
    return [p for i in ref.index for p in parts_of(i)]


def _of_one_choice(b: Branch) -> Branch:
    """Return a branch that uses one column of the ids, with `ids` replaced by that column."""
    if b.choice is None or b.ids is None:
        return b
    at = {J: Const(b.choice)}
    return replace(
        b,
        choice=None,
        ids=substitute(b.ids, at),
        sums_choices=False,
        k=None,
        chosen=tuple(substitute(t, at) for t in b.chosen),
        factors=tuple(substitute(t, at) for t in b.factors),
    )


def _is_mask(term: Term) -> bool:
    return isinstance(term, Ref) and value(term.node).dtype == torch.bool


def _other_slice(b: Branch) -> int | None:
    """Return the slice of a buffer that an expert reads, if its position differs from that of the expert's
    output."""
    if b.place is None or b.place in free_axes(b.x):
        return None
    return next((i for i in range(b.place.size) if along(b.x, i, b.place) is not b.x), None)


# --- rows that no output overwrites ---


def _kept_row(
    row: tuple[Term, ...], written: list[tuple[Any, ...]], m: Mixture, has_experts: Callable[[fx.Node], bool]
) -> tuple[Term, ...]:
    """Return the factors and the row that is kept where no expert overwrites it."""
    none = [f for f in row if isinstance(f, NoneOf)]
    factors = tuple(demote(f) for f in row if not isinstance(f, NoneOf))
    own = len(none) == 1 and m.k == 1 and m.common.place is None and not m.wraps
    others = own and sorted(map(repr, map(_written_by, none[0].masks))) == sorted(map(repr, written))
    need(others, Kind.OTHER_KEPT, m.root)
    for f in factors:
        known = free_axes(f) <= {*m.tokens, m.hidden}
        read = [t.node for t in walk(f) if isinstance(t, Ref)]
        need(known and not any(map(has_experts, read)), Kind.KEPT_APART, m.root, f)
    return factors


def _written_by(mask: Term) -> tuple[Any, ...]:
    """Return (expert, ids, choice, further conditions) of the rows that a mask selects, as in a Branch."""
    factors = flatten(mask, Mul)
    ids, expert = next((f.args for f in factors if is_eq(f)), (None, None))  # type: ignore[attr-defined]
    if not (isinstance(ids, Ref) and isinstance(expert, Const)):
        return ()
    e, choice = int(expert.value), fixed_choice(ids)
    at = ids if choice is None else Ref(ids.node, (*ids.index[:-1], J))
    further = [f for f in factors if not (is_eq(f) or is_implied(f, ids, e))]
    chosen = sorted((in_general(f, e, choice) for f in further), key=repr)
    return e, at, choice, tuple(chosen)
