"""Translates Dynamo's graph to functional aten and traces each distinct call once.

64 experts, or 48 layers, repeat the same few calls. The first of each kind is traced alone, which is
the costly part; its operators are copied for the others. Dynamo already knows the sizes of everything. This
file follows writes from call to call. If it cannot (a write through a view that others see, a nested graph),
it raises `CannotCopy`, and the graph is traced as a whole.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, rebind_unbacked

from ...meta.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    SymT,
    enter_autocast,
    exit_autocast,
    make_graph_module,
    pytree,
    set_grad_enabled,
    symbol_is_type,
)
from ..graph.nodes import arguments, integer
from ..graph.traced_nodes import example
from .calls import (
    OpenRegions,
    as_written,
    current,
    functional_tensors,
    inline_constants,
    is_reshaped,
    is_written,
    storage,
)

aten = torch.ops.aten

_SCALARS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_CONTEXTS = (set_grad_enabled, enter_autocast, exit_autocast)
"""Calls that change how later calls run. They are not in an aten graph."""
_ON_SCALARS = (aten.sym_size.int, aten._assert_scalar.default)
_FORGETFUL = ("as_strided", "as_strided_", "set_", "resize_", "resize_as_", "untyped_storage")
"""Calls that reach memory outside the tensor, so aliasing cannot be tracked."""
_KEPT = ("stack_trace", "nn_module_stack", "source_fn_stack")
_STANDING_FOR = [sympy.Dummy(f"size{i}", integer=True) for i in range(16)]


class CannotCopy(Exception):
    """The graph must be traced as a whole; the message says why."""


@dataclass
class _Call:
    """One call of Dynamo's graph, and the properties by which it is compared with others."""

    node: fx.Node
    inputs: list[fx.Node]
    """Tensors and symbolic numbers among its arguments, without repetition."""
    symbols: list[sympy.Symbol]
    """Data-dependent sizes: those of its inputs, then of its results."""
    number: int | None
    """The number of an expert: the n of x[n] or x == n."""
    key: Any
    """Calls with equal keys differ only in inputs, symbols and number."""


@dataclass
class _Template:
    """The trace of one call alone."""

    symbols: list[sympy.Symbol]
    placeholders: list[fx.Node]
    nodes: list[fx.Node]
    named: set[fx.Node]
    """Nodes whose sizes contain symbols of the call."""
    outputs: list[Any]
    spec: pytree.TreeSpec
    writes: list[tuple[int, Any]]
    """(index of the input, its new contents)"""
    number: int | None
    lists: dict[fx.Node, list[fx.Node]]
    """Nodes with several results. All results are outputs, in this order."""
    places: dict[int, set[int]] | None = None
    """Arguments of nodes that are the expert's number. Two traces with different numbers differ only
    there."""


