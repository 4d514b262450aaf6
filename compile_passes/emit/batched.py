"""Batched products, y[e] = a[e] W[e]: each expert has the same number of rows, as in fixed buffers.

They become `fp4::grouped_mm_masked` with all rows counted. So does x W[e] for all e at once, written as one
product of x and a matrix [K, E N], where it makes the rows of a batched down product.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...meta.layouts import preferred_layout
from ..graph.nodes import PRODUCTS, aten, is_op, shape, static_int, value
from ..index.reader import Reader
from ..index.terms import Axis, Const, Ref, Value, free_axes, substitute
from ..naming import input_name
from ..operands import operand
from ..recognise.evidence import Evidence, router, unrouted
from ..recognise.factors import K, N, indices
from ..recognise.mixture import Matcher, Matrix
from ..recognise.sizes import need_wide
from ..refusal import Kind, Refusal, Refused, need
from ..report import Load, Site, hint
from ..weights.facts import written_to
from .writer import Activations, Packed, Writer

ATTENTION = re.compile(r"attn|attention")
"""Names of parameters that multiply batches in attention: MLA's absorbed projections, grouped output ones."""
FORM = "batched rows (bmm): the same number for each expert"


@dataclass(frozen=True)
class Batched:
    """node = a[e] W[e] for all experts, of which `experts` are the matrices."""

    node: fx.Node
    a: fx.Node
    experts: list[tuple[Matrix, ...]]
    left: bool
    """The weight is the left operand: a is [E, K, T], and the result [E, N, T]."""
    shared: bool
    """All experts have the same rows: a is [.., T, K], and the result [.., T, E N]."""

    @property
    def weight(self) -> fx.Node:
        return self.experts[0][0].ref.node

    @property
    def rows(self) -> Any:
        return shape(self.a)[2 if self.left else -2]


def batched_products(
    writer: Writer,
    reader: Reader,
    matcher: Matcher,
    routed: set[fx.Node],
    written: dict[fx.Node, fx.Node],
    not_experts: dict[fx.Node, Refusal],
) -> Iterator[Site | Refusal]:
    """Rewrite every `bmm` with a whole expert weight that no block has taken.

    routed: products that something routes rows to.
    written: products with weights that the graph has written to before.
    not_experts: gets the products that are no expert's, and why."""
    graph = writer.gm.graph
    found = [b for node in graph.nodes if (b := read_batched(node, reader, writer.written)) is not None]
    for b in found:
        if Evidence.is_router(b.node):
            not_experts[b.node] = router(b.weight, b.node)
        elif b.node not in routed and not b.shared:
            not_experts[b.node] = unrouted(b.weight, b.node)
    found = [b for b in found if b.node in routed and b.node not in not_experts]
    nodes = {b.node for b in found}
    packed: dict[fx.Node, Packed] = {}
    stays: dict[fx.Node, Refusal] = {}
    made_of: dict[fx.Node, list[fx.Node]] = {}
    for b in found:
        try:
            need_wide(b.experts[0], b.node, writer.facts)
            packed[b.node] = writer.pack(b.experts, _layout(b), b.node)
            if not b.shared:
                made_of[b.node] = _before(b, graph, reader, matcher, nodes)
                for product in _nearest_products(b.a) & written.keys():
                    raise Refused(written_to(written[product], product))
        except Refused as why:
            stays[b.node] = why.refusal
    for down, ups in made_of.items():  # all of an expert, or nothing
        whole = next((stays[up] for up in ups if up in stays), None)
        if whole is not None:
            stays.setdefault(down, whole)
    for down, ups in made_of.items():
        if down in stays:
            stays |= {up: stays[down] for up in ups if up not in stays}
    wanted = {up for down, ups in made_of.items() if down not in stays for up in ups}
    refusals_seen: set[Refusal] = set()
    for b in found:
        if b.node in stays and not b.shared and stays[b.node] not in refusals_seen:
            refusals_seen.add(stays[b.node])
            yield stays[b.node]
        elif b.node not in stays and (b.node in wanted or not b.shared):
            yield _write(writer, b, packed[b.node])


def _nearest_products(node: fx.Node) -> set[fx.Node]:
    """The products that these rows are made of."""
    found, todo, seen = set(), [node], {node}
    while todo:
        n = todo.pop()
        if is_op(n, *PRODUCTS):
            found.add(n)
        else:
            new = set(n.all_input_nodes) - seen
            seen |= new
            todo += new
    return found


