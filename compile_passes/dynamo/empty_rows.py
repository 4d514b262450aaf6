"""Proves that the code that Dynamo traced does nothing if there are no rows.

`branches.py` lets Dynamo trace the working path of a branch up to the point where it meets the other path.
Both paths have the same effect if

1. Python: no local that is read later has changed, and no object that Dynamo knows (`Way`);
2. tensors: the nodes traced in between, run again on fake tensors with no rows, raise nothing, draw no
   random numbers, need no gradient, and write to tensors of their own only, or to no element of another's
   (`replay`).
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from ...meta.text import in_short
from ...meta.torch_internals import (
    OpOverload,
    TorchDispatchMode,
    below_functorch,
    enable_python_dispatcher,
    pytree,
    side_effects,
)
from ..graph.nodes import operand
from ..graph.traced_nodes import (
    SAME_ELEMENTS,
    along,
    called,
    example,
    memory,
    since,
    some_elements,
    writes_to,
)
from ..refusal import Kind, Refusal, Refused, refuse
from . import api
from .api import HASFREE, HASLOCAL, JUMP_OPCODES, TERMINAL_OPCODES
from .bytecode import joined_comprehension, joined_list
from .known_values import number_of
from .rules import frames, session

if TYPE_CHECKING:
    from .api import ExceptionEntry, ListVariable, OutputGraph, Tracer, Variable

SAYS_THE_SAME = "_fp4_says_the_same"
"""Key of a node that writes values that are already there."""


@dataclass
class Hits:
    """The experts for which a mask has any element set. `mask` is the node of that mask, whose dimension
    `dim` ranges over experts. `rounds` is the number of all experts."""

    mask: fx.Node
    dim: int
    rounds: int
    unwritten: dict[int, fx.Node] = field(default_factory=dict)
    """For the memory of the mask and of each copy: the last node that was checked. No node before it writes
    there."""

    def is_row(self, node: fx.Node, expert: int) -> bool:
        """Return whether `node` is the entry of the unchanged mask for an expert, or a part of that entry."""
        if called(node) != "getitem" or not isinstance(node.args[0], fx.Node):
            return False
        x, index = operand(node), node.args[1]
        if not isinstance(example(x), Tensor):
            return False
        for dim in _indexed(index, expert, example(x).dim()):
            steps = along(x, dim, sums=True)
            if steps[-1] == (self.mask, self.dim) and self._unwritten([n for n, _ in reversed(steps)]):
                return True
        return False

    def _unwritten(self, nodes: Sequence[fx.Node]) -> bool:
        last = next(iter(reversed(self.mask.graph.nodes)))
        for node in nodes:
            place = memory(example(node))
            if writes_to([node], since(self.unwritten.get(place, node))):
                return False
            self.unwritten[place] = last
        return True


class Named(Hits):
    """The experts that occur among ids. `mask` has these ids, and the entry for expert e is `ids == e`."""

    def is_row(self, node: fx.Node, expert: int) -> bool:
        if called(node) != "eq" or len(node.args) != 2:
            return False
        for ids, number in (node.args, node.args[::-1]):
            asked = number_of(number) if isinstance(number, fx.Node) else number
            if isinstance(ids, fx.Node) and type(asked) is int and asked == expert:
                chain = some_elements(ids)
                at = next((i for i, n in enumerate(chain) if _alike(n, self.mask)), None)
                if at is not None and self._unwritten([self.mask, *chain[at::-1]]):
                    return True
        return False


def _alike(a: fx.Node, b: fx.Node) -> bool:
    """Return whether two nodes take the same part of one tensor."""
    return a is b or (called(a) == called(b) == "getitem" and (a.args, a.kwargs) == (b.args, b.kwargs))


def _indexed(index: object, expert: int, rank: int) -> Iterator[int]:
    """Yield the dimensions in which an index is `expert`, or a slice of this expert alone."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(i, fx.Node) for i in items):
        return
    if Ellipsis in items:
        at = items.index(Ellipsis)
        missing = rank - sum(i is not None and i is not Ellipsis for i in items)
        items[at : at + 1] = [slice(None)] * missing
    dim = 0
    for i in items:
        if i is None:
            continue
        if (type(i) is int and i == expert) or i in (slice(expert, expert + 1), slice(expert, expert + 1, 1)):
            yield dim
        dim += 1


@dataclass(frozen=True)
class Nothing:
    """The assumption of a proof: these sizes are 0, these masks are False everywhere, and so is the entry
    of `hits` for `expert`."""

    sizes: set[sympy.Basic] = field(default_factory=set)
    masks: set[fx.Node] = field(default_factory=set)
    hits: Hits | None = None
    expert: int = -1

    def is_row(self, node: fx.Node) -> bool:
        return self.hits is not None and self.hits.is_row(node, self.expert)