class Copier:
    """Builds `graph`, which computes in functional aten what `gm` computes."""

    def __init__(
        self,
        gm: fx.GraphModule,
        fakes: Sequence[Any],
        fake_mode: FakeTensorMode,
        constants: dict[fx.Node, float],
    ) -> None:
        self.graph = fx.Graph()
        self._fakes, self._mode, self._shape_env = fakes, fake_mode, _shape_env(fake_mode)
        self._order = {n: i for i, n in enumerate(gm.graph.nodes)}
        self._held: dict[fx.Node, Any] = dict(constants)
        """The copy of each of Dynamo's nodes: a node, a Python number, or a tuple of these."""
        self._templates: dict[Any, _Template] = {}
        self._kinds: dict[fx.Node, Any] = {}
        self._facts: dict[sympy.Symbol, Any] = {}
        self._sharing: dict[int, list[fx.Node]] = {}
        """Dynamo's nodes, by the memory of their tensors."""
        self._numbers: dict[sympy.Basic, fx.Node] = {}
        """The first node that computes a symbolic number."""
        self._regions = OpenRegions()
        self._check(gm)

    def _check(self, gm: fx.GraphModule) -> None:
        for node in gm.graph.nodes:
            if node.op in ("get_attr", "call_module"):
                raise CannotCopy(f"{node.op} {node.target}")
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
            if name in _FORGETFUL:
                raise CannotCopy(f"{name} sees memory that is not the tensor's own")
            for x in pytree.tree_leaves(node.meta.get("example_value")):
                if isinstance(x, torch.Tensor) and not self._is_plain(x):
                    raise CannotCopy(f"{node.name} is not a plain tensor")
        self._asserts: dict[sympy.Symbol, list[sympy.Basic]] = {}
        for found in self._shape_env.deferred_runtime_asserts.values():
            for expr in (a.expr for a in found):
                for symbol in expr.free_symbols:
                    self._asserts.setdefault(symbol, []).append(expr)

    def _is_plain(self, x: torch.Tensor) -> bool:
        return (
            isinstance(x, FakeTensor)
            and x.fake_mode.shape_env is self._mode.shape_env
            and x.layout is torch.strided
            and not (x.is_quantized or x.is_conj() or x.is_neg())
        )

    # --- the graph ---

    def run(self) -> fx.GraphModule:
        with self._regions.ended():
            fakes = iter(self._fakes)
            for node in self._order:
                if node.op == "placeholder":
                    self._held[node] = self._placeholder(next(fakes))
                elif node.op == "output":
                    self._finish(node)
                elif node not in self._held:
                    self._held[node] = self._result(node)
                self._share(node)
        # Under Dynamo, use a module that writes its code when it is read, and not after each of Inductor's
        # passes.
        return make_graph_module(torch.nn.Module(), self.graph)

    def _placeholder(self, fake: Any) -> fx.Node:
        node = self.graph.placeholder(f"arg{len(self.graph.nodes)}_1")
        node.meta["val"] = fake
        return self._first(node)

    def _first(self, node: fx.Node) -> fx.Node:
        """Return `node`, or the earlier node that computed the same number."""
        number = node.meta.get("val")
        if not isinstance(number, (torch.SymInt, torch.SymFloat)):
            return node
        return self._numbers.setdefault(number.node.expr, node)

    def _share(self, node: fx.Node) -> None:
        for x in pytree.tree_leaves(node.meta.get("example_value")):
            if isinstance(x, torch.Tensor):
                self._sharing.setdefault(storage(x), []).append(node)

    def _finish(self, output: fx.Node) -> None:
        """Turn writes to inputs into a `copy_` epilogue."""
        inputs = [n for n in self._held if n.op == "placeholder"]
        nodes = self.graph.find_nodes(op="placeholder")
        written = [
            (p, n) for p, n in zip(nodes, inputs, strict=True) if self._held[n] is not p and _is_tensor(n)
        ]
        results = {storage(n.meta["example_value"]) for n in output.all_input_nodes if _is_tensor(n)}
        memory = [storage(f) for f in self._fakes if isinstance(f, torch.Tensor)]
        for placeholder, node in written:
            if memory.count(storage(placeholder.meta["val"])) > 1 or storage(example(node)) in results:
                raise CannotCopy("memory that the graph writes to is shared")
        result = fx.node.map_arg(output.args[0], lambda n: self._held[n])
        for placeholder, node in written:
            copied = self.graph.call_function(aten.copy_.default, (placeholder, self._held[node]))
            copied.meta["val"] = placeholder.meta["val"]
        self.graph.output(result)

    # --- one node ---

    def _result(self, node: fx.Node) -> Any:
        if node.target in _CONTEXTS:
            return self._context(node)
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            parts = self._held.get(node.args[0])
            if isinstance(parts, (tuple, list)):
                return parts[integer(node, 1)]
        if node.target is torch.nn.functional.scaled_dot_product_attention and (new := self._attention(node)):
            return new
        if node.target in _ON_SCALARS or (
            _is_python(node) and not any(map(_is_tensor, node.all_input_nodes))
        ):
            return self._scalar(node)
        call = self._describe(node)
        template = self._templates.get(call.key)
        if template is None or not (template.places or template.number == call.number):
            traced = self._trace(call)
            traced.places = _places(template, traced) if template is not None else None
            template = self._templates[call.key] = traced
        return self._copy(template, call)

    def _context(self, node: fx.Node) -> Any:
        args = fx.node.map_arg(node.args, lambda n: self._held[n])
        region = node.target(*args)  # type: ignore[operator]
        self._regions.ran(node.target, args, region)
        return region

    def _scalar(self, node: fx.Node) -> Any:
        """Copy a call on symbolic numbers. It needs no translation to aten."""
        args = fx.node.map_arg(node.args, lambda n: self._held[n])
        if not any(isinstance(a, fx.Node) for a in args):
            return node.target(*args)  # type: ignore[operator]
        new = self.graph.call_function(node.target, args)  # type: ignore[arg-type]
        new.meta.update(_kept(node))
        new.meta["val"] = node.meta.get("example_value")
        return self._first(new)

    def _attention(self, node: fx.Node) -> fx.Node | None:
        """Keep attention as one operator. A trace would fix the kernel that torch chooses for the current
        arguments, which may change later.

        Return None if autocast would change the arguments first, or random numbers are drawn.
        """
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self._held[n])
        new = self.graph.call_function(aten.scaled_dot_product_attention.default, args, kwargs)
        new.meta.update(_kept(node))
        new.meta["val"] = example(node)
        if any(enabled for enabled, _ in _autocast()) or arguments(new)["dropout_p"] != 0:
            self.graph.erase_node(new)
            return None
        return new

    # --- keys of calls ---

    def _describe(self, node: fx.Node) -> _Call:
        inputs: dict[fx.Node, int] = {}
        symbols: dict[sympy.Symbol, int] = {}
        numbers: list[int] = []

        def of(a: Any) -> Any:
            if isinstance(a, fx.Node):
                held = self._held[a]
                if isinstance(held, fx.Node):
                    return "input", inputs.setdefault(a, len(inputs)), self._kind(a, symbols)
                return of(held)
            if isinstance(a, (tuple, list)):
                return type(a), *map(of, a)
            if isinstance(a, dict):
                return tuple((k, of(v)) for k, v in a.items())
            if isinstance(a, slice):
                return "slice", *(of(x) if isinstance(x, fx.Node) else x for x in (a.start, a.stop, a.step))
            if type(a) is int and node.target in _OF_ONE:
                numbers.append(a)
                return "number", a < 0
            if a is None or isinstance(a, _CONSTANTS):
                return type(a), repr(a)
            return object()  # equal to no other key

        what: Any = (node.op, node.target, of(node.args), of(node.kwargs), _autocast())
        bindings = node.meta.get("unbacked_bindings") or {}
        for symbol in (*bindings, *sorted(filter(_is_unbacked, _symbols(example(node))), key=str)):
            symbols.setdefault(symbol, len(symbols))
        if len(symbols) > len(_STANDING_FOR):
            raise CannotCopy(f"{node.name} has {len(symbols)} sizes that only the data knows")
        if node.target == "item":
            what = object()
        number = numbers[0] if len(numbers) == 1 else None
        if len(numbers) > 1:
            what = (what, *numbers)
        facts = tuple(self._known(s) for s in symbols)
        key = (what, tuple(map(str, bindings.values())), facts)
        return _Call(node, list(inputs), list(symbols), number, key)

    def _kind(self, node: fx.Node, symbols: dict[sympy.Symbol, int]) -> Any:
        """Return dtype, device, sizes and strides, without the names of data-dependent sizes."""
        if node not in self._kinds:
            x = example(node)
            if isinstance(x, _SCALARS):
                self._kinds[node] = (type(x), _sizes([x]))
            elif isinstance(x, torch.Tensor):
                self._kinds[node] = ((x.dtype, x.device), _sizes((*x.shape, *x.stride())))
            else:
                raise CannotCopy(f"{node.name} is a {type(x).__name__}")
        what, sizes = self._kinds[node]
        return what, tuple(s if isinstance(s, int) else _anonymous(s, symbols) for s in sizes)

    def _known(self, symbol: sympy.Symbol) -> Any:
        """Return the known properties of a symbol, such as its range."""
        if symbol not in self._facts:
            env, name = self._shape_env, {symbol: _STANDING_FOR[0]}
            asserts = sorted(str(a.xreplace(name)) for a in self._asserts.get(symbol, ()))
            self._facts[symbol] = (str(env.var_to_range.get(symbol)), symbol in env.size_like, *asserts)
        return self._facts[symbol]

    # --- tracing one call alone ---

    def _trace(self, call: _Call) -> _Template:
        node = call.node
        spec: list[pytree.TreeSpec] = []
        written: list[int] = []
        target: Any = as_written(node)
        if node.op == "call_method":
            method = str(node.target)
            target = lambda self, *args, **kwargs: getattr(self, method)(*args, **kwargs)  # noqa: E731

        def alone(*inputs: Any) -> Any:
            with functional_tensors(inputs) as wrapped:
                at = dict(zip(call.inputs, wrapped))
                args, kwargs = fx.node.map_arg(
                    (node.args, node.kwargs), lambda n: at[n] if n in at else self._held[n]
                )
                result = target(*args, **kwargs)
                rebind_unbacked(self._shape_env, node, result)
                flat, form = pytree.tree_flatten(result)
                spec[:] = [form]
                self._check_memory(call, wrapped, flat)
                written[:] = [i for i, w in enumerate(wrapped) if is_written(w)]
                return [current(o) for o in flat], [current(wrapped[i]) for i in written]

        traced = make_fx(alone, decomposition_table={})(*self._inputs(call))
        inline_constants(traced)
        nodes = list(traced.graph.nodes)
        outputs, contents = nodes[-1].args[0]
        inner = [n for n in nodes if n.op == "call_function"]
        if len(inner) + len(call.inputs) + 1 != len(nodes):
            raise CannotCopy(f"{node.name} has more than operators")
        own = set(call.symbols)
        named = {n for n in inner if own & _symbols(n.meta.get("val"))}
        return _Template(
            call.symbols, nodes[: len(call.inputs)], inner, named, outputs, spec[0],
            list(zip(written, contents)), call.number, _lists(inner, outputs),
        )  # fmt: skip

    def _check_memory(self, call: _Call, inputs: Sequence[Any], outputs: list[Any]) -> None:
        """Check that these tensors share memory exactly as Dynamo's tensors do, because writes are followed
        on Dynamo's tensors."""
        if any(map(is_reshaped, inputs)):
            raise CannotCopy(f"{call.node.name} changes the shape of its input")
        expected = pytree.tree_leaves(example(call.node))
        if len(expected) != len(outputs):
            raise CannotCopy(f"{call.node.name} has another result")
        for x, out in zip(expected, outputs):
            if isinstance(x, torch.Tensor) != isinstance(out, torch.Tensor):
                raise CannotCopy(f"{call.node.name} has another result")
            if not isinstance(x, torch.Tensor):
                continue
            if x.dtype != out.dtype or _sizes((*x.shape, *x.stride())) != _sizes((*out.shape, *out.stride())):
                raise CannotCopy(f"{call.node.name} has another result")
            for node, w in zip(call.inputs, inputs):
                if isinstance(w, torch.Tensor):
                    ours = storage(out) == storage(w)
                    if ours != (storage(x) == storage(example(node))):
                        raise CannotCopy(f"{call.node.name} shares memory otherwise than in Dynamo's trace")

    def _inputs(self, call: _Call) -> list[Any]:
        """Return the inputs for tracing a call. Copies share their stand-ins for tensors; inputs must not."""
        inputs: list[Any] = []
        for node in call.inputs:
            x = self._held[node].meta["val"]
            if isinstance(x, FakeTensor) and (x.fake_mode is not self._mode or any(x is y for y in inputs)):
                x = self._like(x, x.shape, x.stride())
            inputs.append(x)
        return inputs

    def _like(self, x: torch.Tensor, sizes: Sequence[Any], strides: Sequence[Any]) -> torch.Tensor:
        with self._mode:
            return torch.empty_strided(sizes, strides, dtype=x.dtype, device=x.device)

    # --- copying a traced call ---

    def _copy(self, template: _Template, call: _Call) -> Any:
        rename = {old: new for old, new in zip(template.symbols, call.symbols) if old is not new}
        at: dict[Any, Any] = {p: self._held[n] for p, n in zip(template.placeholders, call.inputs)}
        kept = _kept(call.node)
        known = self._known_outputs(template, call) if rename else {}
        for i, node in enumerate(template.nodes):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), at.__getitem__)
            if call.number != template.number:
                places = template.places.get(i, ())  # type: ignore[union-attr]
                args = tuple(call.number if d in places else a for d, a in enumerate(args))
            new = self.graph.create_node("call_function", node.target, args, kwargs, _name(node))
            new.meta.update(kept)
            if "val" in node.meta:
                new.meta["val"] = node.meta["val"]
                if rename and node in template.named:
                    new.meta["val"] = (
                        known[node] if node in known else self._renamed(node.meta["val"], rename)
                    )
            if bindings := node.meta.get("unbacked_bindings"):
                renamings = self._shape_env.unbacked_renamings
                symbols = (renamings.get(s, s) for s in bindings)
                new.meta["unbacked_bindings"] = {
                    rename.get(s, s): path for s, path in zip(symbols, bindings.values())
                }
            at[node] = self._first(new)
        outputs = [at[o] if isinstance(o, fx.Node) else o for o in template.outputs]
        for i, contents in template.writes:
            self._write(call, call.inputs[i], at[contents])
        return pytree.tree_unflatten(outputs, template.spec)

    @staticmethod
    def _known_outputs(template: _Template, call: _Call) -> dict[fx.Node, Any]:
        """Return Dynamo's example values for the results of a call."""
        known = dict(zip(template.outputs, pytree.tree_leaves(example(call.node))))
        return known | {n: type(n.meta["val"])([known[p] for p in ps]) for n, ps in template.lists.items()}

    def _renamed(self, x: Any, rename: dict[sympy.Symbol, sympy.Symbol]) -> Any:
        def size(s: Any) -> Any:
            if not isinstance(s, torch.SymInt):
                return s
            return self._shape_env.create_symintnode(s.node.expr.xreplace(rename), hint=None)

        if isinstance(x, (tuple, list)):
            return type(x)([self._renamed(y, rename) for y in x])
        if isinstance(x, torch.Tensor):
            return self._like(x, [*map(size, x.shape)], [*map(size, x.stride())])
        if isinstance(x, torch.SymInt):
            return size(x)
        raise CannotCopy(f"a {type(x).__name__} of sizes that only the data knows")

    def _write(self, call: _Call, target: fx.Node, contents: fx.Node) -> None:
        """Record a write. All nodes that are the written tensor get the new contents. No other node may read
        its memory later."""
        now = self._order[call.node]
        memory, place = storage(example(target)), _place(example(target))
        if any(n is not target and _is_tensor(n) and storage(example(n)) == memory for n in call.inputs):
            raise CannotCopy(f"{call.node.name} reads the memory that it writes to")
        read_later = [
            n
            for n in self._sharing[memory]
            if n.op == "placeholder" or any(self._order[u] > now for u in n.users)
        ]
        self._sharing[memory] = read_later
        for node in read_later:
            if not _is_tensor(node) or _place(example(node)) != place:
                raise CannotCopy(f"{call.node.name} writes to memory that {node.name} is a view of")
            self._held[node] = contents


