"""Tracks traced tensors with a known value: the number of an expert, and values computed from it.

A loop over hit experts is traced over all experts (`hit_experts.py`). Its variable stays a tensor, but its
value is known, so Python's questions have answers: `t.item()`, `int(t)`, `experts[t]` of a list,
`f"expert_{t[0]}"`, `if t == 3`. If it indexes a tensor, the index becomes a number or a slice, which means
the same and can be read in the graph.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx, nn

from ...meta.torch_internals import without_modes
from ..graph.traced_nodes import called, example, since, writes_to
from . import api
from .rules import answers, replaces, session

if TYPE_CHECKING:
    from .api import Handler, Instruction, Method, Tracer, Variable

_VALUE = "fp4_known"
"""Key in the meta of a node: its value on the CPU."""

_COMPUTED = {
    "getitem", "squeeze", "unsqueeze", "view", "reshape", "flatten", "clone", "contiguous", "detach",
    "long", "int", "eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "floordiv", "mod",
}  # fmt: skip


def create(tx: Tracer, number: int, like: Tensor) -> Variable:
    """Create a variable for Dynamo: an element of `like` [n], or a row of `like` [n, 1], with the value
    `number`."""
    shape = tuple(1 for _ in like.shape[1:])
    settings = {"dtype": like.dtype, "device": like.device}
    v = api.wrap_fx_proxy(tx, tx.output.create_proxy("call_function", torch.full, (shape, number), settings))
    v.as_proxy().node.meta[_VALUE] = torch.full(shape, number, dtype=like.dtype, device="cpu")
    session(tx.output).has_known_values = True
    return v


def value(v: Variable) -> Tensor | None:
    """Return the value of one of Dynamo's variables if it is known, else None."""
    return _value(v.as_proxy().node) if isinstance(v, api.TensorVariable) else None


def _value(node: fx.Node) -> Tensor | None:
    found = node.meta.get(_VALUE)
    if found is None and called(node) in _COMPUTED and not node.kwargs:
        args = [_value(a) if isinstance(a, fx.Node) else a for a in node.args]
        if not any(isinstance(a, Tensor) for a in args) or any(a is None for a in args):
            return None
        of = args[0]
        method = node.op == "call_method"
        found = getattr(of, str(node.target))(*args[1:]) if method else node.target(*args)  # type: ignore[operator]
    if found is not None and writes_to([node], since(node)):
        return None
    return found


def number(v: Variable) -> int | float | None:
    """Return its value as a Python number if it is known and a single one."""
    known = value(v)
    return known.item() if known is not None and known.numel() == 1 else None


def number_of(node: fx.Node) -> int | float | None:
    """Return the number that a node holds, if it is known and a single one, even while other values are
    fake."""
    with without_modes():
        known = _value(node)
        return known.item() if known is not None and known.numel() == 1 else None


def _constant(number: float | None) -> Variable:
    return api.ConstantVariable.create(number)


# --- what wraps Dynamo's handlers of opcodes ---


def formats(method: Handler) -> Handler:
    """Format a tensor without dimensions, `f"{t}"`, as its number."""

    def format_value(tx: Tracer, inst: Instruction) -> None:
        with_spec = inst.opname == "FORMAT_WITH_SPEC" or (inst.opname == "FORMAT_VALUE" and inst.arg & 4)
        converted = inst.opname == "FORMAT_VALUE" and inst.arg & 3
        at = -2 if with_spec else -1
        known = value(tx.stack[at]) if session(tx.output).has_known_values and not converted else None
        if known is not None and known.dim() == 0:
            tx.stack[at] = _constant(known.item())
        method(tx, inst)

    return format_value


@replaces(2)
def subscripts(tx: Tracer, x: Variable, index: Variable) -> Variable | None:
    """Return `x[index]` with numbers or slices in place of known tensors. None if there are none."""
    if not session(tx.output).has_known_values:
        return None
    x, index = x.realize(), index.realize()
    items = [v.realize() for v in index.items] if isinstance(index, api.TupleVariable) else [index]
    several = isinstance(index, api.TupleVariable)
    known = {at: number(v) for at, v in enumerate(items)}
    numbers = {at: n for at, n in known.items() if isinstance(n, int) and not isinstance(n, bool)}
    if not numbers:
        return None
    if not isinstance(x, api.TensorVariable):
        if several or not issubclass(_type(x), _SEQUENCES):
            return None
        return api.BuiltinVariable(operator.getitem).call_function(tx, [x, _constant(numbers[0])], {})
    rows = [at for at in numbers if example(items[at].as_proxy().node).dim() == 1]
    others = [at for at, v in enumerate(items) if isinstance(v, api.TensorVariable) and at not in numbers]
    dims = {example(items[at].as_proxy().node).dim() for at in others}
    masks = any(example(items[at].as_proxy().node).dtype in (torch.bool, torch.uint8) for at in others)
    if rows and others:
        # One index for all of them: known ones are repeated, if they are beside each other.
        together = sorted([*rows, *others])
        if dims != {1} or masks or together != list(range(together[0], together[-1] + 1)):
            return None
    elif len(rows) > 1 or any(example(items[at].as_proxy().node).dim() > 1 for at in numbers):
        return None
    copies = bool(rows) and not others
    for at, n in numbers.items():
        items[at] = _slice(n) if at in rows and copies else _constant(n)
    key = api.TupleVariable(items) if several else items[0]
    found = api.BuiltinVariable(operator.getitem).call_function(tx, [x, key], {})
    return found.call_method(tx, "clone", [], {}) if copies else found  # an index copies, a slice is a view


_SEQUENCES = (list, tuple, nn.ModuleList, nn.Sequential, nn.ParameterList)
"""Types that take such an index as a number."""


def _type(v: Variable) -> type:
    try:
        found = v.python_type()
    except Exception:  # Dynamo cannot tell
        return object
    return found if isinstance(found, type) else object


def _slice(n: int) -> Variable:
    items = [_constant(n), _constant(n + 1), _constant(None)]
    try:
        return api.SliceVariable(items)
    except TypeError:  # newer versions need the place
        return api.SliceVariable(items, None)


# --- what wraps methods of Dynamo's variables of tensors ---


@answers
def numbers(tx: Tracer, v: Variable) -> Variable | None:
    """Answer `t.item()`, `int(t)` and `operator.index(t)`."""
    found = number(v) if session(tx.output).has_known_values else None
    return None if found is None else _constant(found)


def index_of(method: Method) -> Method:
    """Answer `operator.index(t)` where Dynamo's builtin functions handle it."""

    def index(self: Variable, tx: Tracer, arg: Variable) -> Variable:
        found = number(arg.realize()) if session(tx.output).has_known_values else None
        return _constant(found) if type(found) is int else method(self, tx, arg)

    return index
