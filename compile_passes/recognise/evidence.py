"""Evidence that the matrices of a stacked weight are experts: a router decides which rows meet which matrix.

Heads, ensembles and codebooks also have products with one matrix for each slice, y[e] = a[e] W[e]. Such a
product counts as an expert's if one of these holds:

- dispatch: the rows of a[e] were chosen or scaled for e by what a router computed. The probabilities of an
  attention over the rows are none, even if a topk cut them;
- combination: the sum over e weights y[e] by a router's scores, or ids choose the rows of y;
- ids or offsets that are computed from the model's inputs choose the matrices;
- the weight's path has "expert" in it, or the model holds the weight in 4 bits.

Scores and ids that are computed from the products' own results do not count: attention over the outputs of
branches or adapters is no router. If a softmax or a topk chooses by the result of a product, the product is a
router and never an expert. A matrix that all experts share is a layer before them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..graph.nodes import (
    BY_SIZE,
    CUTS,
    PRODUCTS,
    RESHAPES,
    SWAPS,
    aten,
    behind,
    has_chosen_rows,
    is_grouped_mm,
    is_op,
    is_pointwise,
    is_tensor,
    item,
    operand,
    reached,
    same_shape,
    several,
    shape,
    through,
    value,
)
from ..index.reader import Reader, same
from ..index.terms import Axis, Choose, Composite, Mix, Mul, Ref, Sum, Term, Value, flatten, free_axes, walk
from ..naming import input_name
from ..weights.facts import Facts
from .block import UP, Mixture
from .pieces import E
from .probabilities import SOFTMAX, attends
from .products import Batched

NAME = re.compile(r"expert", re.IGNORECASE)
"""Finds "expert" in the path of a weight."""

_CHOICES = (
    aten.topk, aten.argmax, aten.argmin, aten.sort, aten.argsort, aten.histc, aten.bincount, aten.nonzero,
    aten.multinomial, aten.kthvalue,
)  # fmt: skip
_SOFT = (*SOFTMAX, aten.sigmoid, aten.relu, aten.softplus)
_POSITIVE = (aten.relu, aten.softplus)
"""Names the operators of `_SOFT` that do not limit scores from above."""
_ATTENTION = (
    aten.scaled_dot_product_attention, aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_efficient_attention,
)  # fmt: skip
_NORMS = (aten.native_layer_norm, aten.layer_norm, aten.rms_norm, aten.native_group_norm)
_KEEP_ORDER = (*RESHAPES, aten._to_copy)
_VIEWS = (*_KEEP_ORDER, *SWAPS, *CUTS, aten.expand)
_PUTS = (aten.index_put, aten.scatter, aten.scatter_add, aten.index_add, aten.index_copy, aten.masked_scatter)
_READS = (aten.index, aten.index_select, aten.gather, aten.embedding)
_FAR = 96
"""A product's combination must come within this many nodes after it."""
_VERY_FAR = 1024
"""After a search of this many nodes around products without a result, the products do not count as
experts."""


@dataclass(frozen=True)
class _Carrier:
    """A tensor with a dimension over the experts. Later terms that contain the tensor have this dimension,
    too."""

    node: fx.Node
    dim: int
    part: int | None = None
    """The part of that dimension that counts experts, if a view splits it."""
    of_rows: bool = False
    """Whether the tensor holds the rows of experts' outputs. Then only its last dimension holds columns. The
    others, such as that of a batch, belong to the rows."""

    def columns(self, ref: Ref) -> set[Axis]:
        """Return the axes of an element's columns, or of its inner dimension, which is summed."""
        index = ref.index[-1:] if self.of_rows else ref.index
        return {axis for i in index for axis in free_axes(i)} - free_axes(self.expert(ref))

    def expert(self, ref: Ref) -> Term:
        index = ref.index[self.dim]
        if self.part is not None and isinstance(index, Mix) and self.part < len(index.parts):
            return index.parts[self.part]
        return index

    def makes(self, node: fx.Node) -> bool:
        """Return whether a node is computed from this tensor."""
        return _depends(node, lambda n: n is self.node, self.node)


