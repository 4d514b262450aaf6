"""From graph nodes to terms: what each node computes, in index notation (terms.py).

`Reader.value(node, level)` reads back through a bounded part of the graph: `level` says how many products
with weights may lie between the node and the block's input. 2: the output side (down product, routing
weights, sums); 1: inside the FFN (activation, gate/up product); 0: rows and routing, where only re-indexing is
read. What is not understood is opaque: a `Ref` to the node itself. Reading is always right, if not always useful.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .graph import (
    FLOATING,
    Canon,
    Refusal,
    arguments,
    aten,
    exact_int,
    is_op,
    is_tensor,
    item,
    shape,
    strip,
    value,
)
from .products import SortedRows, is_grouped_mm
from .terms import (
    Add,
    Affine,
    AnyOf,
    Apply,
    Axis,
    Choose,
    Const,
    Mix,
    Mul,
    Ref,
    Rows,
    Sum,
    Term,
    Value,
    coordinate,
    flatten,
    free_axes,
    substitute,
)

_COPIES = (aten.clone, aten.alias, aten.detach, aten.contiguous, aten.lift_fresh_copy)
_VIEWS = (aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.flatten)
_MAX = 2**63 - 1
_INDICATOR = (aten.eq, aten.ne, aten.ge, aten.gt, aten.le, aten.lt)


class _Opaque(Exception):
    """This node has no term but itself."""


def same(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)


class Reader:
    def __init__(self, graph: fx.Graph, canon: Canon, is_weight: Callable[[fx.Node], bool]) -> None:
        self.canon, self.is_weight = canon, is_weight
        self._values: dict[tuple[fx.Node, int], Value] = {}
        self._own: dict[int, Value] = {}
        self._splits: dict[tuple[Axis, str], tuple[Axis, ...]] = {}
        self._rows: dict[Any, Rows] = {}
        self._cuts: dict[Axis, Term] = {}
        self._handlers = self._table()

    # --- values ---

    def value(self, node: fx.Node, level: int) -> Value:
        key = (node, level)
        found = self._values.get(key)
        if found is None:
            try:
                found = self._read(node, level)
            except (_Opaque, Refusal):
                found = self.opaque(node)
            self._values[key] = found
        return found

    def opaque(self, node: fx.Node) -> Value:
        """The node as a root with axes of its own; equal nodes have the same ones."""
        number = self.canon.number(node)
        if number not in self._own:
            axes = [None if same(s, 1) else Axis(s, f"{node.name}.{d}") for d, s in enumerate(shape(node))]
            dims = tuple(() if a is None else (a,) for a in axes)
            self._own[number] = Value(dims, Ref(node, [Const(0) if a is None else a for a in axes]))
        return self._own[number]

    def cut(self, node: fx.Node) -> None:
        """Nothing is read through `node` any more: it is a block of its own."""
        for level in range(3):
            self._values[node, level] = self.opaque(node)

    @property
    def understood(self) -> Collection[Any]:
        return self._handlers.keys()

    def _read(self, node: fx.Node, level: int) -> Value:
        if node.op != "call_function" or not is_tensor(node):
            raise _Opaque
        if node.target is operator.getitem:
            return self._getitem(node, level)
        packet = getattr(node.target, "overloadpacket", None)
        handler = self._handlers.get(packet)
        if handler is not None:
            return handler(node, level)
        if is_grouped_mm(node):
            return self._grouped_mm(node, level)
        if torch.Tag.pointwise in getattr(node.target, "tags", ()):
            return self._pointwise(node, level)
        raise _Opaque

    def _table(self) -> dict[Any, Callable[[fx.Node, int], Value]]:
        table: dict[Any, Callable[[fx.Node, int], Value]] = {}
        table.update(dict.fromkeys(_COPIES, self._copy))
        table.update(dict.fromkeys(_VIEWS, self._view))
        table.update(dict.fromkeys(_INDICATOR, self._compare))
        table.update({
            aten._to_copy: self._cast, aten.permute: self._permute, aten.transpose: self._permute,
            aten.t: self._permute, aten.expand: self._expand, aten.repeat: self._repeat,
            aten.select: self._select, aten.slice: self._slice, aten.arange: self._arange,
            aten.zeros: self._fill, aten.zeros_like: self._fill, aten.new_zeros: self._fill,
            aten.full: self._fill, aten.full_like: self._fill, aten.empty: self._fill,
            aten.empty_like: self._fill, aten.new_empty: self._fill, aten.mm: self._product,
            aten.bmm: self._product, aten.addmm: self._product, aten.baddbmm: self._product,
            aten.mul: self._mul, aten.add: self._add, aten.sum: self._sum, aten.any: self._any,
            aten.index: self._index, aten.index_select: self._index, aten.gather: self._gather,
            aten.index_add: self._index_add, aten.scatter_add: self._scatter_add,
            aten.index_put: self._index_put, aten.index_copy: self._index_copy,
            aten.stack: self._stack, aten.cat: self._stack, aten.floor_divide: self._divide,
            aten.where: self._where, aten.masked_fill: self._where,
        })  # fmt: skip
        return table

    # --- axes ---

    def split(self, axis: Axis, sizes: tuple[Any, ...]) -> tuple[Axis, ...]:
        """The parts that an axis has in a view; all views that cut it alike share them."""
        if isinstance(axis, Rows):
            raise _Opaque
        key = (axis, str(sizes))
        if key not in self._splits:
            self._splits[key] = tuple(Axis(s, f"{axis.name}/{i}") for i, s in enumerate(sizes))
        return self._splits[key]

    def align(self, ours: tuple[Axis, ...], theirs: tuple[Axis, ...]) -> tuple[dict, dict]:
        """Renamings that make two groups of one total size the same axes; theirs take our names."""
        a, b = list(ours), list(theirs)
        rename_a: dict[Axis, Any] = {}
        rename_b: dict[Axis, Any] = {}
        while a and b:
            x, y = a.pop(0), b.pop(0)
            if x is y:
                continue
            if isinstance(x, Rows) or isinstance(y, Rows):
                raise _Opaque
            if same(x.size, y.size):
                rename_b[y] = x
                continue
            parts = _prefix(y.size, [x, *a])
            if parts is not None:  # our next few axes make up theirs
                rename_b[y] = tuple(parts)
                del a[: len(parts) - 1]
                continue
            parts = _prefix(x.size, [y, *b])
            if parts is None:
                raise _Opaque
            cut = self.split(x, tuple(p.size for p in parts))
            rename_a[x] = cut
            rename_b.update(zip(parts, cut))
            del b[: len(parts) - 1]
        if a or b:
            raise _Opaque
        return rename_a, rename_b

    def together(self, a: Value, b: Value, pairs: list[tuple[int, int]]) -> tuple[Value, Value]:
        """Two values whose dimensions `pairs` run together, with the same axes there and no others shared."""
        b = self._apart(a, b, pairs)
        for i, j in pairs:
            if a.dims[i] and b.dims[j]:
                rename_a, rename_b = self.align(a.dims[i], b.dims[j])
                a, b = a.rename(rename_a), b.rename(rename_a).rename(rename_b)
        return a, b

    @staticmethod
    def _apart(a: Value, b: Value, pairs: list[tuple[int, int]]) -> Value:
        """`b` with axes of its own, unless it shares with `a` only those that will be one anyway."""
        shared = set(a.axes) & set(b.axes)
        for i, j in pairs:
            if a.dims[i] == b.dims[j]:
                shared -= set(a.dims[i])
        return b.rename({x: Axis(x.size) for x in shared if not isinstance(x, Rows)})

    def broadcast(self, values: list[Value]) -> list[Value]:
        """Operands of a pointwise operator: same number of dimensions, same axes."""
        rank = max(len(v.dims) for v in values)
        values = [Value(((),) * (rank - len(v.dims)) + v.dims, v.term) for v in values]
        pairs = [(d, d) for d in range(rank)]
        for i in range(len(values)):
            for j in range(i + 1, len(values)):
                values[i], values[j] = self.together(values[i], values[j], pairs)
        if len(values) > 2 and any(len({v.dims[d] for v in values if v.dims[d]}) > 1 for d in range(rank)):
            raise _Opaque  # a later operand cut an axis of an earlier pair
        return values

    def ref(self, node: fx.Node, dims: tuple[tuple[Axis, ...], ...]) -> Ref | None:
        """An element of `node` itself; none where rows were selected, which no other place can index."""
        if any(isinstance(a, Rows) for group in dims for a in group):
            return None
        return Ref(node, [coordinate(g) for g in dims])

    # --- re-indexing ---

    def _copy(self, node: fx.Node, level: int) -> Value:
        return self.value(node.args[0], level)

    def _cast(self, node: fx.Node, level: int) -> Value:
        """Casts between floats only round; indicators are 0 and 1 in any type, and ids fit theirs."""
        source, dtype = node.args[0], value(node).dtype
        was = value(source).dtype
        if was in FLOATING and dtype in FLOATING:
            return self.value(source, level)
        inner = self.value(source, 0)
        if dtype == torch.bool and was != torch.bool:
            return Value(inner.dims, _as_boolean(inner.term))
        if was == torch.bool or is_indicator(inner.term):
            return inner
        if not was.is_floating_point and dtype in (torch.int64, torch.int32):
            return inner
        raise _Opaque

    def _view(self, node: fx.Node, level: int) -> Value:
        source = node.args[0]
        if is_op(source, aten.nonzero) and len(shape(node)) == 1 and shape(source)[1] == 1:
            return self._coordinate(source, 0)
        old = self.value(source, level)
        atoms = old.axes
        if isinstance(old.term, Ref) and self._merges_leading(node, source, old):
            raise _Opaque
        dims, mapping = [], {}
        for size in shape(node):
            if same(size, 1):
                dims.append(())
                continue
            if not atoms:
                raise _Opaque
            group = _prefix(size, atoms)
            if group is None:
                first = atoms[0]
                rest = first.size // size
                if isinstance(first, Rows) or not same(rest * size, first.size):
                    raise _Opaque
                parts = self.split(first, (size, rest))
                mapping[first] = parts
                mapping = {a: tuple(_spread(b, first, parts)) for a, b in mapping.items()}
                atoms[:1] = list(parts)
                group = [parts[0]]
            del atoms[: len(group)]
            dims.append(tuple(group))
        if any(not same(a.size, 1) for a in atoms):
            raise _Opaque
        terms = {a: coordinate(tuple(b)) for a, b in mapping.items()}
        return Value(tuple(dims), substitute(old.term, terms))

    def _merges_leading(self, node: fx.Node, source: fx.Node, old: Value) -> bool:
        """[B, S, H] -> [B * S, H]: the tokens become one axis, as the router's and the ids' are."""
        assert isinstance(old.term, Ref)
        new, plain = shape(node), tuple(i for i in old.term.index if isinstance(i, Axis))
        return (
            len(shape(source)) > len(new) >= 2
            and same(shape(source)[-1], new[-1])
            and plain == tuple(old.axes)
            and not self.is_weight(old.term.node)
        )

    def _permute(self, node: fx.Node, level: int) -> Value:
        v = self.value(node.args[0], level)
        rank = len(v.dims)
        order = list(range(rank))
        if is_op(node, aten.permute):
            order = [d % rank for d in node.args[1]]
        elif rank >= 2:
            i, j = (0, 1) if is_op(node, aten.t) else (d % rank for d in node.args[1:3])
            order[i], order[j] = order[j], order[i]
        return Value(tuple(v.dims[d] for d in order), v.term)

    def _expand(self, node: fx.Node, level: int) -> Value:
        v = self.value(node.args[0], level)
        new = shape(node)
        dims = ((),) * (len(new) - len(v.dims)) + v.dims
        return Value(
            tuple(g if g or same(s, 1) else (Axis(s),) for g, s in zip(dims, new)),
            v.term,
        )

    def _repeat(self, node: fx.Node, level: int) -> Value:
        v = self.value(node.args[0], level)
        times = node.args[1]
        dims = ((),) * (len(times) - len(v.dims)) + v.dims
        return Value(tuple(g if same(n, 1) else (Axis(n), *g) for g, n in zip(dims, times)), v.term)

    def _select(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        d = a["dim"] % len(shape(a["self"]))
        if not isinstance(a["index"], int):
            raise _Opaque
        if is_op(strip(a["self"]), aten.nonzero):
            if d != 1:
                raise _Opaque
            return self._coordinate(strip(a["self"]), a["index"] % shape(a["self"])[1])
        v = self.value(a["self"], level)
        index = a["index"]
        if index < 0:
            size = shape(a["self"])[d]
            if not isinstance(size, int):
                raise _Opaque
            index += size
        return self._at(v, d, Const(index))

    def _at(self, v: Value, d: int, index: Term) -> Value:
        """v with one dimension fixed."""
        mapping = self._assign(v.dims[d], index)
        return Value(v.dims[:d] + v.dims[d + 1 :], substitute(v.term, mapping))

    def _assign(self, group: tuple[Axis, ...], index: Term) -> dict[Axis, Term]:
        """Axes of one dimension -> what they are where the dimension's coordinate is `index`."""
        if any(isinstance(a, Rows) for a in group):
            raise _Opaque
        if len(group) <= 1:
            return dict.fromkeys(group, index)
        if isinstance(index, Const):
            out, rest = {}, index.value
            for axis in reversed(group):
                if not isinstance(axis.size, int):
                    raise _Opaque
                out[axis], rest = Const(rest % axis.size), rest // axis.size
            return out
        fits = isinstance(index, Mix) and len(index.parts) == len(group)
        if fits and all(same(a.size, s) for a, s in zip(group, index.sizes)):
            return dict(zip(group, index.parts))
        raise _Opaque

    def _slice(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        size, new = (shape(n)[a["dim"] % len(shape(n))] for n in (a["self"], node))
        if a["start"] in (0, None) and a["step"] == 1 and same(size, new):
            return self.value(a["self"], level)
        start = a["start"] or 0
        if not all(isinstance(n, int) for n in (size, new, start)):
            raise _Opaque
        start = max(start + size, 0) if start < 0 else start
        return self._part(self.value(a["self"], level), a["dim"], start, a["step"], new)

    def _part(self, v: Value, dim: int, start: int, step: int, size: int) -> Value:
        d = dim % len(v.dims)
        group = v.dims[d]
        if size == 1:
            fixed = self._at(v, d, Const(start))
            return Value((*fixed.dims[:d], (), *fixed.dims[d:]), fixed.term)
        if len(group) != 1 or isinstance(group[0], Rows):
            raise _Opaque
        axis = Axis(size)
        term = substitute(v.term, {group[0]: Affine(axis, start, step)})
        return Value((*v.dims[:d], (axis,), *v.dims[d + 1 :]), term)

    def _getitem(self, node: fx.Node, level: int) -> Value:
        found = item(node)
        if found is None:
            raise _Opaque
        producer, index = found
        if is_op(producer, aten.sort):
            return self._sorted(producer, index)
        a = arguments(producer)
        whole = a.get("self")
        if is_op(producer, aten.unbind):
            d = a["dim"] % len(shape(whole))
            if is_op(whole, aten.nonzero):
                if d != 1:
                    raise _Opaque
                return self._coordinate(whole, index)
            return self._at(self.value(whole, level), d, Const(index))
        if is_op(producer, aten.split, aten.split_with_sizes, aten.chunk):
            sizes = [shape_of[a["dim"]] for shape_of in (tuple(t.shape) for t in producer.meta["val"])]
            if not all(isinstance(s, int) for s in sizes):
                raise _Opaque
            return self._part(self.value(whole, level), a["dim"], sum(sizes[:index]), 1, sizes[index])
        raise _Opaque

    def _arange(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        if a.get("start", 0) != 0 or a.get("step", 1) != 1 or value(node).dtype.is_floating_point:
            raise _Opaque
        own = self.opaque(node)
        return Value(own.dims, own.axes[0] if own.axes else Const(0))

    def _fill(self, node: fx.Node, level: int) -> Value:
        own = self.opaque(node)
        if is_op(node, aten.empty, aten.empty_like, aten.new_empty):
            dims = tuple(() if same(s, 1) else (Axis(s),) for s in shape(node))
            return Value(dims, Const(None))
        number = arguments(node).get("fill_value", 0)
        if number != 0:
            raise _Opaque
        return Value(own.dims, Const(0.0))

    # --- rows ---

    def _mask_rows(self, mask: fx.Node, size: Any) -> tuple[Rows, Value]:
        """The rows that a mask selects, in row-major order, and the mask over axes of its own."""
        v = self.value(mask, 0)
        if any(isinstance(x, Rows) for x in v.axes):
            raise _Opaque
        key = ("mask", self.canon.number(mask))
        if key not in self._rows:
            bound = tuple(Axis(x.size) for x in v.axes)
            term = substitute(v.term, dict(zip(v.axes, bound)))
            if value(mask).dtype != torch.bool and not is_boolean(term):
                raise _Opaque
            self._rows[key] = Rows(size, bound, term)
        return self._rows[key], v

    def _coordinate(self, nonzero: fx.Node, dim: int) -> Value:
        """Column `dim` of nonzero(mask): where each selected row lies along that dimension of the mask."""
        rows, mask = self._mask_rows(nonzero.args[0], shape(nonzero)[0])
        place = coordinate(mask.dims[dim])
        return Value(((rows,),), substitute(place, dict(zip(mask.axes, rows.bound))))

    def _sorted(self, sort: fx.Node, output: int) -> Value:
        """Sorting orders all rows anew: each stands for one position of the sorted tensor."""
        a = arguments(sort)
        v = self.value(a["self"], 0)
        if len(v.dims) != 1 or a["descending"] or any(isinstance(x, Rows) for x in v.axes):
            raise _Opaque
        key = ("sort", self.canon.number(a["self"]), str(a.get("stable")))
        if key not in self._rows:
            bound = tuple(Axis(x.size) for x in v.axes)
            by = substitute(v.term, dict(zip(v.axes, bound)))
            self._rows[key] = Rows(shape(a["self"])[0], bound, None, by)
        rows = self._rows[key]
        assert rows.key is not None
        place = substitute(coordinate(v.dims[0]), dict(zip(v.axes, rows.bound)))
        return Value(((rows,),), place if output == 1 else rows.key)

    def _divide(self, node: fx.Node, level: int) -> Value:
        """A row's token, from the number of its (token, choice) pair: pair // k."""
        source, by = node.args[:2]
        v = self.value(source, 0)
        if by == 1:
            return v
        if isinstance(v.term, Mix) and isinstance(by, int):
            tail: Any = 1
            for cut in range(len(v.term.parts) - 1, 0, -1):
                tail = tail * v.term.sizes[cut]
                if same(tail, by):
                    return Value(v.dims, Mix(v.term.parts[:cut], v.term.sizes[:cut]))
        if isinstance(v.term, Axis) and isinstance(by, int) and not isinstance(v.term, Rows):
            axis = v.term
            if same(axis.size, by):
                return Value(v.dims, Const(0))
            count = axis.size // by
            if same(count * by, axis.size):
                parts = self.split(axis, (count, by))
                if axis in v.axes:
                    return Value(v.rename({axis: parts}).dims, parts[0])
                if any(isinstance(r, Rows) and axis in r.bound for r in v.axes):
                    self._recut(v, axis, parts)
                    return Value(v.dims, parts[0])
        raise _Opaque

    def _recut(self, v: Value, axis: Axis, parts: tuple[Axis, ...]) -> None:
        """Rows that range over `axis` range over its parts; terms over `axis` are mended where rows end."""
        self._cuts[axis] = coordinate(parts)
        for rows in v.axes:
            if isinstance(rows, Rows) and axis in rows.bound:
                at = rows.bound.index(axis)
                rows.bound = (*rows.bound[:at], *parts, *rows.bound[at + 1 :])

    def _index(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        if is_op(node, aten.index_select):
            d = a["dim"] % len(shape(a["self"]))
            indices = [None] * d + [a["index"]]
        else:
            indices = list(a["indices"])
        table = self.value(a["self"], level)
        given = [(d, i) for d, i in enumerate(indices) if i is not None]
        if [d for d, _ in given] != list(range(given[0][0], given[0][0] + len(given))):
            raise _Opaque
        first = given[0][0]
        lead, rest = table.dims[:first], table.dims[first + len(given) :]
        if value(given[0][1]).dtype == torch.bool:
            if len(given) > 1:
                raise _Opaque
            mask_node = given[0][1]
            count = len(shape(mask_node))
            rows, mask = self._mask_rows(mask_node, shape(node)[first])
            table, mask = self.together(table, mask, [(first + i, i) for i in range(count)])
            return self._selected(table, mask, rows, first, count)
        values = self.broadcast([self.value(i, 0) for _, i in given])
        dims = tuple(max((v.dims[d] for v in values), key=len) for d in range(len(values[0].dims)))
        if any(v.term is Const(None) for v in values):
            raise _Opaque
        mapping: dict[Axis, Term] = {}
        for (d, _), v in zip(given, values):
            mapping.update(self._assign(*self._fit(table, d, v.term)))
        return Value((*lead, *dims, *rest), substitute(table.term, mapping))

    def _fit(self, table: Value, d: int, index: Term) -> tuple[tuple[Axis, ...], Term]:
        """The axes of dimension d, and the index in as many parts as there are axes."""
        group = table.dims[d]
        if len(group) > 1 and isinstance(index, Axis) and not isinstance(index, Rows):
            cut = self.split(index, tuple(a.size for a in group))
            return group, coordinate(cut)
        return group, index

    def _selected(self, table: Value, mask: Value, rows: Rows, first: int, count: int) -> Value:
        """table where mask, over the axes that `rows` stands for."""
        if len(mask.axes) != len(rows.bound):
            raise _Opaque
        if not all(same(x.size, y.size) for x, y in zip(mask.axes, rows.bound)):
            raise _Opaque
        term = substitute(table.term, dict(zip(mask.axes, rows.bound)))
        return Value((*table.dims[:first], (rows,), *table.dims[first + count :]), term)

    def _gather(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        table, index = self.value(a["self"], level), self.value(a["index"], 0)
        dim = a["dim"] % len(table.dims)
        for d in range(len(table.dims)):
            if d != dim and not same(shape(a["self"])[d], shape(a["index"])[d]):
                raise _Opaque
        if not isinstance(index.term, Term):
            raise _Opaque
        table, index = self.together(table, index, [(d, d) for d in range(len(table.dims)) if d != dim])
        mapping = self._assign(*self._fit(table, dim, index.term))
        dims = tuple((i if d == dim else (t or i)) for d, (t, i) in enumerate(zip(table.dims, index.dims)))
        return Value(dims, substitute(table.term, mapping))

    # --- arithmetic ---

    def _operands(self, node: fx.Node, level: int) -> list[Value]:
        tensors = [n for n in node.args if is_tensor(n)]
        return self.broadcast([self.value(n, level) for n in tensors])

    @staticmethod
    def _joined(values: list[Value]) -> tuple[tuple[Axis, ...], ...]:
        return tuple(max((v.dims[d] for v in values), key=len) for d in range(len(values[0].dims)))

    def _pointwise(self, node: fx.Node, level: int) -> Value:
        if level == 0 or value(node).dtype not in FLOATING:
            raise _Opaque
        values = self._operands(node, level)
        if not values:
            raise _Opaque
        terms = iter(values)
        args = [next(terms).term if is_tensor(a) else a for a in node.args]
        if any(isinstance(a, (fx.Node, list, tuple)) for a in args):
            raise _Opaque
        kwargs = tuple(node.kwargs.items())
        if any(isinstance(v, fx.Node) for _, v in kwargs):
            raise _Opaque
        dims = self._joined(values)
        return Value(dims, Apply(node.target, args, kwargs, self.ref(node, dims)))

    def _mul(self, node: fx.Node, level: int) -> Value:
        a, b = node.args[:2]
        if level == 0 and not (is_tensor(a) and is_tensor(b) and _scales_rows(a, b)):
            inner = [self.value(n, 0) for n in (a, b) if is_tensor(n)]
            if not any(is_indicator(v.term) for v in inner):
                raise _Opaque
        values = self._operands(node, level)
        dims = self._joined(values)
        terms = iter(values)
        factors = [next(terms).term if is_tensor(n) else _number(n) for n in (a, b)]
        return Value(dims, Mul(factors[0], factors[1], self.ref(node, dims)))

    def _add(self, node: fx.Node, level: int) -> Value:
        if level == 0 or node.kwargs.get("alpha", 1) != 1 or value(node).dtype not in FLOATING:
            raise _Opaque
        values = self._operands(node, level)
        dims = self._joined(values)
        terms = iter(values)
        args = [next(terms).term if is_tensor(n) else _number(n) for n in node.args[:2]]
        args = [t for a in args for t in flatten(a, Add)]
        args = [t for t in args if not (isinstance(t, Const) and t.value == 0)] or [Const(0.0)]
        return Value(dims, args[0] if len(args) == 1 else Add(args, self.ref(node, dims)))

    def _compare(self, node: fx.Node, level: int) -> Value:
        """Comparisons of ids with experts, or of routing weights with zero: indicators, 0 or 1."""
        a, b = node.args[:2]
        if is_tensor(b):
            values = self.broadcast([self.value(a, 0), self.value(b, 0)])
            return Value(self._joined(values), indicator(node, values[0].term, values[1].term))
        if not isinstance(b, (int, float)):
            raise _Opaque
        v = self.value(a, 0)
        if is_op(node, aten.gt, aten.ne) and b == 0 and is_indicator(v.term):
            return Value(v.dims, _as_boolean(v.term))
        return Value(v.dims, indicator(node, v.term, _number(b)))

    def _where(self, node: fx.Node, level: int) -> Value:
        """where(mask, a, 0) and masked_fill(a, mask, 0): a times an indicator."""
        if is_op(node, aten.masked_fill):
            raise _Opaque
        mask, a, other = node.args
        if not (is_tensor(mask) and is_tensor(a)):
            raise _Opaque
        if is_tensor(other) and self.value(other, 0).term is not Const(0.0):
            raise _Opaque
        values = self.broadcast([self.value(mask, 0), self.value(a, level)])
        if not is_indicator(values[0].term):
            raise _Opaque
        dims = self._joined(values)
        return Value(dims, Mul(values[0].term, values[1].term, self.ref(node, dims)))

    def _sum(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        source = a["self"]
        inner = self.value(source, level if level == 2 else 0)
        if level < 2 and not is_indicator(inner.term):
            raise _Opaque
        dims = a.get("dim") or list(range(len(shape(source))))
        return self._reduced(node, inner, [d % len(shape(source)) for d in dims], a.get("keepdim"), Sum)

    def _any(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        v = self.value(a["self"], 0)
        if a.get("dim") is None or not is_indicator(v.term):
            raise _Opaque
        dims = a["dim"] if isinstance(a["dim"], (list, tuple)) else [a["dim"]]
        return self._reduced(node, v, [d % len(v.dims) for d in dims], a.get("keepdim"), AnyOf)

    def _reduced(self, node: fx.Node, v: Value, over: list[int], keepdim: Any, kind: Any) -> Value:
        axes = [x for d in over for x in v.dims[d]]
        if any(isinstance(x, Rows) for x in axes):
            raise _Opaque
        v, fresh = self._fresh(v, axes)
        kept = [() if d in over else g for d, g in enumerate(v.dims) if keepdim or d not in over]
        return Value(tuple(kept), summed(kind, fresh, v.term, self.ref(node, tuple(kept))))

    @staticmethod
    def _fresh(v: Value, axes: list[Axis]) -> tuple[Value, tuple[Axis, ...]]:
        """Axes that are summed over get names of their own."""
        new = {a: Axis(a.size) for a in axes}
        return Value(
            tuple(tuple(new.get(a, a) for a in g) for g in v.dims), substitute(v.term, dict(new))
        ), tuple(new.values())

    # --- products ---

    def _product(self, node: fx.Node, level: int) -> Value:
        if level == 0:
            raise _Opaque
        args = list(node.args)
        bias = args.pop(0) if is_op(node, aten.addmm, aten.baddbmm) else None
        if any(node.kwargs.get(n, 1) != 1 for n in ("alpha", "beta")):
            raise _Opaque
        left, right = self._factors(args[0], args[1], level)
        batch = [(d, d) for d in range(len(left.dims) - 2)]
        left, right = self.together(left, right, [*batch, (-1, -2)])
        inner = left.dims[-1] or right.dims[-2]
        if any(isinstance(x, Rows) for x in inner):
            raise _Opaque
        lead = tuple(a or b for a, b in zip(left.dims[:-2], right.dims[:-2]))
        dims = (*lead, left.dims[-2], right.dims[-1])
        fresh = {a: Axis(a.size) for a in inner}
        body = substitute(Mul(left.term, right.term), dict(fresh))
        term = summed(Sum, tuple(fresh.values()), body, self.ref(node, dims) if bias is None else None)
        if bias is not None:
            b = self.value(bias, 0)
            b = Value(((),) * (len(dims) - len(b.dims)) + b.dims, b.term)
            whole, b = self.together(Value(dims, term), b, [(d, d) for d in range(len(dims))])
            return Value(whole.dims, Add((whole.term, b.term), self.ref(node, whole.dims)))
        return Value(dims, term)

    def _factors(self, a: fx.Node, b: fx.Node, level: int) -> tuple[Value, Value]:
        """Operands of a product; one with a weight lowers the level of what it multiplies."""
        left, right = self.value(a, 0), self.value(b, 0)
        if self._is_weight(right.term):
            return self.value(a, level - 1), right
        if self._is_weight(left.term):
            return left, self.value(b, level - 1)
        if level == 2:
            return self.value(a, 2), self.value(b, 2)
        raise _Opaque

    def _is_weight(self, term: Term) -> bool:
        return isinstance(term, Ref) and self.is_weight(term.node)

    def _grouped_mm(self, node: fx.Node, level: int) -> Value:
        """Rows sorted by expert: each meets the weight of its own id."""
        a, weight, offs = node.args[:3] if len(node.args) > 2 else (*node.args, node.kwargs["offs"])
        if level == 0 or len(shape(a)) != 2 or len(shape(weight)) != 3 or not is_tensor(offs):
            raise _Opaque
        if is_op(node, aten._grouped_mm) and arguments(node)["bias"] is not None:
            raise _Opaque
        w = self.value(weight, 0)
        if not self._is_weight(w.term) or len(w.dims[0]) != 1:
            raise _Opaque
        x = self.value(a, level - 1)
        if len(x.dims[0]) != 1 or not isinstance(x.dims[0][0], Rows) or x.dims[0][0].key is None:
            raise _Opaque
        rows = x.dims[0][0]
        if not self._ends_of(offs, rows, shape(weight)[0]):
            raise _Opaque
        w = Value(w.dims[1:], substitute(w.term, self._assign(w.dims[0], rows.key)))
        x, w = self.together(x, w, [(1, 0)])
        fresh = {k: Axis(k.size) for k in x.dims[1]}
        body = substitute(Mul(x.term, w.term), dict(fresh))
        return Value(((rows,), w.dims[1]), summed(Sum, tuple(fresh.values()), body, None))

    def _ends_of(self, offs: fx.Node, rows: Rows, experts: Any) -> bool:
        """Whether offs [E] is where the rows of each expert end, rows being sorted by expert."""
        cumsum = exact_int(offs)
        if not is_op(cumsum, aten.cumsum) or len(shape(cumsum)) != 1 or not isinstance(experts, int):
            return False
        counts = self.value(exact_int(cumsum.args[0]), 0)
        if isinstance(counts.term, Sum) and is_eq(counts.term.body):  # of a one-hot matrix
            ids, expert = counts.term.body.args  # type: ignore[attr-defined]
            axes = counts.term.axes
            renamed = substitute(ids, dict(zip(axes, rows.bound)))
            return counts.dims == ((expert,),) and len(axes) == len(rows.bound) and renamed is rows.key
        proof = SortedRows.prove(offs, experts, self.canon)
        return self._sorted(proof.sort, 0).dims == ((rows,),)

    # --- results put together ---

    def _stack(self, node: fx.Node, level: int) -> Value:
        if level < 2:
            raise _Opaque
        a = arguments(node)
        parts, rank = a["tensors"], len(shape(node))
        d = a["dim"] % rank
        values = [self.value(n, level) for n in parts]
        if is_op(node, aten.cat):
            if any(v.dims[d] for v in values):
                raise _Opaque  # joined along a dimension that is longer than one
            values = [Value(v.dims[:d] + v.dims[d + 1 :], v.term) for v in values]
        first = values[0]
        terms = [first.term]
        for v in values[1:]:
            head, v = self.together(first, v, [(i, i) for i in range(len(first.dims))])
            if head is not first:
                raise _Opaque
            terms.append(v.term)
        axis = Axis(len(parts))
        return Value((*first.dims[:d], (axis,), *first.dims[d:]), Choose(axis, terms))

    def _index_add(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        if a["dim"] != 0 or a["alpha"] != 1:
            raise _Opaque
        return self._accumulate(node, level, a["self"], self.value(a["index"], 0), a["source"])

    def _scatter_add(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        if a["dim"] != 0 or not same(shape(a["index"])[0], shape(a["src"])[0]):
            raise _Opaque
        index = self.value(a["index"], 0)
        if free_axes(index.term) & {x for g in index.dims[1:] for x in g}:
            raise _Opaque  # columns of a row go to different places
        if not all(same(s, t) for s, t in zip(shape(a["index"])[1:], shape(a["self"])[1:])):
            raise _Opaque
        return self._accumulate(node, level, a["self"], Value(index.dims[:1], index.term), a["src"])

    def _index_put(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        if len(a["indices"]) != 1 or a["indices"][0] is None:
            raise _Opaque
        (index,) = a["indices"]
        if value(index).dtype == torch.bool:
            rows, mask = self._mask_rows(index, shape(a["values"])[0])
            if len(mask.dims) != 1:
                raise _Opaque
            place = substitute(coordinate(mask.dims[0]), dict(zip(mask.axes, rows.bound)))
            where = Value(((rows,),), place)
        else:
            where = self.value(index, 0)
        if a["accumulate"]:
            return self._accumulate(node, level, a["self"], where, a["values"])
        added = self._increment(a["self"], index, a["values"])
        if added is not None and (value(index).dtype == torch.bool or _visits_once(where)):
            return self._accumulate(node, level, a["self"], where, added)
        return self._overwrite(node, level, a["self"], where, a["values"])

    def _increment(self, base: fx.Node, index: fx.Node, new: fx.Node) -> fx.Node | None:
        """y if new is base[index] + y: what `out[mask] += y` becomes."""
        if not is_op(new, aten.add) or new.kwargs.get("alpha", 1) != 1:
            return None
        for old, y in ((new.args[0], new.args[1]), (new.args[1], new.args[0])):
            taken = is_op(old, aten.index) and is_tensor(y) and len(old.args[1]) == 1
            if taken and old.args[0] is base and self.canon.same(old.args[1][0], index):
                return y
        return None

    def _index_copy(self, node: fx.Node, level: int) -> Value:
        a = arguments(node)
        if a["dim"] != 0:
            raise _Opaque
        return self._overwrite(node, level, a["self"], self.value(a["index"], 0), a["source"])

    def _placed(
        self, level: int, base: Value, where: Value, source: fx.Node
    ) -> tuple[Value, Term, Term | None]:
        """base; `source` over base's axes, summed over whatever else its rows range over; the rows' mask."""
        if level < 2 or len(where.dims) != 1:
            raise _Opaque
        src = self.value(source, level)
        if len(where.dims[0]) == 1 and isinstance(where.dims[0][0], Rows):
            rows = where.dims[0][0]
            if src.dims[0] != (rows,):
                raise _Opaque
            bound, mask = rows.bound, rows.mask
            src = Value(((), *src.dims[1:]), src.term)
        else:
            src, where = self.together(src, where, [(0, 0)])
            bound, mask = where.dims[0], None
            src = Value(((), *src.dims[1:]), src.term)
        place = substitute(where.term, self._cuts)
        target = place.parts if isinstance(place, Mix) else () if place is Const(0) else (place,)
        if not all(isinstance(t, Axis) and t in bound for t in target) or len(set(target)) != len(target):
            raise _Opaque
        term = src.term if mask is None else Mul(mask, src.term)
        carried = Value((tuple(target), *src.dims[1:]), substitute(term, self._cuts))  # type: ignore[arg-type]
        carried, fresh = self._fresh(carried, [b for b in bound if b not in target])
        base, carried = self.together(base, carried, [(d, d) for d in range(len(base.dims))])
        return base, summed(Sum, fresh, carried.term, None), mask

    def _accumulate(self, node: fx.Node, level: int, base: fx.Node, where: Value, source: fx.Node) -> Value:
        old, new, _ = self._placed(level, self.value(base, level), where, source)
        if isinstance(old.term, Const):
            if old.term.value is None:
                raise _Opaque
            return Value(old.dims, new)
        return Value(old.dims, Add([*flatten(old.term, Add), new], self.ref(node, old.dims)))

    def _overwrite(self, node: fx.Node, level: int, base: fx.Node, where: Value, source: fx.Node) -> Value:
        """Rows that nobody wrote before are written: then to write is to add."""
        if not _visits_once(where):
            raise _Opaque
        old, new, mask = self._placed(level, self.value(base, level), where, source)
        if isinstance(old.term, Const) and not old.term.value:
            return Value(old.dims, new)
        before = flatten(old.term, Add)
        ours = expert_mask(new)
        if mask is None or ours is None:
            raise _Opaque
        for t in before:
            theirs = expert_mask(t)
            if theirs is None or theirs[0] is not ours[0] or theirs[1] == ours[1]:
                raise _Opaque
        return Value(old.dims, Add([*before, new], self.ref(node, old.dims)))


# --- terms ---


def _number(x: Any) -> Const:
    if not isinstance(x, (int, float)):
        raise _Opaque
    return Const(x)


def _prefix(size: Any, axes: list[Axis]) -> list[Axis] | None:
    """The first axes whose sizes multiply to `size`."""
    total: Any = 1
    for i, axis in enumerate(axes):
        total = total * axis.size
        if same(total, size):
            return axes[: i + 1]
    return None


def _spread(parts: Any, axis: Axis, into: tuple[Axis, ...]) -> list[Axis]:
    out: list[Axis] = []
    for p in parts:
        out.extend(into if p is axis else (p,))
    return out


def _scales_rows(a: fx.Node, b: fx.Node) -> bool:
    """One number for each row of the other."""
    sizes = shape(a), shape(b)
    return len(sizes[0]) == len(sizes[1]) and any(same(s[-1], 1) for s in sizes)


def _visits_once(where: Value) -> bool:
    """Whether no two rows have the same place."""
    if len(where.dims) != 1 or len(where.dims[0]) != 1 or not isinstance(where.dims[0][0], Rows):
        return isinstance(where.term, (Axis, Mix))
    rows = where.dims[0][0]
    return set(rows.bound) <= free_axes(where.term)


def indicator(node: fx.Node, a: Term, b: Term) -> Apply:
    return Apply(node.target.overloadpacket, (a, b))


def is_indicator(term: Term) -> bool:
    """Whether a term is built from comparisons, and so is 0 or 1 (or a count of them)."""
    if isinstance(term, Apply):
        return term.op in _INDICATOR
    if isinstance(term, (Sum, AnyOf)):
        return is_indicator(term.body)
    if isinstance(term, Mul):
        return all(map(is_indicator, term.args))
    return False


def is_boolean(term: Term) -> bool:
    """Whether an indicator is never more than 1."""
    if isinstance(term, Mul):
        return all(map(is_boolean, term.args))
    return is_indicator(term) and not isinstance(term, Sum)


def _as_boolean(term: Term) -> Term:
    """Whether a count is not zero."""
    if isinstance(term, Sum) and is_boolean(term.body):
        return AnyOf(term.axes, term.body)
    if not is_boolean(term):
        raise _Opaque
    return term


def is_eq(term: Any) -> bool:
    return isinstance(term, Apply) and term.op is aten.eq


def expert_mask(term: Term) -> tuple[Term, Any] | None:
    """(ids, e) if the term is something times [ids == e], in its first factors."""
    for f in flatten(term, Mul):
        if is_eq(f):
            ids, e = f.args  # type: ignore[attr-defined]
            if isinstance(e, Const):
                return ids, e.value
    return None


def summed(kind: Any, axes: tuple[Axis, ...], body: Term, ref: Ref | None) -> Term:
    """Sum or any, with a choice among stacked tensors written out."""
    if kind is Sum and any(isinstance(t, Choose) for t in flatten(body, Mul)):
        for axis in axes:
            if any(isinstance(t, Choose) and t.index is axis for t in flatten(body, Mul)):
                rest = tuple(a for a in axes if a is not axis)
                each = [substitute(body, {axis: Const(i)}) for i in range(axis.size)]
                return Add([summed(kind, rest, b, None) for b in each], ref)
    return kind(axes, body, ref)
