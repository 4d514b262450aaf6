"""Writes single products. These are products of sorted rows, products with gathered weights, batched products
with the same number of rows for each expert, linear layers outside experts, and the products of experts that
do not fit one operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...meta.layouts import LAYOUTS, preferred_layout
from ...models.outside_experts import kind_of
from ..graph.nodes import PRODUCTS, aten, is_op, nearest_products, operand, shape, static_int, value
from ..index.ids import nonnegative
from ..index.reader import Reader
from ..index.terms import Ref
from ..naming import input_name
from ..options import Options
from ..recognise.block import Experts, Matrix, need_wide
from ..recognise.evidence import Evidence
from ..recognise.pieces import K, N
from ..recognise.products import Batched, Product, factors, read_batched, read_matrix
from ..recognise.search import GATHERED, SORTED, Search
from ..refusal import Kind, Refusal, Refused, need
from ..report import Load, Site, hint
from .writer import Activations, Packed, QuantisedRows, Writer, place

fp4 = torch.ops.fp4


# --- sorted rows, gathered weights ---


def write_product(w: Writer, p: Product) -> Site:
    """Replace one product by fp4::grouped_mm or fp4::indexed_mm."""
    e, n, k = len(p.experts), p.matrix.n, p.matrix.k
    layout = w.layout(p.weight, (n, k))
    how = w.activations(p.weight, layout)
    packed = w.pack(p.experts, layout, p.node)
    weight = w.operands(packed)
    name = "indexed_mm" if p.offs is None else "grouped_mm"
    with w.gm.graph.inserting_before(p.node):
        a = p.a
        if len(shape(a)) != 2:
            a = w.call(aten.reshape.default, a, [-1, k])
        rows = w.quantised(a, how, layout)
        route = p.offs
        if route is None:
            assert p.ids is not None
            route = p.ids if nonnegative(p.ids) else w.wrapped(p.ids, e)
        out = w.product(name, rows, weight, packed.spec, value(p.node).dtype, route)
        if p.unit_dim is not None:
            out = w.call(aten.unsqueeze.default, out, p.unit_dim)
    w.replace(p.node, out)
    form = SORTED if p.offs is not None else GATHERED
    load = Load(e, 1, hint(value(p.node).numel() // n))
    return w.site(f"fp4::{name}", p.node, [packed], form, how, f"{e} experts, N {n}, K {k}", load)


# --- the same number of rows for each expert ---

BATCHED = "batched rows (bmm): the same number for each expert"


def batched_products(
    writer: Writer,
    search: Search,
    evidence: Evidence,
    routed: set[fx.Node],
    gated: dict[fx.Node, Batched],
    written: dict[fx.Node, fx.Node],
    not_experts: dict[fx.Node, Refusal],
) -> Iterator[Site | Refusal]:
    """Rewrite every `bmm` with a whole expert weight that no block has taken, y[e] = a[e] W[e].

    Each expert has the same number of rows, as in fixed buffers, so they become `fp4::grouped_mm_masked` with
    all rows counted. So does x W[e] for all e at once, written as one product of x and a matrix [K, E N], if
    it computes the rows of a batched down product, or if a router's gates weight its results.

    routed: products that something routes rows to.
    gated: products of the same rows and all matrices whose outputs a softmax or a choice weights.
    written: products with weights that the graph has written to before.
    not_experts: receives the products that belong to no expert, each with the reason."""
    graph, reader = writer.gm.graph, search.reader
    found = [b for node in graph.nodes if (b := read_batched(node, reader, writer.written)) is not None]
    for b in found:
        if evidence.is_router(b.node):
            not_experts[b.node] = Refusal(Kind.ROUTER, b.node, (b.weight,))
        elif b.node not in routed and not b.shared:
            not_experts[b.node] = Refusal(Kind.UNROUTED, b.node, (b.weight,))
        elif b.node not in routed and b.node not in gated and value(b.weight).dim() == 3:
            not_experts[b.node] = Refusal(Kind.NOT_GATED, b.node, (b.weight,))
    found = [gated.get(b.node, b) for b in found if b.node in routed or b.node in gated]
    found = [b for b in found if b.node not in not_experts]
    nodes = {b.node for b in found}
    packed: dict[fx.Node, Packed] = {}
    stays: dict[fx.Node, Refusal] = {}
    made_of: dict[fx.Node, list[fx.Node]] = {}
    for b in found:
        try:
            need_wide(b.experts[0], b.node, writer.facts)
            packed[b.node] = writer.pack(b.experts, _layout(b, writer.options), b.node)
            if not b.shared:
                made_of[b.node] = _before(b, search, nodes)
                for product in nearest_products([b.a]) & written.keys():
                    raise Refused(Refusal(Kind.WRITTEN, product, (written[product],)))
        except Refused as why:
            stays[b.node] = why.refusal
    for down, ups in made_of.items():  # rewrite all products of an expert, or none
        whole = next((stays[up] for up in ups if up in stays), None)
        if whole is not None:
            stays.setdefault(down, whole)
    for down, ups in made_of.items():
        if down in stays:
            stays |= {up: stays[down] for up in ups if up not in stays}
    wanted = {up for down, ups in made_of.items() if down not in stays for up in ups}
    refusals_seen: set[Refusal] = set()
    for b in found:
        if b.node in stays and (not b.shared or b.node in gated) and stays[b.node] not in refusals_seen:
            refusals_seen.add(stays[b.node])
            yield stays[b.node]
        elif b.node not in stays and (b.node in wanted or b.node in gated or not b.shared):
            yield _write_batched(writer, b, packed[b.node])


def _layout(b: Batched, options: Options) -> str:
    device = value(b.weight).device.type
    if device != "cpu" and not options.batch_invariant:
        return "plain"
    return preferred_layout(device, batch_invariant=options.batch_invariant)


def _before(b: Batched, search: Search, found: set[fx.Node]) -> list[fx.Node]:
    """Return the gate and up products of a down product. It is rewritten only if they are."""
    reader, matcher = search.reader, search.matcher
    term = reader.value(b.node, 2).term
    down = matcher.linear(term) if matcher.is_down(term) else None
    if down is None:
        return []
    ups = [up for leaf in matcher.leaves(down.input) if (up := matcher.linear(leaf)) is not None]
    weights = {up.weight.node for up in ups}
    products = [n for n in search.graph.nodes if is_op(n, *PRODUCTS) and weights & _weights_of(n, reader)]
    for node in products:
        weight = next(iter(weights & _weights_of(node, reader)))
        need(node in found, Kind.ROWS_STAY, b.node, weight, node)
    return products


def _weights_of(product: fx.Node, reader: Reader) -> set[fx.Node]:
    terms = [reader.value(n, 0).term for n in product.args[-2:] if isinstance(n, fx.Node)]
    return {t.node for t in terms if isinstance(t, Ref) and reader.is_weight(t.node)}


def _write_batched(w: Writer, b: Batched, packed: Packed) -> Site:
    activations = w.activations(b.weight, packed.layout)
    with w.gm.graph.inserting_before(b.node):
        out = put_back(w, b, multiplied(w, b, packed, activations))
    w.replace(b.node, out)
    matrix = b.experts[0][0]
    load = Load(len(b.experts), len(b.experts), hint(b.rows))
    text = f"{len(b.experts)} experts, N {matrix.n}, K {matrix.k}"
    return w.site("fp4::grouped_mm_masked", b.node, [packed], BATCHED, activations, text, load)


def multiplied(w: Writer, b: Batched, packed: Packed, activations: Activations) -> fx.Node:
    """Write the product [E, T, N] of each expert's rows and its packed weight."""
    weight, call, a, count = w.operands(packed), w.call, b.a, static_int(b.rows)
    if b.shared:
        a = call(aten.reshape.default, a, [-1, b.experts[0][0].k])
        a = call(aten.expand.default, call(aten.unsqueeze.default, a, 0), [len(b.experts), -1, -1])
    elif b.left:
        a = call(aten.transpose.int, a, 1, 2)
    counted = count if count is not None else call(aten.sym_size.int, a, 1)
    dtype, device = value(b.node).dtype, value(b.node).device
    every = call(aten.full.default, [len(b.experts)], counted, dtype=torch.int32, device=device)
    rows = w.quantised(a, activations, packed.layout)
    return w.product("grouped_mm_masked", rows, weight, packed.spec, dtype, every)


