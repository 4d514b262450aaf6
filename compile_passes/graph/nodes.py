"""Reads a functional aten graph: what a node is, and which nodes are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from ...meta.torch_internals import OpOverload

aten = torch.ops.aten

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
PRODUCTS = (aten.mm, aten.bmm, aten.addmm, aten.baddbmm)
BY_SIZE = (
    aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.new_zeros, aten.new_ones,
    aten.new_full, aten.new_empty,
)  # fmt: skip
"""Operators that read only the sizes of a tensor, not its values."""
ASSERTIONS = (
    aten._assert_scalar, aten._assert_async, aten._assert_tensor_metadata, aten.sym_constrain_range,
    aten.sym_constrain_range_for_size,
)  # fmt: skip
"""Operators whose result the model does not use. They are removed together with the tensors that they
check."""


# --- what a node is ---


def is_op(node: Any, *packets: Any) -> TypeGuard[fx.Node]:
    """Return whether `node` calls any overload of one of these operators."""
    return (
        isinstance(node, fx.Node)
        and node.op == "call_function"
        and getattr(node.target, "overloadpacket", None) in packets
    )


def is_grouped_mm(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name in ("aten::_grouped_mm", "transformers::grouped_mm_fallback")


def is_product(node: fx.Node) -> bool:
    """Return whether a node is a matrix product of any kind."""
    return is_op(node, *PRODUCTS) or is_grouped_mm(node)


def is_pointwise(node: fx.Node) -> bool:
    """Return whether an operator computes each element from the same elements of its tensors. Such operators
    have a tag of torch's; only `hardswish` lacks it."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or is_op(node, aten.hardswish)


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of an operator call by their schema names, including defaults."""
    assert isinstance(node.target, OpOverload)
    schema = node.target._schema
    out = {a.name: a.default_value for a in schema.arguments}
    out.update(zip((a.name for a in schema.arguments), node.args))
    out.update(node.kwargs)
    return out


def item(node: Any) -> tuple[fx.Node, int] | None:
    """Return (producer, index) of one output of an operator with several outputs."""
    if isinstance(node, fx.Node) and getattr(node.target, "__name__", "") == "getitem":
        producer, index = node.args
        if isinstance(producer, fx.Node) and isinstance(index, int):
            return producer, index
    return None


def value(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor of a node."""
    return node.meta["val"]


def is_tensor(node: Any) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def has_chosen_rows(node: fx.Node) -> bool:
    """Return whether a node is a tensor with rows that a mask or `where` chose."""
    return is_tensor(node) and bool(free_unbacked_symbols(value(node)))


def shape(node: fx.Node) -> tuple[Any, ...]:
    return tuple(value(node).shape)


def same_shape(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b))


def static_int(x: Any) -> int | None:
    """Return a Python int, or None for anything symbolic. A SymInt may hold a number."""
    if isinstance(x, torch.SymInt):
        return x.node.maybe_as_int()
    return x if isinstance(x, int) and not isinstance(x, bool) else None


# --- following a node back through operators that keep its elements ---

COPIES = (aten.clone, aten.alias, aten.detach, aten.contiguous, aten.lift_fresh_copy)
RESHAPES = (*COPIES, aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze)
"""Operators whose result has the same elements in the same row-major order."""
SWAPS = (aten.t, aten.transpose, aten.permute)
CUTS = (aten.select, aten.slice, aten.split, aten.split_with_sizes, aten.chunk)
_MAX = 2**63 - 1


def passes_order(node: fx.Node) -> bool:
    """Return whether an operator keeps the row-major sequence of elements (values and dtype)."""
    if is_op(node, *RESHAPES):
        return node.target is not aten.view.dtype
    if not is_op(node, aten._to_copy, aten.expand, aten.slice) or not is_tensor(operand(node)):
        return False  # an operator that a pass wrote may have no fake tensor
    if is_op(node, aten._to_copy):
        return value(node).dtype == value(operand(node)).dtype
    if is_op(node, aten.expand):
        return same_shape(shape(node), shape(operand(node)))
    if is_op(node, aten.slice):
        a = arguments(node)
        return a["start"] in (0, None) and a["end"] in (_MAX, None) and a["step"] == 1
    return False


def strip(node: fx.Node) -> fx.Node:
    """Follow a node back through reshapes and copies: same elements, same row-major order, same dtype."""
    while passes_order(node):
        node = operand(node)
    return node


def through(node: fx.Node, *packets: Any) -> fx.Node:
    """Follow a node back through calls of these operators, along their first arguments."""
    while is_op(node, *packets):
        node = operand(node)
    return node


def is_float_cast(node: Any) -> TypeGuard[fx.Node]:
    return (
        is_op(node, aten._to_copy)
        and is_tensor(node.args[0])
        and value(node).dtype in FLOATING
        and value(node.args[0]).dtype in FLOATING
    )


def exact_int(node: fx.Node) -> fx.Node:
    """Follow a node back like `strip`, and also through casts of integers to types that hold small ones
    exactly (ids, counts)."""
    node = strip(node)
    exact = (torch.int64, torch.int32, torch.float32, torch.float64)
    while is_op(node, aten._to_copy) and value(node).dtype in exact and value(operand(node)).dtype in exact:
        node = strip(operand(node))
    return node


