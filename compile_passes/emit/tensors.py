"""Writes terms of a Mixture as tensors: over its tokens, over rows, and over elements that ids look up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..graph.nodes import aten, is_tensor, shape, static_int, value
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
    free_axes,
    parts_of,
)
from ..recognise.block import Mixture
from ..recognise.pieces import J, K, indices, spare_rows
from ..refusal import Kind, refuse
from .writer import Writer

Dimension = int | fx.Node
"""A size: a number, or a node that computes it."""


class Tensors:
    """Writes the terms of one mixture."""

    def __init__(self, writer: Writer, m: Mixture) -> None:
        self.w, self.m, self.call = writer, m, writer.call
        self.common = m.common
        self.experts = len(m.branches)

    def pointwise(self, term: Any, values: dict[Term, fx.Node]) -> Any:
        """Write a term of pointwise operators over given tensors."""
        if not isinstance(term, Term):
            return term
        if term in values:
            return values[term]
        if isinstance(term, Const):
            return term.value
        if isinstance(term, Ref):
            found = self.element(term, (self.m.hidden,))
            return self.cast(found, torch.float32) if term.index else found
        if isinstance(term, Mean):
            return self.call(aten.mean.dim, self.pointwise(term.body, values), [-1], True)
        assert isinstance(term, (Apply, Mul, Add))
        args = [self.pointwise(a, values) for a in term.args]
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

    def reshape(self, node: fx.Node, sizes: Sequence[Dimension]) -> fx.Node:
        old = shape(node) if is_tensor(node) else ()
        if len(old) == len(sizes) == 2 and sizes[0] == -1 and same(old[1], sizes[1]):
            return node
        return self.call(aten.reshape.default, node, list(sizes))

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self.call(aten._to_copy.default, node, dtype=dtype)

    def _size(self, node: fx.Node, d: int) -> Dimension:
        size = static_int(shape(node)[d])
        return size if size is not None else self.call(aten.sym_size.int, self.w.replaced.get(node, node), d)

    def sizes(self) -> list[Dimension]:
        """Return the shape of the output, as `reshape` takes it."""
        return self._lengths([*shape(self.m.root)[:-1], self.m.hidden.size])

    def _lengths(self, sizes: Sequence[Size]) -> list[Dimension]:
        """Return sizes as `reshape` takes them. The first symbolic size becomes -1; others are read from a
        tensor that has a dimension of this size."""
        found: list[Dimension] = []
        for size in sizes:
            known = static_int(size)
            if known is None:
                found.append(self.length(size) if -1 in found else -1)
            else:
                found.append(known)
        return found

    def length(self, size: Size) -> Dimension:
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
            whole = [-1 if mine else self.length(t.size) for t, mine in zip(m.tokens, own)]
            node = self.call(aten.expand.default, node, [*whole, *(-1 for _ in last)])
        return self.reshape(node, [-1, *sizes])

    def element(self, term: Term, axes: tuple[Axis, ...]) -> Any:
        """A tensor whose dimensions are `axes` (size 1 where the term lacks one), or a Python number."""
        if isinstance(term, Const):
            return term.value
        if isinstance(term, Ref):
            return self.ref(term, axes)
        if isinstance(term, Axis) and term in axes:
            every = self.call(
                aten.arange.default, self.length(term.size), device=value(self.common.x.node).device
            )
            return self.reshape(every, [-1 if a is term else 1 for a in axes])
        if not isinstance(term, (Apply, Mul, Add)):
            refuse(Kind.NOT_APART, self.m.root, term)
        parts = {a: self.element(a, axes) for a in term.args if isinstance(a, Term)}
        return self.pointwise(term, parts)

    def ref(self, ref: Ref, axes: tuple[Axis, ...]) -> fx.Node:
        node = self.w.replaced.get(ref.node, ref.node)
        if not ref.index:
            return node
        *rows, last = ref.index
        if isinstance(last, Ref) and _is_of_rows(rows, last, axes):
            return self._arranged(*self._gathered(node, rows, last, axes, ref), axes, ref)
        node = self._without_spare_rows(node, ref)
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
            node = self.reshape(node, self._lengths(sizes))
        for d, label in reversed(list(enumerate(labels))):
            if isinstance(label, Const):
                node = self.call(aten.select.int, node, d, label.value)
            else:  # a slice: the weights of routed experts beside those of shared ones
                size, whole = self.m.k if label is J else static_int(label.size), static_int(sizes[d])
                if size and whole is not None and size != whole:
                    node = self.call(aten.slice.Tensor, node, d, 0, size)
        return self._arranged(node, [a for a in labels if isinstance(a, Axis)], axes, ref)

    def _without_spare_rows(self, node: fx.Node, ref: Ref) -> fx.Node:
        """Cut off the rows that come after a buffer's slices."""
        for d, (i, size) in enumerate(zip(ref.index, shape(ref.node))):
            if isinstance(i, Mix) and (left := spare_rows(size, i.sizes)):
                node = self.call(aten.slice.Tensor, node, d, 0, -left)
        return node

    def _gathered(
        self, node: fx.Node, index: list[Term], ids: Ref, axes: tuple[Axis, ...], ref: Ref
    ) -> tuple[fx.Node, list[Axis]]:
        """Write `scores[t, ids[t, j]]`, the weights of a router that does not normalise them."""
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
        return self._inside(self.ref(ids, tuple(labels)), ids, shape(ref.node)[-1])

    def _looked_up(self, node: fx.Node, ref: Ref, axes: tuple[Axis, ...]) -> fx.Node:
        """Write `within[t, group[t]]`, for an index of any form, or the rows `embedding[tokens[t]]`."""
        parts: list[Term] = []
        sizes: list[Size] = []
        for i, size in zip(ref.index, shape(ref.node)):
            parts += parts_of(i)
            sizes += i.sizes if isinstance(i, Mix) else (size,)
        if len(parts) != len(ref.index):
            node = self.reshape(node, self._lengths(sizes))
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
            index = self.ref(term, axes)
            return index if K in ref.index else self._inside(index, term, size)
        if isinstance(term, Const):
            one = [1] * len(axes)
            return self.call(aten.full.default, one, term.value, dtype=torch.int64, device=device)
        if not (isinstance(term, Axis) and term in axes):
            refuse(Kind.INDEXED_ODDLY, self.m.root, ref)
        length = self.m.k if term is J else self.length(size)
        every = self.call(aten.arange.default, length, device=device)
        return self.reshape(every, [-1 if a is term else 1 for a in axes])

    def _inside(self, index: fx.Node, ids: Ref, size: Size) -> fx.Node:
        """Clamp ids to an index into a dimension of this size. Rows that belong to no expert may read any
        entry."""
        known = static_int(size)
        inside = known is not None and below(ids.node, known)
        return index if inside else self.call(aten.remainder.Scalar, index, self.length(size))

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
