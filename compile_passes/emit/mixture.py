"""Emits a Mixture: arranges routing and rows for the operators, adds packed weights as inputs, and writes one
operator.

A block whose activation the operator supports becomes `fp4::moe`. Any other becomes two `fp4::indexed_mm`
over (token, choice) rows, with the model's own activation between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from ...meta.formats import find_activation, known_activation
from ...meta.layouts import LAYOUTS
from ..graph.nodes import FLOATING, aten, is_op, shape, static_int, strip, value
from ..index.ids import distinct, nonnegative, support
from ..index.reader import same
from ..index.terms import (
    Const,
    Ref,
    Term,
    described,
    free_axes,
    parts_of,
)
from ..recognise.block import GATE, UP, Branch, Matrix, Mixture, same_function
from ..recognise.pieces import OUT, E, J, K, N
from ..recognise.products import factors
from ..refusal import Kind, Refusal, need
from ..report import Load, Site, hint
from ..weights.specs import JoinSpec, PackSpec, StoredSpec, own_scales
from .products import format_asked_for
from .tensors import Tensors
from .writer import Operands, Packed, Writer, as_it_is, assemble

fp4 = torch.ops.fp4


class Joined(NamedTuple):
    """Vectors of all experts, put together from these parameters."""

    sources: tuple[fx.Node, ...]
    spec: JoinSpec


@dataclass(frozen=True)
class _Experts:
    """Experts as nodes of the graph, for one operator or for two products."""

    up: Operands | None
    """None if all experts share this layer."""
    down: Operands
    up_bias: fx.Node | None
    down_bias: fx.Node | None
    gain: fx.Node | None
    spec: PackSpec | StoredSpec
    """How gate/up and down are packed."""


@dataclass(frozen=True)
class _Rows:
    """Inputs of the experts: rows [T, K], and for each row ids and weights [T, k]."""

    x: fx.Node
    ids: fx.Node
    weights: fx.Node


class _Shared(NamedTuple):
    """One product of a layer that all experts share."""

    matrix: Matrix
    bias: Matrix | None
    node: fx.Node | None
    """The model's own product of all rows, if there is one. It stays."""
    packed: Packed | None


