"""The passes that a captured graph goes through, in order: PASSES.

Operators replace what recognition proved, best tier first: whole blocks, then single products.

Each run of a pass is timed and logged, and graphs are written on request. `TORCH_LOGS="+fp4_ops"` prints a
line for each run. `TORCH_COMPILE_DEBUG=1` writes the graphs as files into torch's debug folder,
`TORCH_TRACE=folder` into torch's structured trace, which tlparse shows.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import fx

from ..meta.layouts import LAYOUTS
from ..meta.torch_internals import (
    FakeTensorMode,
    OpOverload,
    OpOverloadPacket,
    logging_internals,
    trace_structured,
)
from .dynamo.api import dynamo_timed, get_debug_dir
from .emit.mixture import Emitter
from .emit.products import EveryUse, batched_products, linear_layers, write_product
from .emit.writer import Writer, kernel
from .graph.dead_code import erase_unused, read_past_writes, sweep
from .graph.nodes import FLOATING, Canon, arguments, aten, is_op, nearest_products, unswap, value
from .graph.strides import allow_any_strides
from .index.reader import Reader
from .index.terms import interning
from .naming import location, module_path
from .neighbours.attention import write_attention
from .neighbours.sums import write_sums
from .neighbours.topk import write_topk
from .options import Options
from .recognise import alike
from .recognise.block import need_wide
from .recognise.evidence import Evidence
from .recognise.mixture import Mixture
from .recognise.products import Batched, Product, find_products, read_batched
from .recognise.search import Search
from .recognise.unread import gathered_matrices
from .recognise.written_decoding import decode_to_operator
from .refusal import Kind, Refusal, Refused, refuse
from .report import PassRun, Site, each_told_once, left_alone
from .step.attention import write_attention as write_step_attention
from .step.cache import write_caches, write_counters
from .step.cached import write_cached_attention
from .step.linears import write_linears
from .step.packed import PACKED_LINEARS, write_packed_linears
from .step.router import write_router
from .step.shared import write_shared
from .trace.capture import mutated_inputs
from .weights.facts import Facts, note_decoded, written_before
from .weights.runtime import Swap

log = logging.getLogger("fp4_ops")

State = TypeVar("State")


@dataclass(frozen=True)
class Pass(Generic[State]):
    """`run` changes a graph, or adds to the state that passes share. It is skipped if `when` is false."""

    name: str
    run: Callable[[State], None]
    when: Callable[[State], bool] = lambda _: True


_graphs = itertools.count()


@dataclass
class PassLog:
    """The runs of passes on one of Dynamo's graphs, in order; a graph rewritten twice has them twice."""

    title: str
    runs: list[PassRun] = field(default_factory=list)
    current: str = ""
    """The pass that runs now, or that failed."""
    _number: int = field(default_factory=_graphs.__next__)
    _text: str = ""
    """The text of the graph when it was last written."""

    def run(self, passes: Sequence[Pass[State]], state: State, graph: fx.Graph) -> None:
        """Run the passes in order; all of them change `graph`."""
        for one in passes:
            if one.when(state):
                with self.timed(one.name, graph):
                    one.run(state)

    @contextlib.contextmanager
    def timed(self, name: str, graph: fx.Graph) -> Iterator[list[fx.Graph]]:
        """Time the block as a run of pass `name`. If it makes a new graph, it puts that into the list."""
        self.current, nodes = name, len(graph.nodes)
        if not self.runs:
            self._write("input", graph)
        made: list[fx.Graph] = []
        start = time.perf_counter()
        with dynamo_timed(f"fp4_{name}"):  # for Dynamo's compile_times() and tlparse
            yield made
        seconds = time.perf_counter() - start
        graph = made[0] if made else graph
        self.runs.append(PassRun(name, seconds, nodes, len(graph.nodes)))
        log.debug("%s: pass %s", self.title, self.runs[-1])
        self._write(name, graph)
        self.current = ""

    def _write(self, name: str, graph: fx.Graph) -> None:
        """Write the current graph, unless nobody asked for it or the pass did not change it."""
        from ..meta.torch_internals import inductor_config

        files, trace = inductor_config.trace.enabled, bool(logging_internals.trace_log.handlers)
        if not (files or trace):
            return
        text = graph.python_code("self", verbose=True).src
        if text == self._text:
            return
        self._text, name = text, f"{len(self.runs):02}_{name}"
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": f"fp4_{name}", "encoding": "string"},
            payload_fn=lambda: text,
        )
        if files:
            folder = Path(get_debug_dir(), "fp4_ops", f"graph_{self._number}")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.py").write_text(f"# {self.title}\n{text}")


