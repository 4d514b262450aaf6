"""Holds the state of the rules: for one output graph of Dynamo's, and for all attempts to trace one function.

Both are stored on Dynamo's own objects, in one attribute each, and live as long as these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING, NamedTuple

import sympy
import torch
from torch import fx

from . import api

if TYPE_CHECKING:
    from .api import Guard, Instruction, ListVariable, OutputGraph, SymNodeVariable, Tracer, Variable

Place = tuple[CodeType, int]
"""An instruction: the function's code, and the offset in it."""


@dataclass
class Counted:
    """The row counts of all experts, as Dynamo has them, and their sum."""

    numbers: list[SymNodeVariable]
    total: int | torch.SymInt
    ids: fx.Node
    """Ids that are counted."""
    parts: dict[fx.Node, Sequence[Variable]] = field(default_factory=dict)
    """Parts of tensors, with as many rows as the counts say."""
    written: dict[fx.Node, dict[int, tuple[Variable, fx.Node]]] = field(default_factory=dict)
    """Writes to each expert's rows of such tensors, with the node that writes."""

    def expressions(self) -> list[sympy.Expr]:
        return [n.sym_num.node.expr for n in self.numbers]

    def between(self, start: sympy.Expr, stop: sympy.Expr) -> int | None:
        """Return the expert whose rows, among rows sorted by expert, begin and end at these positions."""
        before: sympy.Expr = sympy.Integer(0)
        for e, n in enumerate(self.expressions()):
            if before == start and before + n == stop:
                return e
            before = before + n
        return None


class Grown(NamedTuple):
    """A list that would be shorter if idle experts were skipped, and the branch that skips them."""

    items: ListVariable
    branch: Place
    place: str
    """file:line"""


class Numbers(NamedTuple):
    """Numbers of each expert, in order: its rows, or the rows up to and including its own."""

    rows: list[Variable]
    shown: list[Variable]
    is_open: bool
    """True if the program's own list may be shorter."""


class OpenList(NamedTuple):
    """A list of numbers that may be shorter in the program itself."""

    tx: Tracer
    begins: Instruction
    """The instruction that a restart leaves as it is."""
    numbers: Numbers


@dataclass
class Session:
    """The state of the rules in one output graph."""

    is_ours: bool
    """Whether the graph is for a backend with `sees_through_branches`."""
    has_known_values: bool = False
    """Whether some nodes have a known value (known_values.py)."""
    counted: list[Counted] = field(default_factory=list)
    numbers: dict[fx.Node, Variable] = field(default_factory=dict)
    """Tensors that Dynamo also has as Python numbers."""
    elements: dict[fx.Node, list[Variable]] = field(default_factory=dict)
    """The same for tensors of one dimension."""
    grown: list[Grown] = field(default_factory=list)
    open_lists: list[OpenList] = field(default_factory=list)
    added_guards: list[Guard] = field(default_factory=list)
    """Guards from earlier attempts. They are not Dynamo's own."""


@dataclass
class Attempts:
    """State that all attempts to trace a function share."""

    kept: set[Place] = field(default_factory=set)
    """Branches and loops that stay as they are."""
    failure: str | None = None
    """The reason why rules no longer apply."""


_SESSION, _ATTEMPTS = "_fp4_session", "_fp4_attempts"


def session(output: OutputGraph) -> Session:
    """Return the session of Dynamo's OutputGraph."""
    known = vars(output)
    if _SESSION not in known:
        known[_SESSION] = Session(is_ours(output.compiler_fn))
    found: Session = known[_SESSION]
    return found


def attempts(speculation_log: object) -> Attempts:
    """Return the state that the attempts with this SpeculationLog share."""
    found: Attempts = vars(speculation_log).setdefault(_ATTEMPTS, Attempts())
    return found


def has_attempts(found: object) -> bool:
    return hasattr(found, _ATTEMPTS)


def new_list(items: list[Variable]) -> ListVariable:
    """Return a variable for a list that the program itself may have made."""
    return api.ListVariable(items, mutation_type=api.ValueMutationNew())


def frames(tx: Tracer | None) -> Iterator[Tracer]:
    """Yield the frame that is traced, and those into which Dynamo inlines it."""
    while tx is not None:
        yield tx
        tx = getattr(tx, "parent", None)


@contextmanager
def scalar_outputs(output: OutputGraph) -> Iterator[None]:
    """Let numbers of tensors become numbers of the graph, as a context manager."""
    mode = output.fake_mode
    allowed, mode.allow_scalar_outputs = mode.allow_scalar_outputs, True
    try:
        yield
    finally:
        mode.allow_scalar_outputs = allowed


def within(backend: object) -> list[object]:
    """Return the backend, and what Dynamo and `torch.compile` wrapped in it, the innermost last."""
    found = [backend]
    for name in ("_torchdynamo_orig_backend", "compiler_fn"):
        while hasattr(found[-1], name):
            found.append(getattr(found[-1], name))
    return found


def is_ours(backend: object) -> bool:
    """Whether graphs for this backend are captured with the rules: it has `sees_through_branches`."""
    return bool(getattr(within(backend)[-1], "sees_through_branches", False))


def is_watched(tx: Tracer) -> bool:
    """Return whether the instructions of a frame are watched up to where two paths meet
    (`branches.watch`)."""
    return "step" in vars(tx)
