"""`if token.numel() == 0: continue` in a loop over experts, captured as if the branch were not there.

Dynamo breaks its graph at a branch on a size that only the data knows; in a loop that leaves the whole
function to Python. A branch that only skips what does nothing for empty rows need not be one: the graph of
the way that does the work holds for both. Proved while Dynamo traces that way, up to where both ways meet:

1. The condition asks if a number of rows is 0: a size that only the data knows, or how much of a mask is set.
2. Python: no local that is read later has changed, and no object that Dynamo knows of.
3. Tensors: the nodes traced in between, run again on fake tensors with no rows, raise nothing, draw no random
   numbers, need no gradient, and write to tensors of their own only, or to no element of another's.

Where the proof fails Dynamo starts over, and breaks the graph at that branch as it always did.
"""

from __future__ import annotations

import dis
import functools
import operator
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.bytecode_analysis import HASFREE, HASLOCAL, JUMP_OPCODES, TERMINAL_OPCODES
from torch._dynamo.exc import UnspecializeRestartAnalysis, Unsupported
from torch._dynamo.utils import counters
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    free_unbacked_symbols,
    statically_known_true,
)
from torch.utils._python_dispatch import TorchDispatchMode

SEEN_THROUGH, KEPT = "fp4_branches_seen_through", "fp4_branches_kept"
"""Of `torch._dynamo.utils.counters`: places ("file:line"), and "file:line stays: why"."""


def see_through_branches() -> None:
    """For graphs of backends with `sees_through_branches`. The one hook in Dynamo is its table of opcodes."""
    from torch._dynamo import symbolic_convert

    jumps = [i for i, name in enumerate(dis.opname) if re.fullmatch(r"POP_JUMP_.*IF_(TRUE|FALSE)", name)]
    classes = [symbolic_convert.InstructionTranslatorBase]
    for cls in classes:
        classes += cls.__subclasses__()
        for opcode in jumps:
            if not hasattr(cls.dispatch_table[opcode], "_fp4"):
                cls.dispatch_table[opcode] = _answering_first(cls.dispatch_table[opcode])


def _answering_first(method: Callable[..., None]) -> Callable[..., None]:
    from torch._dynamo.variables import ConstantVariable

    @functools.wraps(method)
    def jump(tx: Any, inst: Any) -> None:
        answer = _take_the_way_that_works(tx, inst) if _wanted(tx.output) else None
        if answer is not None:
            tx.stack[-1] = ConstantVariable.create(answer)
        try:
            method(tx, inst)
        except GuardOnDataDependentSymNode:  # from `if len(rows):`, where `len(rows) > 0` breaks the graph
            raise Unsupported("a branch on a size that only the data knows") from None

    jump._fp4 = True  # type: ignore[attr-defined]
    return jump


class Unproved(Exception):
    """Why a branch stays one."""


def _take_the_way_that_works(tx: Any, branch: Any) -> bool | None:
    """What the condition on the stack is where there are rows, if the branch may turn out to be none."""
    asked = _rows_asked_for(tx.stack[-1])
    kept = vars(tx.speculation_log).setdefault("_fp4_kept", set())
    if asked is None or "step" in vars(tx) or (tx.f_code, branch.offset) in kept:
        return None
    nothing, empty = asked
    place = f"{tx.f_code.co_filename}:{tx.lineno}"
    following = tx.instructions[tx.instruction_pointer]
    skip = branch.target if ("IF_TRUE" in branch.opname) is empty else following
    way = _Way(tx, nothing, _first_work(tx.instructions, tx.indexof, skip))
    step_of_dynamo = tx.step

    def step() -> bool:
        """Instead of tx.step, until both ways meet."""
        try:
            if tx.instruction_pointer == way.join:
                del tx.step
                way.prove()
                counters[SEEN_THROUGH][place] += 1
            elif not step_of_dynamo():
                raise Unproved("it leaves the function, or the graph breaks, before both ways meet")
            return True
        except Unproved as why:
            kept.add((tx.f_code, branch.offset))
            counters[KEPT][f"{place} stays: {why}"] += 1
            # The one restart that also forgets where Dynamo tried to break the graph: the way is another now.
            raise UnspecializeRestartAnalysis(restart_reason=f"fp4: {place} is a branch") from None

    tx.step = step
    return not empty


def _wanted(output: Any) -> bool:
    backend = output.compiler_fn
    for name in ("_torchdynamo_orig_backend", "compiler_fn"):
        while hasattr(backend, name):
            backend = getattr(backend, name)
    return getattr(backend, "sees_through_branches", False)


