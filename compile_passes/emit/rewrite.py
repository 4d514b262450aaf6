"""Puts fp4 operators where recognition proved them, best tier first: whole blocks, then single products."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import AttrSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ...meta.formats import activation_name
from ...meta.layouts import LAYOUTS, preferred_layout
from .. import advice
from ..graph.nodes import (
    FLOATING,
    Canon,
    Refusal,
    WeightRef,
    Weights,
    aten,
    is_impure,
    is_op,
    is_pure,
    is_tensor,
    need,
    shape,
    value,
    why_not_own,
    written_to,
)
from ..graph.products import IndexedRows, Product, find_products, nonnegative
from ..index.reader import Reader
from ..index.terms import interning
from ..naming import called, input_name, location, module_path
from ..neighbours.attention import write_attention
from ..neighbours.topk import write_topk
from ..options import Options
from ..passes import Pass, PassLog
from ..recognise.block import Block, ends_a_block, match_block
from ..recognise.decode import decode_to_operator
from ..recognise.mixture import Mixture
from ..recognise.search import Search
from ..report import Load, Site, hint, left_alone
from ..trace.capture import CannotCapture, mutated_inputs
from ..weights.decoded import find_decoded
from ..weights.packed import Assembly, JoinSpec, PackSpec, Swap
from ..weights.prequantized import HeldSpec, format_of, held_spec, inputs_of, is_held
from .batched import batched_products
from .every_use import weights_of, write_every_use
from .linears import linear_layers
from .mixture import write_mixture
from .one_precision import refuse_two_precisions, written_before
from .written_slices import read_past_writes

fp4 = torch.ops.fp4


@dataclass
class Rewritten:
    """The new graph's inputs are the old ones at `keep`, then the packed tensors of `swaps`, as `fakes`."""

    gm: fx.GraphModule
    keep: list[int]
    swaps: list[Swap]
    fakes: list[torch.Tensor] = field(default_factory=list)
    also: list[str] = field(default_factory=list)
    """What else was rewritten, in words."""