def unswap(node: fx.Node) -> tuple[fx.Node, bool]:
    """Follow a node back through copies, float casts and swaps of the last two dimensions: (source,
    swapped)."""
    swapped = False
    while True:
        if is_op(node, *SWAPS):
            if not _swaps_last_two(node):
                return node, swapped
            swapped = not swapped
        elif not (is_float_cast(node) or is_op(node, *COPIES)):
            return node, swapped
        node = operand(node)


def _swaps_last_two(node: fx.Node) -> bool:
    dims = len(shape(node))
    if is_op(node, aten.t):
        return True
    if is_op(node, aten.transpose):
        return {integer(node, i) % dims for i in (1, 2)} == {dims - 2, dims - 1}
    order = [d % dims for d in several(node, 1)]
    return order == [*range(dims - 2), dims - 1, dims - 2]


# --- equality ---


class Canon:
    """Numbers values: two nodes with the same number compute the same value from the same inputs.

    The graph is not changed: several nodes `x[ids]` stay, and compare as equal.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._numbers: dict[fx.Node, int] = {}
        table: dict[Any, int] = {}
        for node in graph.nodes:
            key: Any = node
            if node.op == "call_function" and is_pure(node):
                parts = fx.node.map_aggregate(
                    (node.args, dict(node.kwargs)),
                    lambda a: ("node", self._numbers[a]) if isinstance(a, fx.Node) else (type(a).__name__, a),
                )
                key = (node.target, repr(parts))
            self._numbers[node] = table.setdefault(key, len(table))

    def number(self, node: fx.Node) -> int:
        return self._numbers[node]

    def same(self, a: fx.Node, b: fx.Node) -> bool:
        """Return whether two nodes are equal except for reshapes and copies."""
        return self._numbers[strip(a)] == self._numbers[strip(b)]


def is_pure(node: fx.Node) -> bool:
    """Return whether a node has no side effects and gives the same result for the same inputs."""
    if is_op(node, aten.empty, aten.empty_like, aten.copy_) or is_collective(node):
        return False
    return not (_draws(node) or is_impure(node, random=False))


def _draws(node: fx.Node) -> bool:
    """Return whether a node draws random numbers. An operator with dropout draws none if its probability
    is 0."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    a = arguments(node)
    dropped = (a[name] for name in ("dropout_p", "dropout") if name in a)
    training = (a[name] for name in ("train", "training") if name in a)
    return all(p != 0 for p in dropped) and all(t is not False for t in training)


_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem", "_dtensor")
"""Namespaces of operators that other processes call at the same time."""
_GROUPS = ("group", "group_name", "process_group", "pg")
"""Names of process-group arguments of other packages' operators."""


def is_collective(node: fx.Node) -> bool:
    """Return whether other processes must call the operator as often as this one does."""
    if not isinstance(node.target, OpOverload):
        return False
    own = (argument.name for argument in node.target._schema.arguments)
    return node.target.namespace in _COLLECTIVES or any(name in _GROUPS for name in own)


def is_impure(node: fx.Node, random: bool = True) -> bool:
    """True if fx says that the node is impure. The answer is cached for each operator, because fx searches
    torch's registries.

    `random`: whether operators that may draw random numbers count as impure for that reason.
    """
    if not isinstance(node.target, OpOverload):
        return node.is_impure(random)
    if (node.target, random) not in _IMPURE:
        _IMPURE[node.target, random] = node.is_impure(random)
    return _IMPURE[node.target, random]


_IMPURE: dict[tuple[Any, bool], bool] = {}


def reached(
    start: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]], most: int | None = None
) -> dict[fx.Node, None]:
    """Return the nodes of `start` and all nodes that `step` reaches from them, in the order of discovery.

    most: the walk ends when it has found this many.
    """
    found = dict.fromkeys(start)
    todo = list(found)
    while todo and (most is None or len(found) < most):
        for node in step(todo.pop()):
            if node not in found:
                found[node] = None
                todo.append(node)
    return found


def nearest_products(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the products among `nodes`, and the nearest ones that the others are computed from."""
    found = reached(nodes, lambda n: () if is_op(n, *PRODUCTS) else n.all_input_nodes)
    return {n for n in found if is_op(n, *PRODUCTS)}


def behind(*nodes: fx.Node) -> dict[fx.Node, None]:
    """Return nodes, and everything that they are computed from."""
    return reached(nodes, lambda node: node.all_input_nodes)


def after(*nodes: fx.Node) -> dict[fx.Node, None]:
    """Return nodes, and everything that is computed from them."""
    return reached(nodes, lambda node: node.users)


def operand(node: fx.Node, i: int = 0) -> fx.Node:
    """Return argument `i`, which is a node."""
    found = node.args[i]
    if not isinstance(found, fx.Node):
        raise TypeError(f"argument {i} of {node.name} is {found!r}, not a node")
    return found


def integer(node: fx.Node, i: int) -> int:
    """Return argument `i`, which is a constant number."""
    found = node.args[i]
    if not isinstance(found, int):
        raise TypeError(f"argument {i} of {node.name} is {found!r}, not an int")
    return found


def several(node: fx.Node, i: int) -> Sequence[Any]:
    """Return argument `i`, which is a list of numbers or nodes."""
    found = node.args[i]
    if not isinstance(found, (list, tuple)):
        raise TypeError(f"argument {i} of {node.name} is {found!r}, not a list")
    return found