fp4 = torch.ops.fp4


@dataclass
class Rewritten:
    """The new graph's inputs are the old ones at `keep`, then the packed tensors of `swaps`, as `fakes`."""

    gm: fx.GraphModule
    keep: list[int]
    swaps: list[Swap]
    fakes: list[torch.Tensor] = field(default_factory=list)
    also: list[str] = field(default_factory=list)
    """Texts about other rewrites of the graph."""


@dataclass
class _State:
    """State that the passes of a graph share."""

    gm: fx.GraphModule
    facts: Facts
    options: Options
    fake_mode: FakeTensorMode
    writer: Writer
    sites: list[Site | Refusal] = field(default_factory=list)
    """Places that were rewritten or left alone. Refusals become text when all passes have run."""
    found: list[Product | Refusal] = field(default_factory=list)
    products: dict[fx.Node, Product] = field(default_factory=dict)
    why_not: dict[fx.Node, Refusal] = field(default_factory=dict)
    """Why a product that looks like the end of a block is not one."""
    written: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Products with weights that the graph has written to before."""
    search: Search = field(init=False)
    """The blocks of experts in the graph, and the reader of it. The pass `mixtures` makes it."""
    refused: list[tuple[list[fx.Node], Refusal]] = field(default_factory=list)
    """Blocks in index notation that were refused, with their products."""
    evidence: Evidence = field(init=False)
    """Which products a router feeds. The pass `mixtures` makes it."""
    routed: set[fx.Node] = field(default_factory=set)
    """Batched products that something routes rows to."""
    gated: dict[fx.Node, Batched] = field(default_factory=dict)
    """Products of the same rows and all matrices whose results a router's gates weight."""
    unrouted: dict[fx.Node, Refusal] = field(default_factory=dict)
    """Products that could be experts', each with the reason why it does not count as one."""
    also: list[str] = field(default_factory=list)
    rewritten: Rewritten | None = None


def rewrite(
    gm: fx.GraphModule,
    facts: Facts,
    options: Options,
    fake_mode: FakeTensorMode,
    passes: PassLog | None = None,
) -> tuple[Rewritten | None, list[Site], list[Site]]:
    """Rewrite `gm` in place; (None, sites, unrouted) if nothing was rewritten. `unrouted`: products that
    could be experts', although nothing shows that they are.

    Raises ReadTwice if only some uses of a weight would be rewritten. `gm` cannot be used after that.
    """
    state = _State(gm, facts, options, fake_mode, Writer(gm, options, facts))
    with interning():
        (passes or PassLog("graph")).run(PASSES, state, gm.graph)
    sites = [left_alone(s) if isinstance(s, Refusal) else s for s in state.sites]
    return state.rewritten, sites, list(map(left_alone, each_told_once(state.unrouted.values())))


def _read_past_writes(s: _State) -> None:
    read_past_writes(s.gm.graph)
    erase_unused(s.gm.graph)
    s.facts.mutated = mutated_inputs(s.gm.graph)


def _find(s: _State) -> None:
    note_decoded(s.gm.graph, s.facts)
    s.found = list(find_products(s.gm.graph, s.facts))
    s.products = {p.node: p for p in s.found if isinstance(p, Product)}