_CONSTANTS = (
    bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(...)
)  # fmt: skip


_OF_ONE = (
    operator.getitem, operator.eq, operator.ne, operator.ge, operator.gt, operator.le, operator.lt,
    torch.eq, torch.ne, torch.ge, torch.gt, torch.le, torch.lt, "eq", "ne", "ge", "gt", "le", "lt",
    "__eq__",  # Dynamo of torch 2.11 uses this for `==`
)  # fmt: skip
"""Calls that take a number, where the value of the number does not change the size or form of any result."""


def _lists(nodes: list[fx.Node], outputs: list[Any]) -> dict[fx.Node, list[fx.Node]]:
    """Return nodes with several results, such as `unbind`, with the outputs that are their results."""
    found = {}
    for node in nodes:
        if type(node.meta.get("val")) in (list, tuple):
            at = {integer(u, 1): u for u in node.users if u.target is operator.getitem and u in outputs}
            if list(at) == list(range(len(node.meta["val"]))):
                found[node] = list(at.values())
    return found


def _places(a: _Template, b: _Template) -> dict[int, set[int]] | None:
    """Return the arguments in which two traces of a call with different numbers differ. None if they
    differ otherwise."""
    places: dict[int, set[int]] = {}
    twin = dict(zip(a.placeholders, b.placeholders))
    if len(a.nodes) != len(b.nodes):
        return None
    for i, (x, y) in enumerate(zip(a.nodes, b.nodes)):
        args, kwargs = fx.node.map_arg((x.args, x.kwargs), twin.__getitem__)
        if (x.target, kwargs, len(args)) != (y.target, y.kwargs, len(y.args)):
            return None
        for d, (m, n) in enumerate(zip(args, y.args)):
            if m != n:
                if not (type(m) is type(n) is int and (m, n) == (a.number, b.number)):
                    return None
                places.setdefault(i, set()).add(d)
        twin[x] = y
    outputs = [twin[o] if isinstance(o, fx.Node) else o for o in a.outputs]
    return places if outputs == b.outputs and not b.writes else None


