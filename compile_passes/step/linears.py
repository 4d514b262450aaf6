"""Rewrites products of the same rows to one launch of fp4::linears, with the norm before them and the
residual after.

In a decoding step each product waits for memory, and each small kernel between two products waits for the
kernel before it. An attention layer has a norm, three products of the norm's result, and a product whose
result is added to the residual.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ...backends.hopper.trust import linears_kernel
from ...runtime import native
from ..graph.nodes import (
    arguments,
    aten,
    integer,
    is_op,
    is_tensor,
    operand,
    passes_order,
    same_shape,
    shape,
    static_int,
    value,
)
from .norm import Norm, NotRead, read_norm

fp4 = torch.ops.fp4

MAX_WEIGHTS = 3
K_MULTIPLE = 64
FP8_ROWS = 64
"""The most rows of a product with a weight in fp8, which is an fp4::fp8_linear before this pass."""


@dataclass(frozen=True)
class Limits:
    """The products for which the kernel of a device is faster than torch's."""

    dtypes: tuple[torch.dtype, ...]
    rows: int
    norm_rows: int
    """The most rows that the kernel normalises. Up to `rows`, it multiplies rows by several weights."""
    residual_rows: int
    nbytes: float
    """Most bytes of the weights of a call."""
    many_nbytes: float
    """The same for more than norm_rows."""
    alone: bool
    """True if a product gains without a norm before it or a residual after it."""


HOPPER = Limits(
    (torch.bfloat16, torch.float16),
    rows=64, norm_rows=16, residual_rows=32, nbytes=2**27, many_nbytes=2**25, alone=False,
)  # fmt: skip
"""Torch's kernels are faster with an output head, and with one weight and more rows. docs/kernels.md has the
times.
"""
CPU = Limits(
    (torch.bfloat16,),
    rows=4, norm_rows=4, residual_rows=4, nbytes=float("inf"), many_nbytes=float("inf"), alone=True,
)  # fmt: skip
"""docs/kernels.md has the times."""


def limits(device: torch.device) -> Limits | None:
    """Returns None for a device without a kernel, such as a GPU on which it failed the check of its first
    use."""
    if device.type == "cpu":
        return CPU
    return HOPPER if native.is_hopper(device) and linears_kernel(device.index or 0) else None


@dataclass(frozen=True)
class _Linear:
    """x @ weight.T + bias, x [M, K]. With a weight in fp8: (x @ weight.T) * scale + bias, x [..., K].
    `rows` has the elements of x, before reshapes.
    """

    node: fx.Node
    x: fx.Node
    rows: fx.Node
    weight: fx.Node
    scale: fx.Node | None
    bias: fx.Node | None
    limits: Limits

    @property
    def n(self) -> int:
        return int(shape(self.weight)[0])


def write_linears(graph: fx.Graph, parameters: Collection[fx.Node]) -> list[str]:
    """Rewrites products of few rows and `parameters`. The graph must not write to these.

    Returns sentences that say what was rewritten, and why a similar norm was left alone.
    """
    done: Counter[str] = Counter()
    left: Counter[str] = Counter()
    by_rows: dict[fx.Node, list[_Linear]] = {}
    for node in graph.nodes:
        linear = _read(node, parameters) or _read_fp8(node, parameters)
        if linear is not None:
            by_rows.setdefault(linear.rows, []).append(linear)
    for rows, linears in by_rows.items():
        try:
            norm = read_norm(rows)
        except NotRead as why:
            left[str(why)] += 1
            norm = None
        if norm is not None and norm.weight not in parameters:
            left["the norm's weight is not a parameter, or the graph writes to it"] += 1
            norm = None
        taken = _first_that_fit(linears)
        if norm is not None and taken and _few(rows, taken[0].limits.norm_rows):
            _write_normed(graph, norm, taken)
            done["norm"] += 1
            continue  # products that are left read the norm's result from the operator
        if len(taken) > 1 and not _few(rows, taken[0].limits.norm_rows):
            _write_joined(graph, taken)
            done["joined"] += 1
            linears = [linear for linear in linears if linear not in taken]
        for linear in linears:
            add = _residual(linear)
            if _bytes([linear]) > _most_bytes(linear):
                continue
            if add is not None and _few(rows, linear.limits.residual_rows):
                _write_residual(graph, linear, *add)
                done["residual"] += 1
            elif linear.limits.alone:
                _write_alone(graph, linear)
                done["alone"] += 1
    words = {
        "norm": "a norm and the products of its result are one kernel (fp4::linears)",
        "joined": "products of the same rows are one kernel (fp4::linears)",
        "residual": "a product and the residual added to it are one kernel (fp4::linears)",
        "alone": "a product of few rows is one kernel (fp4::linears)",
    }
    told = [f"decoding step ({n}x): {words[what]}" for what, n in done.items()]
    return told + [f"decoding step ({n}x): left alone, {why}" for why, n in left.items()]