def _mixtures(s: _State) -> None:
    """Rewrite mixtures of experts, however they are written. `s.products` come later, one by one."""
    graph, writer, earlier = s.gm.graph, s.writer, set(s.writer.slots)
    taken: set[fx.Node] = set()
    reader = Reader(graph, Canon(graph), lambda n: n in s.facts.fixed and value(n).dtype in FLOATING)
    s.written = written_before(graph, s.facts.fixed & s.facts.mutated)
    s.evidence = Evidence(graph, reader, s.facts)
    s.search = search = Search(graph, reader, s.written)
    blocks = list(search.run())
    dense = _without_router(s, blocks)  # before anything is rewritten
    others = _other_experts(s, blocks)
    by_product = {n for group, _ in others for n in group.nodes}
    for downs, found in blocks:
        if isinstance(found, Refusal) and by_product and _is_told(found, downs, by_product):
            continue
        if dense.keys() >= set(downs):
            s.unrouted |= {n: dense[n] for n in downs}
            continue
        try:
            if isinstance(found, Refusal):
                raise Refused(found)
            b, shared = found.common, found.after_shared
            need_wide((b.down,) if shared else (*b.up, b.down), found.root, s.facts)
            own = found.weights
            weights = [n for n in writer.inputs if n in own]
            why = next((s.facts.each_alone[n] for n in weights if n in s.facts.each_alone), None)
            if why is not None:
                parts = [found.parts(lambda b: (b.down,))]
                if not shared:
                    parts.insert(0, found.parts(lambda b: b.up))
                every_use = Refusal(Kind.EVERY_USE, found.root, (why,))
                s.sites += EveryUse(writer, parts, found.root, reader).run(every_use, taken)
            else:
                s.sites.append(Emitter(writer, found).run())
        except Refused as stop:
            s.refused.append((downs, stop.refusal))
            if isinstance(found, Mixture):
                _stay_together(found, s.facts)
    for group, reason in others:
        try:
            need_wide(group.experts[0].matrices, group.site, s.facts)
            sites = EveryUse(writer, group.operands, group.site, reader).run(reason, taken)
            if not sites:
                raise Refused(reason)
            s.sites += sites
        except Refused as stop:
            s.refused.append(([group.site], stop.refusal))
    sweep(graph)
    packed = {n for slot in writer.slots.keys() - earlier for n in slot[0] if not s.facts.in_4_bits(n)}
    writer.check_uses(packed, set(s.products))


def _other_experts(
    s: _State, blocks: list[tuple[list[fx.Node], Mixture | Refusal]]
) -> list[tuple[alike.Alike, Refusal]]:
    """Return experts that are not two layers, and why they are not one operator."""
    inside: dict[fx.Node, Refusal] = {}
    some: list[set[fx.Node]] = []
    stay: list[set[fx.Node]] = []
    weights = set(s.facts.mutated)
    for downs, found in blocks:
        if isinstance(found, Mixture):
            weights |= found.weights
        elif found.kind in alike.INSIDE:
            inside |= dict.fromkeys(downs, found)
            some.append(set(downs))
        else:
            stay.append(set(downs))
    groups = list(alike.Search(s.gm.graph, s.search.reader, s.evidence, s.facts.fixed, weights).run())
    while True:  # rewrite all products of a block, or none
        nodes = {n for group in groups for n in group.nodes}
        stay += [downs for downs in some if not downs <= nodes]
        left = [g for g in groups if all(downs.isdisjoint(g.nodes) for downs in stay)]
        if len(left) == len(groups):
            break
        groups = left
    result = []
    for group in groups:
        told = (inside[n] for n in group.nodes & inside.keys() if inside[n].kind not in alike.LAYERS)
        why = next(told, Refusal(Kind.NO_FFN, group.site))
        result.append((group, Refusal(Kind.EACH_PRODUCT, group.site, (why,))))
    return result


def _is_told(found: Refusal, downs: list[fx.Node], by_product: set[fx.Node]) -> bool:
    """Return whether a refusal is about products that are rewritten one by one. These are products that look
    like down products, and products before a step that is not an activation."""
    about = set(downs)
    if found.kind in (Kind.BETWEEN, Kind.SUM_BETWEEN):
        about |= _products_before(downs)
    return not by_product.isdisjoint(about)