def number(v: Variable | None, output: OutputGraph | None = None) -> sympy.Expr | None:
    """Return the expression of a Python int, of a data-dependent int, or of a tensor that holds one."""
    if output is not None and isinstance(v, api.TensorVariable):
        v = session(output).numbers.get(v.as_proxy().node)

    if isinstance(v, api.SymNodeVariable):
        return v.sym_num.node.expr if isinstance(v.sym_num, torch.SymInt) else None
    value = v.as_python_constant() if v is not None and v.is_python_constant() else None
    return sympy.Integer(value) if type(value) is int else None


def has_all_rows(output: OutputGraph, rows: ListVariable) -> bool:
    """Return whether a list of tensors has the rows of all experts, and there is at least one row."""
    sizes = {expression(example(x.as_proxy().node).shape[0]) for x in rows.items}
    known = session(output).counted
    return any(sizes.issuperset(c.expressions()) and statically_known_true(c.total >= 1) for c in known)


def expression(size: int | torch.SymInt) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


class Way:
    """The path through a branch that does the work, from the branch on."""

    def __init__(self, tx: Tracer, nothing: Nothing, join: int) -> None:
        self.tx, self.nothing, self.join = tx, nothing, join
        self.names = live(tx, join, swallowing=False) | set(tx.cell_and_freevars())
        self.swallowing = live(tx, join, swallowing=True) - self.names
        self.graph = tx.output.graph
        self.last = next(iter(reversed(self.graph.nodes)))
        self.locals, self.stack, self.state = self._locals(), tx.stack[:-1], self._state()
        self.objects = _Objects(tx)
        self.lists = {n: (v, list(v.items)) for n, v in self.locals.items() if _is_new_list(v)}
        self.comprehension: tuple[ListVariable, list[Variable]] | None = None
        if len(tx.stack) > 2 and _is_new_list(tx.stack[-3]) and joined_comprehension(tx):
            self.comprehension = tx.stack[-3], list(tx.stack[-3].items)
        self.grown: list[ListVariable] = []

    def _locals(self) -> dict[str, Variable]:
        return {n: v for n, v in self.tx.symbolic_locals.items() if n in self.names}

    def _state(self) -> tuple[object, ...]:
        tx, side = self.tx, self.tx.output.side_effects
        return (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
            torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), len(tx.block_stack),
            len(tx.debug_locals), len(side.tensor_hooks), len(side.save_for_backward),
        )  # fmt: skip

    def prove(self) -> None:
        now = self._locals()
        for name in now.keys() | self.locals.keys():
            if not self._same(self.locals.get(name), now.get(name)):
                refuse(Kind.READ_LATER, None, f"`{name}`")
        if not _all_same(self.stack, self.tx.stack) or self._state() != self.state:
            refuse(Kind.SETTING_CHANGES, None)
        grown = self._grown()
        self.objects.check({id(v): len(items) for v, items in grown.values()})
        if self.tx.output.graph is not self.graph:
            refuse(Kind.TWO_GRAPHS, None)
        hits = self.nothing.hits
        if hits is not None and writes_to([hits.mask], since(self.last)):
            refuse(Kind.MASK_CHANGES, None)
        for name in self.swallowing:  # a read of them breaks the graph
            self.tx.symbolic_locals.pop(name, None)
        try:
            sizes = replay(list(since(self.last)), self.nothing, self.tx.output)
        except Refused:
            raise
        except Exception as error:  # an error of any code that the model calls
            raise Refused(Refusal(Kind.FAILS_WITHOUT_ROWS, None, (in_short(error),))) from error
        for name, (v, items) in grown.items():
            if not all(_is_like_without_rows(x, v.items[0], sizes) for x in v.items[len(items) :]):
                refuse(Kind.READ_LATER, None, f"`{name}`")
        self.grown = [v for v, _ in grown.values()]

    def _same(self, a: Variable | None, b: Variable | None) -> bool:
        """Return whether two values are the same. A sum of row counts may have one more addend."""
        if _same(a, b):
            return True
        now, before = ((number(v, self.tx.output) if v is not None else None) for v in (a, b))
        if now is None or before is None:
            return False
        none = dict.fromkeys(self.nothing.sizes, 0)
        return now.subs(none) == before.subs(none)

    def _grown(self) -> dict[str, tuple[ListVariable, list[Variable]]]:
        """Return lists that became longer and are later only joined. Joining tensors without rows does not
        change the result."""
        tx, found = self.tx, {}
        for name, (v, items) in self.lists.items():
            if len(v.items) > len(items) and joined_list(tx, name) and self._has_alone(name, v):
                found[name] = v, items
        if self.comprehension is not None and len(self.comprehension[0].items) > len(self.comprehension[1]):
            found["the comprehension's list"] = self.comprehension
        return found

    def _has_alone(self, name: str, v: Variable) -> bool:
        """Return whether nothing else refers to the value of the local `name`."""
        held: list[str] = []
        for frame in frames(self.tx):
            held += [n for n, x in frame.symbolic_locals.items() if x is v]
            held += ["" for x in frame.stack if x is v]
        elsewhere = any(part is v for _, parts in self.objects.known.values() for part in parts)
        return held == [name] and name not in self.tx.cell_and_freevars() and not elsewhere


