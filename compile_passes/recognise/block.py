"""A whole expert block: gather, gate/up product, activation, down product, weighted sum over the choices.

Two products that a gated activation joins are followed to the sum over each token's k choices. Every step is
proved; the first that does not hold refuses the block, and its products are then rewritten one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from ...meta.formats import ACTIVATIONS, Activation, known_activation
from .. import advice
from ..graph.nodes import (
    FLOATING,
    Canon,
    arguments,
    aten,
    is_float_cast,
    is_op,
    is_tensor,
    item,
    need,
    passes_order,
    refuse,
    same_shape,
    shape,
    sole_user,
    static_int,
    strip,
    uncast,
    value,
)
from ..graph.products import IndexedRows, Product, Rows, gathered
from ..naming import called
from .activations import name_of_gate


@dataclass
class Block:
    """root [T, H] = sum over j of weights[t, j] * down(act(up(x[t]))) with the experts ids[t, j]."""

    root: fx.Node
    x: fx.Node
    k: int
    ids: fx.Node
    weights: fx.Node
    activation: Activation
    up: Product
    down: Product
    up_bias: fx.Node | None
    down_bias: fx.Node | None
    rows: Rows


def match_block(down: Product, products: dict[fx.Node, Product], canon: Canon) -> Block:
    """The block that ends in `down`, or a Refusal."""
    width = down.weight.k
    activation, pre = activation_of(down.a, width, canon)
    rows = down.rows()
    up, up_bias = _up_product(pre, rows, products)
    need(
        up.rows().same_as(rows),
        "gate/up and down products route their rows differently",
        down.node,
        advice.SAME_ROUTE,
    )
    need(
        up.weight.experts == down.weight.experts,
        "gate/up and down differ in experts",
        down.node,
        advice.AS_MANY,
    )
    need(
        up.weight.n == activation.parts * width,
        f"gate/up has {up.weight.n} rows, not {'twice ' * activation.gated}{width}",
        up.node,
        advice.GATE_UP,
    )
    x, k = rows.tokens(up.a)
    root, weights, down_bias = _combine(down, rows, k)
    need(
        value(weights).dtype in FLOATING,
        f"the routing weights are {value(weights).dtype}",
        weights,
        advice.WEIGHTS_DTYPE,
    )
    need(value(root).dtype in FLOATING, f"the output is {value(root).dtype}", root, advice.DTYPE)
    return Block(root, x, k, rows.expert_ids(), weights, activation, up, down, up_bias, down_bias, rows)


def ends_a_block(down: Product, products: dict[fx.Node, Product], canon: Canon) -> bool:
    """Whether another product feeds this one, so that a refused block is worth telling about."""
    seen: set[fx.Node] = set()
    todo = [down.a]
    while todo and len(seen) < 64:  # an activation is a handful of nodes
        node = todo.pop()
        if node in seen or node.op != "call_function":
            continue
        if node in products:
            return True
        seen.add(node)
        todo.extend(node.all_input_nodes)
    return False


def _up_product(pre: fx.Node, rows: Rows, products: dict[fx.Node, Product]) -> tuple[Product, fx.Node | None]:
    node = uncast(pre)
    node = uncast(rows.unmask(node) or node)
    if node in products:
        return products[node], None
    need(
        is_op(node, aten.add),
        f"the activation's input ({called(node)}) is not a product of the experts",
        node,
        advice.BETWEEN,
    )
    for product, bias in _operands(node):
        if uncast(product) in products:
            table = rows.is_expert_row(strip(bias))
            need(
                table is not None,
                f"{called(bias)} is added to gate/up and is not each row's bias",
                node,
                advice.ROW_BIAS,
            )
            return products[uncast(product)], table
    refuse(f"the activation's input ({called(node)}) is not a product of the experts", node, advice.BETWEEN)


# --- activation ---


def activation_of(h: fx.Node, width: int, canon: Canon) -> tuple[Activation, fx.Node]:
    """(activation, the values it was applied to) for h [..., width] = f(gate) * g(up), or relu(up)^2."""
    node = uncast(h)
    up = _relu2(node, canon)
    if up is not None:
        return ACTIVATIONS["relu2"], up
    need(
        is_op(node, aten.mul),
        f"the down product's rows ({called(node)}) are not a gated activation",
        node,
        advice.ACTIVATION,
    )
    for f, u in _operands(node):
        gate = _gate(f, canon)
        if gate is None:
            continue
        kind, alpha, gate_base, gate_limit = gate
        up_offset, up_base = _offset(u)
        up_base, low, high = _clamped(up_base)
        gate_half, up_half = _half(gate_base, width), _half(up_base, width)
        if gate_half is None or up_half is None:
            continue
        need(
            canon.same(gate_half.whole, up_half.whole),
            "gate and up come from different products",
            node,
            advice.ACTIVATION,
        )
        need(
            gate_half.interleaved == up_half.interleaved and not gate_half.second and up_half.second,
            "gate and up are not the two halves (gate first) of one product",
            node,
            advice.ACTIVATION,
        )
        need(
            (low, high) == ((None, None) if gate_limit is None else (-gate_limit, gate_limit)),
            f"gate is clamped at {gate_limit}, up at [{low}, {high}]: no known activation",
            node,
            advice.ACTIVATION,
        )
        if name := name_of_gate(kind, alpha, gate_limit, up_offset, gate_half.interleaved):
            return known_activation(name), gate_half.whole
        refuse(
            f"activation {kind} with interleaved={gate_half.interleaved}, alpha={alpha}, limit={gate_limit}, "
            f"up_offset={up_offset} is none of: {', '.join(ACTIVATIONS)}",
            node,
            advice.ACTIVATION,
        )
    refuse(
        f"the down product's rows ({called(node)}) do not gate one half of a product by the other",
        node,
        advice.ACTIVATION,
    )


def _relu2(node: fx.Node, canon: Canon) -> fx.Node | None:
    """x where node is relu(x), squared."""
    if (is_op(node, aten.pow) and node.args[1] in (2, 2.0)) or is_op(node, aten.square):
        return _relu(node.args[0])
    if is_op(node, aten.mul):
        for a, b in _operands(node):
            first, second = _relu(a), _relu(b)
            if first is not None and second is not None and canon.same(uncast(first), uncast(second)):
                return first
    return None


def _relu(node: Any) -> fx.Node | None:
    node = uncast(node)
    return node.args[0] if is_op(node, aten.relu) else None


def _operands(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Both orders of the two tensors of an elementwise operator that does not broadcast or scale."""
    a, b = node.args[:2]
    if not (is_tensor(a) and is_tensor(b)) or node.kwargs.get("alpha", 1) != 1:
        return []
    if not (same_shape(shape(a), shape(node)) and same_shape(shape(b), shape(node))):
        return []
    return [(a, b), (b, a)]


