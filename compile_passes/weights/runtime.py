"""Makes the callable that Dynamo gets. It calls a graph with packed weights in place of the model's own."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...backends.samples import Comparison, Samples
from ...meta import gradients
from ...meta.torch_internals import BelowAutograd, is_traceable_wrapper_subclass
from ..graph.repeat import Undo
from .packed import (
    NO_MEMORY,
    Entry,
    NoticedWrites,
    forget_packed,
    has_memory,
    leaves_of,
    states_of,
    store,
    watch,
)
from .specs import Spec


@dataclass(frozen=True)
class Swap:
    """Replaces the graph inputs `indices`, which hold one weight, by packed tensors. These come after the
    other inputs, in order."""

    indices: tuple[int, ...]
    spec: Spec
    names: tuple[str, ...] = ()
    """Names of these inputs in the model."""

    def check(self, weights: Sequence[torch.Tensor]) -> None:
        """Raises ValueError if a weight has no memory, or values that have no 4-bit code."""
        for name, w in zip(self.names, weights):
            if not all(map(has_memory, leaves_of([w]))):
                raise ValueError(f"fp4: the weight {name} {NO_MEMORY}")
            if not is_traceable_wrapper_subclass(w) and not bool(w.isfinite().all()):
                raise ValueError(
                    f"fp4: the weight {name} holds NaN or infinity, which have no 4-bit code. Correct it, or "
                    "run this model without the backend"
                )


def runtime(
    compiled: Callable[..., Any], keep: list[int], swaps: list[Swap], undo: Undo | None = None
) -> Callable[..., Any]:
    """Return the callable for Dynamo. It looks up packed tensors and drops unused originals.

    `undo` makes it correct to run the graph twice for one call (graph/repeat.py). Then the host need not wait
    for the GPU to say whether weights have changed. It asks while the graph's kernels run, and runs the graph
    again if they have. None: the graph must not run twice.

    Dynamo's guards ensure that no gradient is needed here, so autograd is skipped. The autograd kernel that
    refuses gradients is written in Python and would cost 8 us for each operator call.
    """
    kept, lookup = _getter(keep), _Lookup(swaps)

    @torch.inference_mode()
    def take_back(args: Sequence[Any]) -> None:
        for i, number in undo or ():
            args[keep[i]].sub_(number)

    def run(*args: Any) -> Any:
        # Guards do not check for dual tensors, and their tangents would be lost below autograd.
        if gradients.has_tangent(args):
            reason = gradients.INFERENCE._replace(instead="call the model uncompiled")
            gradients.refuse_tangent('a model compiled with backend="fp4"', reason)
        packed, unsure = lookup.get(args, undo is not None)
        with BelowAutograd():
            out = compiled(*kept(args), *packed)
        if unsure is not None and unsure.differ():
            del out
            take_back(args)
            packed = unsure.again()
            with BelowAutograd():
                out = compiled(*kept(args), *packed)
        return out

    return run


def _getter(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda args: tuple(args[i] for i in indices)


_Packed = tuple[torch.Tensor, ...]


class _Met:
    """The weights of one call. All of them were packed."""

    def __init__(
        self, key: tuple[int, ...], writes: object, states: Any, entries: list[Entry], refs: list[Any]
    ) -> None:
        self.key, self.writes, self.states, self.refs = key, writes, states, refs
        self.serials = [e.serial for e in entries]
        self.packed: _Packed = tuple(t for e in entries for t in e.packed)
        distinct = {e.serial: e for e in entries}.values()
        self.samples = Samples.joined(s for e in distinct for s in e.samples)
        self.on_gpu = any(s.device.type == "cuda" for s in self.samples)


class _Unsure:
    """A call that has begun with the packed weights of earlier calls. It checks later whether the weights
    have changed."""

    __slots__ = ("_args", "_begun", "_lookup", "_met", "_suspect")

    def __init__(self, lookup: _Lookup, met: _Met, args: Sequence[Any], begun: list[Comparison]) -> None:
        self._lookup, self._met, self._args, self._begun = lookup, met, args, begun
        self._suspect: Sequence[int] = ()

    def differ(self) -> bool:
        weights = self._lookup.weights(self._args)
        if self._met.key != _key(weights) or self._met.states != _states(weights):
            return True  # the sampled memory may be freed by now
        if any([c.differs() for c in self._begun]):
            self._suspect = self._met.serials
        return len(self._suspect) > 0

    def again(self) -> _Packed:
        return self._lookup.ask(self._args, self._suspect)


class _Lookup:
    """Finds the packed tensors of all swaps, in order, for a graph's arguments.

    One comparison checks the address and version of every weight that was seen before, and one compares their
    samples. To ask each store would take microseconds for each weight before every step. Entries are freed
    together with the weights.
    """

    def __init__(self, swaps: list[Swap]) -> None:
        self._swaps = swaps
        self._stores = [(_getter(s.indices), store(s.spec)) for s in swaps]
        self.weights = _getter(sorted({i for s in swaps for i in s.indices}))
        self._met: dict[tuple[int, ...], _Met] = {}
        self._only: _Met | None = None
        """The entry, if there is only one."""
        self.on_gpu = False
        self.ran = 0
        """The number of the watched call (`Calls`) in which the graph last ran."""
        _lookups.add(self)

    def get(self, args: Sequence[Any], may_repeat: bool = False) -> tuple[_Packed, _Unsure | None]:
        self.ran = Calls.number
        late = may_repeat and self.on_gpu and not torch.cuda.is_current_stream_capturing()
        met = self._only if late else None
        if met is None:
            met = self._met.get(_key(self.weights(args)))
        if met is None or met.writes is not NoticedWrites.last:
            return self.ask(args, ()), None
        if late:
            return met.packed, _Unsure(self, met, args, [s.begin() for s in met.samples])
        if met.states != _states(self.weights(args)):
            return self.ask(args, ()), None
        if any([s.differs() for s in met.samples]):
            return self.ask(args, met.serials), None
        return met.packed, None

    def ask(self, args: Sequence[Any], but: Sequence[int]) -> _Packed:
        """Ask each store for its packed weight. Entries whose serials are in `but` are packed again.

        If a sample of one weight differs, all weights of the graph are packed again. A program that changes
        one weight usually changes others, too, and the samples may have missed these changes.
        """
        weights = self.weights(args)
        key = _key(weights)
        self._forget(key)  # newly packed tensors replace the old ones
        writes, states, suspect = NoticedWrites.last, _states(weights), set(but)
        entries = []
        for swap, (chosen, kept) in zip(self._swaps, self._stores):
            of = chosen(args)
            try:
                entry = kept.entry(of)
                entries.append(kept.entry(of, entry.serial) if entry.serial in suspect else entry)
            except RuntimeError:
                swap.check(of)
                raise
        refs = watch(weights, self._when_gone(key), all(e.owned for e in entries))
        self._met[key] = met = _Met(key, writes, states, entries, refs)
        self._only, self.on_gpu = met if len(self._met) == 1 else None, met.on_gpu
        return met.packed

    def met(self) -> list[tuple[int, ...]]:
        """Return the ids of all weights that were seen."""
        return list(self._met)

    def _forget(self, key: tuple[int, ...]) -> None:
        self._met.pop(key, None)
        self._only = None

    def clear(self) -> None:
        self._met.clear()
        self._only = None

    def _when_gone(self, key: tuple[int, ...]) -> Callable[[Any], None]:
        lookup = weakref.ref(self)

        def forget(dead: Any) -> None:
            me = lookup()
            if me is not None:
                me._forget(key)

        return forget


_lookups: weakref.WeakSet[_Lookup] = weakref.WeakSet()


class Calls:
    """Numbers the watched calls, so that it is known which graphs ran in a call."""

    number = 0

    @classmethod
    def begin(cls) -> int:
        """Return the number of a call that begins now."""
        cls.number += 1
        return cls.number


def packed_since(number: int) -> set[int]:
    """Return the ids of weights whose packed tensors were used since that call began."""
    return {i for lookup in list(_lookups) if lookup.ran >= number for key in lookup.met() for i in key}


def _key(weights: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    return tuple(map(id, weights))


def _states(weights: tuple[torch.Tensor, ...]) -> Any:
    return states_of(weights if _PLAIN.issuperset(map(type, weights)) else leaves_of(weights))


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def forget_all() -> None:
    """Forget everything that was packed, for torch.compiler.reset()."""
    forget_packed()
    for lookup in list(_lookups):
        lookup.clear()
