"""Finds experts of other forms than two layers and an activation: one Linear, three layers, a norm at the
end, a residual.

Each expert is the part of the graph that leads to its output and to no other expert's. Experts are alike if
these parts differ only in their weights and in the number of the expert. Each product is rewritten by itself,
so what is between the products may be anything. One of these must show that a router chooses:

- dispatch: each part has rows of its own, and a choice that depends on the model's inputs selects them;
- combination: the outputs are added with a router's weights, each once and with its own. mixture.py proves
  this, with each output in the place of a down product.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from torch import fx

from ..graph.nodes import (
    CUTS,
    FLOATING,
    RESHAPES,
    SWAPS,
    after,
    aten,
    has_chosen_rows,
    is_op,
    is_product,
    is_tensor,
    reached,
    shape,
    strip,
    through,
    value,
)
from ..index.reader import Reader
from ..index.terms import Ref, Term
from ..refusal import Kind, Refused
from .block import UP, Act, Linear, Matrix, Mixture, Parts
from .evidence import Evidence
from .mixture import Matcher, _Input
from .pieces import K
from .products import factors, read_matrix
from .search import DULL, VAGUE
from .unread import is_random

_FAR = 96
"""The outputs must be combined within this many nodes after them, and _FOR_EACH more for each expert."""
_FOR_EACH = 8
_TRIED = 12
"""The largest number of nodes that are tried as the combination of the same experts."""
_MOST = 16
"""The largest number of products in an expert. Larger parts are whole networks. Walking them for each node
would take time that grows with the square of their depth."""


@dataclass(frozen=True)
class Expert:
    """One expert: its output, and its products with their matrices, in the graph's order."""

    output: fx.Node
    products: tuple[fx.Node, ...]
    rows: tuple[fx.Node, ...]
    """For each product, the node that its rows are a view of."""
    matrices: Parts
    inputs: tuple[fx.Node, ...]
    """Tensors that it shares with other experts: x, ids."""
    structure: tuple[Any, ...]
    """Its calls, without its weights and its number."""
    numbers: tuple[Any, ...]
    """Integers in the choice of its rows. The expert's number is one of them."""
    own: frozenset[fx.Node]


@dataclass(frozen=True)
class Alike:
    """Experts that are alike. Each of their products will be rewritten by itself."""

    experts: list[Expert]

    @property
    def nodes(self) -> set[fx.Node]:
        """All nodes that are an expert's own."""
        return {n for e in self.experts for n in e.own}

    @property
    def site(self) -> fx.Node:
        return self.experts[-1].products[-1]

    @property
    def operands(self) -> list[list[Parts]]:
        """Return, for each operand, the matrices of all experts. Products of the same rows, such as gate and
        up, are one operand."""
        first = self.experts[0]
        of: dict[object, list[int]] = {}
        for i, (rows, m) in enumerate(zip(first.rows, first.matrices, strict=True)):
            of.setdefault((rows, m.n, m.k), []).append(i)
        return [[tuple(e.matrices[i] for i in own) for e in self.experts] for own in of.values()]


_Ends: TypeAlias = "tuple[dict[int, list[fx.Node]], Collection[fx.Node]]"
"""Two things: the nodes that depend on several outputs, by the set of these outputs as bits; and all nodes
that depend on any output, up to products with weights and norms."""