def _layout(b: Batched) -> str:
    device = value(b.weight).device.type
    return preferred_layout(device) if device == "cpu" else "plain"


def _before(
    b: Batched, graph: fx.Graph, reader: Reader, matcher: Matcher, found: set[fx.Node]
) -> list[fx.Node]:
    """The gate and up products of a down product, which is in 4 bits only if they are."""
    term = reader.value(b.node, 2).term
    down = matcher.linear(term) if matcher.is_down(term) else None
    if down is None:
        return []
    ups = [up for leaf in matcher.leaves(down.input) if (up := matcher.linear(leaf)) is not None]
    weights = {up.weight.node for up in ups}
    products = [n for n in graph.nodes if is_op(n, *PRODUCTS) and weights & _weights_of(n, reader)]
    for node in products:
        weight = next(iter(weights & _weights_of(node, reader)))
        need(node in found, Kind.ROWS_STAY, b.node, weight, node)
    return products


def _weights_of(product: fx.Node, reader: Reader) -> set[fx.Node]:
    terms = [reader.value(n, 0).term for n in product.args[-2:] if isinstance(n, fx.Node)]
    return {t.node for t in terms if isinstance(t, Ref) and reader.is_weight(t.node)}


def read_batched(node: fx.Node, reader: Reader, written: set[fx.Node]) -> Batched | None:
    if not is_op(node, aten.bmm, aten.mm):
        return None
    a, b = operand(node), operand(node, 1)
    for matrix, other, left in ((b, a, False), (a, b, True)):
        if _is_written(matrix, written):
            continue
        v = reader.value(matrix, 0)
        if is_op(node, aten.bmm) and (experts := _experts(v, left, reader)) is not None:
            return Batched(node, other, experts, left, shared=False)
        if not left and all(s == 1 for s in shape(other)[:-2]):
            experts = _experts(_apart(v), left, reader)
            if experts is not None:
                return Batched(node, other, experts, left, shared=True)
    return None


def _apart(v: Value) -> Value:
    """A weight [K, E N] as [E, K, N]."""
    *lead, inner, last = v.dims
    if any(lead) or len(last) != 2:
        return v
    return Value((last[:1], inner, last[1:]), v.term)


def _is_written(node: fx.Node, written: set[fx.Node]) -> bool:
    """Whether a tensor is a view of what a block has become, which is no weight."""
    while node not in written and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node in written


def _experts(v: Value, left: bool, reader: Reader) -> list[tuple[Matrix, ...]] | None:
    """The matrices of a weight [E, K, N], or [E, N, K] as the left operand."""
    if not isinstance(v.term, Ref) or not reader.is_weight(v.term.node):
        return None
    if any(isinstance(i, Ref) for i in indices(v.term)):
        return None  # gathered by ids
    if ATTENTION.search(input_name(v.term.node)):
        return None  # heads, or groups of heads
    if len(v.dims) != 3 or any(len(g) != 1 for g in v.dims) or free_axes(v.term) != set(v.axes):
        return None
    e, inner, out = v.axes if not left else (v.axes[0], v.axes[2], v.axes[1])
    sizes = [static_int(a.size) for a in (e, out, inner)]
    if None in sizes:
        return None
    names: dict[Any, Axis] = {inner: K, out: N}
    refs = [substitute(v.term, {**names, e: Const(i)}) for i in range(e.size)]
    return [(Matrix(r, out.size, inner.size),) for r in refs]


def _write(w: Writer, b: Batched, packed: Packed) -> Site:
    activations = w.activations(b.weight, packed.layout)
    with w.gm.graph.inserting_before(b.node):
        out = put_back(w, b, multiplied(w, b, packed, activations))
    w.replace(b.node, out)
    matrix = b.experts[0][0]
    load = Load(len(b.experts), len(b.experts), hint(b.rows))
    text = f"{len(b.experts)} experts, N {matrix.n}, K {matrix.k}"
    return w.site("fp4::grouped_mm_masked", b.node, [packed], FORM, activations, text, load)


def multiplied(w: Writer, b: Batched, packed: Packed, activations: Activations) -> fx.Node:
    """[E, T, N]: each expert's rows times its packed weight."""
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
    """[E, T, N] in the shape that the product has."""
    if b.left:
        return writer.call(aten.transpose.int, out, 1, 2)
    if not b.shared:
        return out
    out = writer.call(aten.permute.default, out, [1, 0, 2])
    lead = [1] * (len(shape(b.node)) - 2)
    return writer.call(aten.reshape.default, out, [*lead, -1, len(b.experts) * b.experts[0][0].n])
