"""Lets Dynamo capture `if token.numel() == 0: continue` in a loop over experts as if the branch were not
there.

Dynamo breaks its graph at a branch on a data-dependent size, and in a loop leaves the whole function to
Python. But a branch that only skips work on empty rows is not needed: the graph of the working path is right
for both paths. If a condition asks whether a number of rows is 0 (a data-dependent size, or the number of set
elements of a mask), this module answers it for the working path. When Dynamo has traced that path up to the
point where both meet, `without_rows` must prove that it does nothing without rows. If the proof fails, Dynamo
starts over and breaks the graph at that branch, as it does without us.

`hit_experts.py` handles a loop over the experts that are hit in the same way.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ...meta.text import in_short
from ...meta.torch_internals import assert_async
from ..graph.traced_nodes import called, example, same_elements
from ..refusal import Kind, Refusal, Refused, refuse
from . import api, known_values
from .api import JUMP_OPCODES, TERMINAL_OPCODES, RestartAnalysis, UnspecializeRestartAnalysis, counters
from .bytecode import asks_for
from .empty_rows import Named, Nothing, Way, empty_with, has_all_rows
from .rules import Grown, Place, attempts, session

if TYPE_CHECKING:
    from .api import Handler, Instruction, OutputGraph, Tracer, Variable

SEEN_THROUGH = "fp4_branches_seen_through"
"""A key of `torch._dynamo.utils.counters`. It counts, by place (file:line), the branches that were
captured."""


@dataclass(frozen=True, eq=False)
class Kept:
    """A branch, or a loop over hit experts, that stays as it is."""

    place: str
    """file:line"""
    is_loop: bool
    why: Refusal


KEPT: dict[str, Kept] = {}
"""The latest one for each place."""


JUMPS = [name for name in dis.opmap if re.fullmatch(r"POP_JUMP_.*IF_(TRUE|FALSE)", name)]


def answering_first(method: Handler) -> Handler:
    def jump(tx: Tracer, inst: Instruction) -> None:
        if session(tx.output).grown:
            _asks_whether_there_are_rows(tx, inst)
        answer = known_values.number(tx.stack[-1])
        if answer is None:
            if into_the_graph(tx, inst):
                return
            answer = _take_the_way_that_works(tx, inst)
        if answer is not None:
            tx.stack[-1] = api.ConstantVariable.create(bool(answer))
        method(tx, inst)

    return jump


def _take_the_way_that_works(tx: Tracer, branch: Instruction) -> bool | None:
    """Return the value of the condition on the stack if there are rows, and begin the proof that both paths
    are equal. Return None if the branch must stay."""
    asked = _rows_asked_for(tx.stack[-1], tx.output)
    around = _watching(tx)
    if asked is None or (around and not around.replaced) or is_kept(tx, branch):
        return None
    nothing, empty = asked
    following = tx.instructions[tx.instruction_pointer]
    skip = branch.target if ("IF_TRUE" in branch.opname) is empty else following
    watch(tx, Way(tx, nothing, _first_work(tx, skip)), branch)
    return not empty


def _asks_whether_there_are_rows(tx: Tracer, jump: Instruction) -> None:
    """Answer `if len(outputs):` for a list with an entry for each expert that has rows. If the list covers
    all experts and there are rows, at least one expert has rows."""
    asked = asks_for(tx, jump)
    for v, branch, place in session(tx.output).grown:
        if asked is not None and tx.symbolic_locals.get(asked) is v and not has_all_rows(tx.output, v):
            _kept(tx).add(branch)
            counters[SEEN_THROUGH].pop(place, None)
            KEPT[place] = Kept(place, False, Refusal(Kind.MAY_BE_EMPTY, None, (asked,)))
            raise UnspecializeRestartAnalysis(restart_reason=f"fp4: {place} is a branch")


def keep_loop(tx: Tracer) -> None:
    """Note that a loop over what only the data knows stays as it is."""
    place = f"{tx.f_code.co_filename}:{tx.lineno}"
    KEPT[place] = Kept(place, True, Refusal(Kind.NOT_ALL_HITS, None))


def is_kept(tx: Tracer, inst: Instruction) -> bool:
    return (tx.f_code, inst.offset) in _kept(tx)


def _kept(tx: Tracer) -> set[Place]:
    return attempts(tx.speculation_log).kept


def begins_again(tx: Tracer, inst: Instruction) -> None:
    """Trace the function again and keep `inst` as it is, without the nodes that had replaced it."""
    _kept(tx).add((tx.f_code, inst.offset))
    raise UnspecializeRestartAnalysis(restart_reason="fp4: a loop within what is skipped")


def watch(tx: Tracer, way: Way, branch: Instruction, replaced: bool = False) -> None:
    """Watch the frame until `way` ends, and prove `way` then. replaced: `way` is a round of a loop over all
    experts."""
    place = f"{tx.f_code.co_filename}:{tx.lineno}"
    tx.step = _Watched(tx, way, branch, place, replaced, _watching(tx), tx.step)


@dataclass
class _Watched:
    """Replaces `tx.step` until both paths meet."""

    tx: Tracer
    way: Way
    branch: Instruction
    place: str
    replaced: bool
    around: _Watched | None
    """The watcher that watched the frame before this one."""
    step: Callable[[], bool]

    def __call__(self) -> bool:
        tx, place = self.tx, self.place
        try:
            if tx.instruction_pointer == self.way.join:
                if tx.step is not self:
                    refuse(Kind.BRANCH_INSIDE, None)
                self._end()
            elif not self._advance():
                refuse(Kind.LEAVES, None)
            return True
        except Refused as stop:
            _kept(tx).add((tx.f_code, self.branch.offset))
            counters[SEEN_THROUGH].pop(place, None)
            KEPT[place] = Kept(place, self.replaced, stop.refusal)
            # Only this restart also forgets where Dynamo tried to break the graph, because the path is
            # different now.
            raise UnspecializeRestartAnalysis(restart_reason=f"fp4: {place} is a branch") from None

    def _end(self) -> None:
        tx = self.tx
        del tx.step
        if self.around is not None:
            tx.step = self.around
        self.way.prove()
        branch = (tx.f_code, self.branch.offset)
        session(tx.output).grown += [Grown(v, branch, self.place) for v in self.way.grown]
        counters[SEEN_THROUGH][self.place] += 1

    def _advance(self) -> bool:
        try:
            return self.step()
        except RestartAnalysis:
            raise
        except Exception as error:
            if not self.replaced:
                raise
            raise Refused(Refusal(Kind.FAILS_FOR_ALL, None, (in_short(error),))) from error


def _watching(tx: Tracer) -> _Watched | None:
    return tx.step if isinstance(tx.step, _Watched) else None


def of_an_expert(output: OutputGraph, rows: sympy.Basic | None) -> Nothing:
    """Return the assumption that a number of rows is 0: everything that is empty in that case.

    If it is a count of ids, the expert's masks are empty, too.
    """
    for counts in session(output).counted:
        found = [e for e, n in enumerate(counts.expressions()) if n == rows]
        if found:
            hits = Named(same_elements(counts.ids)[-1], 0, len(counts.numbers))
            return Nothing({rows}, hits=hits, expert=found[0])
    return Nothing({rows})


def _rows_asked_for(condition: Variable, output: OutputGraph) -> tuple[Nothing, bool] | None:
    """Return the assumption that there are no rows, and the value of `condition` in that case. For every
    other number of rows the condition has the opposite value. Return None if the condition tests something
    else, or if its value is known."""
    nothing = Nothing()
    if isinstance(condition, api.SymNodeVariable):
        expr = condition.sym_num.node.expr
        if isinstance(expr, _RELATIONS) and len(expr.free_symbols) > 1:  # `if start == start + n:`
            expr = type(expr)(expr.lhs - expr.rhs, 0)
        if len(expr.free_symbols) != 1 or not free_unbacked_symbols(condition.sym_num):
            return None
        nothing = of_an_expert(output, *expr.free_symbols)
        if not isinstance(condition.sym_num, torch.SymBool):
            expr = sympy.Ne(expr, 0)
    elif isinstance(condition, api.TensorVariable):
        found = _count_of_a_mask(condition.as_proxy().node)
        if found is None:
            return None
        mask, expr = found
        nothing.masks.update(empty_with(mask))
    else:
        return None
    (symbol,) = expr.free_symbols
    some = expr.subs(symbol, sympy.Symbol("some", integer=True, positive=True))
    none = expr.subs(symbol, 0)
    if some not in (sympy.true, sympy.false) or none != sympy.Not(some):
        return None
    return nothing, bool(none)


_RELATIONS = (sympy.Eq, sympy.Ne, sympy.Gt, sympy.Ge, sympy.Lt, sympy.Le)
_COMPARISONS = {
    "eq": sympy.Eq, "ne": sympy.Ne, "gt": sympy.Gt, "ge": sympy.Ge, "lt": sympy.Lt, "le": sympy.Le,
}  # fmt: skip


def _count_of_a_mask(node: fx.Node) -> tuple[fx.Node, sympy.Basic] | None:
    """Return the mask and the condition of `mask.any()`, `mask.sum() == 0` and similar tests. Nothing may
    have been traced since, so the mask is unchanged."""
    last = next(iter(reversed(node.graph.nodes)))
    count = sympy.Symbol("count", integer=True)
    expr = sympy.Ne(count, 0)
    compared = _COMPARISONS.get(called(node).strip("_"))
    if compared is not None and isinstance(node.args[0], fx.Node) and isinstance(node.args[1], int):
        expr = compared(count, node.args[1])
        last = last.prev if last is node else last
        node = node.args[0]
    if (
        last is not node
        or called(node) not in ("any", "sum", "count_nonzero")
        or len(node.args) != 1
        or node.kwargs
    ):
        return None
    (mask,) = node.args
    return (mask, expr) if isinstance(mask, fx.Node) and example(mask).dtype == torch.bool else None


def _first_work(tx: Tracer, at: Instruction) -> int:
    """Return the first instruction from `at` on that is neither a jump nor a condition on an attribute of a
    module, such as `elif self.training:`."""
    while True:
        if at.opcode in JUMP_OPCODES & TERMINAL_OPCODES:
            at = at.target
        elif at.opname == "NOP":
            at = tx.instructions[tx.indexof[at] + 1]
        elif (after := _past_constant(tx, at)) is not None:
            at = after
        else:
            return int(tx.indexof[at])


def _past_constant(tx: Tracer, at: Instruction) -> Instruction | None:
    """Return the target of the condition at instruction `at`, if it tests a module's attribute, which is
    constant. Else None."""
    found = tx.symbolic_locals.get(at.argval) if at.opname in ("LOAD_FAST", "LOAD_FAST_BORROW") else None
    i, modules = tx.indexof[at] + 1, (api.NNModuleVariable, api.UnspecializedNNModuleVariable)
    while found is not None and tx.instructions[i].opname == "LOAD_ATTR":
        name = tx.instructions[i].argval
        owner = found.realize()
        if not isinstance(owner, modules) or not isinstance(name, str):
            return None
        read = getattr(owner, "tp_getattro_impl", None) or owner.var_getattr  # torch 2.14 renamed it
        found, i = read(tx, name), i + 1
    jump = tx.instructions[i + (tx.instructions[i].opname == "TO_BOOL")]
    if found is None or i == tx.indexof[at] + 1 or jump.opname not in JUMPS:
        return None
    if not found.is_python_constant() or not isinstance(found.as_python_constant(), bool | int | None):
        return None
    jumps = bool(found.as_python_constant()) is ("IF_TRUE" in jump.opname)
    return jump.target if jumps else tx.instructions[tx.indexof[jump] + 1]


def into_the_graph(tx: Tracer, jump: Instruction) -> bool:
    """Return whether `jump` only decides if an AssertionError is raised. If so, the graph asserts its
    condition now.

    Dynamo writes an assertion about a tensor into the graph if its message is a constant. It breaks the
    graph if the message is computed, which separates routers from their experts. It also breaks the graph at
    `assert not x.isnan().any()` and, from Python 3.12 on, at the last statement of a loop, because the jump
    there goes to the code that raises the error.
    """
    condition = tx.stack[-1]
    if (
        type(condition) is not api.TensorVariable
        or condition.as_proxy().node.meta["example_value"].numel() != 1
    ):
        return False
    jumps_if = "IF_TRUE" in jump.opname
    jumps_to_raise = (raising := _raising(tx.instructions[tx.indexof[jump.target] :])) is not None
    if not jumps_to_raise:
        raising = _raising(tx.instructions[tx.instruction_pointer :])
    if raising is None:
        return False
    holds_if = jumps_if is not jumps_to_raise
    if (
        holds_if
        and not jumps_to_raise
        and not any(n.startswith(("BUILD_STRING", "FORMAT_")) for n in raising)
    ):
        return False  # Dynamo asserts this itself
    asserted = condition if holds_if else condition.call_method(tx, "logical_not", [], {})
    place = f"{tx.f_code.co_filename}:{tx.lineno}"
    tx.output.create_proxy(
        "call_function", assert_async, (asserted.as_proxy(), f"the assertion failed at {place}"), {}
    )
    tx.pop()
    if not jumps_to_raise:
        tx.jump(jump)
    return True


def _raising(following: Sequence[Instruction]) -> list[str] | None:
    """Return the names of the instructions up to the raise, if they only raise an AssertionError."""
    names: list[str] = []
    for inst in following:
        names.append(inst.opname)
        if names[0] != "LOAD_ASSERTION_ERROR" or "JUMP" in inst.opname:
            return None
        if inst.opname == "RAISE_VARARGS":
            return names
    return None