class Routing(Tensors):
    """Ids and weights [T, k] of a mixture: the experts of each row."""

    def __init__(self, writer: Writer, m: Mixture) -> None:
        super().__init__(writer, m)
        self.support: tuple[fx.Node, ...] | None = None
        """The ids that can have nonzero factors, if a matrix over all experts has the weights."""
        self.dense = False
        if self.m.k is None:
            self.support = self._support()
            self.dense = self.support is None
            choices = [int(shape(ids)[-1]) for ids in self.support or ()]
            self.k = self.experts if self.dense else sum(choices)
        else:
            self.k = self.m.k
            if self.common.ids is None and self.common.place is None:
                assert self.common.masked is not None
                need(distinct(self.common.masked.node), Kind.TWICE_CHOSEN, self.m.root)

    def emit(self, rows: fx.Node) -> tuple[fx.Node, fx.Node]:
        call, m = self.call, self.m
        ids = self._expert_ids(rows)
        weights = self.weighted(self.common.factors, ids)
        if self.common.chosen:  # the other rows belong to no expert
            nobody = m.first + self.experts
            ids = call(aten.where.ScalarOther, self.weighted(self.common.chosen, ids), ids, nobody)
        if m.first:
            ids = call(aten.sub.Tensor, ids, m.first)
        return ids, weights

    def _expert_ids(self, rows: fx.Node) -> fx.Node:
        m, b = self.m, self.common
        if self.support is not None:
            return self._united([self.reshape(p, [-1, int(shape(p)[-1])]) for p in self.support])
        if self.dense:
            every = self.call(aten.arange.start, m.first, m.first + self.k, device=value(b.x.node).device)
            return self.call(aten.expand.default, every, [self.call(aten.sym_size.int, rows, 0), self.k])
        if b.place is not None:  # the place of an output row determines its expert
            every = self.call(aten.arange.default, self.experts, device=value(b.x.node).device)
            every = self.reshape(every, [-1 if a is b.place else 1 for a in m.tokens])
            sizes = [self.length(a.size) for a in m.tokens]
            return self.reshape(self.call(aten.expand.default, every, sizes), [-1, 1])
        ref = b.ids if b.ids is not None else b.masked
        assert ref is not None
        several = J in free_axes(ref)
        ids = self.rows(ref, (J,) if several else (), [self.k])
        if not free_axes(ref) & set(m.tokens):  # all tokens have the same ids
            ids = self.call(aten.expand.default, ids, [self.call(aten.sym_size.int, rows, 0), -1])
        if m.wraps and not nonnegative(ref.node):  # indexing counts negative ids from the end
            ids = self.w.wrapped(ids, self.experts)
        return ids

    def _united(self, parts: list[fx.Node]) -> fx.Node:
        """Join several sources of ids to [T, k]. A repeated id is replaced by an id that belongs
        to no expert."""
        call, nobody = self.call, self.m.first + self.experts
        out = parts[0]
        for ids in parts[1:]:
            again = call(
                aten.eq.Tensor, call(aten.unsqueeze.default, ids, 2), call(aten.unsqueeze.default, out, 1)
            )
            ids = call(aten.where.ScalarSelf, call(aten.any.dim, again, 2), nobody, ids)
            out = call(aten.cat.default, [out, ids], 1)
        return out

    def weighted(self, factors: tuple[Term, ...], ids: fx.Node) -> fx.Node:
        """The product of factors over tokens, choices and experts, as [T, k]."""
        out = None
        for f in factors:
            part = self._factor(f, ids)
            out = part if out is None else self.call(aten.mul.Tensor, out, part)
        if out is None:
            return self.call(aten.ones_like.default, ids, dtype=torch.float32)
        if not isinstance(out, fx.Node):
            return self.call(aten.full_like.default, ids, out, dtype=torch.float32)
        if any(isinstance(f, Ref) and f.index and value(f.node).dtype not in FLOATING for f in factors):
            out = self.call(aten._to_copy.default, out, dtype=torch.float32)
        each = self.k == 1 or any({J, E} & free_axes(f) for f in factors)
        tokens = set(self.m.tokens)
        if tokens and not any(E in free_axes(f) or tokens & free_axes(f) for f in factors):
            return self.call(aten.expand.default, out, [self.call(aten.sym_size.int, ids, 0), self.k])
        return out if each else self.call(aten.expand.default, out, [-1, self.k])

    def _factor(self, term: Term, ids: fx.Node) -> Any:
        m = self.m
        if isinstance(term, Const):
            return term.value
        if isinstance(term, Ref) and not term.index:  # a number that the graph computes
            number = self.element(term, ())
            if isinstance(value(number), torch.Tensor):  # without dimensions
                ones = self.call(aten.ones_like.default, ids, dtype=torch.float32)
                return self.call(aten.mul.Tensor, ones, number)
            return self.call(aten.full_like.default, ids, number, dtype=torch.float32)
        if E not in free_axes(term):
            return self.rows(term, (J,), [self.k if J in free_axes(term) else 1])
        each = J in free_axes(term)
        columns = _columns(term)
        need(columns is not None, Kind.NOT_OVER_EXPERTS, m.root, term)
        assert columns is not None
        table = self.rows(term, (J, E) if each else (E,), [self.k, columns] if each else [columns])
        alike = m.tokens and not set(m.tokens) & free_axes(term)
        if self.dense and m.first == 0 and columns == self.k and not alike:
            return table
        inside = self.call(aten.clamp.default, ids, 0, columns - 1)
        inside = self.call(aten._to_copy.default, inside, dtype=torch.int64)
        if each:
            table = self.call(aten.expand.default, table, [self.call(aten.sym_size.int, ids, 0), -1, -1])
            column = self.call(aten.unsqueeze.default, inside, 2)
            return self.call(aten.squeeze.dim, self.call(aten.gather.default, table, 2, column), 2)
        if alike or not m.tokens:
            return self.call(aten.index.Tensor, self.reshape(table, [-1]), [inside])
        return self.call(aten.gather.default, table, 1, inside)

    def _support(self) -> tuple[fx.Node, ...] | None:
        """Ids that can have nonzero factors. Some factor is zero for others, whose experts need not run."""
        quiet = bool(self.common.act.name) and not any((*self.common.up_bias, self.common.down_bias))
        for f in (*self.common.factors, *(self.common.scales if quiet else ())):
            if not isinstance(f, Ref):
                continue
            index = tuple(p for i, s in zip(f.index, shape(f.node)) if not same(s, 1) for p in parts_of(i))
            if index == (*self.m.tokens, E):
                found = support(f.node)
                if found is not None:
                    return found
        return None