def _products_before(downs: list[fx.Node]) -> set[fx.Node]:
    return nearest_products(n for down in downs for n in down.all_input_nodes)


def _without_router(
    s: _State, blocks: list[tuple[list[fx.Node], Mixture | Refusal]]
) -> dict[fx.Node, Refusal]:
    """Return down products of blocks that look like experts but meet no router. `s.routed` gets those that
    meet one."""
    evidence, graph = s.evidence, s.gm.graph
    found: dict[fx.Node, Refusal] = {}
    experts: set[fx.Node] = set()
    for downs, block in blocks:
        if isinstance(block, Refusal):
            if not evidence.may_be_routed(downs):
                found |= dict.fromkeys(downs, Refusal(Kind.SIDE_BY_SIDE, downs[-1], (len(downs),)))
        elif not evidence.of_mixture(block, {*downs, *_products_before(downs)}):
            found |= dict.fromkeys(downs, Refusal(Kind.UNROUTED, downs[-1], (block.common.down.ref.node,)))
        elif (matrix := block.part_shared) is not None:
            found |= dict.fromkeys(downs, Refusal(Kind.PART_SHARED, downs[-1], (matrix.ref.node,)))
        else:
            experts |= block.weights
    batched = [b for n in graph.nodes if (b := read_batched(n, s.search.reader, set())) is not None]
    s.routed = {b.node for b in batched if b.weight in experts}
    s.routed |= evidence.routed([b for b in batched if b.weight not in experts])
    for b in (b for b in batched if b.shared and b.weight not in experts):
        ways = (b, read_batched(b.node, s.search.reader, set(), last=True))
        gated = next((way for way in ways if way is not None and evidence.is_gated(way)), None)
        if gated is not None:
            s.gated[b.node] = gated
    return found


def _batched(s: _State) -> None:
    """Rewrite products of buffers with equally many rows for each expert."""
    s.sites += batched_products(s.writer, s.search, s.evidence, s.routed, s.gated, s.written, s.unrouted)
    sweep(s.gm.graph)
    alive = set(s.gm.graph.nodes)
    refused = [(downs, r) for downs, r in s.refused if alive.issuperset(downs)]
    refused = [(downs, r) for downs, r in refused if not s.unrouted.keys() >= set(downs)]
    left = [*(r for _, r in refused), *(r for r in s.sites if isinstance(r, Refusal))]
    already = {r.facts for r in left if r.kind is Kind.WRITTEN}
    stacks = [(p, w) for p, w in s.written.items() if p in alive and value(w).dim() == 3]
    writes = [([p], Refusal(Kind.WRITTEN, p, (w,))) for p, w in stacks]
    refused += [(downs, r) for downs, r in writes if r.facts not in already]
    s.refused = []
    for downs, refusal in refused:
        alone = [n for n in downs if n in s.products]
        s.why_not |= dict.fromkeys(alone, refusal)
        if not alone:
            s.refused.append((downs, refusal))


def _linears(s: _State) -> None:
    s.sites += linear_layers(s.writer, s.search.reader, s.evidence)
    sweep(s.gm.graph)


def _products(s: _State) -> None:
    """Rewrite single products of sorted rows or gathered weights that belong to no block."""
    alive = set(s.gm.graph.nodes)
    s.facts.stays.clear()  # each product counts alone from here on, not the block around it
    refusals = [r for r in s.found if isinstance(r, Refusal) and r.node in alive]
    s.unrouted = {n: r for n, r in s.unrouted.items() if n in alive}
    _need_evidence(s, [r.site for r in refusals])
    s.sites += [r for r in refusals if r.site not in s.unrouted]
    s.sites += each_told_once(r for _, r in s.refused)
    left = [p for p in s.products.values() if p.node in alive and p.node not in s.unrouted]
    reasons = [s.why_not.get(p.node) or _why_not_read(s, p) for p in left]
    for product, why in zip(left, reasons):
        refused = _why_not_packed(s, product)
        if refused is not None:
            s.unrouted[product.node] = refused
            continue
        try:
            need_wide((product.matrix,), product.node, s.facts)
            site = write_product(s.writer, product)
        except Refused as stop:  # the product stays; others are written
            s.sites.append(stop.refusal)
            continue
        if why is not None:
            whole = Refusal(Kind.NOT_WHOLE, product.node, (why, why.node))
            site = replace(site, reason=whole.reason, change=whole.change)
        s.sites.append(site)
    told = {r.site for r in refusals} | s.products.keys()
    unread = gathered_matrices(s.gm.graph, s.search.reader.is_weight, s.evidence.gathers)
    s.sites += each_told_once(r for r in unread if r.site not in told)
    s.sites += fp4_calls(s.gm.graph, s.writer.written)