def put_back(writer: Writer, b: Batched, out: fx.Node) -> fx.Node:
    """Reshape [E, T, N] to the shape of the original product."""
    if b.left:
        return writer.call(aten.transpose.int, out, 1, 2)
    if not b.shared:
        return out
    out = writer.call(aten.permute.default, out, [1, 2, 0] if b.last else [1, 0, 2])
    lead = [1] * (len(shape(b.node)) - 2)
    return writer.call(aten.reshape.default, out, [*lead, -1, len(b.experts) * b.experts[0][0].n])


# --- linear layers outside experts ---


def linear_layers(writer: Writer, reader: Reader, evidence: Evidence) -> Iterator[Site | Refusal]:
    """Rewrite `mm` and `addmm` to `fp4::mm`, if the options give their kind a format, or if the model holds
    their weights in 4 bits.

    The kind follows from the weight's name, as in `prepare`. Routers always keep their dtype. They are known
    by their names, or because a softmax or topk chooses by what they compute.
    """
    quantised: dict[Any, QuantisedRows] = {}
    for node in list(writer.gm.graph.nodes):
        if not is_op(node, aten.mm, aten.addmm):
            continue
        if any(node.kwargs.get(n, 1) != 1 for n in ("alpha", "beta")):
            continue
        bias, a, weight = factors(node)
        matrix = read_matrix(weight, reader)
        if matrix is None or set(matrix.ref.index) != {N, K}:
            continue
        format = None
        if not writer.facts.in_4_bits(matrix.ref.node):
            format = format_asked_for(matrix.ref.node, writer.options)
            if format is None or evidence.is_router(node):
                continue
        if bias is not None and len(shape(bias)) != 1:
            continue
        try:
            yield _write_linear(writer, node, a, matrix, bias, format, quantised)
        except Refused as why:
            yield why.refusal