def _columns(term: Term) -> int | None:
    """The size of the expert axis of a term."""
    found = set()
    for t in [term, *term.children()]:
        if isinstance(t, Ref) and E in t.index:
            found.add(static_int(shape(t.node)[t.index.index(E)]))
    return found.pop() if len(found) == 1 else None


class Emitter(Tensors):
    def __init__(self, writer: Writer, m: Mixture) -> None:
        super().__init__(writer, m)
        self.activation = self.activation_text = ""
        self.before: list[fx.Node] = []
        """The products of a layer that all experts share: gate and up, or up."""
        self.apart = bool(self.common.scales) or self.common.after is not OUT
        """True if rows differ among a token's choices, at the input or the output. Each is then a token of
        its own."""

    def run(self) -> Site:
        """Replace `m.root` by the operator. A Refusal leaves the graph as it was."""
        m, b = self.m, self.common
        act, like = b.act, b.down.ref.node
        device = value(like).device.type
        need(value(m.root).dtype in FLOATING, Kind.OUTPUT_DTYPE, m.root, value(m.root).dtype)
        need(device in ("cpu", "cuda"), Kind.DEVICE, m.root, device)
        fused = bool(act.name) and b.gain is None and not m.after_shared
        layout = self._layout()
        up, interleaved = (None, False) if m.after_shared else self._gate_up(layout)
        down = self.w.pack(m.parts(lambda b: (b.down,)), layout, m.root)
        if up is not None:
            if isinstance(up.spec, StoredSpec) and isinstance(down.spec, StoredSpec) and own_scales(up.spec):
                down = self._rescaled(up, down)
            same_kind = (up.spec.format, up.layout) == (down.spec.format, down.layout)
            need(same_kind, Kind.PACKED_DIFFERENTLY, m.root)
        before = self._pack_shared() if up is None else []
        vectors = (
            None if up is None else self._vectors(lambda b: b.up_bias, interleaved),
            self._vectors(lambda b: (b.down_bias,), False),
            self._vectors(lambda b: (b.gain,), False),
        )
        routing = self.routing = Routing(self.w, m)
        self.how = self.w.activations(like, down.layout, block=fused)

        with self.w.gm.graph.inserting_before(m.root):
            x = self.reshape(self._expanded(self.ref(b.x, (*m.tokens, K))), [-1, b.up[0].k])
            ids, weights = routing.emit(x)
            k = routing.k
            if self.apart:
                x = self._for_each_choice(x, ids, k)
                ids, weights = self.reshape(ids, [-1, 1]), self.reshape(weights, [-1, 1])
            operands = self.w.operands(up) if up is not None else None, self.w.operands(down)
            up_bias, down_bias, gain = map(self._joined, vectors)
            experts = _Experts(*operands, up_bias, down_bias, gain, down.spec)
            if up is None:
                self.before = [self._shared(x, layer) for layer in before]
            emit = self._moe if fused else self._products
            if b.after is OUT:
                out = emit(_Rows(x, ids, weights), experts, value(m.root).dtype)
            else:
                ones = self.call(aten.ones_like.default, ids, dtype=torch.float32)
                out = emit(_Rows(x, ids, ones), experts, torch.float32)
                out = self._finished(out, ids, weights)
            if self.apart and k > 1:
                out = self.call(aten.sum.dim_IntList, self.reshape(out, [-1, k, b.down.n]), [1])
            if len(shape(m.root)) != 2:
                out = self.reshape(out, self.sizes())
            if m.kept:
                out = self._or_kept(out, ids)
            for rest in m.rest:
                out = self.call(aten.add.Tensor, out, self._tensor(rest))
            if m.rest or b.after is not OUT:
                out = self.cast(out, value(m.root).dtype)
        self.w.replace(m.root, out)
        packed = [up, down] if up is not None else [down, *(s.packed for s in before if s.packed is not None)]
        why = None if fused or up is None else Refusal(Kind.ACTIVATION, m.root, (act.term,))
        if b.gain is not None:
            why = Refusal(Kind.GAIN, m.root)
        return self.w.site(
            "fp4::moe" if fused else "fp4::indexed_mm", m.at or m.root, packed,
            self._form(routing), self.how,
            f"{self.experts} experts, top {k}, hidden {b.up[0].k}, intermediate {b.down.k}",
            Load(self.experts, k, hint(value(m.root).numel() // b.down.n), all_before=m.k is None),
            activation=self.activation_text or described(act.term), why=why,
        )  # fmt: skip

    def _form(self, routing: Routing) -> str:
        after = "" if self.common.after is OUT else f"; each output becomes {described(self.common.after)}"
        if self.m.after_shared:
            after += "; all experts share the layer before them"
        if self.m.form:
            return self.m.form + after
        how = "dense" if routing.dense else "routed"
        if self.common.place is not None:
            how = "each expert's slice of a buffer:"
        return f"{how} experts in index notation, from {len(self.m.weights)} parameters{after}"

    def _for_each_choice(self, x: fx.Node, ids: fx.Node, k: int) -> fx.Node:
        """Repeat x for each choice of a token, scaled for that choice."""
        b = self.common
        x = self.call(aten.unsqueeze.default, x, 1)
        if b.scales:
            scale = self.reshape(self.routing.weighted(b.scales, ids), [-1, k, 1])
            x = self.cast(self.call(aten.mul.Tensor, x, scale), value(b.x.node).dtype)
        else:
            x = self.call(aten.expand.default, x, [-1, k, -1])
        return self.reshape(x, [-1, b.up[0].k])

    def _finished(self, out: fx.Node, ids: fx.Node, weights: fx.Node) -> fx.Node:
        """Return each expert's finished and weighted output, and zero where the id belongs to no expert."""
        out = self.pointwise(self.common.after, {OUT: out})
        out = self.call(aten.mul.Tensor, out, self.cast(weights, torch.float32))
        return self.call(aten.masked_fill.Scalar, out, self._nobodys(ids), 0)

    def _nobodys(self, ids: fx.Node) -> fx.Node:
        """Write a test whether an id belongs to no expert."""
        low, high = (self.call(op.Scalar, ids, n) for op, n in ((aten.lt, 0), (aten.ge, self.experts)))
        return self.call(aten.logical_or.default, low, high)

    def _or_kept(self, out: fx.Node, ids: fx.Node) -> fx.Node:
        """Return the output, with the kept values in rows that belong to no expert."""
        m = self.m
        rows = [self.element(f, (*m.tokens, m.hidden)) for f in m.kept]
        kept = rows[0]
        for row in rows[1:]:
            kept = self.call(aten.mul.Tensor, kept, row)
        nobodys = self.reshape(self._nobodys(ids), [*self.sizes()[:-1], 1])
        return self.call(aten.where.self, nobodys, self.cast(kept, value(m.root).dtype), out)

    # --- operators ---

    def _moe(self, rows: _Rows, experts: _Experts, out_dtype: torch.dtype) -> fx.Node:
        assert experts.up is not None
        return self.call(
            fp4.moe.default, rows.x, rows.ids, rows.weights, *experts.up, *experts.down, experts.up_bias,
            experts.down_bias, format=experts.spec.format, layout=experts.spec.layout,
            activation=self.activation, a_format=self.how.format, out_dtype=out_dtype,
        )  # fmt: skip

    def _products(self, rows: _Rows, experts: _Experts, out_dtype: torch.dtype) -> fx.Node:
        """The two products over (token, choice) rows. Their outputs are float32."""
        b, spec = self.common, experts.spec
        k = 1 if self.apart else self.routing.k
        dtype, inter = value(b.x.node).dtype, b.down.k
        each = rows.x
        if experts.up is None:
            each = self.pointwise(b.act.term, dict(zip((GATE, UP) if b.act.gated else (UP,), self.before)))
        each = self.call(aten.expand.default, self.call(aten.unsqueeze.default, each, 1), [-1, k, -1])
        each = self.reshape(each, [-1, inter if experts.up is None else b.up[0].k])
        flat = self.reshape(rows.ids, [-1])

        def product(a: fx.Node, weight: Operands, bias: fx.Node | None) -> fx.Node:
            quantised = self.w.quantised(a, self.how, spec.layout)
            return self.w.product("indexed_mm", quantised, weight, spec, torch.float32, flat, bias=bias)

        h = each
        if experts.up is not None:
            h = product(each, experts.up, experts.up_bias)
            values: dict[Term, fx.Node] = {UP: h}
            if b.act.gated:
                values = {
                    GATE: self.call(aten.slice.Tensor, h, 1, 0, inter),
                    UP: self.call(aten.slice.Tensor, h, 1, inter, 2 * inter),
                }
            h = self.pointwise(b.act.term, values)
        if experts.gain is not None:  # a row that belongs to no expert is not read
            own = self.call(aten.clamp.default, flat, 0, self.experts - 1)
            gains = self.cast(self.call(aten.index.Tensor, experts.gain, [own]), torch.float32)
            h = self.call(aten.mul.Tensor, h, gains)
        h = self.cast(h, dtype)
        y = product(h, experts.down, experts.down_bias)
        y = self.reshape(y, [-1, k, b.down.n])
        scale = self.cast(self.call(aten.unsqueeze.default, rows.weights, 2), torch.float32)
        y = self.call(aten.sum.dim_IntList, self.call(aten.mul.Tensor, y, scale), [1])
        return self.cast(y, out_dtype)

    # --- a layer that all experts share ---

    def _pack_shared(self) -> list[_Shared]:
        """Return the products of the shared layer: gate and up, or up.

        The layer is no expert, so its weight is packed only if the options ask for that, or if it is in 4
        bits already.
        """
        found = []
        for p, bias in zip(self.common.up, self.common.up_bias, strict=True):
            format, packed, node = (
                format_asked_for(p.ref.node, self.w.options),
                None,
                self._own_product(p, bias),
            )
            if node is None and (format is not None or self.w.facts.in_4_bits(p.ref.node)):
                layout = self.w.layout(p.ref.node, (p.n, p.k), format=format)
                packed = self.w.pack([(p,)], layout, self.m.root, format=format)
            found.append(_Shared(p, bias, node, packed))
        return found

    def _own_product(self, p: Matrix, bias: Matrix | None) -> fx.Node | None:
        """Return the model's own product of all rows of x with a matrix, if there is one."""
        x = self.common.x
        if x.index != (*self.m.tokens, K) or self.apart or p.ref.index != (N, K):
            return None
        given = bias.ref.node if bias is not None else None
        for node in self.w.gm.graph.nodes:
            if node is self.m.root:
                break
            if is_op(node, aten.mm, aten.addmm) and not node.kwargs:
                vector, rows, weight = factors(node)
                own = vector is given and is_op(weight, aten.t) and weight.args[0] is p.ref.node
                if own and strip(rows) is strip(x.node):
                    return node
        return None

    def _shared(self, x: fx.Node, layer: _Shared) -> fx.Node:
        """Return the outputs of one product of the shared layer for rows of x, float32."""
        if layer.node is not None:
            return self.cast(layer.node, torch.float32)
        p, packed, dtype = layer.matrix, layer.packed, value(self.common.x.node).dtype
        bias = self.ref(layer.bias.ref, (N,)) if layer.bias is not None else None
        if packed is not None:
            how = self.w.activations(p.ref.node, packed.layout)
            rows, operand = self.w.quantised(x, how, packed.layout), self.w.one_expert(packed, 0)
            return self.w.product("mm", rows, operand, packed.spec, torch.float32, bias=bias)
        weight = self.cast(self.ref(p.ref, (N, K)), dtype)
        bias = self.cast(bias, dtype) if bias is not None else None
        return self.cast(self.call(aten.linear.default, x, weight, bias), torch.float32)

    # --- weights ---

    def _layout(self) -> str:
        """Return one layout for all weights of the block."""
        up = () if self.m.after_shared else self.common.up
        parts = {(p.n, p.k) for p in (*up, self.common.down)}
        return self.w.layout(self.common.down.ref.node, *parts)

    def _gate_up(self, layout: str) -> tuple[Packed, bool]:
        """Return the weight of gate and up, and whether their rows alternate.

        The order of rows is the one that the layout's kernels read fastest. If they have no preference, it is
        the parameter's order, or the one that the activation needs.
        """
        experts, site = self.m.parts(lambda b: b.up), self.m.root
        self.activation = self.common.act.name if self.common.gain is None else ""
        names = same_function(self.activation)
        whole = None
        for name in names:
            interleaved = known_activation(name).interleaved
            packed = self.w.pack(experts, layout, site, interleaved=interleaved)
            if packed.spec.assembly is None:
                self.activation, whole = name, packed
                break
        interleaved = bool(self.activation) and known_activation(self.activation).interleaved
        self.activation_text = self.activation
        turned = next((n for n in names if known_activation(n).interleaved), "")
        if turned and not interleaved and LAYOUTS[layout].interleaved:
            self.activation = turned
            if whole is None:
                return self.w.pack(experts, layout, site, interleaved=True), True
            assert isinstance(whole.spec, PackSpec)
            return Packed(whole.sources, replace(whole.spec, interleave=True)), True
        return whole or self.w.pack(experts, layout, site, interleaved=interleaved), interleaved

    def _rescaled(self, up: Packed, down: Packed) -> Packed:
        """Return `down` with the factor that up lacks when it is stored under gate's global scale
        (StoredSpec.rescale)."""
        a = find_activation(self.activation)
        linear = a is not None and a.linear_in_up and not any(self.common.up_bias)
        need(linear, Kind.GLOBAL_SCALES_DIFFER, self.m.root)
        sources = tuple(dict.fromkeys((*down.sources, *up.sources)))
        at = [sources.index(s) for s in up.sources]
        assert isinstance(up.spec, StoredSpec) and isinstance(down.spec, StoredSpec)
        pairs = tuple(
            (replace(gate, source=at[gate.source]), replace(own, source=at[own.source]))
            for gate, own in up.spec.assembly.experts
        )
        stored = tuple(self.w.facts.stored[s].way for s in sources)
        return Packed(sources, replace(down.spec, sources=stored, rescale=pairs))

    def _vectors(
        self, of: Callable[[Branch], tuple[Matrix | None, ...]], interleaved: bool
    ) -> fx.Node | Joined | None:
        """Return biases or other vectors of the experts: one parameter, or a recipe that joins several."""
        own = [p is not None for p in of(self.common)]
        if not any(own):
            return None
        need(all(own), Kind.SOME_BIASES, self.m.root)
        experts = self.m.parts(of)
        one = as_it_is(experts, interleaved, self.m.root)
        if one is not None:
            return one.parameter
        sources, assembly = assemble(experts, interleaved, self.m.root)
        return Joined(sources, JoinSpec(assembly, value(sources[0]).dtype))

    def _joined(self, vectors: fx.Node | Joined | None) -> fx.Node | None:
        """Return one tensor of the graph. For several parameters it is an input that holds them all."""
        return self.w.slot(*vectors)[0] if isinstance(vectors, Joined) else vectors

    def _tensor(self, ref: Ref) -> fx.Node:
        """Write a term over the tokens and the hidden axis in the root's shape."""
        m = self.m
        return self.reshape(self.element(ref, (*m.tokens, m.hidden)), self.sizes())

    def _expanded(self, node: fx.Node) -> fx.Node:
        """Repeat x for each token, if a row of the output is one choice of a token."""
        free = free_axes(self.common.x)
        sizes = [-1 if t in free else self.length(t.size) for t in self.m.tokens]
        if all(s == -1 for s in sizes):
            return node
        return self.call(aten.expand.default, node, [*sizes, -1])
