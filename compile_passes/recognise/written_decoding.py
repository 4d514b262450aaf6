"""Finds weights that a graph decodes from 4-bit codes by tables or bit arithmetic, and puts `fp4.dequantize`
in their place.

An element of such a weight is read in index notation down to the bytes that it comes from, as a product of

    code(byte, k % 2) * scale(byte of the block) * factors that are the same for the whole matrix

`code` and `scale` are evaluated for all 256 bytes. Codes must be e2m1; scales must be e4m3 in blocks of 16 or
e8m0 in blocks of 32. The axes of the term prove the order of the bytes. How the model writes the decoding
does not matter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ...meta.formats import FORMATS
from ...meta.torch_internals import FakeTensorMode
from ..graph.nodes import (
    FLOATING,
    RESHAPES,
    SWAPS,
    Canon,
    arguments,
    aten,
    behind,
    is_op,
    is_pointwise,
    is_pure,
    is_tensor,
    operand,
    shape,
    value,
)
from ..index.arithmetic import operands, stack
from ..index.reader import Opaque, Reader, Renamed, dims_of, same
from ..index.terms import Affine, Apply, Axis, Choose, Const, Mix, Ref, Term, Value, free_axes, interning
from ..index.views import fill, getitem
from ..weights.facts import Facts

fp4 = torch.ops.fp4

BYTES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)
TABLE = 4096
"""The largest number of values in a table."""
Tables = Mapping[fx.Node, Tensor]
"""The values of small constants. They are written in the model, or are the current values of fixed inputs."""
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], device="cpu")


_EMPTY = (aten.empty, aten.empty_like, aten.new_empty)
_POINTWISE = (aten.floor_divide, aten.remainder, aten.bitwise_and, aten.__and__, aten.__rshift__)
"""Pointwise operators that lack torch's tag."""


def decode_to_operator(graph: fx.Graph, facts: Facts, fake_mode: FakeTensorMode) -> None:
    """Put `fp4.dequantize` in place of every weight that the graph decodes from fixed inputs."""
    fixed = facts.fixed - facts.mutated
    if not any(value(n).dtype in BYTES for n in fixed):
        return
    with interning():
        _decode_all(graph, _constant_nodes(graph, fixed), facts, fake_mode)
    graph.eliminate_dead_code()


def _decode_all(graph: fx.Graph, constant: set[fx.Node], facts: Facts, fake_mode: FakeTensorMode) -> None:
    _note_tables(graph, constant, facts.constants)
    reader, done = Decoder(graph, constant, facts.constants), set[fx.Node]()
    for node in reversed(list(graph.nodes)):
        if node not in constant or node in done or value(node).dtype not in FLOATING or len(shape(node)) < 2:
            continue
        try:
            new = _replace(graph, node, reader, fake_mode)
            used = behind(new)
            unused = (n for n in behind(node) if n not in used)
            facts.tables[new] = tuple(n for n in unused if n.op == "placeholder" and n in facts.constants)
        except Opaque:
            continue
        done.update(behind(node))
        node.replace_all_uses_with(new)


