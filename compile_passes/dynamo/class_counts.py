"""Lets Dynamo capture `one_hot(ids, n)` with a data-dependent n.

An example is `one_hot(ids, max(ids.max() + 1, c))[..., :c]`. If the number of classes n is a tensor, Python
reads its value, and Dynamo breaks the graph there. Here n becomes c + m, where only m depends on the data: a
size that can stay in the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx

from ...meta.torch_internals import assert_async
from ..graph.traced_nodes import called, example
from . import api
from .rules import scalar_outputs

if TYPE_CHECKING:
    from .api import Method, Proxy, TorchInGraphFunctionVariable, Tracer, Variable


def at_least(method: Method) -> Method:
    """Wrap `max(n, c)` of a tensor and a size, which is a data-dependent comparison for Dynamo."""

    def call_max(self: Variable, tx: Tracer, *args: Variable, **kwargs: object) -> Variable:
        if len(args) == 2 and not kwargs:
            of = [v.realize() for v in args]
            numbers = [v for v in of if _is_number(v)]
            sizes = [
                v for v in of if isinstance(v, api.SymNodeVariable) and isinstance(v.sym_num, torch.SymInt)
            ]
            if len(numbers) == len(sizes) == 1:
                clamp = api.TorchInGraphFunctionVariable(torch.clamp)
                return clamp.call_function(tx, numbers, {"min": sizes[0]})
        return method(self, tx, *args, **kwargs)

    return call_max


def one_hot(method: Method) -> Method:
    """Wrap the method by which Dynamo's variables of torch functions are called."""

    def call_function(
        self: TorchInGraphFunctionVariable, tx: Tracer, args: Sequence[Variable], kwargs: dict[str, Variable]
    ) -> Variable:
        if self.value is torch.nn.functional.one_hot and len(args) + len(kwargs) == 2:
            given = [v.realize() for v in (*args, *kwargs.values())]
            if kwargs.keys() <= {"num_classes"} and _is_number(given[1]):
                return _one_hot(tx, *given)
        return method(self, tx, args, kwargs)

    return call_function


def _one_hot(tx: Tracer, ids: Variable, classes: Variable) -> Variable:
    n, of = classes.as_proxy(), ids.as_proxy()
    least = _least(n)
    with scalar_outputs(tx.output):
        more = api.wrap_fx_proxy(tx, (n - least).item())
    torch._check(more.sym_num >= 0)
    columns = api.wrap_fx_proxy(tx, more.as_proxy() + least)
    for fine, what in ((of >= 0, "non-negative"), (of < n, "smaller than num_classes")):
        message = f"one_hot: Class values must be {what}."
        tx.output.create_proxy("call_function", assert_async, (fine.all(), message), {})
    where = {"device": api.ConstantVariable.create(example(of.node).device)}
    every = api.TorchInGraphFunctionVariable(torch.arange).call_function(tx, [columns], where)
    rows = ids.call_method(tx, "unsqueeze", [api.ConstantVariable.create(-1)], {})
    return api.wrap_fx_proxy(tx, (rows.as_proxy() == every.as_proxy()).long())


def _is_number(v: Variable) -> bool:
    """Return whether a variable of Dynamo's is a tensor that holds one integer."""
    x = example(v.as_proxy().node) if type(v) is api.TensorVariable else None
    return isinstance(x, torch.Tensor) and x.dim() == 0 and x.dtype in (torch.int32, torch.int64)


def _least(number: Proxy) -> object:
    """Return a lower bound of a number: an int or a size."""
    node = number.node
    if called(node) in ("clamp", "clip", "clamp_min") and isinstance(node.args[0], fx.Node):
        names = ("min", "max") if called(node) != "clamp_min" else ("min",)
        bounds = dict(zip(names, node.args[1:])) | node.kwargs
        least = bounds.get("min")
        known = example(least) if isinstance(least, fx.Node) else least
        if bounds.get("max") is None and isinstance(known, int | torch.SymInt):
            return fx.Proxy(least, number.tracer) if isinstance(least, fx.Node) else least
    return 0