@dataclass(frozen=True)
class Nothing:
    """What is empty: these sizes are 0, and these masks are False everywhere."""

    sizes: set[Any]
    masks: set[fx.Node]


def _rows_asked_for(condition: Any) -> tuple[Nothing, bool] | None:
    """What is empty if there are no rows, and what `condition` is then; it is the opposite for every other
    number of rows. None if it asks for anything else, or if its answer is known."""
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

    nothing = Nothing(set(), set())
    if isinstance(condition, SymNodeVariable):
        expr = condition.sym_num.node.expr
        if len(expr.free_symbols) != 1 or not free_unbacked_symbols(condition.sym_num):
            return None
        nothing.sizes.update(expr.free_symbols)
        if not isinstance(condition.sym_num, torch.SymBool):
            expr = sympy.Ne(expr, 0)
    elif isinstance(condition, TensorVariable):
        found = _count_of_a_mask(condition.as_proxy().node)
        if found is None:
            return None
        mask, expr = found
        nothing.masks.add(mask)
    else:
        return None
    (symbol,) = expr.free_symbols
    some = expr.subs(symbol, sympy.Symbol("some", integer=True, positive=True))
    none = expr.subs(symbol, 0)
    if some not in (sympy.true, sympy.false) or none != sympy.Not(some):
        return None
    return nothing, bool(none)


_COMPARISONS = {
    "eq": sympy.Eq, "ne": sympy.Ne, "gt": sympy.Gt, "ge": sympy.Ge, "lt": sympy.Lt, "le": sympy.Le,
}  # fmt: skip


def _count_of_a_mask(node: fx.Node) -> tuple[fx.Node, Any] | None:
    """The mask and the condition for `mask.any()`, `mask.sum() == 0` and their like. Nothing may have been
    traced since: the mask is still what it was."""
    last = next(iter(reversed(node.graph.nodes)))
    count = sympy.Symbol("count", integer=True)
    expr = sympy.Ne(count, 0)
    compared = _COMPARISONS.get(_call(node).strip("_"))
    if compared is not None and isinstance(node.args[0], fx.Node) and isinstance(node.args[1], int):
        expr = compared(count, node.args[1])
        last = last.prev if last is node else last
        node = node.args[0]
    if (
        last is not node
        or _call(node) not in ("any", "sum", "count_nonzero")
        or len(node.args) != 1
        or node.kwargs
    ):
        return None
    (mask,) = node.args
    return (mask, expr) if isinstance(mask, fx.Node) and _example(mask).dtype == torch.bool else None


def _first_work(instructions: Sequence[Any], indexof: dict[Any, int], at: Any) -> int:
    while at.opcode in JUMP_OPCODES & TERMINAL_OPCODES or at.opname == "NOP":
        at = at.target if at.opcode in JUMP_OPCODES else instructions[indexof[at] + 1]
    return indexof[at]


def _live(instructions: Sequence[Any], indexof: dict[Any, int], start: int) -> set[str]:
    """The locals that may be read, from instruction `start` on, before they are written."""

    def successors(i: int) -> Iterator[int]:
        inst = instructions[i]
        if inst.opcode in JUMP_OPCODES:
            yield indexof[inst.target]
        if inst.opcode not in TERMINAL_OPCODES:
            yield i + 1
        if inst.exn_tab_entry:
            yield indexof[inst.exn_tab_entry.target]

    live: list[set[str]] = [set() for _ in instructions]
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(instructions))):
            inst = instructions[i]
            now = set().union(*(live[j] for j in successors(i) if j < len(instructions)))
            if inst.opcode in HASLOCAL:
                # Python 3.13 has instructions with two names: taken as reads of both.
                if isinstance(inst.argval, str) and inst.opname.startswith("STORE"):
                    now.discard(inst.argval)
                else:
                    now.update([inst.argval] if isinstance(inst.argval, str) else inst.argval)
            elif inst.opcode in HASFREE:
                now.add(inst.argval)
            changed |= now != live[i]
            live[i] = now
    return live[start]