def _scalar(node: fx.Node) -> tuple[fx.Node, float] | None:
    """(tensor, number) of a product or sum with a Python number."""
    a, b = node.args[:2]
    if isinstance(b, (int, float)) and node.kwargs.get("alpha", 1) == 1:
        return a, float(b)
    return None


def _gate(node: fx.Node, canon: Canon) -> tuple[str, float, fx.Node, float | None] | None:
    """(kind, alpha, gate before clamping, limit) if node is silu, gelu or gate * sigmoid(alpha * gate)."""
    node = uncast(node)
    if is_op(node, aten.silu):
        return _limited("silu", 1.0, node.args[0])
    if is_op(node, aten.gelu):
        kind = "gelu" if arguments(node)["approximate"] == "none" else "gelu_tanh"
        return _limited(kind, 1.0, node.args[0])
    if is_op(node, aten.mul):
        for base, s in _operands(node):
            s = uncast(s)
            if not is_op(s, aten.sigmoid):
                continue
            inner, alpha = uncast(s.args[0]), 1.0
            if is_op(inner, aten.mul) and (scaled := _scalar(inner)) is not None:
                inner, alpha = scaled
            if canon.same(uncast(inner), uncast(base)):
                return _limited("silu", alpha, base)
    return None


def _limited(kind: str, alpha: float, gate: Any) -> tuple[str, float, fx.Node, float | None] | None:
    base, low, high = _clamped(gate)
    return (kind, alpha, base, high) if low is None else None


def _clamped(node: fx.Node) -> tuple[fx.Node, float | None, float | None]:
    """(tensor, min, max) through one clamp."""
    node = uncast(node)
    if is_op(node, aten.clamp, aten.clamp_max, aten.clamp_min):
        a = arguments(node)
        if not any(is_tensor(a.get(n)) for n in ("min", "max")):
            return uncast(a["self"]), a.get("min"), a.get("max")
    return node, None, None


def _offset(node: fx.Node) -> tuple[float, fx.Node]:
    node = uncast(node)
    if is_op(node, aten.add) and (sum_ := _scalar(node)) is not None:
        return sum_[1], sum_[0]
    return 0.0, node


@dataclass
class _Half:
    whole: fx.Node
    second: bool
    interleaved: bool


