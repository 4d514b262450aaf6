"""Dynamo's graph -> a functional aten graph in which `silu`, `_softmax`, `_grouped_mm` are still whole.

Inductor decomposes while it traces, so an FFN is hard to see in its graphs. Here Dynamo's graph is
interpreted once more under its own fake tensors with no decompositions; the result is handed back to
Inductor as if Dynamo had produced it. Dynamo's graph itself is never changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts
from torch.utils import _pytree as pytree

from .held import Held, Unreadable, held, is_subclass, stand_in

aten = torch.ops.aten


class CannotCapture(Exception):
    """The graph is left to Inductor as it is; the message says why."""


def fake_inputs(fake_mode: FakeTensorMode, inputs: Sequence[Any]) -> list[Any]:
    """The fakes Dynamo used for these inputs: same symbols, so nothing is guarded or recompiled anew."""
    context = TracingContext.try_get()
    known = context.tensor_to_context if context is not None else {}

    def convert(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if is_subclass(x):  # one that is held in 4 bits: an ordinary tensor takes its place
            with fake_mode:
                return stand_in(x)
        if isinstance(x, FakeTensor):
            return x if x.fake_mode is fake_mode else fake_mode.from_tensor(x)
        symbolic = known.get(x)
        source = symbolic.tensor_source if symbolic is not None else None
        return fake_mode.from_tensor(x, symbolic_context=symbolic, source=source, trace=symbolic is None)

    return [convert(x) for x in inputs]


def capture(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, FakeTensorMode]:
    """Trace `gm`. Writes to inputs become a `copy_` epilogue, which Inductor's AOTAutograd understands."""
    if any(True for _ in gm.parameters()) or any(True for _ in gm.buffers()):
        raise CannotCapture("the graph holds tensors as attributes (inline_inbuilt_nn_modules is off?)")
    ways = [_held(x) for x in inputs]

    context = TracingContext.try_get()
    fake_mode = (context.fake_mode if context is not None else None) or detect_fake_mode(inputs)
    if fake_mode is None:
        fake_mode = FakeTensorMode()
    fakes = fake_inputs(fake_mode, inputs)
    # Memoised fake outputs of Dynamo's own run must not be taken for those of this one.
    fake_mode.epoch += 1

    interpreter = _Interpreter(gm)
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_mode)
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(torch.no_grad())
        stack.enter_context(fx.traceback.preserve_node_meta())
        traced = make_fx(_functional(interpreter.run), decomposition_table={})(*fakes)
    _restore_dynamo_metadata(gm, traced)
    for node, way in zip(_placeholders(traced), ways, strict=True):
        if way is not None:
            node.meta["held"] = way
    _inline_constants(traced)
    return traced, fake_mode


def _held(x: Any) -> Held | None:
    if not is_subclass(x):
        return None
    try:
        way = held(x)
    except Unreadable as reason:
        raise CannotCapture(f"an input is {reason}") from None
    if way is None:
        raise CannotCapture(f"an input is a tensor subclass, {type(x).__name__}")
    return way


def _inline_constants(gm: fx.GraphModule) -> None:
    """`torch.tensor([...])` in the model became an attribute; Inductor expects Dynamo's graphs to have none.

    An empty DynamicCache starts with one, so every call of a transformers model that fills a cache does.
    """
    for node in list(gm.graph.find_nodes(op="get_attr")):
        value = getattr(gm, node.target)
        if not isinstance(value, torch.Tensor):
            continue
        for user in list(node.users):
            if user.target is not aten.lift_fresh_copy.default or isinstance(value, FakeTensor):
                raise CannotCapture(f"the graph holds a tensor as an attribute ({node.target})")
            with gm.graph.inserting_before(user):
                new = gm.graph.call_function(
                    torch.tensor, (value.tolist(),), {"dtype": value.dtype, "device": value.device}
                )
            new.meta.update(user.meta)
            user.replace_all_uses_with(new)
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)
        delattr(gm, node.target)
    gm.recompile()


def _placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="placeholder"))


