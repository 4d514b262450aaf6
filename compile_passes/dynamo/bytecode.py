"""Reads from a function's instructions how it uses one of its locals.

Dynamo's variables do not say which code may read them later. The instructions do.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from .api import HASFREE, HASLOCAL, JUMP_OPCODES

if TYPE_CHECKING:
    from .api import Instruction, Tracer

_NOTHING = ("PRECALL", "PUSH_NULL", "TO_BOOL", "NOP", "CACHE")


def _code(tx: Tracer) -> list[Instruction]:
    code = tx.instructions
    return [i for at, i in enumerate(code) if i.opname not in _NOTHING and not _loads_a_method(code, at - 2)]


def _loads_a_method(code: Sequence[Instruction], at: int) -> bool:
    """Return whether three instructions load an attribute that is called at once: torch 2.15 writes Python
    3.12's marked LOAD_ATTR like this."""
    names = [i.opname for i in code[at : at + 3]] if at >= 0 else []
    return names == ["LOAD_ATTR", "PUSH_NULL", "SWAP"]


def _names(inst: Instruction) -> Sequence[str]:
    if inst.opcode not in HASLOCAL and inst.opcode not in HASFREE:
        return ()
    return inst.argval if isinstance(inst.argval, tuple) else (inst.argval,)


def _uses(code: Sequence[Instruction], name: str) -> Iterator[tuple[int, Instruction]]:
    return ((at, i) for at, i in enumerate(code) if name in _names(i))


def _is(inst: Instruction, opname: str, argval: object = None) -> bool:
    return inst.opname == opname and (argval is None or inst.argval == argval)


def _builtin(tx: Tracer, inst: Instruction, *names: str) -> bool:
    own = inst.opname == "LOAD_GLOBAL" and inst.argval in names
    return own and not any(inst.argval in scope for scope in (tx.f_globals, tx.symbolic_globals))


def _called(tx: Tracer, inst: Instruction) -> bool:
    """Return whether an instruction is LOAD_METHOD; from Python 3.12 on it is a marked LOAD_ATTR."""
    if inst.opname != "LOAD_ATTR" or sys.version_info < (3, 12):
        return inst.opname == "LOAD_METHOD"
    return bool((inst.arg or 0) & 1) or _loads_a_method(tx.instructions, tx.indexof[inst])


def _goes_into(tx: Tracer) -> tuple[list[Instruction], int]:
    """Return the instructions, and the index of the one that takes the result of the current call of `tx`."""
    code, at = _code(tx), tx.instruction_pointer
    while tx.instructions[at].opname in _NOTHING:
        at += 1
    return code, code.index(tx.instructions[_assigned_with_others(tx.instructions, at)])


_VALUES = (
    "LOAD_FAST", "LOAD_CONST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_ATTR", "LOAD_METHOD", "BINARY_OP",
    "BINARY_SUBSCR", "CALL", "KW_NAMES", *_NOTHING,
)  # fmt: skip
"""Instructions that compute the other values of `a, b = x, y`.

Each adds a value or replaces several by one.
"""


def _assigned_with_others(code: Sequence[Instruction], at: int) -> int:
    """Return the instruction that stores the value on the stack before `at`, in `a, b = x, y`; otherwise
    `at`."""
    above, here = 0, at
    while above or code[here].opname in ("SWAP", *_VALUES):
        inst = code[here]
        if inst.opname == "SWAP":
            above = inst.arg - 1 if above == 0 else 0 if above == inst.arg - 1 else above
        elif inst.opname == "STORE_FAST" and above:
            above -= 1
        else:
            grown = above + dis.stack_effect(inst.opcode, inst.arg)
            takes = 1 if inst.opname in ("LOAD_ATTR", "LOAD_METHOD") else 0
            if inst.opname not in _VALUES or above < takes or (grown < 1 and inst.opname not in _NOTHING):
                return at
            above = grown
        here += 1
    return here if code[here].opname == "STORE_FAST" else at


def _later_uses(code: Sequence[Instruction], here: int) -> list[tuple[int, Instruction]]:
    """Return the later uses of the local that instruction `here` stores; in a loop also those before it."""
    positions = {id(i): at for at, i in enumerate(code)}
    again = any(i.opcode in JUMP_OPCODES and positions.get(id(i.target), 0) < here for i in code[here:])
    first_use = 0 if again else here
    return [(at, i) for at, i in _uses(code, code[here].argval) if at >= first_use and at != here]