def _is_python(node: fx.Node) -> bool:
    return getattr(node.target, "__module__", "") == "_operator"


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(example(node), torch.Tensor)


def _place(x: torch.Tensor) -> Any:
    """Return the offset, sizes and strides of a tensor in its memory."""
    return x.dtype, _sizes((*x.shape, *x.stride(), x.storage_offset()))


def _sizes(sizes: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(s if isinstance(s, int) else s.node.expr for s in sizes)


def _is_unbacked(symbol: Any) -> bool:
    return symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT))


def _anonymous(expr: sympy.Basic, symbols: dict[sympy.Symbol, int]) -> sympy.Basic:
    if expr in symbols:
        return _STANDING_FOR[symbols[expr]]
    unbacked = sorted(filter(_is_unbacked, expr.free_symbols), key=str)
    if len(symbols) + len(unbacked) > len(_STANDING_FOR):
        raise CannotCopy("too many sizes that only the data knows")
    return expr.xreplace({s: _STANDING_FOR[symbols.setdefault(s, len(symbols))] for s in unbacked})


def _symbols(x: Any) -> set[Any]:
    sizes = []
    for y in pytree.tree_leaves(x):
        sizes += [*y.shape, *y.stride()] if isinstance(y, torch.Tensor) else [y]
    return {symbol for s in sizes if isinstance(s, _SCALARS) for symbol in s.node.expr.free_symbols}


def _autocast() -> Any:
    return tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))


def _kept(node: fx.Node) -> dict[str, Any]:
    return {k: node.meta[k] for k in _KEPT if k in node.meta}


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return getattr(packet, "__name__", node.name)


def _shape_env(mode: FakeTensorMode) -> ShapeEnv:
    """Return the mode's ShapeEnv, or an empty one if the sizes have no symbols."""
    return mode.shape_env if mode.shape_env is not None else ShapeEnv()