class _Way:
    """The way through a branch that does the work, from the branch on."""

    def __init__(self, tx: Any, nothing: Nothing, join: int) -> None:
        self.tx, self.nothing, self.join = tx, nothing, join
        self.names = _live(tx.instructions, tx.indexof, join) | set(tx.cell_and_freevars())
        self.graph = tx.output.graph
        self.last = next(iter(reversed(self.graph.nodes)))
        self.locals, self.stack, self.state = self._locals(), tx.stack[:-1], self._state()
        self.objects = _Objects(tx)

    def _locals(self) -> dict[str, Any]:
        return {n: v for n, v in self.tx.symbolic_locals.items() if n in self.names}

    def _state(self) -> tuple[Any, ...]:
        tx, side = self.tx, self.tx.output.side_effects
        return (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
            torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), len(tx.block_stack),
            len(tx.debug_locals), len(side.tensor_hooks), len(side.save_for_backward),
        )  # fmt: skip

    def prove(self) -> None:
        now = self._locals()
        for name in now.keys() | self.locals.keys():
            if not _same(self.locals.get(name), now.get(name)):
                raise Unproved(f"`{name}`, which is read later, changes where there are rows")
        if not _all_same(self.stack, self.tx.stack) or self._state() != self.state:
            raise Unproved("what is being computed, or a setting of torch, changes where there are rows")
        self.objects.check()
        if self.tx.output.graph is not self.graph:
            raise Unproved("it is in two graphs")
        try:
            replay(self._nodes(), self.nothing, self.tx.output)
        except Unproved:
            raise
        except Exception as error:  # of whatever the model calls
            raise Unproved(f"without rows it fails: {error}") from error

    def _nodes(self) -> list[fx.Node]:
        nodes, node = [], self.last.next
        while node.op != "root":
            nodes.append(node)
            node = node.next
        return nodes


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    constants = all(v is not None and v.is_python_constant() for v in (a, b))
    return constants and _equal(a.as_python_constant(), b.as_python_constant())


def _equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, bool | int | float | str) and a == b)


def _all_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b))


class _Objects:
    """All objects that Dynamo can reach and what they are made of, one level deep."""

    def __init__(self, tx: Any) -> None:
        from torch._dynamo.variables import base
        from torch._dynamo.variables.lazy import LazyVariableTracker

        self.attributes = base.AttributeMutation
        self.existing = (base.AttributeMutationExisting, base.ValueMutationExisting)
        self.side = tx.output.side_effects
        self.known: dict[int, tuple[Any, list[Any]]] = {}

        def record(v: Any) -> None:
            if not isinstance(v, LazyVariableTracker):
                self.known[id(v)] = v, self._parts(v)

        side = self.side
        roots: list[Any] = [list(side.id_to_variable.values()), list(side.store_attr_mutations)]
        roots += [list(attributes.values()) for attributes in side.store_attr_mutations.values()]
        frame = tx
        while frame is not None:
            roots += [list(frame.symbolic_locals.values()), list(frame.stack)]
            frame = getattr(frame, "parent", None)
        base.VariableTracker.visit(record, roots)

    def _parts(self, v: Any) -> list[Any]:
        """Fields, and what their containers hold; of objects with attributes those that were set, since their
        other fields are Dynamo's caches."""
        parts: list[Any] = [*self.side.store_attr_mutations.get(v, {}).values()]
        if isinstance(v.mutation_type, self.attributes):
            return parts
        generator = getattr(v, "inline_tracer", None)
        if generator is not None:
            parts += [generator.instruction_pointer, *generator.symbolic_locals.values()]
        for fields in (vars(v), vars(v.mutation_type) if v.mutation_type else {}):
            for name, value in fields.items():
                parts.append(name)
                if isinstance(value, list | tuple | deque):
                    parts += value
                elif isinstance(value, dict):
                    parts += [*value.keys(), *value.values()]
                else:
                    parts.append(value)
        return parts

    def check(self) -> None:
        for v, before in self.known.values():
            now = self._parts(v)
            if len(now) != len(before) or not all(map(_equal, before, now)):
                raise Unproved(f"{_name(v)} changes where there are rows")
        for v in (*self.side.id_to_variable.values(), *self.side.store_attr_mutations):
            new = id(v) not in self.known and isinstance(v.mutation_type, self.existing)
            if new and self.side.is_modified(v):
                raise Unproved(f"{_name(v)} changes where there are rows")


def _name(v: Any) -> str:
    source = getattr(v, "source", None)
    return f"`{source.name if isinstance(source.name, str) else source.name()}`" if source else "an object"