def only_iterates(tx: Tracer, alone: bool = False) -> bool:
    """Return whether the result of the current call goes into a local that is only iterated over (also
    zipped or enumerated) or measured by len. alone: neither zip, enumerate nor len is allowed, but a loop may
    iterate over the result directly."""
    code, here = _goes_into(tx)
    if alone and _is(code[here], "GET_ITER"):
        return True
    if code[here].opname != "STORE_FAST":
        return False

    def iterates(at: int) -> bool:
        if _is(code[at + 1], "GET_ITER"):
            return True
        if alone or not (_is(code[at + 1], "CALL") and len(code) > at + 2):
            return False
        if _is(code[at + 1], "CALL", 1) and _builtin(tx, code[at - 1], "len"):
            return True
        return _is_numbered_or_zipped(tx, code, at)

    return all(i.opname == "LOAD_FAST" and iterates(at) for at, i in _later_uses(code, here))


def _is_numbered_or_zipped(tx: Tracer, code: Sequence[Instruction], at: int) -> bool:
    """Return whether the local that instruction `at` loads is iterated over by `enumerate` or `zip`."""
    first = at - 1
    while code[first].opname in ("LOAD_FAST", "LOAD_ATTR"):
        first -= 1
    return _builtin(tx, code[first], "enumerate", "zip") and _is(code[at + 2], "GET_ITER")


def only_in_loops(tx: Tracer, subscripts: bool) -> bool:
    """Return whether the result of the current call goes into a local that only this function's own loops
    iterate over (also zipped or enumerated). subscripts: single elements may be read, too."""
    code, here = _goes_into(tx)
    if _is(code[here], "GET_ITER"):
        return _is(code[here + 1], "FOR_ITER")
    if _is(code[here], "CALL") and code[here].arg and len(tx.stack) >= code[here].arg:
        function = tx.stack[-code[here].arg].realize()  # below its other arguments
        own = function.is_python_constant() and function.as_python_constant() in (enumerate, zip)
        return own and _is(code[here + 1], "GET_ITER") and _is(code[here + 2], "FOR_ITER")
    if code[here].opname != "STORE_FAST":
        return False

    def loops(at: int) -> bool:
        if _is(code[at + 1], "GET_ITER"):
            return _is(code[at + 2], "FOR_ITER")
        if not _is(code[at + 1], "CALL"):
            return subscripts and _is_subscripted(code, at + 1)
        return _is_numbered_or_zipped(tx, code, at) and _is(code[at + 3], "FOR_ITER")

    return all(i.opname == "LOAD_FAST" and loops(at) for at, i in _later_uses(code, here))


def _is_subscripted(code: Sequence[Instruction], at: int) -> bool:
    """Return whether the value on the stack before instruction `at` is read at one place: x[i], x[i - 1]."""
    above = 0
    for inst in code[at:]:
        if inst.opname in ("LOAD_FAST", "LOAD_CONST"):
            above += 1
        elif inst.opname == "BINARY_OP" and above > 1:
            above -= 1
        else:
            return inst.opname == "BINARY_SUBSCR" and above == 1
    return False


def only_indexes(tx: Tracer) -> bool:
    """Return whether the result of the current call is an index, or goes into a local that is only used as
    one."""
    code, here = _goes_into(tx)
    if code[here].opname != "STORE_FAST":
        return _is_index(code, here)
    return all(i.opname == "LOAD_FAST" and _is_index(code, at + 1) for at, i in _later_uses(code, here))


def _is_index(code: Sequence[Instruction], at: int) -> bool:
    """Return whether the value on the stack before instruction `at` becomes an index, or one of several."""
    above = 0
    for inst in code[at:]:
        if inst.opname in ("LOAD_FAST", "LOAD_CONST"):
            above += 1
        elif inst.opname == "BUILD_TUPLE":
            above = 0 if above < inst.arg else above - inst.arg + 1
        elif inst.opname == "BUILD_SLICE" and above >= inst.arg:
            above -= inst.arg - 1
        elif inst.opname in ("BINARY_SUBSCR", "STORE_SUBSCR"):
            if above == 0 or inst.opname == "STORE_SUBSCR":
                return above == 0
            if above == 1:
                return False
            above -= 1
        else:
            return False
    return False