@dataclass
class _State:
    """What the passes of one graph hand on."""

    gm: fx.GraphModule
    fixed: set[fx.Node]
    """Inputs that are parameters or buffers."""
    options: Options
    fake_mode: FakeTensorMode
    mutated: set[fx.Node]
    """Inputs that the graph writes to."""
    writer: _Writer
    sites: list[Site] = field(default_factory=list)
    found: list[Product | Refusal] = field(default_factory=list)
    products: dict[fx.Node, Product] = field(default_factory=dict)
    why_not: dict[fx.Node, Refusal] = field(default_factory=dict)
    """Of a product that ends something like a block: why it is none."""
    written: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Products with weights that the graph has written to before."""
    search: Search | None = None
    refused: list[tuple[list[fx.Node], Refusal]] = field(default_factory=list)
    """Blocks in index notation that were refused, with their products."""
    also: list[str] = field(default_factory=list)
    rewritten: Rewritten | None = None


def rewrite(
    gm: fx.GraphModule,
    fixed: set[fx.Node],
    options: Options,
    fake_mode: FakeTensorMode,
    passes: PassLog | None = None,
) -> tuple[Rewritten | None, list[Site]]:
    """Rewrite `gm` in place; (None, sites) if nothing was. `fixed`: inputs that are parameters or buffers.

    Raises ReadTwice where some uses of a weight would be rewritten and others not: `gm` is of no use then.
    Weights with `meta["each"]`, which says why, are rewritten in each product by itself, and those with
    `meta["read_twice"]` left alone.
    """
    state = _State(gm, fixed, options, fake_mode, set(), _Writer(gm, options))
    with interning():
        (passes or PassLog("graph")).run(PASSES, state, gm.graph)
    return state.rewritten, state.sites


def _read_past_writes(s: _State) -> None:
    read_past_writes(s.gm.graph)
    s.gm.graph.eliminate_dead_code()
    s.mutated = mutated_inputs(s.gm.graph)


def _decode(s: _State) -> None:
    """Codes that the model decodes by itself are weights, too."""
    decode_to_operator(s.gm.graph, s.fixed - s.mutated, s.fake_mode)


def _find(s: _State) -> None:
    s.fixed = s.fixed | find_decoded(s.gm.graph, s.fixed, s.mutated)
    s.found = list(find_products(s.gm.graph, Weights(s.gm.graph, s.fixed, s.mutated), Canon(s.gm.graph)))
    s.products = {p.node: p for p in s.found if isinstance(p, Product)}


def _blocks(s: _State) -> None:
    """Blocks of sorted rows or gathered weights."""
    blocks, canon = [], Canon(s.gm.graph)
    for product in s.products.values():
        try:
            block = match_block(product, s.products, canon)
            formats = [_format(w.placeholder, s.options) for w in (block.up.weight, block.down.weight)]
            need(
                formats[0] == formats[1],
                "gate/up and down are held in different formats",
                product.node,
                advice.ALL_HELD,
            )
            blocks.append(block)
        except Refusal as refusal:
            if ends_a_block(product, s.products, canon):
                s.why_not[product.node] = refusal
    for block in blocks:
        s.sites.append(s.writer.block(block))
    sweep(s.gm.graph)


def _mixtures(s: _State) -> None:
    """Blocks written in any other way, read in index notation. `s.products` come later, each alone."""
    graph, writer, others = s.gm.graph, s.writer, set(s.writer.slots)
    taken: set[fx.Node] = set()
    reader = Reader(graph, Canon(graph), lambda n: _is_weight(n, s.fixed))
    s.written = written_before(graph, s.fixed & s.mutated)
    s.search = search = Search(graph, reader, s.written)
    for downs, found in list(search.run()):
        try:
            if isinstance(found, Refusal):
                raise found
            weights = [n for n in writer.inputs if n in weights_of(found)]
            why = next((n.meta["each"] for n in weights if "each" in n.meta), "")
            if why:
                s.sites += write_every_use(writer, found, reader, why, s.mutated, taken)
            else:
                s.sites.append(write_mixture(writer, found, s.mutated))
        except Refusal as refusal:
            s.refused.append((downs, refusal))
            if isinstance(found, Mixture):
                _stay_together(weights_of(found), s.mutated)
    sweep(graph)
    packed = {n for slot in writer.slots.keys() - others for n in slot[0] if not is_held(n)}
    writer.check_uses(packed, set(s.products))


def _batched(s: _State) -> None:
    """Products of buffers that have as many rows for each expert."""
    graph, search = s.gm.graph, s.search
    assert search is not None
    s.sites += batched_products(s.writer, graph, search.reader, search.matcher, s.mutated, s.written)
    sweep(graph)
    alive = set(graph.nodes)
    refused = [(downs, r) for downs, r in s.refused if alive.issuperset(downs)]
    told = {r.reason for _, r in refused} | {site.reason for site in s.sites}
    stacks = [(p, w) for p, w in s.written.items() if p in alive and value(w).dim() == 3]
    writes = [([p], written_to(w, p)) for p, w in stacks]
    refused += [(downs, r) for downs, r in writes if r.reason not in told]
    s.refused = [(downs, r) for downs, r in refused if not any(n in s.products for n in downs)]


def _linears(s: _State) -> None:
    assert s.search is not None
    s.sites += linear_layers(s.writer, s.gm.graph, s.search.reader, s.mutated)
    sweep(s.gm.graph)


def _products(s: _State) -> None:
    """Single products of sorted rows or gathered weights that no block has taken."""
    alive = set(s.gm.graph.nodes)
    s.sites += [left_alone(r) for r in s.found if isinstance(r, Refusal) and r.node in alive]
    s.sites += dict.fromkeys(left_alone(r) for _, r in s.refused)
    for product in s.products.values():
        if product.node in alive:
            site, why = s.writer.product(product), s.why_not.get(product.node)
            if why is not None:
                reason = f"not a whole block: {why.reason} ({location(why.node)})"
                site = replace(site, reason=reason, change=why.change)
            s.sites.append(site)
    s.sites += fp4_calls(s.gm.graph, s.writer.written)


def _topk(s: _State) -> None:
    s.also += write_topk(s.gm.graph)


def _attention(s: _State) -> None:
    s.also += write_attention(s.gm.graph, s.fake_mode)


def _inputs(s: _State) -> None:
    """Packed weights are new inputs, and inputs that nothing reads any more go."""
    sweep(s.gm.graph)
    _no_stand_in_is_left(s.gm.graph, s.sites)
    s.writer.check_uses()
    s.rewritten = s.writer.finish(s.fake_mode)
    s.rewritten.also = s.also


PASSES: tuple[Pass[_State], ...] = (
    Pass("read_past_writes", _read_past_writes),
    Pass("decode", _decode),
    Pass("find_products", _find),
    Pass("blocks", _blocks),
    Pass("mixtures", _mixtures),
    Pass("batched_products", _batched),
    Pass("linear_layers", _linears, when=lambda s: s.options.linear or any(map(is_held, s.fixed))),
    Pass("single_products", _products),
    Pass("topk", _topk, when=lambda s: any(site.rewritten for site in s.sites)),
    Pass("attention", _attention, when=lambda s: any(site.rewritten for site in s.sites)),
    Pass("inputs", _inputs, when=lambda s: bool(s.writer.written or s.also)),
)
"""All that happens to a captured graph, in order."""


def _stay_together(weights: set[fx.Node], mutated: set[fx.Node]) -> None:
    """All weights of a block stay if one must."""
    why = next((r for n in weights if (r := why_not_own(n, mutated)) is not None), None)
    if why is not None:
        for node in weights:
            node.meta.setdefault("stays", why)


def _is_weight(node: fx.Node, fixed: set[fx.Node]) -> bool:
    return node in fixed and value(node).dtype in FLOATING


def _format(weight: fx.Node, options: Options) -> tuple[str, bool]:
    """(format, whether the model itself holds it so) of a weight once it is packed."""
    return (weight.meta["held"].format, True) if is_held(weight) else (options.format, False)


def _no_stand_in_is_left(graph: fx.Graph, sites: list[Site]) -> None:
    """What takes the place of a tensor subclass holds no values: every use must have become an operator's."""
    for node in graph.find_nodes(op="placeholder"):
        for user in node.users if is_held(node) else ():
            kind, refused = node.meta["held"].kind, [(s.reason, s.change) for s in sites if not s.rewritten]
            own = f"{called(user)} reads it", advice.HELD_PRODUCT
            why, change = refused[0] if refused else own
            raise CannotCapture(f"a product of {input_name(node)} ({kind}) was not found: {why}", change)