def _constant_nodes(graph: fx.Graph, fixed: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes that are the same in every call."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        pure = node.op == "call_function" and is_tensor(node) and (is_pure(node) or is_op(node, *_EMPTY))
        sizes = is_tensor(node) and all(isinstance(s, int) for s in shape(node))
        if node in fixed or (pure and sizes and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def _note_tables(graph: fx.Graph, constant: set[fx.Node], values: dict[fx.Node, Tensor]) -> None:
    """Note the values of small tensors that the model makes of numbers."""
    for node in graph.nodes:
        made = node.op == "call_function" and node in constant and value(node).numel() <= TABLE
        if made and all(n.op != "placeholder" and n in values for n in node.all_input_nodes):
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            kwargs = {name: x for name, x in kwargs.items() if name not in ("device", "pin_memory")}
            with torch.inference_mode(False), torch.no_grad():
                values[node] = node.target(*args, **kwargs)


class Decoder(Reader):
    """Reads integers, too. It sees through casts between floats only, and keeps all other casts."""

    def __init__(self, graph: fx.Graph, constant: set[fx.Node], tables: Tables) -> None:
        super().__init__(graph, Canon(graph), lambda n: False)
        self._constant, self.tables = constant, tables

    _MOVES = (
        *(*RESHAPES, *SWAPS, aten.flatten, aten.expand, aten.select, aten.slice),
        *(aten.index, aten.index_select),
    )

    def _read(self, node: fx.Node, level: int) -> Value:
        if node not in self._constant or node.op != "call_function" or node in self.tables:
            raise Opaque
        if is_op(node, aten._to_copy):
            return self._cast(node, operand(node))
        # The old values are overwritten.
        if is_op(node, aten.copy) and shape(node) == shape(operand(node, 1)):
            return self._cast(node, operand(node, 1))
        if is_op(node, aten.view) and isinstance(node.args[1], torch.dtype):
            return self._bits(node)
        if is_op(node, *self._MOVES):
            return super()._read(node, 2)
        if is_op(node, aten.stack):
            return stack(self, node, 2)
        if is_op(node, *_EMPTY):
            return fill(self, node, 2)
        if is_op(node, aten.slice_scatter):
            return self._every_other(node)
        if node.all_input_nodes and (is_pointwise(node) or is_op(node, *_POINTWISE)):
            return self._pointwise(node)
        return getitem(self, node, 2)

    def ref(self, node: fx.Node, dims: tuple[tuple[Axis, ...], ...]) -> None:
        """Return None always, so that reading does not stop at an intermediate value of a decoding."""
        return None

    def align(self, ours: tuple[Axis, ...], theirs: tuple[Axis, ...]) -> tuple[Renamed, Renamed]:
        """Align axes. Nibbles of bytes and elements of blocks split K differently, so both are split at every
        boundary of either."""
        try:
            return super().align(ours, theirs)
        except Opaque:
            if not all(type(a) is Axis and isinstance(a.size, int) for a in (*ours, *theirs)):
                raise
        cuts = sorted({c for group in (ours, theirs) for c in _suffixes(group)}, reverse=True)
        if any(big % small for big, small in itertools.pairwise(cuts)):
            raise Opaque

        def pieces(group: tuple[Axis, ...]) -> list[tuple[Axis, ...]]:
            ends, out = _suffixes(group), []
            for axis, high, low in zip(group, ends, ends[1:]):
                inside = [c for c in cuts if low <= c <= high]
                sizes = tuple(big // small for big, small in itertools.pairwise(inside))
                out.append(self.split(axis, sizes) if len(sizes) > 1 else (axis,))
            return out

        mine = pieces(ours)
        flat = [p for parts in mine for p in parts]
        rename_a = {x: parts for x, parts in zip(ours, mine) if parts != (x,)}
        rename_b = {}
        for y, parts in zip(theirs, pieces(theirs)):
            rename_b[y] = tuple(flat[: len(parts)])
            del flat[: len(parts)]
        return rename_a, rename_b

    def _cast(self, node: fx.Node, source: Any) -> Value:
        dtype, was = value(node).dtype, value(source).dtype
        v = self.value(source, 2)
        if dtype == was or (dtype in FLOATING and was in FLOATING):
            return v
        return Value(v.dims, Apply(aten._to_copy.default, (v.term,), (("dtype", dtype),)))

    def _every_other(self, node: fx.Node) -> Value:
        """Read out[..., 0::2] = a; out[..., 1::2] = b."""
        a = arguments(node)
        d, start, size = len(shape(node)) - 1, a["start"] or 0, shape(node)[-1]
        if (
            a["dim"] % (d + 1) != d
            or a["step"] != 2
            or start not in (0, 1)
            or 2 * shape(a["src"])[-1] != size
        ):
            raise Opaque
        if not (a["end"] is None or a["end"] >= size):
            raise Opaque
        base, src = self.value(a["self"], 2), self.value(a["src"], 2)
        options: list[Term] = [Const(None), Const(None)]
        half = Axis(2)
        if isinstance(base.term, Choose) and base.dims[d] and base.term.index is base.dims[d][-1]:
            half = base.dims[d][-1]
            other = Value((*base.dims[:d], base.dims[d][:-1]), base.term)
            head, src = self.together(other, src, [(i, i) for i in range(d + 1)])
            if head is not other:
                raise Opaque
            options = list(base.term.options)
        elif base.term is not Const(None):
            raise Opaque
        options[start] = src.term
        return Value((*src.dims[:d], (*src.dims[d], half)), Choose(half, options))

    def _bits(self, node: fx.Node) -> Value:
        source, dtype = operand(node), node.args[1]
        if not isinstance(dtype, torch.dtype) or value(source).dtype.itemsize != dtype.itemsize:
            raise Opaque
        v = self.value(source, 2)
        return Value(v.dims, Apply(aten.view.dtype, (v.term, dtype)))

    def _pointwise(self, node: fx.Node) -> Value:
        values = operands(self, node, 2)
        terms = iter(values)
        args = [next(terms).term if is_tensor(a) else a for a in node.args]
        if any(isinstance(a, (fx.Node, list, tuple)) for a in (*args, *node.kwargs.values())):
            raise Opaque
        return Value(dims_of(values), Apply(node.target, args, tuple(node.kwargs.items())))


# --- one weight ---


def _replace(graph: fx.Graph, node: fx.Node, reader: Decoder, fake_mode: FakeTensorMode) -> fx.Node:
    """Insert `fp4.dequantize` with the operands from which `node` is decoded."""
    v = reader.value(node, 2)
    axes, tables = v.axes, reader.tables
    sizes = [a.size for a in axes]
    if isinstance(v.term, Ref) or any(isinstance(a.size, torch.SymInt) for a in axes):
        raise Opaque
    *lead, n, k = shape(node)
    lead_axes = [a for g in v.dims[:-2] for a in g]
    codes = _leaf(v.term, [*axes[:-1]], lambda total: total * 2 == value(node).numel(), tables)
    if sizes[-1] != 2 or codes is None:
        raise Opaque
    for format in ("nvfp4", "mxfp4"):
        block = FORMATS[format].block
        cut = next((i for i in range(len(axes)) if math.prod(sizes[i:]) == block), None)
        scale = _leaf(v.term, axes[:cut], lambda total: total * block == value(node).numel(), tables)  # noqa: B023
        if cut is not None and scale is not None and scale is not codes and k % block == 0:
            break
    else:
        raise Opaque
    others = _others(v.term, codes, scale, format, axes[-1], lead_axes, tables)

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = graph.call_function(target, args, kwargs)
        with fake_mode:
            given = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
            made.meta["val"] = target(*given[0], **given[1])
        return made

    def operand(leaf: Ref, dtype: torch.dtype, *last: int) -> fx.Node:
        out = leaf.node
        if value(out).dtype != dtype:
            out = call(aten.view.dtype, out, dtype)
        return call(aten.reshape.default, out, [*lead, n, *last])

    with graph.inserting_before(node):
        packed = operand(codes, torch.uint8, k // 2)
        scales = operand(scale, FORMATS[format].scale_dtype, k // block)
        global_scale = None
        if FORMATS[format].has_global_scale:
            global_scale = call(aten.ones.default, lead, dtype=torch.float32, device=value(node).device)
            for f in others:
                global_scale = call(aten.mul.Tensor, global_scale, _emit(f, lead_axes, lead, call))
        dtype = value(node).dtype
        new = call(fp4.dequantize.default, packed, scales, global_scale, format, dtype)
    new.meta.update(node.meta)
    return new


def _others(
    term: Term, codes: Ref, scale: Ref, format: str, nibble: Axis, lead: list[Axis], tables: Tables
) -> list[Term]:
    """Prove the codes and block scales of a weight and return its other factors."""
    of_codes, of_scale, others, numbers = [], [], [], []
    for f in _product_of(term):
        leaves = _leaves(f, tables)
        if leaves == {codes}:
            of_codes.append(f)
        elif leaves == {scale}:
            of_scale.append(f)
        elif isinstance(f, Const):
            numbers.append(f)
        elif leaves & {codes, scale} or not free_axes(f) <= set(lead):
            raise Opaque
        else:
            others.append(f)
    if _is_e2m1([*of_codes, *numbers], codes, nibble, tables):  # a table of integers, halved
        numbers = []
    elif not _is_e2m1(of_codes, codes, nibble, tables):
        raise Opaque
    if numbers and _is_scale([*of_scale, *numbers], scale, format, tables):
        numbers = []
    elif not _is_scale(of_scale, scale, format, tables):
        raise Opaque
    others += numbers
    if others and not FORMATS[format].has_global_scale:
        raise Opaque
    return others


def _suffixes(group: tuple[Axis, ...]) -> list[int]:
    """Return the products of the sizes from each axis on, and 1."""
    return [math.prod([a.size for a in group[i:]]) for i in range(len(group) + 1)]


def _product_of(term: Term) -> Iterator[Term]:
    """Yield the factors of a product of floats."""
    op = getattr(term.op, "overloadpacket", None) if isinstance(term, Apply) else None
    if op is aten.mul and isinstance(term, Apply):
        for a in term.args:
            yield from _product_of(a if isinstance(a, Term) else Const(a))
    elif op in (aten.div, aten.ldexp) and isinstance(term, Apply) and not term.kwargs:
        a, b = (t if isinstance(t, Term) else Const(t) for t in term.args)
        yield from _product_of(a)
        # torch's ldexp warns if a tensor without dimensions is broadcast, and later versions will raise.
        yield Apply(aten.div.Tensor, (Const(1.0), b)) if op is aten.div else Apply(aten.pow.Scalar, (2.0, b))
    else:
        yield term


def _leaves(term: Term, tables: Tables) -> set[Ref]:
    """Return the elements of inputs that a term is computed from, except tables."""
    found: set[Ref] = set()
    todo: list[Term] = [term]
    while todo:
        t = todo.pop()
        if isinstance(t, Ref) and (t.node not in tables or _is_held(t)):
            found.add(t)
        else:
            todo.extend(t.children())
    return found


def _is_held(ref: Ref) -> bool:
    """Return whether a term reads the bytes of an input in order. This excludes tables, which computed values
    index."""
    return ref.node.op == "placeholder" and value(ref.node).dtype in BYTES and _along(ref) is not None


def _leaf(term: Term, axes: list[Axis], fits: Any, tables: Tables) -> Ref | None:
    """Return the single input of bytes that lies along exactly these axes in row-major order."""
    found = [
        t for t in _leaves(term, tables) if _is_held(t) and fits(value(t.node).numel()) and _along(t) == axes
    ]
    return found[0] if len(found) == 1 else None


def _along(ref: Ref) -> list[Axis] | None:
    """Return the axes that index an input's elements, if each dimension has an axis of its own."""
    out: list[Axis] = []
    for i, size in zip(ref.index, shape(ref.node)):
        parts = i.parts if isinstance(i, Mix) else () if same(size, 1) else (i,)
        if not all(isinstance(p, Axis) for p in parts):
            return None
        out += parts  # type: ignore[arg-type]
    whole = all(
        math.prod([p.size for p in (i.parts if isinstance(i, Mix) else (i,))]) == s  # type: ignore[attr-defined]
        for i, s in zip(ref.index, shape(ref.node))
        if not same(s, 1)
    )
    return out if whole else None


# --- evaluation for every byte ---


def _evaluate(term: Any, given: dict[Term, Any], tables: Tables) -> Any:
    if not isinstance(term, Term):
        return term
    if term in given:
        return given[term]
    if isinstance(term, Const):
        return term.value
    if isinstance(term, Apply):
        args = [_evaluate(a, given, tables) for a in term.args]
        if _takes_tensor(term) and not isinstance(args[0], Tensor):
            args[0] = torch.tensor(args[0], device="cpu")
        return term.op(*args, **term.kwargs)
    if isinstance(term, Choose):
        index = _evaluate(term.index, given, tables)
        return _evaluate(term.options[int(index)], given, tables)
    if isinstance(term, Affine):
        return term.start + term.step * _evaluate(term.base, given, tables)
    if isinstance(term, Mix):
        out: Any = 0
        for part, size in zip(term.parts, term.sizes):
            out = out * size + _evaluate(part, given, tables)
        return out
    if not isinstance(term, Ref) or (values := tables.get(term.node)) is None:
        raise Opaque
    index = [torch.as_tensor(_evaluate(i, given, tables), device="cpu").long() for i in term.index]
    if any(((i < 0) | (i >= s)).any() for i, s in zip(index, values.shape)):
        raise Opaque
    found = values.cpu()[tuple(index)]
    # Keep the model's number of dimensions, because type promotion treats tensors without dimensions
    # differently.
    return found.expand(256) if index else found


def _takes_tensor(term: Apply) -> bool:
    return isinstance(term.op._schema.arguments[0].type, torch.TensorType)


def _all_bytes(factors: list[Term], leaf: Ref, given: dict[Term, Any], tables: Tables) -> Tensor:
    """Return the product of `factors` for every value of the byte `leaf`."""
    every = torch.arange(256, dtype=torch.uint8, device="cpu").view(value(leaf.node).dtype)
    out = torch.ones(256, dtype=torch.float64, device="cpu")
    with torch.inference_mode(False), torch.no_grad():
        for f in factors:
            try:
                out = out * _evaluate(f, {**given, leaf: every}, tables)
            except (RuntimeError, TypeError, NotImplementedError):
                raise Opaque from None
    return out


def _is_e2m1(factors: list[Term], leaf: Ref, nibble: Axis, tables: Tables) -> bool:
    """Return whether the factors decode e2m1, with the low nibble of each byte first."""
    byte = torch.arange(256, device="cpu")
    each = [_all_bytes(factors, leaf, {nibble: i}, tables) for i in (0, 1)]
    return all(torch.equal(got, _E2M1[code].double()) for got, code in zip(each, (byte & 15, byte >> 4)))


def _is_scale(factors: list[Term], leaf: Ref, format: str, tables: Tables) -> bool:
    """Return whether the factors decode block scales. NaN codes may decode to anything, and 2^-127, a
    subnormal, may decode to 0."""
    got = _all_bytes(factors, leaf, {}, tables)
    want = torch.arange(256, dtype=torch.uint8, device="cpu").view(FORMATS[format].scale_dtype).double()
    number = ~want.isnan()
    return torch.allclose(got[number], want[number], rtol=0, atol=2.0**-126)


# --- factors that are the same for a whole matrix ---


def _emit(term: Any, axes: list[Axis], lead: list[int], call: Any) -> Any:
    """Compute a term over the leading axes as a tensor of their shape, or without dimensions."""
    if not isinstance(term, Term):
        return term
    if isinstance(term, Const):
        return term.value
    if isinstance(term, Ref):
        along = _along(term)
        if along not in ([], axes):
            raise Opaque
        flat = call(aten.reshape.default, term.node, lead if along else [])
        return call(aten._to_copy.default, flat, dtype=torch.float32)
    if isinstance(term, Apply):
        args = [_emit(a, axes, lead, call) for a in term.args]
        if _takes_tensor(term) and not isinstance(args[0], fx.Node):
            args[0] = call(torch.tensor, args[0])
        return call(term.op, *args, **term.kwargs)
    raise Opaque