class Evidence:
    """Decides which products of one graph are experts and which are routers."""

    def __init__(self, graph: fx.Graph, reader: Reader, facts: Facts) -> None:
        self._reader, self._facts = reader, facts
        self._data: set[fx.Node] = set()
        """Nodes whose values depend on the model's inputs."""
        self._hard: set[fx.Node] = set()
        """Choices, and nodes that are computed from them without a product with weights or a softmax."""
        self._soft: set[fx.Node] = set()
        """The nodes of `_hard`, scores after one of `_SOFT`, and nodes that are computed from these alone. A
        value that a score scales is no score: x * sigmoid(x) is an activation, like silu(x)."""
        self._limited: set[fx.Node] = set()
        """The nodes of `_soft` without those whose scores only `_POSITIVE` limits."""
        self._gates: set[fx.Node] = set()
        """The nodes of `_hard`, results of a softmax, and nodes that are computed from these alone."""
        self._weighted: set[fx.Node] = set()
        """The nodes of `_soft`, and all nodes that are computed from them without a product with weights."""
        self._leads: set[fx.Node] = set()
        """Choices by a softmax or a topk, and the nodes that these are computed from."""
        for node in graph.nodes:
            self._classify(node)
        for node in reversed(graph.nodes):
            if _decides(node) or (not self._leads.isdisjoint(node.users) and _passes_on(node)):
                self._leads.add(node)

    def _classify(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        if node.op == "placeholder":
            if is_tensor(node) and node not in self._facts.fixed:
                self._data.add(node)
            return
        if is_op(node, *BY_SIZE) or self._data.isdisjoint(inputs):
            return
        self._data.add(node)
        if self.mixes_columns(node):
            return
        hard = _chooses(node) or not self._hard.isdisjoint(inputs)
        if hard and self._is_picked(node):
            return
        if hard and not is_op(node, *SOFTMAX):
            self._hard.add(node)
        made_of = self._made_of(node)
        hard = hard and is_tensor(node)  # values of a topk are scores only if it chose among scores
        if hard or is_op(node, *_SOFT) or self._soft.issuperset(made_of or [node]):
            self._soft.add(node)
        if hard or is_op(node, *SOFTMAX) or self._gates.issuperset(made_of or [node]):
            self._gates.add(node)
        if node in self._soft or not self._weighted.isdisjoint(inputs):
            self._weighted.add(node)
        limits = is_op(node, *_SOFT) and not is_op(node, *_POSITIVE)
        if hard or limits or self._limited.issuperset(made_of or [node]):
            self._limited.add(node)

    def _is_picked(self, node: fx.Node) -> bool:
        """Return whether a node holds values that a choice read, not among scores: those of a max pooling, of
        a codebook, or rows."""
        if not is_tensor(node) or not value(node).dtype.is_floating_point:
            return False
        if is_op(node, *_READS):
            return operand(node) not in self._soft
        of = operand(node) if item(node) is not None else None
        return of is not None and _chooses(of) and operand(of) not in self._soft

    def _made_of(self, node: fx.Node) -> list[fx.Node]:
        """Return the inputs that must be scores if the result is to be scores. Smaller operands of an
        elementwise operator, such as a mask of tokens, do not matter, and neither do conditions and ids."""
        inputs = [n for n in node.all_input_nodes if n in self._data and not _is_number(n)]
        floats = [n for n in inputs if not is_tensor(n) or value(n).dtype.is_floating_point]
        if is_pointwise(node):
            whole = [n for n in floats if is_tensor(n) and same_shape(shape(n), shape(node))]
            floats = whole or floats
        return floats or [n for n in inputs if n in self._soft]

    # --- choices and scores ---

    def chosen(self, ids: fx.Node) -> bool:
        """Return whether ids or offsets depend on the model's inputs. If so, they are a choice."""
        return ids in self._data

    def mixes_columns(self, node: fx.Node) -> bool:
        """Return whether an operator is a product with weights, attention or a norm."""
        if is_op(node, *PRODUCTS):
            return any(through(n, *_VIEWS) in self._facts.fixed for n in node.all_input_nodes)
        return is_grouped_mm(node) or is_op(node, *_ATTENTION, *_NORMS)

    @property
    def has_router(self) -> bool:
        """Return whether anything in the graph makes a choice, or could be a router's scores."""
        return bool(self._soft)

    def chooses(self, node: fx.Node) -> bool:
        """Return whether a node is a choice, or is computed from a choice."""
        return node in self._hard

    def weighs(self, node: fx.Node) -> bool:
        """Return whether a node holds a router's scores."""
        return node in self._soft

    def is_weighted(self, node: fx.Node) -> bool:
        """Return whether a node depends on a router's scores, such as outputs that they scale."""
        return node in self._weighted

    def named(self, weight: fx.Node) -> bool:
        return self._facts.in_4_bits(weight) or bool(NAME.search(input_name(weight)))

    def is_router(self, product: fx.Node) -> bool:
        """Return whether a softmax or a topk chooses by the result of this product."""
        return not self._leads.isdisjoint(product.users)

    def may_be_routed(self, products: Sequence[fx.Node]) -> bool:
        """Return whether choices or scores are combined with anything before or after these products."""
        if any(map(has_chosen_rows, products)):
            return True  # the products have rows that a mask chose
        if any(
            self.named(w)
            for p in products
            for n in p.all_input_nodes
            if (w := through(n, *_VIEWS)).op == "placeholder"
        ):
            return True
        seen = reached(products, lambda n: n.users, _VERY_FAR)
        after = seen.keys() - set(products)
        if any(n in self._soft and n not in seen for user in after for n in user.all_input_nodes):
            return True
        before = self._rows_of(products)
        before |= self._rows_of([n for n in before if self.mixes_columns(n)])
        return any(n in self._hard for n in before)

    def _rows_of(self, products: Iterable[fx.Node]) -> dict[fx.Node, None]:
        """Return the nodes that the rows of these products are computed from, back to earlier products with
        weights and to a softmax. What is before those, such as the mask of an attention, chooses no rows."""

        def step(node: fx.Node) -> Iterable[fx.Node]:
            ends = is_op(node, aten._softmax, *_ATTENTION) or (
                is_op(node, *PRODUCTS) and self.mixes_columns(node)
            )
            return () if ends else node.all_input_nodes

        return reached([n for p in products for n in p.all_input_nodes], step, _VERY_FAR)

    def tells_apart(self, m: Mixture, made: Collection[fx.Node]) -> bool:
        """Return whether ids select the experts whose outputs are used, or a router's scores weight the
        outputs.

        made: the nodes that depend on the outputs.
        """
        b = m.common
        ids = b.ids if b.ids is not None else b.masked
        if ids is not None:
            return self._is_choice(ids) and ids.node not in made
        scores = [n for f in b.factors if E in free_axes(f) for n in _nodes(f)]
        return self._are_scores(scores, self._soft) and any(n in self._soft and n not in made for n in scores)

    def _is_choice(self, ids: Ref) -> bool:
        """Return whether ids, or the places in a table that holds them, depend on the model's inputs."""
        return any(map(self.chosen, _nodes(ids)))

    def _are_scores(self, factors: Iterable[fx.Node], scores: Collection[fx.Node]) -> bool:
        """Return whether the factors of the outputs that depend on inputs are scores. In x * sigmoid(x), x is
        none."""
        return all(n in scores for n in factors if n in self._data and value(n).dtype.is_floating_point)

    def of_mixture(self, m: Mixture, products: Collection[fx.Node]) -> bool:
        """Return whether a router decides which rows the experts of a block get, or how their outputs are
        weighted.

        products: the block's own products. Products of other blocks may have the same parameters.
        """
        b = m.common
        if any(self.named(w) for w in m.weights):
            return True
        after_shared = m.after_shared
        weights = m.weights - {u.ref.node for u in b.up} if after_shared else m.weights

        def of_experts(n: fx.Node) -> bool:
            return n in products and any(through(i, *_VIEWS) in weights for i in n.all_input_nodes)

        ids = b.ids if b.ids is not None else b.masked
        if ids is not None:
            return self._is_choice(ids) and not any(_depends(n, of_experts, b.x.node) for n in _nodes(ids))
        # Without an activation, or after a layer that all experts share, scores that nothing limits make the
        # block a bilinear layer: the shared layer computes the weights of a kernel (CondConv). It does, too,
        # if it reads the factors. Values after a ReLU may be any layer's, not only a router's.
        scores = self._limited if after_shared else self._soft if b.act.term is UP else self._data
        read = behind(b.x.node) if after_shared else ()
        factors = (n for t in b.factors if E in free_axes(t) for n in _nodes(t))
        found = (n for t in (*b.factors, *b.scales, *b.chosen) for n in _nodes(t) if n in scores)
        own = (n for n in found if n not in read and not _depends(n, of_experts, b.x.node))
        if self._are_scores(factors, scores) and next(own, None) is not None:
            return True
        if b.place is None:
            return False
        if self._is_filled(b.x, b.place):
            return True
        after = self._reader.afresh()
        after.cut(m.root)
        return self._is_combined(m.root, _carrier_of_places(m), after, self._soft)

    def gathers(self, node: fx.Node) -> bool:
        """Return whether a node reads a tensor at places that were chosen."""
        return is_op(node, *_READS) and any(self.chooses(n) for n in _indices(node))

    def routed(self, products: Sequence[Batched]) -> set[fx.Node]:
        """Return the batched products of a graph that belong to experts."""
        nodes = {p.node for p in products}
        found = {p.node for p in products if self._is_routed(p)}
        feeds = {p.node: _made_of(p.a, nodes) for p in products}
        size = 0
        # Products that feed an expert's product belong to that expert, and the reverse.
        while size != len(found):
            size = len(found)
            for node, ups in feeds.items():
                if node in found or not found.isdisjoint(ups):
                    found |= {node, *ups}
        return found

    def _is_routed(self, p: Batched) -> bool:
        if self.named(p.weight):
            return True
        if not p.shared and self._is_dispatched(self._reader.value(p.a, 2), 1 if p.left else -1):
            return True
        return self._combines(p, self._soft)

    def is_gated(self, p: Batched) -> bool:
        """Return whether a softmax or a choice among the experts weights the outputs of one product of the
        same rows and all matrices. Other scores do not count: such a product may be a bilinear layer's."""
        return p.shared and self._combines(p, self._gates) and not self._is_summed_router(p.node)

    def _is_summed_router(self, product: fx.Node) -> bool:
        """Return whether a softmax or a topk chooses by sums of the product's results: routers, weighted by
        another's gates."""
        after = reached(
            [product], lambda n: () if n is not product and self.mixes_columns(n) else n.users, _FAR
        )
        return any(map(_decides, after))

    def _combines(self, p: Batched, scores: Collection[fx.Node]) -> bool:
        first, second = p.experts[0][0].ref, p.experts[1][0].ref
        dims = [d for d, (i, j) in enumerate(zip(first.index, second.index, strict=True)) if i is not j]
        if len(dims) != 1:
            return False
        return self._is_combined(p.node, _Carrier(first.node, dims[0]), self._reader, scores)

    # --- dispatch ---

    def _is_filled(self, x: Ref, place: Axis) -> bool:
        """Return whether a router filled the buffer whose slices the experts read."""
        v = self._reader.value(x.node, 2)
        dims = [d for d, i in enumerate(x.index) if place in free_axes(i)]
        if dims != [d for d in dims if d < len(x.index) - 1] or len(dims) != 1:
            return False  # these are slices of a token's own values: heads
        first = dims[0]
        own = v.dims[first]
        index = x.index[first]
        if isinstance(index, Mix) and len(index.parts) == len(own):
            own = (own[index.parts.index(place)],)
        return self._chooses_rows(v.term, set(own), set(v.dims[-1]), frozenset())

    def _is_dispatched(self, rows: Value, k: int) -> bool:
        return self._chooses_rows(rows.term, set(rows.dims[0]), set(rows.dims[k]), frozenset())

    def _chooses_rows(self, t: Term, e: set[Axis], k: set[Axis], summed: frozenset[Axis]) -> bool:
        """Return whether a choice selected the row of which t is an element, for expert e. Here e are the
        axes over experts and k those over columns.

        summed: the axes of the sums around t.
        """
        if isinstance(t, Ref):
            inside = [r for i in t.index for r in _refs_in(i)]
            if any(self._tells(r, e, k) and self._selects(r, t.node) for r in inside):
                return True
            return bool(t.index) and t.index[-1] in k and self._is_put(t.node)
        if isinstance(t, Choose):
            if free_axes(t.index) & e:
                rows = [r for o in t.options for r in walk(o) if isinstance(r, Ref)]
                if any(self._selects(i, r.node) for r in rows for c in r.index for i in _refs_in(c)):
                    return True
            return any(self._chooses_rows(o, e, k, summed) for o in t.options)
        if isinstance(t, Sum):
            return self._chooses_rows(t.body, e, k, summed | set(t.axes))
        if not isinstance(t, Composite):
            return False
        factors = flatten(t, Mul)
        apart = any(free_axes(f) & e and free_axes(f) & k for f in factors)
        for f in factors:
            if self._tells(f, e, k) and not attends(f, e, set(summed)):
                nodes = _whose_values(f)
                if any(n in self._hard for n in nodes):
                    return True
                if not apart and not free_axes(f) & summed and any(n in self._soft for n in nodes):
                    return True
        parts = factors if isinstance(t, Mul) else [c for c in t.children() if c is not t.ref]
        return any(self._chooses_rows(f, e, k, summed) for f in parts if free_axes(f) & k)

    def _selects(self, ids: Ref, rows: fx.Node) -> bool:
        """Return whether ids choose rows for an expert. Rows of a table of parameters, such as the embedding
        of each of a record's fields, say nothing about experts, unless something chose the ids."""
        return self.chosen(ids.node) and rows in self._data

    @staticmethod
    def _tells(t: Term, e: set[Axis], k: set[Axis]) -> bool:
        """Return whether a term is one number for each row of an expert."""
        axes = free_axes(t)
        return bool(axes & e) and not axes & k

    def _is_put(self, buffer: fx.Node) -> bool:
        """Return whether whole rows were written to a buffer at chosen positions."""
        buffer = through(buffer, *_KEEP_ORDER, aten.slice)
        return is_op(buffer, *_PUTS) and any(n in self._hard for n in _indices(buffer))

    # --- combination ---

    def _is_combined(
        self, product: fx.Node, carrier: _Carrier, reader: Reader, scores: Collection[fx.Node]
    ) -> bool:
        """Return whether a router's scores or ids decide how each expert's output is weighted."""
        seen, todo, in_order = {product}, [product], {product}
        while todo and len(seen) < _FAR:
            node = todo.pop(0)
            for user in node.users:
                if user in seen:
                    continue
                seen.add(user)
                if node in in_order and scores is self._soft and self._places(user, node):
                    return True
                if node in in_order and (is_op(user, *_KEEP_ORDER) or is_pointwise(user)):
                    in_order.add(user)
                if is_tensor(user) and self._weights(reader.value(user, 2), carrier, scores):
                    return True
                todo.append(user)
        return False

    def _places(self, node: fx.Node, rows: fx.Node) -> bool:
        """Return whether `node` writes or reads rows [E C, N] by chosen ids."""
        if is_op(node, *_READS):
            first, table = is_op(node, aten.index, aten.embedding) or node.args[1] == 0, operand(node)
        elif is_op(node, aten.index_put):
            first, table = True, operand(node, 2)
        elif is_op(node, *_PUTS):
            first, table = node.args[1] == 0, operand(node, len(node.args) - 1)
        else:
            return False
        by_ids = any(n in self._hard for n in _indices(node))
        return bool(first) and table is rows and by_ids

    def _weights(self, v: Value, carrier: _Carrier, scores: Collection[fx.Node]) -> bool:
        out = set(v.axes)
        for t in walk(v.term):
            if isinstance(t, Ref) and t.node is carrier.node:
                by = _refs_in(carrier.expert(t))
                if any(self.chosen(r.node) and not carrier.makes(r.node) for r in by):
                    return True
            if not isinstance(t, Sum):
                continue
            for w in walk(t.body):
                if not isinstance(w, Ref) or w.node is not carrier.node:
                    continue
                e = free_axes(carrier.expert(w))
                columns = carrier.columns(w) & out
                if not e & set(t.axes) or e & out or not columns:
                    continue
                for f in (f for m in walk(t.body) for f in flatten(m, Mul) if isinstance(m, Mul)):
                    soft = [n for n in _whose_values(f) if n in scores]
                    if not soft or not self._tells(f, e, columns) or all(map(carrier.makes, soft)):
                        continue
                    gates = scores is self._gates
                    if attends(f, e, None if gates else set(t.axes)):
                        continue
                    if not gates or free_axes(f) <= e | out:
                        return True
        return False


def _whose_values(factor: Term) -> list[fx.Node]:
    """Return the nodes whose values a factor has, not those of its index."""
    return [factor.node] if isinstance(factor, Ref) else _nodes(factor)


def _is_number(node: fx.Node) -> bool:
    return not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


def _chooses(node: fx.Node) -> bool:
    """Return whether an operator makes a choice: among values, or by comparing ids."""
    if is_op(node, *_CHOICES):
        return True
    if is_op(node, aten.max, aten.min):
        return len(node.args) > 1
    if not is_op(node, aten.eq):
        return False
    first = operand(node)
    return is_tensor(first) and not value(first).dtype.is_floating_point


def _passes_on(node: fx.Node) -> bool:
    return is_op(node, *_VIEWS) or item(node) is not None or is_pointwise(node)


def _decides(node: fx.Node) -> bool:
    if is_op(node, aten.max, aten.min):
        return len(node.args) > 1
    return is_op(node, *_CHOICES, *SOFTMAX, aten._log_softmax, aten.log_softmax)


def _indices(node: fx.Node) -> list[fx.Node]:
    """Return the index tensors with which an operator reads or writes."""
    if is_op(node, aten.index, aten.index_put):
        return [n for n in several(node, 1) if isinstance(n, fx.Node)]
    if is_op(node, aten.embedding, aten.masked_scatter):
        return [operand(node, 1)]
    return [operand(node, 2)]


def _refs_in(index: Term) -> Iterator[Ref]:
    """Yield the tensors whose elements a coordinate is computed from."""
    todo = [index]
    while todo:
        t = todo.pop()
        if isinstance(t, Ref):
            yield t
        todo.extend(t.children())


def _nodes(term: Term) -> list[fx.Node]:
    """Return the node that computes a term, or else the nodes that compute its parts."""
    if isinstance(term, Ref):
        return [term.node, *(r.node for i in term.index for r in _refs_in(i))]
    if isinstance(term, Composite) and term.ref is not None:
        return [term.ref.node]
    return [n for c in term.children() for n in _nodes(c)]


def _depends(node: fx.Node, on: Callable[[fx.Node], bool], first: fx.Node) -> bool:
    """Return whether a node is computed from one for which `on` is true and which is not before `first` in
    the graph."""
    return any(map(on, reached([node], lambda n: (i for i in n.all_input_nodes if not i < first))))


def _made_of(rows: fx.Node, products: set[fx.Node]) -> set[fx.Node]:
    """Return the products that rows are computed from by elementwise operators or a norm."""

    def step(node: fx.Node) -> Iterable[fx.Node]:
        passes_on = is_op(node, *_VIEWS, *_NORMS, aten.cat, aten.glu) or item(node) or is_pointwise(node)
        return node.all_input_nodes if passes_on and node not in products else ()

    return products & reached([rows], step).keys()


def _carrier_of_places(m: Mixture) -> _Carrier:
    """Return the carrier for a block that reads slices of a buffer: the axis of the output that counts the
    experts."""
    tokens = list(m.tokens)
    for dim, size in enumerate(shape(m.root)[:-1]):
        own: list[Axis] = []
        total: object = 1
        if same(size, 1):
            continue
        while tokens and not (own and same(total, size)):
            own.append(tokens.pop(0))
            total = own[-1].size if len(own) == 1 else total * own[-1].size  # type: ignore[operator]
        if m.common.place in own:
            return _Carrier(m.root, dim, own.index(m.common.place) if len(own) > 1 else None, of_rows=True)
    return _Carrier(m.root, 0, of_rows=True)