def _half(node: fx.Node, width: int) -> _Half | None:
    """Which half of [..., 2 * width] a tensor [..., width] is: a block of columns, or every other one."""
    node = uncast(node)
    found = item(node)
    if found is not None:
        producer, index = found
        a = arguments(producer)
        whole = a.get("self")
        if is_op(producer, aten.split, aten.split_with_sizes, aten.chunk) and index in (0, 1):
            halves = _last(a["dim"], whole) and _is_double(whole, width) and _last_size(node) == width
            return _Half(whole, index == 1, False) if halves else None
        if is_op(producer, aten.unbind) and _is_pairs(whole, a["dim"], width):
            return _Half(strip(whole), index == 1, True)
        return None
    if is_op(node, aten.select):
        a = arguments(node)
        if _is_pairs(a["self"], a["dim"], width) and a["index"] in (0, 1, -1):
            return _Half(strip(a["self"]), a["index"] != 0, True)
    if is_op(node, aten.slice):
        a = arguments(node)
        whole = a["self"]
        if not (_last(a["dim"], whole) and _is_double(whole, width) and _last_size(node) == width):
            return None
        start = a["start"] or 0
        if a["step"] == 2 and start in (0, 1):
            return _Half(whole, start == 1, True)
        if a["step"] == 1 and start in (0, width):
            return _Half(whole, start == width, False)
    return None


def _last(dim: int, whole: fx.Node) -> bool:
    return dim % len(shape(whole)) == len(shape(whole)) - 1


def _last_size(node: fx.Node) -> int | None:
    return static_int(shape(node)[-1])


def _is_double(whole: fx.Node, width: int) -> bool:
    return _last_size(whole) == 2 * width


def _is_pairs(node: fx.Node, dim: int, width: int) -> bool:
    """[..., width, 2], a view of [..., 2 * width], taken along its last dimension."""
    sizes = tuple(static_int(s) for s in shape(node)[-2:])
    return sizes == (width, 2) and _last(dim, node) and _is_double(strip(node), width)


# --- the weighted sum over the choices ---


def _combine(down: Product, rows: Rows, k: int) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """(root, routing weights in token order, bias): from the down product forward to the sum over k."""
    node = down.node
    in_order = isinstance(rows, IndexedRows)
    weights: fx.Node | None = None
    bias: fx.Node | None = None
    while True:
        user = sole_user(node)
        if passes_order(user) or is_float_cast(user) or rows.unmask(user) is node:
            pass
        elif is_op(user, aten.sum):
            break
        elif is_op(user, aten.add):
            others = [b for a, b in _operands(user) if a is node]
            table = rows.is_expert_row(strip(others[0])) if others and not (in_order and rows.sorts) else None
            need(
                table is not None,
                f"{called(user)} adds something other than each row's expert bias",
                user,
                advice.ROW_BIAS,
            )
            need(
                bias is None and weights is None,
                "a bias is added twice or after the routing weights",
                user,
                advice.ROW_BIAS,
            )
            bias = table
        elif is_op(user, aten.mul):
            need(weights is None, f"{called(user)} scales the rows a second time", user, advice.ONE_SCALE)
            (other,) = [a for a in user.all_input_nodes if a is not node] or [None]
            need(
                is_tensor(other) and same_shape(shape(other), (*shape(node)[:-1], 1)),
                f"{called(user)} scales the rows by something other than one routing weight each",
                user,
                advice.ONE_SCALE,
            )
            weights = rows.weights_in_token_order(uncast(other), in_order)
        elif gathered(user)[0] is node:
            need(
                not in_order and rows.restored(user) is node,
                f"{called(user)} reorders the rows",
                user,
                advice.RESTORE,
            )
            in_order = True
        else:
            refuse(
                f"{called(user)} stands between down and the sum over choices",
                user,
                advice.AFTER_SUM,
            )
        node = user

    a = arguments(user)
    need(weights is not None, "the rows are summed without routing weights", user, advice.WEIGHTED)
    need(in_order, "sorted rows are summed before they are put back in token order", user, advice.RESTORE)
    need(
        len(shape(node)) == 3 and [d % 3 for d in a["dim"] or ()] == [1] and not a["keepdim"],
        "the sum is not over the choices of each token",
        user,
        advice.SUM_CHOICES,
    )
    need(
        shape(node)[1] == k,
        f"the sum is over {shape(node)[1]} choices of {k} taken",
        user,
        advice.SUM_CHOICES,
    )
    need(
        static_int(shape(node)[2]) == down.weight.n,
        "the sum does not keep all columns",
        user,
        advice.SUM_CHOICES,
    )
    root = user
    if len(root.users) == 1 and is_float_cast(next(iter(root.users))):
        root = next(iter(root.users))
    assert weights is not None
    return root, weights, bias
