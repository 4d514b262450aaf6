"""Emits a Mixture: arranges routing and rows for the operators, adds packed weights as inputs, and writes one
operator.

A block whose activation the operator supports becomes `fp4::moe`. Any other becomes two `fp4::indexed_mm`
over (token, choice) rows, with the model's own activation between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from ...meta.formats import find_activation, known_activation
from ...meta.layouts import LAYOUTS
from ..graph.nodes import FLOATING, aten, is_tensor, shape, static_int, value
from ..index.conditions import INDICATOR
from ..index.ids import below
from ..index.reader import same
from ..index.terms import (
    Add,
    Affine,
    Apply,
    Axis,
    Const,
    Mean,
    Mix,
    Mul,
    Ref,
    Size,
    Term,
    described,
    free_axes,
    parts_of,
)
from ..recognise.activations import GATE, UP, same_function
from ..recognise.branches import Branch, Matrix, Mixture
from ..recognise.factors import OUT, J, K, indices
from ..refusal import Kind, Refusal, need, refuse
from ..report import Load, Site, hint
from ..weights.specs import JoinSpec, PackSpec, StoredSpec, own_scales
from .routing import Routing
from .writer import Operands, Packed, Writer, as_it_is, assemble

fp4 = torch.ops.fp4

Dimension = int | fx.Node
"""A size: a number, or a node that computes it."""


class Joined(NamedTuple):
    """Vectors of all experts, put together from these parameters."""

    sources: tuple[fx.Node, ...]
    spec: JoinSpec


@dataclass(frozen=True)
class _Experts:
    """Experts as nodes of the graph, for one operator or for two products."""

    up: Operands
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


class Emitter:
    def __init__(self, writer: Writer, m: Mixture) -> None:
        self.w, self.m, self.call = writer, m, writer.call
        self.common = m.common
        self.experts = len(m.branches)
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
        fused = bool(act.name) and b.gain is None
        layout = self._layout()
        up, interleaved = self._gate_up(layout)
        down = self.w.pack(m.parts(lambda b: (b.down,)), layout, m.root)
        if isinstance(up.spec, StoredSpec) and isinstance(down.spec, StoredSpec) and own_scales(up.spec):
            down = self._rescaled(up, down)
        same_kind = (up.spec.format, up.layout) == (down.spec.format, down.layout)
        need(same_kind, Kind.PACKED_DIFFERENTLY, m.root)
        vectors = (
            self._vectors(lambda b: b.up_bias, interleaved),
            self._vectors(lambda b: (b.down_bias,), False),
            self._vectors(lambda b: (b.gain,), False),
        )
        routing = self.routing = Routing(self)
        self.how = self.w.activations(like, down.layout, block=fused)

        with self.w.gm.graph.inserting_before(m.root):
            x = self._reshape(self._expanded(self._ref(b.x, (*m.tokens, K))), [-1, b.up[0].k])
            ids, weights = routing.emit(x)
            k = routing.k
            if self.apart:
                x = self._for_each_choice(x, ids, k)
                ids, weights = self._reshape(ids, [-1, 1]), self._reshape(weights, [-1, 1])
            operands = self.w.operands(up), self.w.operands(down)
            up_bias, down_bias, gain = map(self._joined, vectors)
            experts = _Experts(*operands, up_bias, down_bias, gain, down.spec)
            emit = self._moe if fused else self._products
            if b.after is OUT:
                out = emit(_Rows(x, ids, weights), experts, value(m.root).dtype)
            else:
                ones = self.call(aten.ones_like.default, ids, dtype=torch.float32)
                out = emit(_Rows(x, ids, ones), experts, torch.float32)
                out = self._finished(out, ids, weights)
            if self.apart and k > 1:
                out = self.call(aten.sum.dim_IntList, self._reshape(out, [-1, k, b.down.n]), [1])
            if len(shape(m.root)) != 2:
                out = self._reshape(out, self._sizes())
            if m.kept:
                out = self._or_kept(out, ids)
            for rest in m.rest:
                out = self.call(aten.add.Tensor, out, self._tensor(rest))
            if m.rest or b.after is not OUT:
                out = self._cast(out, value(m.root).dtype)
        self.w.replace(m.root, out)
        why = None if fused else Refusal(Kind.ACTIVATION, m.root, (act.term,))
        if b.gain is not None:
            why = Refusal(Kind.GAIN, m.root)
        return self.w.site(
            "fp4::moe" if fused else "fp4::indexed_mm", m.at or m.root, [up, down],
            self._form(routing), self.how,
            f"{self.experts} experts, top {k}, hidden {b.up[0].k}, intermediate {b.down.k}",
            Load(self.experts, k, hint(value(m.root).numel() // b.down.n), all_before=m.k is None),
            activation=self.activation_text or described(act.term), why=why,
        )  # fmt: skip

    def _form(self, routing: Routing) -> str:
        after = "" if self.common.after is OUT else f"; each output becomes {described(self.common.after)}"
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
            scale = self._reshape(self.routing.weighted(b.scales, ids), [-1, k, 1])
            x = self._cast(self.call(aten.mul.Tensor, x, scale), value(b.x.node).dtype)
        else:
            x = self.call(aten.expand.default, x, [-1, k, -1])
        return self._reshape(x, [-1, b.up[0].k])

    def _finished(self, out: fx.Node, ids: fx.Node, weights: fx.Node) -> fx.Node:
        """Return each expert's finished and weighted output, and zero where the id belongs to no expert."""
        out = self._pointwise(self.common.after, {OUT: out})
        out = self.call(aten.mul.Tensor, out, self._cast(weights, torch.float32))
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
        nobodys = self._reshape(self._nobodys(ids), [*self._sizes()[:-1], 1])
        return self.call(aten.where.self, nobodys, self._cast(kept, value(m.root).dtype), out)

    # --- operators ---

    def _moe(self, rows: _Rows, experts: _Experts, out_dtype: torch.dtype) -> fx.Node:
        return self.call(
            fp4.moe.default, rows.x, rows.ids, rows.weights, *experts.up, *experts.down, experts.up_bias,
            experts.down_bias, format=experts.spec.format, layout=experts.spec.layout,
            activation=self.activation, a_format=self.how.format, out_dtype=out_dtype,
        )  # fmt: skip

    def _products(self, rows: _Rows, experts: _Experts, out_dtype: torch.dtype) -> fx.Node:
        """The two products over (token, choice) rows. Their outputs are float32."""
        b, spec = self.common, experts.spec
        k = 1 if self.apart else self.routing.k
        dtype = value(b.x.node).dtype
        each = self.call(aten.expand.default, self.call(aten.unsqueeze.default, rows.x, 1), [-1, k, -1])
        each = self._reshape(each, [-1, b.up[0].k])
        flat = self._reshape(rows.ids, [-1])

        def product(a: fx.Node, weight: Operands, bias: fx.Node | None) -> fx.Node:
            quantised = self.w.quantised(a, self.how, spec.layout)
            return self.w.product("indexed_mm", quantised, weight, spec, torch.float32, flat, bias=bias)

        h = product(each, experts.up, experts.up_bias)
        inter = b.down.k
        values: dict[Term, fx.Node] = {UP: h}
        if b.act.gated:
            values = {
                GATE: self.call(aten.slice.Tensor, h, 1, 0, inter),
                UP: self.call(aten.slice.Tensor, h, 1, inter, 2 * inter),
            }
        h = self._pointwise(b.act.term, values)
        if experts.gain is not None:  # a row that belongs to no expert is not read
            own = self.call(aten.clamp.default, flat, 0, self.experts - 1)
            gains = self._cast(self.call(aten.index.Tensor, experts.gain, [own]), torch.float32)
            h = self.call(aten.mul.Tensor, h, gains)
        h = self._cast(h, dtype)
        y = product(h, experts.down, experts.down_bias)
        y = self._reshape(y, [-1, k, b.down.n])
        scale = self._cast(self.call(aten.unsqueeze.default, rows.weights, 2), torch.float32)
        y = self.call(aten.sum.dim_IntList, self.call(aten.mul.Tensor, y, scale), [1])
        return self._cast(y, out_dtype)

    def _pointwise(self, term: Any, values: dict[Term, fx.Node]) -> Any:
        """Write a term of pointwise operators over given tensors."""
        if not isinstance(term, Term):
            return term
        if term in values:
            return values[term]
        if isinstance(term, Const):
            return term.value
        if isinstance(term, Ref):
            found = self.element(term, (self.m.hidden,))
            return self._cast(found, torch.float32) if term.index else found
        if isinstance(term, Mean):
            return self.call(aten.mean.dim, self._pointwise(term.body, values), [-1], True)
        assert isinstance(term, (Apply, Mul, Add))
        args = [self._pointwise(a, values) for a in term.args]
        if isinstance(term, Apply):
            op = term.op
            if op in INDICATOR:
                other = term.args[1]
                number = not isinstance(other, Term) or isinstance(other, Const)
                number = number or (isinstance(other, Ref) and not other.index)
                op = op.Scalar if number else op.Tensor
            return self.call(op, *args, **term.kwargs)
        op = aten.mul if isinstance(term, Mul) else aten.add
        out = args[0]
        for a in args[1:]:
            first, second = (a, out) if not isinstance(out, fx.Node) else (out, a)
            out = self.call(op.Tensor if isinstance(second, fx.Node) else op.Scalar, first, second)
        return out

    # --- weights ---

    def _layout(self) -> str:
        """Return one layout for all weights of the block."""
        parts = {(p.n, p.k) for p in (*self.common.up, self.common.down)}
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
        linear = (
            a is not None and a.gated and a.limit is None and not a.up_offset and not any(self.common.up_bias)
        )
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

    # --- tensors of terms ---

    def _reshape(self, node: fx.Node, sizes: Sequence[Dimension]) -> fx.Node:
        old = shape(node) if is_tensor(node) else ()
        if len(old) == len(sizes) == 2 and sizes[0] == -1 and same(old[1], sizes[1]):
            return node
        return self.call(aten.reshape.default, node, list(sizes))

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self.call(aten._to_copy.default, node, dtype=dtype)

    def _size(self, node: fx.Node, d: int) -> Dimension:
        size = static_int(shape(node)[d])
        return size if size is not None else self.call(aten.sym_size.int, self.w.replaced.get(node, node), d)

    def _sizes(self) -> list[Dimension]:
        """The output's shape for reshape."""
        return self._lengths([*shape(self.m.root)[:-1], self.m.hidden.size])

    def _lengths(self, sizes: Sequence[Size]) -> list[Dimension]:
        """Sizes for reshape: the first symbolic one is -1, others are read from a tensor that has them."""
        found: list[Dimension] = []
        for size in sizes:
            known = static_int(size)
            if known is None:
                found.append(self._length(size) if -1 in found else -1)
            else:
                found.append(known)
        return found

    def _length(self, size: Size) -> Dimension:
        """A size as an int, or as a node that reads it from the first tensor with such a dimension."""
        if (known := static_int(size)) is not None:
            return known
        for node in self.w.gm.graph.nodes:
            if node is self.m.root:
                break
            if not is_tensor(node):
                continue
            for d, n in enumerate(shape(node)):
                if static_int(n) is None and same(n, size):
                    return self._size(node, d)
        refuse(Kind.SIZE, self.m.root, size)

    def rows(self, term: Term, last: tuple[Axis, ...], sizes: list[int]) -> fx.Node:
        """`term` for each token, over `last`: [T, *sizes]; T is 1 if it is the same for all tokens."""
        m = self.m
        node = self.element(term, (*m.tokens, *last))
        own = [t in free_axes(term) for t in m.tokens]
        if any(own) and not all(own):
            whole = [-1 if mine else self._length(t.size) for t, mine in zip(m.tokens, own)]
            node = self.call(aten.expand.default, node, [*whole, *(-1 for _ in last)])
        return self._reshape(node, [-1, *sizes])

    def _tensor(self, ref: Ref) -> fx.Node:
        """Write a term over the tokens and the hidden axis in the root's shape."""
        m = self.m
        return self._reshape(self.element(ref, (*m.tokens, m.hidden)), self._sizes())

    def _expanded(self, node: fx.Node) -> fx.Node:
        """Repeat x for each token, if a row of the output is one choice of a token."""
        free = free_axes(self.common.x)
        sizes = [-1 if t in free else self._length(t.size) for t in self.m.tokens]
        if all(s == -1 for s in sizes):
            return node
        return self.call(aten.expand.default, node, [*sizes, -1])

    def element(self, term: Term, axes: tuple[Axis, ...]) -> Any:
        """A tensor whose dimensions are `axes` (size 1 where the term lacks one), or a Python number."""
        if isinstance(term, Const):
            return term.value
        if isinstance(term, Ref):
            return self._ref(term, axes)
        if isinstance(term, Axis) and term in axes:
            every = self.call(
                aten.arange.default, self._length(term.size), device=value(self.common.x.node).device
            )
            return self._reshape(every, [-1 if a is term else 1 for a in axes])
        if not isinstance(term, (Apply, Mul, Add)):
            refuse(Kind.NOT_APART, self.m.root, term)
        parts = {a: self.element(a, axes) for a in term.args if isinstance(a, Term)}
        return self._pointwise(term, parts)

    def _ref(self, ref: Ref, axes: tuple[Axis, ...]) -> fx.Node:
        node = self.w.replaced.get(ref.node, ref.node)
        if not ref.index:
            return node
        *rows, last = ref.index
        if isinstance(last, Ref) and _is_of_rows(rows, last, axes):
            return self._arranged(*self._gathered(node, rows, last, axes, ref), axes, ref)
        if any(isinstance(i, Ref) for i in indices(ref)):
            return self._looked_up(node, ref, axes)
        labels: list[Axis | Const] = []
        sizes: list[Size] = []
        for d, i in enumerate(ref.index):
            for part in parts_of(i):
                if not (isinstance(part, Axis) or (isinstance(part, Const) and part is i)):
                    refuse(Kind.INDEXED_ODDLY, self.m.root, ref)
                labels.append(part)
            sizes += i.sizes if isinstance(i, Mix) else (shape(ref.node)[d],)
        if len(labels) != len(ref.index):
            node = self._reshape(node, self._lengths(sizes))
        for d, label in reversed(list(enumerate(labels))):
            if isinstance(label, Const):
                node = self.call(aten.select.int, node, d, label.value)
            else:  # a slice: the weights of routed experts beside those of shared ones
                size, whole = self.m.k if label is J else static_int(label.size), static_int(sizes[d])
                if size and whole is not None and size != whole:
                    node = self.call(aten.slice.Tensor, node, d, 0, size)
        return self._arranged(node, [a for a in labels if isinstance(a, Axis)], axes, ref)

    def _gathered(
        self, node: fx.Node, index: list[Term], ids: Ref, axes: tuple[Axis, ...], ref: Ref
    ) -> tuple[fx.Node, list[Axis]]:
        """`scores[t, ids[t, j]]`: the weights of a router that does not normalise them."""
        for d, i in reversed(list(enumerate(index))):
            if isinstance(i, Const):
                node = self.call(aten.select.int, node, d, i.value)
        others = [a for a in axes if a in free_axes(ids) and a not in index]
        rows = [i for i in index if isinstance(i, Axis)]
        if not rows:  # `scale[ids[t, j]]`, or of one token
            return self.call(aten.index.Tensor, node, [self._index(ids, others, ref)]), others
        # `scores[t, ids[t, j]]`, or `scores[t, ids[t]]` of a router with one choice
        at = self._index(ids, [*rows, *others], ref)
        if others:
            return self.call(aten.gather.default, node, len(rows), at), [*rows, *others]
        at = self.call(aten.unsqueeze.default, at, len(rows))
        return self.call(aten.squeeze.dim, self.call(aten.gather.default, node, len(rows), at), -1), rows

    def _index(self, ids: Ref, labels: list[Axis], ref: Ref) -> fx.Node:
        """Ids over `labels` as an index into the last dimension of `ref`."""
        return self._inside(self._ref(ids, tuple(labels)), ids, shape(ref.node)[-1])

    def _looked_up(self, node: fx.Node, ref: Ref, axes: tuple[Axis, ...]) -> fx.Node:
        """`within[t, group[t]]`, whatever the index is made of, or rows `embedding[tokens[t]]`."""
        parts: list[Term] = []
        sizes: list[Size] = []
        for i, size in zip(ref.index, shape(ref.node)):
            parts += parts_of(i)
            sizes += i.sizes if isinstance(i, Mix) else (size,)
        if len(parts) != len(ref.index):
            node = self._reshape(node, self._lengths(sizes))
        rows = [K] if parts[-1] is K else []  # whole rows, as for x
        index = list(zip(parts, sizes))[: len(parts) - len(rows)]
        labels = tuple(a for a in axes if a is not K and any(a in free_axes(part) for part, _ in index))
        at = [self._coordinate(part, size, labels, ref) for part, size in index]
        return self._arranged(self.call(aten.index.Tensor, node, at), [*labels, *rows], axes, ref)

    def _coordinate(self, term: Term, size: Size, axes: tuple[Axis, ...], ref: Ref) -> fx.Node:
        """An index into a dimension of `ref`, of this size: a tensor with a dimension for each of `axes`."""
        device = value(ref.node).device
        if isinstance(term, Affine):
            base = self._coordinate(term.base, size, axes, ref)
            return self.call(aten.add.Tensor, self.call(aten.mul.Tensor, base, term.step), term.start)
        if isinstance(term, Ref):
            index = self._ref(term, axes)
            return index if K in ref.index else self._inside(index, term, size)
        if isinstance(term, Const):
            one = [1] * len(axes)
            return self.call(aten.full.default, one, term.value, dtype=torch.int64, device=device)
        if not (isinstance(term, Axis) and term in axes):
            refuse(Kind.INDEXED_ODDLY, self.m.root, ref)
        length = self.m.k if term is J else self._length(size)
        every = self.call(aten.arange.default, length, device=device)
        return self._reshape(every, [-1 if a is term else 1 for a in axes])

    def _inside(self, index: fx.Node, ids: Ref, size: Size) -> fx.Node:
        """Clamp ids to an index into a dimension of this size. Rows that belong to no expert may read any
        entry."""
        known = static_int(size)
        inside = known is not None and below(ids.node, known)
        return index if inside else self.call(aten.remainder.Scalar, index, self._length(size))

    def _arranged(self, node: fx.Node, labels: list[Axis], axes: tuple[Axis, ...], ref: Ref) -> fx.Node:
        if not (set(labels) <= set(axes) and len(set(labels)) == len(labels)):
            refuse(Kind.OWN_AXES, self.m.root, ref)
        order = [labels.index(a) for a in axes if a in labels]
        if order != sorted(order):
            node = self.call(aten.permute.default, node, order)
        for d, a in enumerate(axes):
            if a not in labels:
                node = self.call(aten.unsqueeze.default, node, d)
        return node


def _is_of_rows(index: list[Term], ids: Ref, axes: tuple[Axis, ...]) -> bool:
    """Return whether ids look up a number in rows, `scores[t, ids[t, j]]`, or in a vector, with one
    `gather`."""
    own = free_axes(ids)
    others = [a for a in axes if a in own and a not in index]
    rows = [i for i in index if not isinstance(i, Const)]
    return all(isinstance(i, Axis) and i in own for i in rows) and (not rows or len(others) <= 1)