def replay(nodes: Sequence[fx.Node], nothing: Nothing, output: Any) -> None:
    """Runs Dynamo's `nodes` on fake tensors without rows, and raises Unproved unless nothing comes of it."""
    env: dict[fx.Node, Any] = {}
    watch = _Watch()
    sizes, masks = set(nothing.sizes), set(nothing.masks)

    def emptied(node: fx.Node) -> Any:
        return fx.node.map_aggregate(_example(node), lambda v: _emptied(v, sizes))

    def argument(node: fx.Node) -> Any:
        if node not in env:
            env[node] = emptied(node)
            watch.keep(env[node], node in masks)
        return env[node]

    with output.fake_mode, enable_python_dispatcher(), watch, output.shape_env.suppress_guards():
        for node in nodes:
            if torch.is_grad_enabled() and _needs_gradient(_example(node)):
                raise Unproved("gradients are asked for, and experts without rows have none")
            if _selects_by(node, masks):
                sizes |= _data_sizes(node) - _data_sizes(node.args[0])
                env[node] = emptied(node)
                continue
            if node.meta.get("unbacked_bindings"):
                raise Unproved(f"{_call(node)} has a size that only the data knows")
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), argument)
            if node.op == "call_function" and node.target not in _EFFECTS:
                env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            elif node.op == "call_method":
                env[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                raise Unproved(f"{_call(node)} may do more than compute")
            if _call(node) == "any" and node.args[0] in masks:
                masks.add(node)
                watch.keep(env[node], True)


# An assignment to elements is watched.
_EFFECTS = fx.node._side_effectful_functions - {operator.setitem}


def _call(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _selects_by(node: fx.Node, masks: set[fx.Node]) -> bool:
    """Whether the elements that `node` chooses are those where one of `masks` is set."""
    if _call(node) in ("where", "nonzero"):
        return len(node.args) == 1 and node.args[0] in masks
    if _call(node) != "getitem":
        return False
    index = node.args[1]
    tensors = [i for i in (index if isinstance(index, tuple) else (index,)) if isinstance(i, fx.Node)]
    if masks.isdisjoint(tensors):
        return False
    if len(tensors) > 1:
        raise Unproved("a mask is one of several indices")
    return True


def _data_sizes(node: fx.Node) -> set[Any]:
    tensors = torch.utils._pytree.tree_leaves(_example(node))
    return set().union(*(free_unbacked_symbols(t) for t in tensors))


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _needs_gradient(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_needs_gradient, value))
    return isinstance(value, Tensor) and value.requires_grad


def _emptied(value: Any, sizes: set[Any]) -> Any:
    if isinstance(value, Tensor):
        shape = [_emptied(size, sizes) for size in value.shape]
        return value if _all_same(shape, value.shape) else value.new_empty(shape)
    if isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat):
        expr = value.node.expr
        if not sizes.isdisjoint(expr.free_symbols):
            expr = expr.subs(dict.fromkeys(sizes, 0))
            if expr.free_symbols:
                raise Unproved(f"{value} is about more than one size")
            return bool(expr) if isinstance(value, torch.SymBool) else int(expr)
    return value


_WRITES_AT = {
    "aten::index_add_": "index", "aten::index_copy_": "index", "aten::index_fill_": "index",
    "aten::index_put_": "indices", "aten::_index_put_impl_": "indices",
    "aten::scatter_": "index", "aten::scatter_add_": "index", "aten::scatter_reduce_": "index",
}  # fmt: skip


class _Watch(TorchDispatchMode):
    """Lets only through what computes, or writes to what was made under it, or writes nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.outer: dict[int, Any] = {}
        self.empty_masks: list[Tensor] = []

    def keep(self, values: Any, empty_mask: bool) -> None:
        """`values` came from outside."""
        if empty_mask:
            self.empty_masks.append(values)
        for v in torch.utils._pytree.tree_leaves(values):
            if isinstance(v, Tensor):
                storage = v.untyped_storage()
                self.outer[storage._cdata] = storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Unproved(f"{func} draws random numbers")
        if torch.Tag.inplace_view in func.tags:
            raise Unproved(f"{func} changes a tensor's shape")
        schema = func._schema
        named = {a.name: v for a, v in zip(schema.arguments, args)} | kwargs
        at = torch.utils._pytree.tree_leaves(named.get(_WRITES_AT.get(schema.name, "")))
        if any(index is mask for index in at for mask in self.empty_masks):
            return args[0]
        if not any(isinstance(index, Tensor) and _no_elements(index) for index in at):
            for argument in schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = torch.utils._pytree.tree_leaves(named.get(argument.name))
                    if not all(map(self._own, written)):
                        raise Unproved(f"{func} writes to a tensor that is read later")
        return func(*args, **kwargs)

    def _own(self, t: Any) -> bool:
        return not isinstance(t, Tensor) or t.untyped_storage()._cdata not in self.outer or _no_elements(t)


def _no_elements(t: Tensor) -> bool:
    return statically_known_true(t.numel() == 0)