def _why_not_packed(s: _State, product: Product) -> Refusal | None:
    """Return a refusal if a single product is not an expert's: its ids or offsets are constant, or it is a
    router."""
    weight, route = product.weight, product.ids if product.offs is None else product.offs
    if s.evidence.is_router(product.node):
        return Refusal(Kind.ROUTER, product.node, (weight,))
    routed = s.evidence.named(weight) or (route is not None and s.evidence.chosen(route))
    return None if routed else Refusal(Kind.UNROUTED, product.node, (weight,))


def _need_evidence(s: _State, refused: list[fx.Node]) -> None:
    """Report products that no operator supports only if they are experts'."""
    for node in refused:
        if node in s.unrouted or not is_op(node, aten.bmm):
            continue
        weights = [w for n in node.all_input_nodes if (w := unswap(n)[0]) in s.facts.fixed]
        if weights and not any(map(s.evidence.named, weights)):
            s.unrouted[node] = Refusal(Kind.UNROUTED, node, (weights[0],))


def _why_not_read(s: _State, product: Product) -> Refusal | None:
    """Return why a product whose input is another product's output is not the end of a block."""
    read = s.search.reader.refusals
    between, todo, feeds = {product.node}, [product.a], False
    while todo and len(between) < 64:  # an activation has only a few nodes
        node = todo.pop()
        if node not in between and node.op == "call_function":
            between.add(node)
            feeds = feeds or node in s.products
            todo += () if node in s.products else node.all_input_nodes
    return next((read[n] for n in read if n in between), None) if feeds else None


def _inputs(s: _State) -> None:
    """Add packed weights as inputs, and remove inputs that nothing reads any more."""
    sweep(s.gm.graph)
    _no_stand_in_is_left(s)
    s.writer.check_uses()
    s.rewritten = Rewritten(s.gm, *s.writer.finish(s.fake_mode), s.also)


def _packed_linears(s: _State) -> None:
    """Write products of the same int8 rows as one call, and say so in the sites of these products."""
    alive = set(s.gm.graph.nodes)
    taken = write_packed_linears(s.gm.graph, s.facts.mutated)
    sites = {node: site for node, site in s.writer.site_of.items() if node in alive}
    stay = [site for node, site in sites.items() if node not in taken]
    now = [site for node, site in sites.items() if node in taken and site not in stay]
    s.sites = [replace(x, op=PACKED_LINEARS) if isinstance(x, Site) and x in now else x for x in s.sites]


def _has_operators(s: _State) -> bool:
    return any(isinstance(site, Site) for site in s.sites)


