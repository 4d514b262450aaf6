"""Rewrites batched products, y[e] = a[e] W[e]: each expert has the same number of rows, as in fixed buffers.

They become `fp4::grouped_mm_masked` with all rows counted. So does x W[e] for all e at once, written as one
product of x and a matrix [K, E N], if it computes the rows of a batched down product.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from ...meta.layouts import preferred_layout
from ..graph.nodes import PRODUCTS, aten, is_op, reached, shape, static_int, value
from ..index.reader import Reader
from ..index.terms import Ref
from ..options import Options
from ..recognise.block import need_wide
from ..recognise.evidence import Evidence, router, unrouted
from ..recognise.mixture import Matcher
from ..recognise.products import Batched, read_batched
from ..refusal import Kind, Refusal, Refused, need
from ..report import Load, Site, hint
from ..weights.facts import written_to
from .writer import Activations, Packed, Writer

FORM = "batched rows (bmm): the same number for each expert"


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
            packed[b.node] = writer.pack(b.experts, _layout(b, writer.options), b.node)
            if not b.shared:
                made_of[b.node] = _before(b, graph, reader, matcher, nodes)
                for product in _nearest_products(b.a) & written.keys():
                    raise Refused(written_to(written[product], product))
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
        if b.node in stays and not b.shared and stays[b.node] not in refusals_seen:
            refusals_seen.add(stays[b.node])
            yield stays[b.node]
        elif b.node not in stays and (b.node in wanted or not b.shared):
            yield _write(writer, b, packed[b.node])


def _nearest_products(node: fx.Node) -> set[fx.Node]:
    """Return the products that these rows are computed from."""
    found = reached([node], lambda n: () if is_op(n, *PRODUCTS) else n.all_input_nodes)
    return {n for n in found if is_op(n, *PRODUCTS)}


def _layout(b: Batched, options: Options) -> str:
    device = value(b.weight).device.type
    if device != "cpu" and not options.batch_invariant:
        return "plain"
    return preferred_layout(device, batch_invariant=options.batch_invariant)


def _before(
    b: Batched, graph: fx.Graph, reader: Reader, matcher: Matcher, found: set[fx.Node]
) -> list[fx.Node]:
    """Return the gate and up products of a down product. It is rewritten only if they are."""
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
    out = writer.call(aten.permute.default, out, [1, 0, 2])
    lead = [1] * (len(shape(b.node)) - 2)
    return writer.call(aten.reshape.default, out, [*lead, -1, len(b.experts) * b.experts[0][0].n])