def _read(node: fx.Node, parameters: Collection[fx.Node]) -> _Linear | None:
    """Reads a product of few rows and a parameter, as nn.Linear makes it. Returns None for other nodes."""
    if not is_op(node, aten.mm, aten.addmm) or not is_tensor(node):
        return None
    a = arguments(node)
    x, swapped = (a["self"], a["mat2"]) if is_op(node, aten.mm) else (a["mat1"], a["mat2"])
    bias = None
    if is_op(node, aten.addmm):
        bias = a["self"]
        if a["beta"] != 1 or a["alpha"] != 1 or bias not in parameters:
            return None
    if not is_op(swapped, aten.t, aten.transpose):
        return None
    if is_op(swapped, aten.transpose) and {integer(swapped, i) % 2 for i in (1, 2)} != {0, 1}:
        return None
    weight = operand(swapped)
    if weight not in parameters or value(weight).dim() != 2 or not value(weight).is_contiguous():
        return None
    tensors = [x, weight] if bias is None else [x, weight, bias]
    dtypes, most = {value(t).dtype for t in tensors}, limits(value(x).device)
    if most is None or len(dtypes) != 1 or value(x).dtype not in most.dtypes:
        return None
    if bias is not None and not same_shape(shape(bias), shape(weight)[:1]):
        return None  # addmm repeats a bias of one element
    n, k = (static_int(size) for size in shape(weight))
    if n is None or k is None or k % K_MULTIPLE or static_int(shape(x)[-1]) != k:
        return None
    rows = _source(x, k)
    if not _few(rows, most.rows):
        return None
    return _Linear(node, x, rows, weight, None, bias, most)


def _read_fp8(node: fx.Node, parameters: Collection[fx.Node]) -> _Linear | None:
    """Reads a product of few rows and a parameter in fp8. Returns None for other nodes."""
    if not is_op(node, fp4.fp8_linear) or not is_tensor(node):
        return None
    a = arguments(node)
    x, weight, scale, bias = (a[name] for name in ("x", "weight", "weight_scale", "bias"))
    if not {weight, scale, bias} - {None} <= set(parameters) or not is_tensor(x):
        return None
    most = limits(value(x).device)
    if most is None or value(x).dtype not in most.dtypes or not value(weight).is_contiguous():
        return None
    k = static_int(shape(weight)[1])
    if k is None or k % K_MULTIPLE:
        return None
    rows = _source(x, k)
    if not _few(rows, FP8_ROWS) or None in _sizes(node):
        return None
    # torch has no such product, so the operator is not compared with any, and it is one already.
    own = replace(
        HOPPER, dtypes=most.dtypes, rows=FP8_ROWS, residual_rows=FP8_ROWS, nbytes=float("inf"),
        many_nbytes=float("inf"),
    )  # fmt: skip
    return _Linear(node, x, rows, weight, scale, bias, own)


def _bytes(linears: list[_Linear]) -> int:
    return sum(value(linear.weight).nbytes for linear in linears)


def _most_bytes(linear: _Linear) -> float:
    most = linear.limits
    return most.nbytes if _few(linear.rows, most.norm_rows) else most.many_nbytes


def _first_that_fit(linears: list[_Linear]) -> list[_Linear]:
    """Returns the first products that fit into one call. A Qwen2-MoE layer has four of one norm. All weights
    of a call are in fp8, or none."""
    taken: list[_Linear] = []
    for linear in linears:
        if (linear.scale is None) != (linears[0].scale is None):
            continue
        if len(taken) < MAX_WEIGHTS and _bytes([*taken, linear]) <= _most_bytes(linear):
            taken.append(linear)
    return taken


def _source(x: fx.Node, k: int) -> fx.Node:
    """Follows reshapes of x back, as long as their rows have k elements."""
    source = x
    while passes_order(x) and is_tensor(operand(x)):
        x = operand(x)
        if shape(x) and static_int(shape(x)[-1]) == k:
            source = x
    return source


def _few(rows: fx.Node, most: int) -> bool:
    """True if there are at most `most` rows. A symbolic number counts as too many."""
    total = 1
    for n in map(static_int, shape(rows)[:-1]):
        if n is None:
            return False
        total *= n
    return 0 < total <= most


def _residual(linear: _Linear) -> tuple[fx.Node, fx.Node] | None:
    """Returns (the sum, the residual) if only a sum `residual + y` of equal shapes reads the product y; else
    None.
    """
    node = linear.node
    while len(node.users) == 1:
        (user,) = node.users
        if not passes_order(user):
            break
        node = user
    if len(node.users) != 1 or not is_op(user, aten.add):
        return None
    a = arguments(user)
    if a.get("alpha", 1) != 1 or (a["self"] is node) == (a["other"] is node):
        return None
    other = a["other"] if a["self"] is node else a["self"]
    if (
        not is_tensor(other)
        or value(other).dtype != value(node).dtype
        or value(user).dtype != value(node).dtype
    ):
        return None
    alike = shape(node)[-1] == linear.n and same_shape(shape(other), shape(node))
    if not alike or None in _sizes(user):
        return None
    return user, other