def _is_ours(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace == "fp4"


def _may_sum_anew(s: _State) -> bool:
    """Return whether sums may depend on the batch: nobody asked for batch invariance, neither here nor when
    the weights of the graph's operators were packed.
    """
    found = {arguments(n).get("layout", "") for n in s.gm.graph.nodes if _is_ours(n)}
    packed = any(LAYOUTS[layout].batch_invariant for layout in found & LAYOUTS.keys())
    return _has_operators(s) and not s.options.batch_invariant and not packed


PASSES: tuple[Pass[_State], ...] = (
    Pass("read_past_writes", _read_past_writes),
    Pass("decode", lambda s: decode_to_operator(s.gm.graph, s.facts, s.fake_mode)),
    Pass("find_products", _find),
    Pass("mixtures", _mixtures),
    Pass("batched_products", _batched),
    Pass(
        "linear_layers",
        _linears,
        when=lambda s: bool(s.options.outside) or not s.facts.fixed.isdisjoint(s.facts.stored),
    ),
    Pass("single_products", _products),
    Pass(
        "topk",
        lambda s: s.also.extend(write_topk(s.gm.graph, on_cpu=_may_sum_anew(s))),
        when=_has_operators,
    ),
    Pass("attention", lambda s: s.also.extend(write_attention(s.gm.graph, s.fake_mode)), when=_has_operators),
    Pass("sums", lambda s: s.also.extend(write_sums(s.gm.graph)), when=_has_operators),
    Pass(
        "step_linears",
        lambda s: s.also.extend(write_linears(s.gm.graph, s.facts.fixed - s.facts.mutated)),
        when=lambda s: _may_sum_anew(s) and not s.options.cpp_wrapper,
    ),
    Pass(
        "step_router",
        lambda s: s.also.extend(write_router(s.gm.graph)),
        when=lambda s: _may_sum_anew(s) and not s.options.cpp_wrapper,
    ),
    Pass("caches", lambda s: s.also.extend(write_caches(s.gm.graph)), when=_has_operators),
    Pass(
        "step_attention",
        lambda s: s.also.extend(write_step_attention(s.gm.graph)),
        when=_may_sum_anew,
    ),
    Pass(
        "cached_attention",
        lambda s: s.also.extend(write_cached_attention(s.gm.graph)),
        when=_has_operators,
    ),
    Pass("shared", lambda s: s.also.extend(write_shared(s.gm.graph)), when=_has_operators),
    Pass("counters", lambda s: s.also.extend(write_counters(s.gm.graph)), when=_has_operators),
    Pass("inputs", _inputs, when=lambda s: bool(s.writer.written or s.also)),
    Pass(
        "step_packed_linears",
        _packed_linears,
        when=lambda s: s.rewritten is not None and not s.options.cpp_wrapper,
    ),
    Pass("strides", lambda s: allow_any_strides(s.gm), when=lambda s: s.rewritten is not None),
)
"""All passes over a captured graph, in order."""


def _stay_together(block: Mixture, facts: Facts) -> None:
    """Keep all weights of a block in their original form if one of them must stay."""
    weights = block.weights
    why = next((r for n in weights if (r := facts.why_not_own(n, block.root)) is not None), None)
    if why is not None:
        for node in weights:
            facts.stays.setdefault(node, why)


def _no_stand_in_is_left(s: _State) -> None:
    """Checks that no stand-in for a tensor subclass is left.

    It holds no values, so every node that uses it must have been replaced by an operator.
    """
    for node, stored in s.facts.stored.items():
        for user in node.users if node.op == "placeholder" else ():
            why = next((site for site in s.sites if isinstance(site, Refusal)), None)
            why = Refusal(Kind.READ_BY_OTHER, user, (user,)) if why is None else why
            refuse(Kind.PRODUCT_NOT_FOUND, user, node, stored.way.kind, why)


def fp4_calls(graph: fx.Graph, known: Collection[fx.Node] = ()) -> list[Site]:
    """Return a site for each fp4 operator that the model calls itself, as a prepared model does."""
    sites = []
    for node in graph.nodes:
        is_operator = isinstance(node.target, (OpOverload, OpOverloadPacket))
        if is_operator and str(node.target).startswith("fp4.") and node not in known:
            name = str(node.target).split(".")[1]
            out = node.meta.get("val", node.meta.get("example_value"))
            out = out[0] if isinstance(out, list | tuple) else out
            by = kernel(out.device.type) if isinstance(out, torch.Tensor) else ""
            where, module = location(node), module_path(node)
            sites.append(Site(f"fp4::{name}", "", where, module, form=OWN_CALL, kernel=by))
    return sites


OWN_CALL = "the model, which calls it itself"