def format_asked_for(weight: fx.Node, options: Options) -> str | None:
    """The format that the options give to weights of this kind. The head may share its weight with the
    embeddings."""
    tied = any(is_op(user, aten.embedding) for user in weight.users)
    kind = "head" if tied else kind_of(input_name(weight))
    return options.outside.get(kind) if kind is not None else None


def _same_for_all(a: fx.Node) -> Any:
    """Return a key for rows: each F.linear of a tensor has its own view, and all views have the same key."""
    return (operand(a), str(a.args[1:])) if is_op(a, aten.view) else a


def _write_linear(
    w: Writer,
    node: fx.Node,
    a: fx.Node,
    matrix: Matrix,
    bias: fx.Node | None,
    format: str | None,
    quantised: dict[Any, QuantisedRows],
) -> Site:
    """Writes `fp4::mm`.

    format: None for a weight that is in 4 bits already.
    quantised: rows of earlier layers, which several layers may share, as query, key and value do.
    """
    like = matrix.ref.node
    layout = w.layout(like, (matrix.n, matrix.k), format=format)
    packed = w.pack([(matrix,)], layout, node, format=format)
    how = w.activations(like, layout)
    key = (_same_for_all(a), how.format, LAYOUTS[layout].a_layout)
    with w.gm.graph.inserting_before(node):
        rows = quantised.get(key) or w.quantised(a, how, layout)
        quantised[key] = rows
        out = w.product("mm", rows, w.one_expert(packed, 0), packed.spec, value(node).dtype, bias=bias)
    w.replace(node, out)
    load = Load(1, 1, hint(value(node).numel() // matrix.n))
    text = f"N {matrix.n}, K {matrix.k}"
    site = w.site("fp4::mm", node, [packed], "a linear layer", how, text, load)
    w.site_of[out] = site
    return site


# --- experts that are no single operator ---

EACH = "experts that are no single operator, each product by itself"


@dataclass(frozen=True)
class _Part:
    """The place of a parameter's rows in packed weights: row `start + step r` is row `at + by r` of expert
    `expert`, r < n."""

    operand: int
    expert: int
    start: int
    step: int
    n: int
    at: int
    by: int

    def row(self, r: int) -> int | None:
        own, rest = divmod(r - self.start, self.step)
        return self.at + self.by * own if not rest and 0 <= own < self.n else None


class EveryUse:
    """Rewrites each product of experts by itself.

    The weights are packed as for the block (gate and up of an expert as one operand), so their 4-bit values
    are the same. A product with one expert's matrix becomes `fp4::mm`, one with those of all experts
    `fp4::grouped_mm_masked`.
    """

    def __init__(self, writer: Writer, parts: Sequence[Experts], root: fx.Node, reader: Reader) -> None:
        """parts: for each operand, the matrices of all experts; gate and up are one operand.
        root: the last node of the experts.
        """
        self.w, self.root, self.reader = writer, root, reader
        self.experts = len(parts[0])
        like = next(iter(parts[0]))[0].ref.node
        for node in {p.ref.node for experts in parts for each in experts for p in each}:
            need(not writer.facts.in_4_bits(node), Kind.PACKED_READ_AGAIN, root)
        self.layout = writer.layout(
            like, *{(p.n, p.k) for experts in parts for each in experts for p in each}
        )
        self.how = writer.activations(like, self.layout)
        sides = [(p.n, p.k) for experts in parts for p in next(iter(experts))]
        self.last, self.sizes = sides[-1][0], ", ".join(f"{n} x {k}" for n, k in dict.fromkeys(sides))
        self.packed: list[Packed] = []
        self.parts: dict[Any, list[_Part]] = {}
        for o, experts in enumerate(map(list, parts)):
            interleaved = len(experts[0]) == 2 and _rows(experts[0][0], root)[2] == 2
            self.packed.append(writer.pack(experts, self.layout, root, interleaved=interleaved))
            for e, each in enumerate(experts):
                for i, p in enumerate(each):
                    key, start, step = _rows(p, root)
                    at, by = (i, len(each)) if interleaved else (i * p.n, 1)
                    self.parts.setdefault(key, []).append(_Part(o, e, start, step, p.n, at, by))
        self.made: dict[Any, Any] = {}
        self.products: list[fx.Node] = []
        """Each `fp4::mm`."""

    def run(self, why: Refusal, taken: set[fx.Node]) -> list[Site]:
        """Rewrite the products with these weights, except the products in `taken`, which belong to other
        blocks.

        why: the reason why they are not one operator."""
        ops = []
        for node in list(self.w.gm.graph.nodes):
            if node not in taken and (op := self._rewrite(node)):
                taken.add(node)
                ops.append(op)
        if not ops:
            return []
        load = Load(self.experts, self.experts, hint(value(self.root).numel() // self.last), all_before=True)
        text = f"{len(ops)} products of {self.experts} experts, {self.sizes}"
        site = self.w.site(ops[0], self.root, self.packed, EACH, self.how, text, load, why=why)
        if set(ops) == {"fp4::mm"}:
            self.w.site_of |= dict.fromkeys(self.products, site)
        return [site]

    def _rewrite(self, node: fx.Node) -> str:
        """Rewrite a product, and return the operator that it became, or ""."""
        if is_op(node, aten.mm, aten.addmm) and all(node.kwargs.get(n, 1) == 1 for n in ("alpha", "beta")):
            bias, a, weight = factors(node)
            matrix = read_matrix(weight, self.reader)
            found = self._find([matrix]) if matrix is not None else None
            if found is not None:
                self._replace_one(node, a, bias, found)
                return "fp4::mm"
        batched = read_batched(node, self.reader, self.w.written)
        if batched is None:
            return ""
        found = self._find([each[0] for each in batched.experts])
        if found is None or len(batched.experts) != self.experts:
            return ""
        operand, _, rows = found
        key = (self._number(batched.a), operand, batched.left, batched.shared)
        with self.w.gm.graph.inserting_before(node):
            if key not in self.made:
                self.made[key] = multiplied(self.w, batched, self.packed[operand], self.how)
            out = put_back(self.w, batched, self._cut(self.made[key], 2, rows, operand))
        self.w.replace(node, out)
        return "fp4::grouped_mm_masked"

    def _replace_one(self, node: fx.Node, a: fx.Node, bias: fx.Node | None, found: Any) -> None:
        operand, expert, rows = found
        packed, key, given = self.packed[operand], (self._number(a), operand, expert), (self._number(a), None)
        with self.w.gm.graph.inserting_before(node):
            if key not in self.made:
                if given not in self.made:
                    self.made[given] = self.w.quantised(a, self.how, self.layout)
                weight = self.w.one_expert(packed, expert)
                self.made[key] = self.w.product(
                    "mm", self.made[given], weight, packed.spec, value(node).dtype
                )
                self.products.append(self.made[key])
            out = self._cut(self.made[key], 1, rows, operand)
            if bias is not None:
                out = self.w.call(aten.add.Tensor, out, bias)
        self.w.replace(node, out)

    def _number(self, node: fx.Node) -> Any:
        return node if node in self.w.written else self.reader.canon.number(node)

    def _cut(self, whole: fx.Node, dim: int, rows: range, operand: int) -> fx.Node:
        if rows == range(self.packed[operand].shape[1]):
            return whole
        return self.w.call(aten.slice.Tensor, whole, dim, rows.start, rows.stop, rows.step)

    def _find(self, matrices: Sequence[Matrix]) -> tuple[int, int, range] | None:
        """Return (operand, expert, rows) of a matrix in the packed weights. If `matrices` are those of all
        experts, return the values of the first expert."""
        found: set[tuple[int, range]] = set()
        experts = []
        for matrix in matrices:
            one = self._find_one(matrix)
            if one is None:
                return None
            found.add((one[0], one[2]))
            experts.append(one[1])
        if len(found) != 1 or experts != list(range(experts[0], experts[0] + len(experts))):
            return None
        operand, rows = found.pop()
        return operand, experts[0], rows

    def _find_one(self, matrix: Matrix) -> tuple[int, int, range] | None:
        key, start, step = _rows(matrix, self.root)
        parts, rows = self.parts.get(key, ()), []
        owners = set()
        for r in range(start, start + step * matrix.n, step):
            own = [(p, at) for p in parts if (at := p.row(r)) is not None]
            if not own:
                return None
            owners.add((own[0][0].operand, own[0][0].expert))
            rows.append(own[0][1])
        by = rows[1] - rows[0] if len(rows) > 1 else 1
        whole = range(rows[0], rows[0] + by * len(rows), by) if by > 0 else range(0)
        if len(owners) != 1 or list(whole) != rows:
            return None
        return (*owners.pop(), whole)


def _rows(matrix: Matrix, site: fx.Node) -> tuple[tuple[Any, ...], int, int]:
    """Return (the parameter and the indices that all rows share, first row, step)."""
    at = [place(i, site) for i in matrix.ref.index]
    start, step = next((p[1], p[2]) for p in at if p[0] == "n")
    fixed = tuple(p if p[0] != "n" else ("n",) for p in at)
    return (matrix.ref.node, matrix.k, *fixed), start, step
