"""Emits the routing of a Mixture: ids and weights of the experts of each row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..graph.nodes import FLOATING, aten, shape, static_int, value
from ..index.ids import Support, distinct, nonnegative, support
from ..index.reader import same
from ..index.terms import Const, Ref, Term, free_axes, parts_of
from ..recognise.factors import E, J
from ..refusal import Kind, need

if TYPE_CHECKING:
    from .mixture import Emitter


class Routing:
    """Ids and weights [T, k] of a mixture."""

    def __init__(self, emitter: Emitter) -> None:
        self.e, self.m, self.b = emitter, emitter.m, emitter.common
        self.support: Support | None = None
        self.dense = False
        if self.m.k is None:
            self.support = self._support()
            self.dense = self.support is None
            self.k = self.e.experts if self.support is None else self.support.k
        else:
            self.k = self.m.k
            if self.b.ids is None and self.b.place is None:
                assert self.b.masked is not None
                need(distinct(self.b.masked.node), Kind.TWICE_CHOSEN, self.m.root)

    def emit(self, rows: fx.Node) -> tuple[fx.Node, fx.Node]:
        call, m = self.e.call, self.m
        ids = self._expert_ids(rows)
        weights = self.weighted(self.b.factors, ids)
        if self.b.chosen:  # the other rows belong to no expert
            nobody = m.first + self.e.experts
            ids = call(aten.where.ScalarOther, self.weighted(self.b.chosen, ids), ids, nobody)
        if m.first:
            ids = call(aten.sub.Tensor, ids, m.first)
        return ids, weights

    def _expert_ids(self, rows: fx.Node) -> fx.Node:
        m, b = self.m, self.b
        if self.support is not None:
            return self._united([self.e._reshape(p, [-1, int(shape(p)[-1])]) for p in self.support.parts])
        if self.dense:
            every = self.e.call(aten.arange.start, m.first, m.first + self.k, device=value(b.x.node).device)
            return self.e.call(aten.expand.default, every, [self.e.call(aten.sym_size.int, rows, 0), self.k])
        if b.place is not None:  # the place of an output row determines its expert
            every = self.e.call(aten.arange.default, self.e.experts, device=value(b.x.node).device)
            every = self.e._reshape(every, [-1 if a is b.place else 1 for a in m.tokens])
            sizes = [self.e._length(a.size) for a in m.tokens]
            return self.e._reshape(self.e.call(aten.expand.default, every, sizes), [-1, 1])
        ref = b.ids if b.ids is not None else b.masked
        assert ref is not None
        several = J in free_axes(ref)
        ids = self.e.rows(ref, (J,) if several else (), [self.k])
        if not free_axes(ref) & set(m.tokens):  # all tokens have the same ids
            ids = self.e.call(aten.expand.default, ids, [self.e.call(aten.sym_size.int, rows, 0), -1])
        if m.wraps and not nonnegative(ref.node):  # indexing counts negative ids from the end
            wrapped = self.e.call(aten.add.Tensor, ids, self.e.experts)
            ids = self.e.call(aten.where.self, self.e.call(aten.lt.Scalar, ids, 0), wrapped, ids)
        return ids

    def _united(self, parts: list[fx.Node]) -> fx.Node:
        """Join several sources of ids to [T, k]. A repeated id is replaced by an id that belongs
        to no expert."""
        call, nobody = self.e.call, self.m.first + self.e.experts
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
            out = part if out is None else self.e.call(aten.mul.Tensor, out, part)
        if out is None:
            return self.e.call(aten.ones_like.default, ids, dtype=torch.float32)
        if not isinstance(out, fx.Node):
            return self.e.call(aten.full_like.default, ids, out, dtype=torch.float32)
        if any(isinstance(f, Ref) and f.index and value(f.node).dtype not in FLOATING for f in factors):
            out = self.e.call(aten._to_copy.default, out, dtype=torch.float32)
        each = self.k == 1 or any({J, E} & free_axes(f) for f in factors)
        tokens = set(self.m.tokens)
        if tokens and not any(E in free_axes(f) or tokens & free_axes(f) for f in factors):
            return self.e.call(aten.expand.default, out, [self.e.call(aten.sym_size.int, ids, 0), self.k])
        return out if each else self.e.call(aten.expand.default, out, [-1, self.k])

    def _factor(self, term: Term, ids: fx.Node) -> Any:
        m = self.m
        if isinstance(term, Const):
            return term.value
        if isinstance(term, Ref) and not term.index:  # a number that the graph computes
            number = self.e.element(term, ())
            if isinstance(value(number), torch.Tensor):  # without dimensions
                ones = self.e.call(aten.ones_like.default, ids, dtype=torch.float32)
                return self.e.call(aten.mul.Tensor, ones, number)
            return self.e.call(aten.full_like.default, ids, number, dtype=torch.float32)
        if E not in free_axes(term):
            return self.e.rows(term, (J,), [self.k if J in free_axes(term) else 1])
        each = J in free_axes(term)
        columns = _columns(term)
        need(columns is not None, Kind.NOT_OVER_EXPERTS, m.root, term)
        assert columns is not None
        table = self.e.rows(term, (J, E) if each else (E,), [self.k, columns] if each else [columns])
        alike = m.tokens and not set(m.tokens) & free_axes(term)
        if self.dense and m.first == 0 and columns == self.k and not alike:
            return table
        inside = self.e.call(aten.clamp.default, ids, 0, columns - 1)
        inside = self.e.call(aten._to_copy.default, inside, dtype=torch.int64)
        if each:
            table = self.e.call(aten.expand.default, table, [self.e.call(aten.sym_size.int, ids, 0), -1, -1])
            column = self.e.call(aten.unsqueeze.default, inside, 2)
            return self.e.call(aten.squeeze.dim, self.e.call(aten.gather.default, table, 2, column), 2)
        if alike or not m.tokens:
            return self.e.call(aten.index.Tensor, self.e._reshape(table, [-1]), [inside])
        return self.e.call(aten.gather.default, table, 1, inside)

    def _support(self) -> Support | None:
        """Ids that can have nonzero factors. Some factor is zero for others, whose experts need not run."""
        quiet = bool(self.b.act.name) and not any((*self.b.up_bias, self.b.down_bias))
        for f in (*self.b.factors, *(self.b.scales if quiet else ())):
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