def _write_normed(graph: fx.Graph, norm: Norm, linears: list[_Linear]) -> None:
    readers = _readers(norm.node) - {linear.node for linear in linears}
    x, addend = _addends(norm.x) or (norm.x, None)
    with graph.inserting_after(norm.node if addend is None else norm.x):
        out = _call(graph, x, linears, norm, None, bool(readers), addend)
    with graph.inserting_after(out):
        kept = graph.call_function(operator.getitem, (out, len(linears))) if readers else None
    _replace_products(graph, linears, out)
    if kept is not None:
        _replace(norm.node, kept)
    if addend is not None:
        with graph.inserting_after(out):
            total = graph.call_function(operator.getitem, (out, len(linears) + bool(readers)))
        _replace(norm.x, total)


def _replace_products(graph: fx.Graph, linears: list[_Linear], out: fx.Node) -> None:
    with graph.inserting_after(out):
        made = [graph.call_function(operator.getitem, (out, i)) for i in range(len(linears))]
    for linear, y in zip(linears, made):
        with graph.inserting_after(y):
            lead = [-1] if value(linear.node).dim() == 2 else _sizes(linear.node)[:-1]
            like = graph.call_function(aten.reshape.default, (y, [*lead, linear.n]))
        _replace(linear.node, like)


def _write_joined(graph: fx.Graph, linears: list[_Linear]) -> None:
    with graph.inserting_before(linears[0].node):
        out = _call(graph, _flat(graph, linears[0]), linears, None, None)
    _replace_products(graph, linears, out)


def _flat(graph: fx.Graph, linear: _Linear) -> fx.Node:
    """Returns x of two dimensions."""
    if value(linear.x).dim() == 2:
        return linear.x
    return graph.call_function(aten.reshape.default, (linear.x, [-1, int(shape(linear.weight)[1])]))


def _addends(total: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Returns the operands of a sum of two tensors like it; else None."""
    if not is_op(total, aten.add) or arguments(total).get("alpha", 1) != 1:
        return None
    operands = arguments(total)["self"], arguments(total)["other"]
    for x in operands:
        if not is_tensor(x) or value(x).dtype != value(total).dtype or not same_shape(shape(x), shape(total)):
            return None
    return operands


def _write_residual(graph: fx.Graph, linear: _Linear, add: fx.Node, residual: fx.Node) -> None:
    with graph.inserting_before(add):
        flat = graph.call_function(aten.reshape.default, (residual, [-1, linear.n]))
        out = _call(graph, _flat(graph, linear), [linear], None, flat)
        y = graph.call_function(operator.getitem, (out, 0))
        made = graph.call_function(aten.reshape.default, (y, _sizes(add)))
    _replace(add, made)


def _write_alone(graph: fx.Graph, linear: _Linear) -> None:
    with graph.inserting_before(linear.node):
        out = _call(graph, linear.x, [linear], None, None)
        made = graph.call_function(operator.getitem, (out, 0))
    _replace(linear.node, made)


def _call(
    graph: fx.Graph,
    x: fx.Node,
    linears: list[_Linear],
    norm: Norm | None,
    residual: fx.Node | None,
    keep_norm: bool = False,
    addend: fx.Node | None = None,
) -> fx.Node:
    weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
    options: dict[str, Any] = {"keep_norm": True} if keep_norm else {}
    if linears[0].scale is not None:
        options["weight_scales"] = [linear.scale for linear in linears]
    if norm is not None and norm.in_float:
        options["norm_in_float"] = True
    if any(_is_computed(t) for t in (x, addend) if t is not None):  # A kernel of this graph makes x, but none
        # makes the weights.
        options["early"] = True
    norm_of = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    last = (residual,) if addend is None else (residual, addend)
    return graph.call_function(fp4.linears.default, (x, weights, biases, *norm_of, *last), options)


_VIEWS = (aten.slice, aten.select, aten.transpose, aten.permute, aten.t, aten.expand)


def _is_computed(x: fx.Node) -> bool:
    """True if a kernel of the graph makes x, so that x is not a view of an input."""
    while passes_order(x) or is_op(x, *_VIEWS):
        x = operand(x)
    return x.op != "placeholder"


def _replace(old: fx.Node, new: fx.Node) -> None:
    new.meta.update(old.meta)
    old.replace_all_uses_with(new)


def _sizes(node: fx.Node) -> list[int | None]:
    return list(map(static_int, shape(node)))


def _readers(node: fx.Node) -> set[fx.Node]:
    """Returns the nodes that read a node's elements, directly or through reshapes."""
    found: set[fx.Node] = set()
    for user in node.users:
        found |= _readers(user) if passes_order(user) else {user}
    return found
