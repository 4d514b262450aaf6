"""Turns graph nodes into terms: what each node computes, in index notation (terms.py).

`Reader.value(node, level)` reads back through a bounded part of the graph. `level` is the number of products
with weights that may be between the node and the block's input. 2: the output side (down product, routing
weights, sums). 1: inside the FFN (activation, gate/up product). 0: rows and routing, where only re-indexing
is read. A node that is not understood is opaque: a `Ref` to itself. A term is always correct, although it is
not always useful. Each operator has a function (`@reads`) in the files beside this one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any, TypeVar

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..graph.nodes import Canon, aten, is_grouped_mm, is_pointwise, is_product, is_tensor, shape
from ..refusal import Refusal, Refused
from .ids import distinct
from .terms import (
    AnyOf,
    Axis,
    ChosenRows,
    Const,
    Mul,
    Ref,
    Sum,
    Term,
    Value,
    coordinate,
    is_eq,
    some_chosen,
    substitute,
)

log = logging.getLogger("fp4_ops")

Renamed = dict[Axis, Any]
"""Replacements of axes: other axes, or several axes of the same total size."""


class Opaque(Exception):
    """The node can only be read as itself."""


MOST_NESTED = 16
"""The largest number of nested reads. Each takes four to six Python frames. Python allows a thousand frames,
and the caller and Dynamo may already use most of them."""


PRODUCTS_OF_A_BLOCK = 2
"""An expert has two products, up and down. Before a block's output there are this many products. A node
before all of them is an input of the block."""


class _ReadFirst(Exception):
    """Unwinds reads that are nested too deeply: `node` at `level` must be read before them."""

    def __init__(self, node: fx.Node, level: int) -> None:
        super().__init__()
        self.asked = node, level


def same(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):  # the usual case; a SymInt is not an int
        return a == b
    return statically_known_true(a == b)


def dimension(d: int, rank: int) -> int:
    """Return dimension d as a non-negative number. A tensor without dimensions has none."""
    if not -rank <= d < rank:
        raise Opaque
    return d % rank


READERS: dict[Any, Callable[[Any, fx.Node, int], Value]] = {}
"""Operator, or test of a node -> the function (reader, node, level) that turns a call of it into a term."""
Rule = TypeVar("Rule", bound=Callable[..., Value])


def reads(*operators: Any) -> Callable[[Rule], Rule]:
    """Make a function the one that reads calls of these operators of aten, with any overload.

    Instead of an operator, a test such as `is_grouped_mm` or `is_pointwise` may be given; it applies to
    operators that have no rule of their own."""

    def mark(rule: Rule) -> Rule:
        READERS.update(dict.fromkeys(operators, rule))
        return rule

    return mark


class Reader:
    """Reads nodes, and keeps the value and the axes of each node that it has read."""

    def __init__(self, graph: fx.Graph, canon: Canon, is_weight: Callable[[fx.Node], bool]) -> None:
        self.graph, self.canon, self.is_weight = graph, canon, is_weight
        self._values: dict[tuple[fx.Node, int], Value] = {}
        self._own: dict[int, Value] = {}
        self._splits: dict[tuple[Axis, str], tuple[Axis, ...]] = {}
        self.rows: dict[Any, ChosenRows] = {}
        self.any_of: dict[tuple[int, Value], Value] = {}
        """Results of `any` on masks. Equal masks choose the same rows, so they must have the same axes."""
        self.cuts: dict[Axis, Term] = {}
        self.scalars: dict[int, fx.Node] = {}
        self.refusals: dict[fx.Node, Refusal] = {}
        """Reasons why nodes could not be read, if they can be told to the user."""
        self.sorted_from: dict[ChosenRows, Term] = {}
        """The position of each sorted row before the sort, as a term over the axes `bound` as they were
        before any of them was split."""
        self.continued: set[fx.Node] = set()
        """Products over a slice that are added to those over the slices before it. Together they are one
        product."""
        self.parts: dict[ChosenRows, list[ChosenRows]] = {}
        """Parts of sorted rows, one for each expert. Together they are all rows."""
        self._nested = 0
        """The number of nested reads."""

    def afresh(self) -> Reader:
        """Return a new reader of the same graph. It has read nothing yet, and has no cut nodes."""
        other = Reader(self.graph, self.canon, self.is_weight)
        other._products_before = self._products_before
        return other

    def _read(self, node: fx.Node, level: int) -> Value:
        if node.op != "call_function" or not is_tensor(node):
            raise Opaque
        if node.target is aten.view.dtype:  # the bits are reinterpreted as other values
            raise Opaque
        rule = READERS.get(getattr(node.target, "overloadpacket", node.target))
        for test in (is_grouped_mm, is_pointwise):
            if rule is None and test(node):
                rule = READERS[test]
        if rule is None:
            raise Opaque
        return rule(self, node, level)

    # --- values ---

    def value(self, node: fx.Node, level: int) -> Value:
        """Read `node`, after the nodes that it is computed from.

        A sum over 1024 experts is a chain of 1024 nodes, and the stack must not grow with the graph. If reads
        nest too deeply, the innermost one is done first, by itself, and the outer ones start again.
        """
        found = self._values.get((node, level))
        if found is not None:
            return found
        if self._nested == MOST_NESTED:
            raise _ReadFirst(node, level)
        if self._nested:
            return self._read_once(node, level)
        waiting = [(node, level)]
        while waiting:
            try:
                found = self._read_once(*waiting[-1])
                waiting.pop()
            except _ReadFirst as first:
                waiting.append(first.asked)
        assert found is not None
        return found

    def addend(self, node: fx.Node, operand: fx.Node, level: int) -> Value:
        """Read the tensor to which `node` adds something or writes rows.

        If the tensor is what the block reads, as in a residual connection, only its rows are read (level 0).
        Otherwise the term of a layer would contain those of all layers before it.
        """
        before = self._products_before
        is_read = before[node] - before[operand] >= PRODUCTS_OF_A_BLOCK
        return self.value(operand, 0 if is_read else level)

    @cached_property
    def _products_before(self) -> dict[fx.Node, int]:
        """Count, for each node, the products on the longest path from the graph's inputs to it, itself
        included."""
        found: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            own = is_product(node)
            found[node] = max((found[n] for n in node.all_input_nodes), default=0) + own
        return found

    def _read_once(self, node: fx.Node, level: int) -> Value:
        self._nested += 1
        try:
            found = self._read(node, level)
        except Refused as why:
            self.refusals.setdefault(node, why.refusal)
            found = self.opaque(node)
        except Opaque:
            found = self.opaque(node)
        except (_ReadFirst, RecursionError):
            raise
        except Exception:  # an error of ours must not lose the rest of the graph
            log.warning("fp4: reading %s (%s) failed; please report it", node, node.target, exc_info=True)
            found = self.opaque(node)
        finally:
            self._nested -= 1
        self._values[node, level] = found
        return found

    def opaque(self, node: fx.Node) -> Value:
        """Return the node as an opaque root with axes of its own. Equal nodes have the same axes."""
        number = self.canon.number(node)
        if number not in self._own:
            axes = [None if same(s, 1) else Axis(s, f"{node.name}.{d}") for d, s in enumerate(shape(node))]
            dims = tuple(() if a is None else (a,) for a in axes)
            self._own[number] = Value(dims, Ref(node, [Const(0) if a is None else a for a in axes]))
        return self._own[number]

    def cut(self, node: fx.Node) -> None:
        """Treat `node` as opaque from now on, because it is a block of its own."""
        for level in range(3):
            self._values[node, level] = self.opaque(node)

    def forget(self, nodes: Collection[fx.Node]) -> None:
        """Forget the terms of `nodes`, because an axis in them was cut. They are read again."""
        for key in [k for k in self._values if k[0] in nodes]:
            del self._values[key]

    # --- axes ---

    def split(self, axis: Axis, sizes: tuple[Any, ...]) -> tuple[Axis, ...]:
        """Return the parts into which a view splits an axis. All views that split it alike share them."""
        if isinstance(axis, ChosenRows):
            raise Opaque
        key = (axis, str(sizes))
        if key not in self._splits:
            self._splits[key] = tuple(Axis(s, f"{axis.name}/{i}") for i, s in enumerate(sizes))
        return self._splits[key]

    def align(self, ours: tuple[Axis, ...], theirs: tuple[Axis, ...]) -> tuple[Renamed, Renamed]:
        """Return renamings that give two groups of equal total size the same axes. Theirs take our names,
        or ours take theirs if only they know the size."""
        a, b = list(ours), list(theirs)
        rename_a: dict[Axis, Any] = {}
        rename_b: dict[Axis, Any] = {}
        while a and b:
            x, y = a.pop(0), b.pop(0)
            if x is y:
                continue
            if isinstance(x, ChosenRows) or isinstance(y, ChosenRows):
                raise Opaque
            if same(x.size, y.size):
                if isinstance(y.size, int) and not isinstance(x.size, int):
                    rename_a[x] = y
                else:
                    rename_b[y] = x
                continue
            parts = prefix(y.size, [x, *a])
            if parts is not None:  # our next few axes together are theirs
                rename_b[y] = tuple(parts)
                del a[: len(parts) - 1]
                continue
            parts = prefix(x.size, [y, *b])
            if parts is None:
                raise Opaque
            cut = self.split(x, tuple(p.size for p in parts))
            rename_a[x] = cut
            rename_b.update(zip(parts, cut))
            del b[: len(parts) - 1]
        if a or b:
            raise Opaque
        return rename_a, rename_b

    def together(self, a: Value, b: Value, pairs: list[tuple[int, int]]) -> tuple[Value, Value]:
        """Give two values the same axes in the dimensions `pairs`, and share no other axes."""
        for i, j in pairs:
            a, b = _as_any(a, i, b.dims[j]), _as_any(b, j, a.dims[i])
        b = _apart(a, b, pairs)
        for i, j in pairs:
            if a.dims[i] and b.dims[j]:
                rename_a, rename_b = self.align(a.dims[i], b.dims[j])
                a, b = a.rename(rename_a), b.rename(rename_a).rename(rename_b)
        return a, b

    def broadcast(self, values: list[Value]) -> list[Value]:
        """Broadcast the operands of a pointwise operator to the same number of dimensions and the same
        axes."""
        rank = max(len(v.dims) for v in values)
        values = [Value(((),) * (rank - len(v.dims)) + v.dims, v.term) for v in values]
        pairs = [(d, d) for d in range(rank)]
        for i in range(len(values)):
            for j in range(i + 1, len(values)):
                values[i], values[j] = self.together(values[i], values[j], pairs)
        if len(values) > 2 and any(len({v.dims[d] for v in values if v.dims[d]}) > 1 for d in range(rank)):
            raise Opaque  # a later operand cut an axis of an earlier pair
        return values

    def ref(self, node: fx.Node, dims: tuple[tuple[Axis, ...], ...]) -> Ref | None:
        """Return an element of `node` itself. None if rows were selected, because such rows have no position
        outside of the selection."""
        if some_chosen(a for group in dims for a in group):
            return None
        return Ref(node, [coordinate(g) for g in dims])


def _apart(a: Value, b: Value, pairs: list[tuple[int, int]]) -> Value:
    """Return `b` with axes of its own, unless it shares with `a` only axes that will be equal anyway."""
    shared = set(a.axes) & set(b.axes)
    for i, j in pairs:
        if a.dims[i] == b.dims[j]:
            shared -= set(a.dims[i])
    return b.rename({x: Axis(x.size) for x in shared if not isinstance(x, ChosenRows)})


def _as_any(v: Value, d: int, theirs: tuple[Axis, ...]) -> Value:
    """Return `v` with rows over tokens instead of (token, choice) pairs, if `theirs` are the axes of these
    tokens.

    `v` ranges over the pairs (t, j) with ids[t, j] == e. `theirs` ranges over the tokens t that have e
    among their ids. If no token has an expert twice, both have the same rows in the same order.
    """
    d %= len(v.dims)
    ours = v.dims[d]
    rows, tokens = (g[0] if len(g) == 1 else None for g in (ours, theirs))
    if not isinstance(rows, ChosenRows) or not isinstance(tokens, ChosenRows) or rows is tokens:
        return v
    if rows.mask is None or not isinstance(tokens.mask, AnyOf) or not is_eq(rows.mask):
        return v
    *token, choice = rows.bound
    ids = rows.mask.args[0]
    if len(tokens.mask.axes) != 1 or len(token) != len(tokens.bound) or not isinstance(ids, Ref):
        return v
    j = tokens.mask.axes[0]
    names = dict(zip(rows.bound, (*tokens.bound, j)))
    if substitute(rows.mask, names) is not tokens.mask.body:
        return v
    if not ids.index or ids.index[-1] is not choice or not distinct(ids.node):
        return v
    fresh = Axis(j.size)
    body = substitute(Mul(rows.mask, v.term), {**names, choice: fresh})
    return Value((*v.dims[:d], theirs, *v.dims[d + 1 :]), Sum((fresh,), body))


def dims_of(values: list[Value]) -> tuple[tuple[Axis, ...], ...]:
    """Return the dimensions of a pointwise operator's result, given its operands after `broadcast`."""
    return tuple(max((v.dims[d] for v in values), key=len) for d in range(len(values[0].dims)))


def prefix(size: Any, axes: list[Axis]) -> list[Axis] | None:
    """Return the first axes whose sizes multiply to `size`."""
    total: Any = 1
    for i, axis in enumerate(axes):
        total = total * axis.size
        if same(total, size):
            return axes[: i + 1]
    return None


def spread(parts: Any, axis: Axis, into: tuple[Axis, ...]) -> list[Axis]:
    out: list[Axis] = []
    for p in parts:
        out.extend(into if p is axis else (p,))
    return out