def _is_new_list(v: Variable) -> TypeGuard[ListVariable]:
    return type(v) is api.ListVariable and isinstance(v.mutation_type, api.ValueMutationNew)


def _is_like_without_rows(x: Variable, other: Variable, sizes: set[sympy.Basic]) -> bool:
    """Return whether x, which has no rows if `sizes` are 0, can be joined to `other` without an effect."""
    if not all(isinstance(v, api.TensorVariable) for v in (x, other)):
        return False
    a, b = (example(v.as_proxy().node) for v in (x, other))
    alike = (a.dtype, a.device, a.layout, a.dim()) == (b.dtype, b.device, b.layout, b.dim())
    if not alike or a.dim() < 2 or expression(a.shape[0]).subs(dict.fromkeys(sizes, 0)) != 0:
        return False
    return all(statically_known_true(m == n) for m, n in zip(a.shape[1:], b.shape[1:]))


def _same(a: Variable | None, b: Variable | None) -> bool:
    if a is b:
        return True
    if a is None or b is None or not (a.is_python_constant() and b.is_python_constant()):
        return False
    return _equal(a.as_python_constant(), b.as_python_constant())


def _equal(a: object, b: object) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, bool | int | float | str) and a == b)


def _all_same(a: Sequence[object], b: Sequence[object]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b))


class _Objects:
    """All objects that Dynamo can reach, and their contents, one level deep."""

    def __init__(self, tx: Tracer) -> None:
        self.attributes = api.AttributeMutation
        self.existing = (api.AttributeMutationExisting, api.ValueMutationExisting)
        self.side = tx.output.side_effects
        self.known: dict[int, tuple[Variable, list[object]]] = {}

        def record(v: Variable) -> None:
            if not isinstance(v, api.LazyVariableTracker):
                self.known[id(v)] = v, self._parts(v)

        side = self.side
        roots: list[object] = [list(side.id_to_variable.values()), list(side.store_attr_mutations)]
        roots += [list(attributes.values()) for attributes in side.store_attr_mutations.values()]
        for frame in frames(tx):
            roots += [list(frame.symbolic_locals.values()), list(frame.stack)]
        api.VariableTracker.visit(record, roots)

    def _parts(self, v: Variable) -> list[object]:
        """Return the fields of a variable and the contents of its containers. For objects with attributes,
        return those that were set, because their other fields are Dynamo's caches."""
        parts: list[object] = [*self.side.store_attr_mutations.get(v, {}).values()]
        if isinstance(v.mutation_type, self.attributes):
            return parts
        generator = getattr(v, "inline_tracer", None)
        if generator is not None:
            parts += [generator.instruction_pointer, *generator.symbolic_locals.values()]
        for fields in (vars(v), vars(v.mutation_type) if v.mutation_type else {}):
            for name, value in fields.items():
                if name == "source_location":  # the place of the first read
                    continue
                parts.append(name)
                if isinstance(value, list | tuple | deque):
                    parts += value
                elif isinstance(value, dict):
                    parts += [*value.keys(), *value.values()]
                else:
                    parts.append(value)
        return parts

    def check(self, grown: dict[int, int]) -> None:
        """Check that nothing has changed. grown: lists of which only the first items count."""
        for v, before in self.known.values():
            now = self._parts(v)
            if isinstance(v, api.ListVariable) and id(v) in grown:
                items = v.items
                v.items = items[: grown[id(v)]]
                now, v.items = self._parts(v), items
            if len(now) != len(before) or not all(map(_equal, before, now)):
                refuse(Kind.CHANGES, None, _name(v))
        for v in (*self.side.id_to_variable.values(), *self.side.store_attr_mutations):
            new = id(v) not in self.known and isinstance(v.mutation_type, self.existing)
            if new and self.side.is_modified(v):
                refuse(Kind.CHANGES, None, _name(v))