class Search:
    def __init__(
        self, graph: fx.Graph, reader: Reader, evidence: Evidence, fixed: set[fx.Node],
        taken: Collection[fx.Node],
    ) -> None:  # fmt: skip
        """taken: parameters that already belong to experts of two layers."""
        self._reader, self._evidence, self._fixed = reader, evidence, fixed
        self._nodes = list(graph.nodes)
        self._at = {n: i for i, n in enumerate(self._nodes)}
        self._matrices: dict[fx.Node, Matrix] = {}
        for node in graph.nodes:
            if is_op(node, aten.mm, aten.addmm):
                weight = factors(node)[2]
                matrix = None if _parameter_of(weight) in taken else read_matrix(weight, reader)
                if matrix is not None and matrix.ref.node not in taken:
                    self._matrices[node] = matrix
        self._of_weights = set(fixed)
        """Nodes that are computed from parameters alone."""

    def run(self) -> Iterator[Alike]:
        """Yield groups, the later ones in the graph first. No expert is a part of an expert that was yielded
        before."""
        if len(self._matrices) < 2 or not self._evidence.has_router:
            return
        covered: set[fx.Node] = set()
        for outputs in self._classes():
            outputs = [n for n in outputs if n not in covered]
            routers = [n for n in outputs if n in self._matrices and self._evidence.is_router(n)]
            if len(outputs) - len(routers) < 2:
                continue
            ends = self._ends(outputs)
            if ends[0] or all(map(has_chosen_rows, outputs)):
                for alike in self._alike(outputs, ends):
                    covered |= alike.nodes
                    yield alike

    def _classes(self) -> list[list[fx.Node]]:
        """Return groups of nodes that compute the same function of different weights. Each of the nodes
        contains a product."""
        depth: dict[fx.Node, int] = {}
        """For each node that depends on products: the largest number of products in a chain up to it."""
        kinds: dict[fx.Node, int] = {}
        classes: dict[int, list[fx.Node]] = {}
        table: dict[object, int] = {}
        for node in self._nodes:
            inputs, key = node.all_input_nodes, cast(object, node)
            if node in self._fixed:
                key = _parameter(node)
            elif node.op == "call_function" and inputs:
                if self._of_weights.issuperset(inputs):
                    self._of_weights.add(node)
                before = max((depth.get(n, 0) for n in inputs), default=0)
                if before or node in self._matrices:
                    depth[node] = before + (node in self._matrices)
                if before and is_op(node, aten.sum, aten.bmm) and self._evidence.is_weighted(node):
                    key = ("sum", str(shape(node)), value(node).dtype, before)  # a sum of any number of terms
                else:
                    key = self._call(node, kinds.__getitem__, [])
            kinds[node] = kind = table.setdefault(key, len(table))
            if node in depth and _floats(node):
                classes.setdefault(kind, []).append(node)
        return sorted((c for c in classes.values() if len(c) > 1), key=lambda c: -self._at[c[-1]])

    def _call(self, node: fx.Node, name: Callable[[fx.Node], int], numbers: list[Any]) -> tuple[Any, ...]:
        """Return the call of a node as a key. Numbers that choose rows or a part of a weight are left out of
        the key and added to `numbers`."""
        free = node in self._of_weights or not _floats(node)

        def one(a: Any) -> Any:
            if isinstance(a, fx.Node):
                return ("node", name(a))
            if isinstance(a, (list, tuple)):
                return tuple(map(one, a))
            if free and type(a) is int:
                numbers.append(a)
                return "#"
            return repr(a)

        return (node.target, *map(one, node.args), *((k, one(a)) for k, a in node.kwargs.items()))

    def _alike(self, outputs: list[fx.Node], ends: _Ends) -> Iterator[Alike]:
        found: dict[object, dict[object, list[Expert]]] = {}
        for e in self._experts(outputs):
            named = all(self._evidence.named(m.ref.node) for m in e.matrices)
            found.setdefault(e.structure, {}).setdefault(None if named else e.inputs, []).append(e)
        for groups in found.values():
            left = []
            for experts in groups.values():
                if self._are_experts(experts, outputs, ends):
                    yield Alike(experts)
                else:
                    left.append(experts)
            # One sum may be over experts of several inputs, such as those of a task and those of all tasks.
            several = [e for experts in left for e in experts]
            if len(left) > 1 and len(several) > len(left) and self._are_experts(several, outputs, ends):
                yield Alike(several)

    def _are_experts(self, experts: list[Expert], outputs: list[fx.Node], ends: _Ends) -> bool:
        sources = [m.ref for e in experts for m in e.matrices]
        if len(experts) < 2 or len(set(sources)) < len(sources):
            return False
        if any(map(self._evidence.is_router, (p for e in experts for p in e.products))):
            return False
        own = [e.output for e in experts]
        same = own == outputs
        return self._are_dispatched(experts) or self._are_combined(experts, ends if same else self._ends(own))

    def _experts(self, outputs: list[fx.Node]) -> Iterator[Expert]:
        """Yield for each output the part of the graph that leads to it alone."""
        owner: dict[fx.Node, fx.Node | None] = {n: n for n in outputs}
        own: dict[fx.Node, list[fx.Node]] = {n: [] for n in outputs}
        products = dict.fromkeys(outputs, 0)
        todo = [(-self._at[n], n) for n in outputs]
        heapq.heapify(todo)
        while todo:
            _, node = heapq.heappop(todo)
            output = owner[node]
            if output is None:
                continue
            own[output].append(node)
            products[output] += node in self._matrices
            if products[output] > _MOST:
                return
            for n in node.all_input_nodes:
                if n not in owner:
                    owner[n] = output
                    heapq.heappush(todo, (-self._at[n], n))
                elif owner[n] is not output:
                    owner[n] = None
        for output, nodes in own.items():
            expert = self._expert(output, [n for n in reversed(nodes) if owner[n] is output])
            if expert is not None:
                yield expert

    def _expert(self, output: fx.Node, own: list[fx.Node]) -> Expert | None:
        products = tuple(n for n in own if n in self._matrices)
        others = [n for n in own if is_product(n) and n not in self._matrices]
        given = any(n.op == "placeholder" and n not in self._fixed for n in own)
        if not products or others or given or any(map(is_random, own)):
            return None
        names = {n: i for i, n in enumerate(own)}
        inputs: dict[fx.Node, int] = {}
        numbers: list[Any] = []

        def name(n: fx.Node) -> Any:
            if n in self._fixed:
                return _parameter(n)
            return names[n] if n in names else -1 - inputs.setdefault(n, len(inputs))

        calls = [_parameter(n) if n in self._fixed else self._call(n, name, numbers) for n in own]
        matrices = tuple(self._matrices[p] for p in products)
        structure = (*calls, *((m.n, m.k) for m in matrices))
        rows = tuple(strip(factors(p)[1]) for p in products)
        return Expert(
            output, products, rows, matrices, tuple(inputs), structure, tuple(numbers), frozenset(own)
        )

    def _are_dispatched(self, experts: list[Expert]) -> bool:
        """Return whether each expert has rows of its own, and the model computes which rows these are."""
        if not all(has_chosen_rows(p) for e in experts for p in e.products):
            return False
        if len({e.numbers for e in experts}) < len(experts) or any(self._goes_on(e.output) for e in experts):
            return False
        return all(any(self._evidence.chooses(n) for n in e.own) for e in experts)

    def _goes_on(self, output: fx.Node) -> bool:
        """Return whether a product with other weights follows on the same rows. If so, the output is only the
        middle of an expert."""

        def on_them(n: fx.Node) -> bool:  # a dropout returns several results
            return has_chosen_rows(n) if is_tensor(n) else isinstance(n.meta.get("val"), (tuple, list))

        rows = reached(output.users, lambda n: n.users if on_them(n) else ())
        return not rows.keys().isdisjoint(self._matrices)

    def _ends(self, outputs: list[fx.Node]) -> _Ends:
        """Return the `_Ends` of these outputs. The first part is empty if no router's scores are used."""
        made = {n: 1 << i for i, n in enumerate(outputs)}
        ends: dict[int, list[fx.Node]] = {}
        weighted = False
        todo = sorted({self._at[u] for n in outputs for u in n.users})
        seen = set(todo)
        for _ in range(_FAR + _FOR_EACH * len(outputs)):
            if not todo:
                break
            node = self._nodes[heapq.heappop(todo)]
            if self._evidence.mixes_columns(node):
                continue
            bits = made.get(node, 0)
            for n in node.all_input_nodes:
                bits |= made.get(n, 0)
                weighted = weighted or (n not in made and self._evidence.weighs(n))
            made[node] = bits
            if bits & (bits - 1) and is_tensor(node) and len(ends.setdefault(bits, [])) < _TRIED:
                ends[bits].append(node)
            for at in {self._at[u] for u in node.users} - seen:
                seen.add(at)
                heapq.heappush(todo, at)
        return (ends, made) if weighted else ({}, made)

    def _are_combined(self, experts: list[Expert], found: _Ends) -> bool:
        """Return whether the outputs of all are added with a router's weights, each with its own."""
        of = {e.output: e for e in experts}
        ends, made = found
        reader = self._reader.afresh()
        for output in of if ends else ():
            reader.cut(output)
        matcher, proved = _Combination(reader, of), 0
        for bit in (1 << i for i in reversed(range(len(of)))):  # the last one is in the fewest sums
            if proved & bit:
                continue
            sums = sorted((bits for bits in ends if bits & bit), key=int.bit_count, reverse=True)[:_TRIED]
            tried = ((bits, n) for bits in sums for n in ends[bits])
            whole = next((bits for bits, n in tried if self._combines(n, matcher, bits, list(of), made)), 0)
            if not whole:
                return False
            proved |= whole
        return True

    def _combines(
        self, node: fx.Node, matcher: Matcher, bits: int, outputs: list[fx.Node], made: Collection[fx.Node]
    ) -> bool:
        """Return whether a node adds those outputs that `bits` names with a router's weights."""
        try:
            found = matcher.match(node, True, lambda n: n in made)
        except Refused:
            return False
        own = [n for i, n in enumerate(outputs) if bits >> i & 1]
        # Scores may read the outputs through products and norms, where `made` ends. They may read outputs of
        # an earlier block, which are in `made`, too.
        return found.downs == len(own) and self._evidence.tells_apart(found, after(*own))