def joined_comprehension(tx: Tracer) -> bool:
    """Return whether `tx` is at a condition in a comprehension, `[f(x) for x in xs if len(x)]`, whose list
    is only joined by `torch.cat` or tested for emptiness. On the stack the list is below the iterator and
    the condition."""
    code = _code(tx)
    at = next((n for n, i in enumerate(code) if i is tx.instructions[tx.instruction_pointer - 1]), None)
    loops = [n for n, i in enumerate(code[:at]) if i.opname == "FOR_ITER"]
    if at is None or not loops or code[loops[-1]].target not in code:
        return False
    end = code.index(code[loops[-1]].target)
    appends = [i for i in code[at:end] if i.opname == "LIST_APPEND"]
    if len(appends) != 1 or appends[0].arg != 2:
        return False
    kept = 0
    if tx.f_code.co_name == "<listcomp>":  # a function of its own up to Python 3.11
        if not _is(code[end], "RETURN_VALUE") or tx.parent is None:
            return False
        tx = tx.parent
        stack = tx.stack
        code, here = _goes_into(tx)
    else:
        here = end + 1
        here += _is(code[here], "POP_TOP")
        if _is(code[here], "SWAP"):  # below: what the comprehension's variables held before
            kept = code[here].arg - 1
            here += 1 + kept
        stack = tx.stack[: -3 - kept]
    if code[here].opname == "STORE_FAST":
        return joined_list(tx, code[here].argval, appends=0)
    joins = any(getattr(v, "value", None) is torch.cat for v in stack[-2:])
    return joins and _along_rows(tx, code[here:])


def joined_list(tx: Tracer, name: str, appends: int = 1) -> bool:
    """Return whether a list that only the local `name` holds is created in one place, appended to in
    `appends` places, and otherwise only joined by `torch.cat` or tested for emptiness."""
    code, stores, found = _code(tx), 0, 0
    for at, i in _uses(code, name):
        before, after = code[max(at - 2, 0) : at], code[at + 1 :]
        if i.opname == "STORE_FAST":
            stores += 1
        elif i.opname != "LOAD_FAST":
            return False
        elif _called(tx, after[0]) and after[0].argval == "append":
            found += 1
        elif _truth(tx, before, after) is None and not (
            len(before) == 2
            and _is(before[0], "LOAD_GLOBAL", "torch")
            and tx.f_globals.get("torch") is torch
            and before[1].opname in ("LOAD_ATTR", "LOAD_METHOD")
            and before[1].argval == "cat"
            and _along_rows(tx, after)
        ):
            return False
    return stores == 1 and found == appends


def _along_rows(tx: Tracer, after: Sequence[Instruction]) -> bool:
    """Return whether the instructions end `torch.cat(x)`, `torch.cat(x, 0)` or `torch.cat(x, dim=0)`."""
    if _is(after[0], "CALL", 1):
        return True
    if not _is(after[0], "LOAD_CONST") or after[0].argval != 0:
        return False
    if _is(after[1], "KW_NAMES"):
        return after[1].argval == ("dim",) and _is(after[2], "CALL", 2)
    return _is(after[1], "CALL", 2)


def _truth(tx: Tracer, before: Sequence[Instruction], after: Sequence[Instruction]) -> Instruction | None:
    """Return the jump that tests whether a list is empty: `if x:`, `if len(x):`, `if len(x) > 0:`."""
    then = list(after[:4])
    if before and _builtin(tx, before[-1], "len") and _is(then[0], "CALL", 1):
        then.pop(0)
        zero = _is(then[0], "LOAD_CONST") and then[0].argval == 0
        if zero and len(then) > 2 and _is(then[1], "COMPARE_OP") and then[1].argval in (">", "!=", "=="):
            del then[:2]
    return then[0] if then[0].opname.startswith("POP_JUMP") else None


def asks_for(tx: Tracer, jump: Instruction) -> str | None:
    """Return the local list that a jump tests for emptiness."""
    code = _code(tx)
    end = code.index(jump)
    for at in range(max(end - 4, 0), end):
        if code[at].opname == "LOAD_FAST" and _truth(tx, code[max(at - 1, 0) : at], code[at + 1 :]) is jump:
            return code[at].argval
    return None