def _name(v: Variable) -> str:
    source = getattr(v, "source", None)
    return f"`{source.name if isinstance(source.name, str) else source.name()}`" if source else "an object"


def live(tx: Tracer, start: int, swallowing: bool) -> set[str]:
    """Return the locals that may be read, from instruction `start` on, before they are written.
    swallowing: also if a context manager suppresses an exception."""
    instructions, indexof = tx.instructions, tx.indexof

    def handled(entry: ExceptionEntry) -> bool:
        handler = indexof[entry.target]
        return swallowing or all(i.opname != "WITH_EXCEPT_START" for i in instructions[handler : handler + 2])

    def successors(i: int) -> Iterator[int]:
        inst = instructions[i]
        if inst.opcode in JUMP_OPCODES:
            yield indexof[inst.target]
        if inst.opcode not in TERMINAL_OPCODES:
            yield i + 1
        if inst.exn_tab_entry and handled(inst.exn_tab_entry):
            yield indexof[inst.exn_tab_entry.target]

    found: list[set[str]] = [set() for _ in instructions]
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(instructions))):
            inst = instructions[i]
            now = set().union(*(found[j] for j in successors(i) if j < len(instructions)))
            if inst.opcode in HASLOCAL:
                # An instruction of Python 3.13 may have two names. It counts as a read of both.
                if isinstance(inst.argval, str) and inst.opname.startswith("STORE"):
                    now.discard(inst.argval)
                else:
                    now.update([inst.argval] if isinstance(inst.argval, str) else inst.argval)
            elif inst.opcode in HASFREE:
                now.add(inst.argval)
            changed |= now != found[i]
            found[i] = now
    return found[start]


def replay(nodes: Sequence[fx.Node], nothing: Nothing, output: OutputGraph) -> set[sympy.Basic]:
    """Run Dynamo's `nodes` on fake tensors without rows. Raise Refused if they have any effect. Returns
    the sizes that are 0."""
    env: dict[fx.Node, Any] = {}
    watch = _Watch()
    sizes, masks = set(nothing.sizes), set(nothing.masks)

    def emptied(node: fx.Node) -> Any:
        return fx.node.map_aggregate(example(node), lambda v: _emptied(v, sizes))

    def argument(node: fx.Node) -> Any:
        if node not in env:
            env[node] = emptied(node)
            watch.keep(env[node], node in masks)
        return env[node]

    with output.fake_mode, enable_python_dispatcher(), watch, output.shape_env.suppress_guards():
        for node in nodes:
            if torch.is_grad_enabled() and _needs_gradient(example(node)):
                refuse(Kind.GRADIENTS, None)
            if selects_by(node, masks):
                sizes |= _data_sizes(node) - _data_sizes(operand(node))
                env[node] = emptied(node)
                continue
            if called(node) == "split" and not sizes.isdisjoint(_data_sizes(node)):  # views of some rows each
                env[node] = emptied(node)
                watch.keep(env[node], False)
                continue
            no_rows = called(node) == "setitem" and _is_no_slice(node.args[1], sizes)
            if no_rows or node.meta.get(SAYS_THE_SAME):
                continue
            if node.meta.get("unbacked_bindings"):
                refuse(Kind.SIZE_OF_DATA, None, called(node))
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), argument)
            if node.op == "call_function" and node.target not in _EFFECTS:
                env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            elif node.op == "call_method":
                env[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                refuse(Kind.DOES_MORE, None, called(node))
            if is_empty_with(node, masks) or nothing.is_row(node):
                masks.add(node)
                watch.keep(env[node], True)
    return sizes


# `setitem` is not one of them: `_Watch` checks assignments to elements.
_EFFECTS = side_effects - {operator.setitem}


def _is_no_slice(index: object, sizes: set[sympy.Basic]) -> bool:
    """Return whether `x[index]` is a slice from a row up to the same row if `sizes` are 0."""
    first = index[0] if isinstance(index, tuple) and index else index
    if not isinstance(first, slice) or first.step not in (None, 1):
        return False
    ends = [example(n) if isinstance(n, fx.Node) else n for n in (first.start, first.stop)]
    if not all(isinstance(n, int | torch.SymInt) for n in ends):
        return False
    start, stop = (expression(n).subs(dict.fromkeys(sizes, 0)) for n in ends)
    return start == stop


def _data_sizes(node: fx.Node) -> set[sympy.Basic]:
    tensors = pytree.tree_leaves(example(node))
    return set().union(*(free_unbacked_symbols(t) for t in tensors))


def _needs_gradient(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_needs_gradient, value))
    return isinstance(value, Tensor) and value.requires_grad