def sweep(graph: fx.Graph) -> None:
    """Dead code, and assertions about sizes or chosen rows of tensors that nothing needs any more."""
    live: set[fx.Node] = set()
    _keep((n for n in graph.nodes if _has_effect(n) and not is_op(n, *_ASSERTIONS)), live)
    asserted = [
        n
        for n in graph.nodes
        if (is_op(n, *_ASSERTIONS) and _tensors_behind(n) & live)
        or (is_op(n, aten._assert_async) and not _is_of_some_rows(n, live))
    ]
    _keep(asserted, live)
    for node in reversed(graph.nodes):
        if node not in live:
            graph.erase_node(node)


def _is_of_some_rows(node: fx.Node, live: set[fx.Node]) -> bool:
    """Whether what is not needed otherwise, and `node` is computed from, has rows that a mask chose."""
    seen: set[fx.Node] = set()
    _keep([node], seen)
    return any(is_tensor(n) and free_unbacked_symbols(value(n)) for n in seen - live)


def may_run_twice(graph: fx.Graph) -> bool:
    """Whether a second run with the same inputs gives the same: nothing is written to, or drawn at random."""
    return all(
        n.op in ("placeholder", "output", "get_attr") or is_op(n, *_ASSERTIONS) or is_pure(n)
        for n in graph.nodes
        if not is_op(n, aten.empty, aten.empty_like)
    )