def mutated_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Placeholders that the graph writes to."""
    writes = graph.find_nodes(op="call_function", target=aten.copy_.default)
    return {n.args[0] for n in writes if isinstance(n.args[0], fx.Node) and n.args[0].op == "placeholder"}


def source_name(source: Any) -> str:
    """Where Dynamo found an input, such as L['self']._modules['experts']._parameters['down_proj']."""
    name = getattr(source, "name", "")
    return name if isinstance(name, str) else name()  # a method in older torch


class _Interpreter(PropagateUnbackedSymInts):
    """Takes Python floats beside expert weights in a module (alpha, limit) for the constants they are.

    With `dynamic=True` Dynamo makes symbols of them, and an activation could not be told. They are guarded
    on, so another value compiles anew; all other floats stay symbols.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        weights = [n for n in _placeholders(gm) if _rank(n) == 3]
        self._expert_weights = [source_name(getattr(n, "_dynamo_source", None)) for n in weights]

    def run_node(self, n: fx.Node) -> Any:
        symbol = n.meta.get("example_value")
        if isinstance(symbol, torch.SymFloat) and n.op == "call_method" and n.target == "item":
            module = source_name(getattr(getattr(n.args[0], "_dynamo_source", None), "base", None))
            if module and any(w.startswith(module + ".") for w in self._expert_weights):
                return float(symbol)
        return super().run_node(n)


def _rank(node: fx.Node) -> int:
    example = node.meta.get("example_value")
    return example.dim() if isinstance(example, torch.Tensor) else 0


def _functional(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` without writes: what it wrote to an input is copied there at the end.

    AOTAutograd's functional tensors, since `torch.func.functionalize` turns symbolic sizes into numbers in
    some composite operators (a linear layer with a bias).
    """

    def inner(*args: Any) -> Any:
        keep_out = torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
        )
        with keep_out, FunctionalTensorMode():
            wrapped = [FunctionalTensor.to_functional(a) if isinstance(a, torch.Tensor) else a for a in args]
            outputs = run(*wrapped)
            flat, spec = pytree.tree_flatten(outputs)
            inputs = [(a, w) for a, w in zip(args, wrapped) if isinstance(w, FunctionalTensor)]
            _check_aliases(inputs, flat)
            flat = [_current(o) for o in flat]
            writes = [(a, _current(w)) for a, w in inputs if _is_written(w)]
        for target, new in writes:
            target.copy_(new)
        return pytree.tree_unflatten(flat, spec)

    return inner


def _current(t: Any) -> Any:
    if not isinstance(t, FunctionalTensor):
        return t
    torch._sync(t)
    return torch._from_functional_tensor(t.elem)


def _is_written(t: FunctionalTensor) -> bool:
    torch._sync(t)
    return torch._functionalize_has_data_mutation(t.elem)


def _check_aliases(inputs: list[tuple[torch.Tensor, FunctionalTensor]], outputs: list[Any]) -> None:
    """A second view of a mutated input would be taken for separate memory once the graph is functional."""
    if any(torch._functionalize_has_metadata_mutation(w.elem) for _, w in inputs):
        raise CannotCapture("the graph changes the shape or strides of an input in place")
    written = [(_storage(a), _storage(w.elem)) for a, w in inputs if _is_written(w)]
    memory = {m for m, _ in written}
    if len(written) < sum(_storage(a) in memory for a, _ in inputs):
        raise CannotCapture("two inputs share memory and the graph writes to it")
    results = [_storage(o.elem) for o in outputs if isinstance(o, FunctionalTensor)]
    if any(storage in results for _, storage in written):
        raise CannotCapture("an output shares memory with an input that the graph writes to")


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def _restore_dynamo_metadata(gm: fx.GraphModule, traced: fx.GraphModule) -> None:
    """What AOTAutograd reads from Dynamo's graph: sources, and which inputs have fixed addresses."""
    for old, new in zip(_placeholders(gm), _placeholders(traced), strict=True):
        new._dynamo_source = getattr(old, "_dynamo_source", None)
        if "tensor_dict" in old.meta:
            new.meta["tensor_dict"] = dict(old.meta["tensor_dict"])
    if hasattr(gm, "_param_name_to_source"):
        traced._param_name_to_source = {}
    # Constants (`torch.tensor(2.0)` in the model) are traced as buffers, which need a source in AOTAutograd.
    for name, constant in list(traced.named_buffers(recurse=False)):
        delattr(traced, name)
        setattr(traced, name, constant)
    traced.meta.update(gm.meta)