def _emptied(value: Any, sizes: set[sympy.Basic]) -> Any:
    if isinstance(value, Tensor):
        shape = [_emptied(size, sizes) for size in value.shape]
        return value if _all_same(shape, value.shape) else value.new_empty(shape)
    if isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat):
        expr = value.node.expr
        if not sizes.isdisjoint(expr.free_symbols):
            expr = expr.subs(dict.fromkeys(sizes, 0))
            if expr.free_symbols and isinstance(value, torch.SymInt):  # the sum of others' rows
                return value.node.shape_env.create_symintnode(expr, hint=None)
            if expr.free_symbols:
                refuse(Kind.SEVERAL_SIZES, None, str(value))
            return bool(expr) if isinstance(value, torch.SymBool) else int(expr)
    return value


_WRITES_AT = {
    "aten::index_add_": "index", "aten::index_copy_": "index", "aten::index_fill_": "index",
    "aten::index_put_": "indices", "aten::_index_put_impl_": "indices",
    "aten::scatter_": "index", "aten::scatter_add_": "index", "aten::scatter_reduce_": "index",
}  # fmt: skip


class _Watch(TorchDispatchMode):
    """Allows only operators that write nothing, that write no element, or that write to tensors which were
    made while this mode was active."""

    def __init__(self) -> None:
        super().__init__()
        self.outer: dict[int, torch.UntypedStorage] = {}
        self.empty_masks: list[object] = []

    def keep(self, values: object, empty_mask: bool) -> None:
        """Note that `values` were made before this mode was active."""
        if empty_mask:
            self.empty_masks.append(values)
        for v in pytree.tree_leaves(values):
            if isinstance(v, Tensor):
                storage = below_functorch(v).untyped_storage()
                self.outer[storage._cdata] = storage

    def __torch_dispatch__(self, func: OpOverload, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            refuse(Kind.RANDOM, None, func)
        if torch.Tag.inplace_view in func.tags:
            refuse(Kind.RESHAPES, None, func)
        schema = func._schema
        named = {a.name: v for a, v in zip(schema.arguments, args)} | kwargs
        at = pytree.tree_leaves(named.get(_WRITES_AT.get(schema.name, "")))
        if any(index is mask for index in at for mask in self.empty_masks):
            return args[0]
        if not any(isinstance(index, Tensor) and _no_elements(index) for index in at):
            for argument in schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = pytree.tree_leaves(named.get(argument.name))
                    if not all(map(self._own, written)):
                        refuse(Kind.WRITES, None, func)
        return func(*args, **kwargs)

    def _own(self, t: object) -> bool:
        return not isinstance(t, Tensor) or memory(t) not in self.outer or _no_elements(t)


def _no_elements(t: Tensor) -> bool:
    return statically_known_true(t.numel() == 0)


_PARTS = (*SAME_ELEMENTS, "bool", "any", "unsqueeze", "expand", "detach", "unbind")
_BOTH = ("and_", "__and__", "logical_and", "bitwise_and")


def is_empty_with(node: fx.Node, masks: set[fx.Node]) -> bool:
    """Return whether `node` has no True element if none of `masks` has one."""
    if called(node) in _BOTH:
        return isinstance(example(node), Tensor) and not masks.isdisjoint(node.all_input_nodes)
    return called(node) in _PARTS and bool(node.args) and node.args[0] in masks


def empty_with(mask: fx.Node) -> set[fx.Node]:
    """Return the masks without a True element if `mask` has none: its sources, and masks made from these."""
    chain = [mask]
    while called(chain[-1]) in (*SAME_ELEMENTS, "bool", "any", "unsqueeze") and isinstance(
        chain[-1].args[0], fx.Node
    ):
        chain.append(chain[-1].args[0])
    if len(chain) == 1 or writes_to(chain, since(chain[-1])):
        return {mask}
    found = set(chain)
    for node in since(chain[-1]):
        if node not in found and is_empty_with(node, found) and not writes_to([node], since(node)):
            found.add(node)
    return found


def selects_by(node: fx.Node, masks: set[fx.Node]) -> bool:
    """Return whether `node` chooses exactly the elements where one of `masks` is True."""
    if called(node) in ("where", "nonzero"):
        return len(node.args) == 1 and node.args[0] in masks
    if called(node) != "getitem":
        return False
    index = node.args[1]
    tensors = [i for i in (index if isinstance(index, tuple) else (index,)) if isinstance(i, fx.Node)]
    if masks.isdisjoint(tensors):
        return False
    if len(tensors) > 1:
        refuse(Kind.SEVERAL_INDICES, None)
    return True