def _has_effect(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or is_impure(node)


def _keep(nodes: Iterable[fx.Node], live: set[fx.Node]) -> None:
    """What these nodes are computed from is live."""
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in live:
            live.add(node)
            todo.extend(node.all_input_nodes)


_ASSERTIONS = (
    aten._assert_scalar, aten._assert_async, aten._assert_tensor_metadata, aten.sym_constrain_range,
    aten.sym_constrain_range_for_size,
)  # fmt: skip


def _tensors_behind(node: fx.Node) -> set[fx.Node]:
    """The tensors that a scalar, or a condition on all of a tensor, is computed from."""
    found, todo = set(), list(node.all_input_nodes)
    while todo:
        n = todo.pop()
        if is_tensor(n) and len(shape(n)) > 0:
            found.add(n)
        else:
            todo.extend(n.all_input_nodes)
    return found


def fp4_calls(graph: fx.Graph, known: Collection[fx.Node] = ()) -> list[Site]:
    """The fp4 operators that the model calls itself, as a prepared model does."""
    sites = []
    for node in graph.nodes:
        is_operator = isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
        if is_operator and str(node.target).startswith("fp4.") and node not in known:
            name = str(node.target).split(".")[1]
            out = node.meta.get("val", node.meta.get("example_value"))
            kernel = _kernel(out.device.type) if isinstance(out, torch.Tensor) else ""
            sites.append(Site(f"fp4::{name}", "", *_where(node), form=OWN_CALL, kernel=kernel))
    return sites


OWN_CALL = "the model, which calls it itself"


def _where(node: fx.Node) -> tuple[str, str]:
    """(line, module) that a node comes from."""
    return location(node), module_path(node)


def _kernel(device_type: str, layout: str = "plain") -> str:
    if device_type == "cpu":
        return f"cpu {torch.ops.fp4.cpu_capability()}"
    return "hopper" if LAYOUTS[layout].hopper else "triton"


class _Writer:
    def __init__(self, gm: fx.GraphModule, options: Options) -> None:
        self.gm, self.options = gm, options
        self.slots: dict[tuple[tuple[fx.Node, ...], PackSpec | JoinSpec | HeldSpec], tuple[fx.Node, ...]] = {}
        self.written: set[fx.Node] = set()
        self.replaced: dict[fx.Node, fx.Node] = {}
        self.inputs = list(gm.graph.find_nodes(op="placeholder"))
        self._last_input = self.inputs[-1]

    # --- tiers ---

    def block(self, b: Block) -> Site:
        """fp4::moe in place of the block's root."""
        both = (b.up.weight, b.down.weight)
        layout = self._layout(*both)
        a_format, why = self._a_format(layout, b.down.weight)
        gate = b.activation.name
        split = LAYOUTS[layout].interleaved and b.activation.gated and not b.activation.interleaved
        if split:
            gate = activation_name(replace(b.activation, interleaved=True)) or ""
        up, down = self._packed(b.up.weight, layout, interleave=split), self._packed(b.down.weight, layout)
        with self.gm.graph.inserting_before(b.root):
            hidden = b.up.weight.k
            x = b.x if len(shape(b.x)) == 2 else self.call(aten.reshape.default, b.x, [-1, hidden])
            out = self.call(
                fp4.moe.default,
                x,
                self.call(aten.reshape.default, self._safe_ids(b.ids, b.rows, b.up.weight), [-1, b.k]),
                self.call(aten.reshape.default, b.weights, [-1, b.k]),
                *up,
                *down,
                self._interleaved(b.up_bias) if split and b.up_bias is not None else b.up_bias,
                b.down_bias,
                format=_format(b.down.weight.placeholder, self.options)[0],
                layout=layout,
                activation=gate,
                a_format=a_format,
                out_dtype=value(b.root).dtype,
            )
        where = _where(b.up.node)
        self.replace(b.root, out)
        w = b.up.weight
        return self._site(
            "fp4::moe", "", where, both, layout, b.rows.form, why, b.activation.name,
            f"{w.experts} experts, top {b.k}, hidden {w.k}, intermediate {b.down.weight.k}",
            Load(w.experts, b.k, hint(value(b.root).numel() // b.down.weight.n)),
        )  # fmt: skip

    def product(self, p: Product) -> Site:
        """fp4::grouped_mm or fp4::indexed_mm in place of one product."""
        layout = self._layout(p.weight)
        a_format, why = self._a_format(layout, p.weight)
        packed = self._packed(p.weight, layout)
        out_dtype = value(p.node).dtype
        name = "indexed_mm" if p.offs is None else "grouped_mm"
        with self.gm.graph.inserting_before(p.node):
            a, a_scale = p.a, None
            if len(shape(a)) != 2:
                a = self.call(aten.reshape.default, a, [-1, p.weight.k])
            if a_format in ("int8", "fp8"):
                both = self.quantize(a, a_format, layout)
                a, a_scale = (self.call(operator.getitem, both, i) for i in (0, 1))
            route = p.offs if p.offs is not None else self._safe_ids(p.ids, p.rows(), p.weight)
            out = self.call(
                getattr(fp4, name).default,
                a,
                *packed,
                route,
                a_scale,
                None,
                format=_format(p.weight.placeholder, self.options)[0],
                layout=layout,
                out_dtype=out_dtype,
            )
            if p.unit_dim is not None:
                out = self.call(aten.unsqueeze.default, out, p.unit_dim)
        where = _where(p.node)
        self.replace(p.node, out)
        w = p.weight
        form = "rows sorted by expert (grouped_mm)" if p.offs is not None else IndexedRows.form
        return self._site(
            f"fp4::{name}",
            "",
            where,
            [w],
            layout,
            form,
            why,
            "",
            f"{w.experts} experts, N {w.n}, K {w.k}",
            Load(w.experts, 1, hint(value(p.node).numel() // w.n)),
        )

    # --- pieces ---

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.gm.graph.call_function(target, args, kwargs)
        self.written.add(node)
        return node

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        for key in ("val", "stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in old.meta:
                new.meta[key] = old.meta[key]
        old.replace_all_uses_with(new)
        self.replaced[old] = new

    def _safe_ids(self, ids: Any, rows: Any, weight: WeightRef) -> fx.Node:
        """Indexing counts negative ids from the end, the operators skip them: keep the model's meaning."""
        if not isinstance(rows, IndexedRows) or nonnegative(ids):
            return ids
        wrapped = self.call(aten.add.Tensor, ids, weight.experts)
        return self.call(aten.where.self, self.call(aten.lt.Scalar, ids, 0), wrapped, ids)

    def quantize(self, a: fx.Node, a_format: str, layout: str) -> fx.Node:
        """The activations of one product in int8 or fp8: a pair."""
        if a_format == "int8":
            return self.call(fp4.quantize_int8.default, a)
        return self.call(fp4.quantize_fp8.default, a, layout=LAYOUTS[layout].a_layout)

    def _layout(self, *weights: WeightRef) -> str:
        """One layout for the weights of one operator."""
        like = value(weights[0].placeholder)
        shapes = [(w.n, w.k) for w in weights]
        format = format_of(weights[0].placeholder, self.options.format)
        return preferred_layout(
            like.device.type, *shapes, dtype=like.dtype, format=format, a_format=self.options.wanted
        )

    def _interleaved(self, bias: fx.Node) -> fx.Node:
        """A bias [E, 2 I] in the order of interleaved rows."""
        e, n = shape(bias)
        halves = self.call(aten.reshape.default, bias, [e, 2, n // 2])
        return self.call(aten.reshape.default, self.call(aten.transpose.int, halves, 1, 2), [e, n])

    def _spec(self, w: WeightRef, layout: str, interleave: bool = False) -> PackSpec | HeldSpec:
        if is_held(w.placeholder):
            whole = Assembly.of_one(w.experts, w.n, w.k, w.transposed, 2 if interleave else 1)
            return held_spec((w.placeholder,), whole, layout, w.placeholder)
        return PackSpec(self.options.format, layout, w.transposed, interleave=interleave)

    def _a_format(self, layout: str, w: WeightRef) -> tuple[str, str]:
        a_format, why = self.options.a_format(value(w.placeholder).device.type, layout)
        return a_format, f"{a_format} ({why})"

    def _packed(self, w: WeightRef, layout: str, *, interleave: bool = False) -> tuple[fx.Node | None, ...]:
        """(packed, block_scale, global_scale or None) as graph inputs, made once for each weight."""
        return (*self.slot((w.placeholder,), self._spec(w, layout, interleave)), None)[:3]

    def slot(self, sources: tuple[fx.Node, ...], spec: PackSpec | JoinSpec | HeldSpec) -> tuple[fx.Node, ...]:
        """The graph inputs that hold what `spec` makes of these parameters."""
        sources = tuple(n for s in sources for n in inputs_of(s))
        key = (sources, spec)
        if key not in self.slots:
            first, nodes = sources[0], []
            for i in range(spec.tensors):
                with self.gm.graph.inserting_after(self._last_input):
                    node = self.gm.graph.placeholder(f"{first.name}_fp4_{len(self.slots)}_{i}")
                source = getattr(first, "_dynamo_source", None)
                order = "i" if getattr(spec, "interleave", False) else ""
                attribute = f"_fp4_{spec.layout}{order}_{int(spec.transposed)}_{i}"
                if len(sources) > 1 or getattr(spec, "assembly", None) is not None:
                    attribute += f"_{len(self.slots)}"
                node._dynamo_source = AttrSource(source, attribute) if source is not None else None
                # Fixed addresses until the weight changes: CUDA graphs need not copy these inputs.
                node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
                self._last_input = node
                nodes.append(node)
            self.slots[key] = tuple(nodes)
        return self.slots[key]

    def _site(self, op, reason, where, weights, layout, form, a_format, activation, shape_text, load) -> Site:
        packed = [((w.placeholder,), self._spec(w, layout)) for w in weights]
        return self.site(op, reason, where, packed, form, a_format, activation, shape_text, load)

    def site(self, op, reason, where, packed, form, a_format, activation, shape_text, load: Load) -> Site:
        """What was done; `packed`: for each weight the parameters it is made of, and how."""
        specs = [spec for _, spec in packed]
        sources = list(dict.fromkeys(n for nodes, _ in packed for n in nodes))
        values = [value(n) for n in sources]
        after = sum(s.num_bytes(tuple(value(nodes[0]).shape)) for nodes, s in packed)
        held = any(map(is_held, sources))
        before = after if held else sum(v.numel() * v.dtype.itemsize for v in values)
        return Site(
            module=where[1],
            op=op,
            reason=reason,
            where=where[0],
            weights=tuple(input_name(inputs_of(n)[0]) for n in sources),
            shape=shape_text,
            form=form + (f", weights from {sources[0].meta['held'].kind}" if held else ""),
            kernel=_kernel(values[0].device.type, specs[0].layout),
            format=specs[0].format,
            layout=specs[0].layout,
            activation=activation,
            a_format=a_format,
            bytes_before=before,
            bytes_after=after,
            gain=None if held else load.gain(before, after),
        )

    def check_uses(
        self, packed: Collection[fx.Node] | None = None, products: Collection[fx.Node] = ()
    ) -> None:
        """Raises ReadTwice where a product that stays, none of `products`, reads a weight that was packed."""
        if packed is None:
            packed = {s for sources, _ in self.slots for s in sources}
        refuse_two_precisions(self.inputs, packed, products)

    def finish(self, fake_mode: FakeTensorMode) -> Rewritten:
        """Drop inputs that nothing uses any more, so that the graph does not keep the originals alive."""
        swaps, fakes = [], []
        position = {n: i for i, n in enumerate(self.inputs)}
        for (sources, spec), nodes in self.slots.items():
            names = tuple(map(input_name, sources))
            swaps.append(Swap(tuple(position[n] for n in sources), spec, names))
            like = value(sources[0])
            with fake_mode:
                made = [
                    torch.empty(s, dtype=d, device=like.device) for s, d in spec.shapes(tuple(like.shape))
                ]
            for node, fake in zip(nodes, made, strict=True):
                node.meta["val"] = fake
            fakes += made
        swapped = {p for sources, _ in self.slots for p in sources}
        keep = []
        for index, node in enumerate(self.inputs):
            if (node in swapped or is_held(node)) and not node.users:
                self.gm.graph.erase_node(node)
            else:
                keep.append(index)
        self.gm.graph.lint()
        self.gm.recompile()
        return Rewritten(self.gm, keep, swaps, fakes)