class _Combination(Matcher):
    """Reads how experts' outputs are added up. The outputs themselves are opaque."""

    def __init__(self, reader: Reader, experts: dict[fx.Node, Expert]) -> None:
        super().__init__(reader)
        self._experts = experts

    def linear(self, term: Term) -> Linear | None:
        return Linear(term, K, (), None) if self.is_down(term) else None  # type: ignore[arg-type]

    def is_down(self, term: Term) -> bool:
        return isinstance(term, Ref) and term.node in self._experts

    def apart(self, term: Term) -> None:
        return None

    def _matrix(self, lin: Linear, out: Any, site: fx.Node) -> tuple[Matrix, None]:
        return self._experts[lin.weight.node].matrices[-1], None

    def _input(self, lin: Linear, m: Mixture) -> _Input:
        expert = self._experts[lin.weight.node]
        x = Ref(next(iter(self._experts)), (K,))  # the same for all: the search compares what they read
        return _Input(x, (), Act("", UP, False), expert.matrices, (None,) * len(expert.matrices), None)


def _parameter_of(weight: fx.Node) -> fx.Node:
    return through(weight, *RESHAPES, *SWAPS, *CUTS)


def _parameter(node: fx.Node) -> tuple[Any, ...]:
    return ("parameter", str(shape(node)), value(node).dtype)


def _floats(node: fx.Node) -> bool:
    return is_tensor(node) and value(node).dtype in FLOATING


LAYERS = (Kind.ONE_LAYER, Kind.THREE_LAYERS, Kind.SIDE_BY_SIDE)
"""Reasons that say only that the experts do not have two layers."""
INSIDE = (
    *LAYERS, *VAGUE, *DULL,
    Kind.BETWEEN, Kind.SUM_BETWEEN,
    Kind.PRODUCTS_IN_ACTIVATION, Kind.MORE_IN_ACTIVATION, Kind.SEVERAL_GAINS, Kind.NOT_OWN_GAIN,
    Kind.GATE_UP_ROWS, Kind.GATE_UP_SHAPES, Kind.AFTER_DIFFERS, Kind.BECOMES, Kind.SCALED_BY,
    Kind.HIDDEN_NOT_LAST,
)  # fmt: skip
"""Reasons about the inside of an expert, or that name no cause. Reasons about routing are not among them."""
