"""Packed weights at run time: made at the first call, shared by all graphs, gone with the Parameter."""

from __future__ import annotations

import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...experts import interleave
from ...meta import gradients
from ...meta.formats import FORMATS
from ...meta.layouts import LAYOUTS, packed_spec
from ...samples import Comparison, Samples


@dataclass(frozen=True)
class Piece:
    """A part of parameter `source`, [n, k] or for a bias [n].

    `at` says what each of the parameter's dimensions is: ("at", i), one place; ("n", start, step) or
    ("k", start, step), a slice that becomes that dimension of the piece; ("both", start, n's step, k's step),
    the only one of a parameter with one dimension, which holds both.
    """

    source: int
    at: tuple[tuple[Any, ...], ...]

    def take(self, weights: tuple[torch.Tensor, ...], sizes: dict[str, int]) -> torch.Tensor:
        w, order = weights[self.source].detach(), list[str]()
        if self.at[0][0] == "both":
            _, start, *steps = self.at[0]
            each = w.stride(0)
            strides = tuple(step * each for step in steps)
            return w.as_strided((sizes["n"], sizes["k"]), strides, w.storage_offset() + start * each)
        for what, *rest in self.at:
            d = len(order)
            if what == "at":
                w = w.select(d, rest[0])
            else:
                start, step = rest
                w = w[(slice(None),) * d + (slice(start, start + step * (sizes[what] - 1) + 1, step),)]
                order.append(what)
        return w.t() if order == ["k", "n"] else w


@dataclass(frozen=True)
class Assembly:
    """A weight [E, parts * n, k] put together from many parameters: for each expert its parts, in order."""

    experts: tuple[tuple[Piece, ...], ...]
    n: int
    k: int
    interleaved: bool = False
    """Rows of the parts alternate, as a fused activation may want gate and up."""

    @property
    def shape(self) -> tuple[int, ...]:
        rows = len(self.experts[0]) * self.n
        return (len(self.experts), rows, self.k) if self.k else (len(self.experts), rows)

    @staticmethod
    def of_one(e: int, n: int, k: int, transposed: bool) -> Assembly:
        """One parameter as it is."""
        rows: tuple[tuple[Any, ...], ...] = (
            (("k", 0, 1), ("n", 0, 1)) if transposed else (("n", 0, 1), ("k", 0, 1))
        )
        return Assembly(tuple((Piece(0, (("at", i), *rows)),) for i in range(e)), n, k)

    def build(self, *weights: torch.Tensor) -> torch.Tensor:
        sizes = {"n": self.n, "k": self.k}
        rows = []
        for parts in self.experts:
            taken = [p.take(weights, sizes) for p in parts]
            rows.append(torch.stack(taken, 1).flatten(0, 1) if self.interleaved else torch.cat(taken))
        return torch.stack(rows)

    def whole(self, shapes: list[tuple[int, ...]]) -> bool | None:
        """None unless it is one parameter as it is; then whether that is stored transposed, [E, K, N]."""
        count, order = len(self.experts[0]), [what for what, *_ in self.experts[0][0].at[1:]]
        transposed = order == ["k", "n"]
        e, n, *k = self.shape
        if shapes != [(e, *k, n) if transposed else (e, n, *k)]:
            return None
        for i, parts in enumerate(self.experts):
            for p, part in enumerate(parts):
                rows = ("n", p, count) if self.interleaved else ("n", p * self.n, 1)
                both = [rows, ("k", 0, 1)] if k else [rows]
                if part.at != (("at", i), *(both[::-1] if transposed else both)):
                    return None
        return transposed


@dataclass(frozen=True)
class PackSpec:
    """How a weight is packed.

    `transposed`: stored as [E, K, N]. `assembly`: put together first. `interleave`: rows of all gates,
    then all ups, become gate 0, up 0, gate 1, ...
    """

    format: str
    layout: str
    transposed: bool
    assembly: Assembly | None = None
    interleave: bool = False

    @property
    def tensors(self) -> int:
        return len(packed_spec(FORMATS[self.format], LAYOUTS[self.layout], (1,), 1, 1))

    def shapes(self, stored: tuple[int, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of the packed tensors of a weight stored with this shape."""
        if self.assembly is not None:
            stored = self.assembly.shape
        e, n, k = (stored[0], stored[2], stored[1]) if self.transposed else stored
        return packed_spec(FORMATS[self.format], LAYOUTS[self.layout], (e,), n, k)

    def num_bytes(self, stored: tuple[int, ...]) -> int:
        return sum(torch.Size(s).numel() * d.itemsize for s, d in self.shapes(stored))

    def pack(self, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Quantise and reorder; the result is no inference tensor whatever mode the caller is in."""
        with torch.inference_mode(False), torch.no_grad():
            w = self.assembly.build(*weights) if self.assembly is not None else weights[0].detach()
            if self.transposed:
                w = w.transpose(1, 2)
            if self.interleave:
                w = interleave(w)
            packed, scale, global_scale = torch.ops.fp4.quantize(w, self.format)
            if self.layout != "plain":
                packed, scale, global_scale = torch.ops.fp4.prepack(
                    packed, scale, global_scale, self.format, self.layout
                )
        return (packed, scale, global_scale)[: self.tensors]


@dataclass(frozen=True)
class JoinSpec:
    """Biases of many parameters as one tensor [E, N], not packed."""

    assembly: Assembly
    dtype: torch.dtype
    layout = "bias"
    transposed = False
    tensors = 1

    def shapes(self, stored: tuple[int, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [(self.assembly.shape, self.dtype)]

    def pack(self, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.inference_mode(False), torch.no_grad():
            return (self.assembly.build(*weights),)


class Spec(Protocol):
    """How graph inputs are made of weights: PackSpec, JoinSpec and prequantized.StoredSpec; a key."""

    @property
    def tensors(self) -> int: ...

    def shapes(self, stored: tuple[int, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each input, for a weight that is stored with this shape."""

    def pack(self, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The inputs."""

    def __hash__(self) -> int: ...


class _Entry:
    """What is known of some weights, and what they were packed into."""

    __slots__ = ("owned", "packed", "refs", "samples", "serial", "shapes", "states", "stores", "written")

    def __init__(self, weights: tuple[torch.Tensor, ...]) -> None:
        leaves = leaves_of(weights)
        if not all(map(_has_memory, leaves)):
            raise RuntimeError(f"fp4: a weight {NO_MEMORY}")
        self.shapes, self.states = _shapes(weights), states_of(leaves)
        self.refs: list[Any] = []
        self.stores = frozenset(map(_memory, leaves))
        self.written = False
        # Before the weights are read to pack them: what is written meanwhile is then noticed later.
        self.samples = Samples.of(leaves)
        self.serial = next(_serials)
        self.packed: tuple[torch.Tensor, ...] = ()
        self.owned = False
        """Whether the packed tensors share no memory with the weights."""

    def holds(self, weights: tuple[torch.Tensor, ...]) -> bool:
        """Whether these are the same weights, and nothing shows that they were written to."""
        if self.written or self.shapes != _shapes(weights):
            return False
        return self.states == states_of(leaves_of(weights)) and not any(s.differ() for s in self.samples)

    def put(self, packed: tuple[torch.Tensor, ...], old: _Entry | None) -> None:
        """Keeps them where the old ones lie, so that CUDA graphs that were recorded read the new ones."""
        self.packed, self.owned = packed, self.stores.isdisjoint(map(_memory, packed))
        if old is None:
            return
        if self.owned and old.owned and list(map(_like, old.packed)) == list(map(_like, packed)):
            with torch.inference_mode(False), torch.no_grad():
                for kept, new in zip(old.packed, packed, strict=True):
                    kept.copy_(new)
            self.packed = old.packed
        else:
            _NoticedWrites.record()


_serials = itertools.count(1)


def _like(t: torch.Tensor) -> tuple[Any, ...]:
    return (t.shape, t.dtype, t.device, t.stride())


def _memory(t: torch.Tensor) -> int:
    try:
        return t.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, or on no device
        return 0


NO_MEMORY = (
    "has no memory: its storage was freed, or made smaller than the weight is. Fill it again before the "
    "call. To run without the original weights, use fp4_ops.prepare(model), which frees them"
)


def _has_memory(t: torch.Tensor) -> bool:
    """Whether all its elements lie within its storage: `untyped_storage().resize_(0)` frees what is read."""
    if t.numel() == 0 or t.layout is not torch.strided or t.device.type == "meta":
        return True
    last = t.storage_offset() + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
    return (last + 1) * t.element_size() <= t.untyped_storage().nbytes()


def leaves_of(weights: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The plain tensors that weights are, or, of tensor subclasses, hold."""
    found: list[torch.Tensor] = []
    for w in weights:
        if is_traceable_wrapper_subclass(w):
            found += leaves_of(getattr(w, name) for name in w.__tensor_flatten__()[0])
        else:
            found.append(w)
    return tuple(found)


def _shapes(weights: Iterable[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [(w.shape, w.stride()) for w in weights]


def watch(weights: Iterable[torch.Tensor], gone: Callable[[Any], None], owned: bool) -> list[Any]:
    """Weak references that call `gone` when the weights are; `owned`: as `_Entry.owned`, of what is kept.

    To their memory, not to the tensors: `torch.utils.swap_tensors`, by which `load_state_dict` and
    `Module.to` may replace what a parameter holds, refuses a tensor that anything refers to weakly. But
    memory that is kept here never goes.
    """
    kept = [leaf.untyped_storage() for leaf in leaves_of(weights)] if owned else weights
    return [weakref.ref(x, gone) for x in kept]


def states_of(leaves: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Versions and addresses. Inference tensors have no version."""
    try:
        versions = [w._version for w in leaves]
    except RuntimeError:
        versions = [-1 if w.is_inference() else w._version for w in leaves]
    return versions, list(map(_data_ptr, leaves))


_data_ptr = torch.Tensor.data_ptr


class PackedWeights:
    """Parameters -> packed tensors under one spec.

    An entry holds while the Parameters are the same objects in the same memory, and nothing shows that they
    were written to: neither `_version`, nor an optimizer (`note_writes`), nor a sample of what they hold.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._entries: dict[tuple[int, ...], _Entry] = {}
        self._lock = threading.Lock()

    def get(self, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.entry(weights).packed

    def entry(self, weights: tuple[torch.Tensor, ...], but: int = 0) -> _Entry:
        """Packed anew unless it holds; `but`: the serial of an entry that does not, whatever it shows."""
        key = tuple(map(id, weights))
        entry = self._entries.get(key)
        if entry is not None and entry.serial != but and entry.holds(weights):
            return entry
        with self._lock:
            now = self._entries.get(key)
            if now is not None and now is not entry and now.serial != but and now.holds(weights):
                return now  # another thread has packed them meanwhile
            made = _Entry(weights)
            made.put(self._spec.pack(*weights), now)
            made.refs = watch(weights, lambda dead: self._forget(key, dead), made.owned)
            self._entries[key] = made
            return made

    def _forget(self, key: tuple[int, ...], dead: Any) -> None:
        entry = self._entries.get(key)
        if entry is not None and any(ref is dead for ref in entry.refs):
            del self._entries[key]

    def note_writes(self, stores: set[int]) -> bool:
        """Whether any of these weights lie in memory that was written to: they are packed anew then."""
        found = [e for e in list(self._entries.values()) if not e.stores.isdisjoint(stores)]
        for entry in found:
            entry.written = True
        return bool(found)

    def refresh(self, tensors: Mapping[int, torch.Tensor]) -> int:
        """Packs anew what is made of these weights (by id): now, or when it is used if others are in it."""
        done = 0
        for key, entry in list(self._entries.items()):
            found = (tensors[i] for i in key if i in tensors)  # an id may be that of another tensor by now
            weights = tuple(w for w in found if not entry.stores.isdisjoint(map(_memory, leaves_of([w]))))
            if len(weights) == len(key):
                self.entry(weights, entry.serial)
            entry.written = entry.written or bool(weights)
            done += bool(weights)
        return done

    def of(self, weights: Iterable[torch.Tensor]) -> set[int]:
        """The ids of those weights of which something is kept."""
        stores: dict[int, set[int]] = {}
        for key, entry in list(self._entries.items()):
            for i in key:
                stores.setdefault(i, set()).update(entry.stores)
        # An id may be that of another tensor by now, as memory may outlive the parameter that was packed.
        known = [w for w in weights if id(w) in stores]
        return {id(w) for w in known if not stores[id(w)].isdisjoint(map(_memory, leaves_of([w])))}

    def clear(self) -> None:
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


_stores: dict[Spec, PackedWeights] = {}


def store(spec: Spec) -> PackedWeights:
    """The one cache for this spec: prefill, decode and regional graphs share their packed weights."""
    return _stores.setdefault(spec, PackedWeights(spec))


# --- what tells that weights were written to ---


class _NoticedWrites:
    """`last` is another object after each write that was noticed: then every store is asked again."""

    last = object()

    @classmethod
    def record(cls) -> None:
        cls.last = object()


def note_writes(tensors: Iterable[Any]) -> None:
    """These tensors were written to in a way that leaves no trace: what is packed of them is made anew."""
    if any(map(len, list(_stores.values()))):
        stores = {_memory(t) for t in leaves_of(t for t in tensors if isinstance(t, torch.Tensor))} - {0}
        if any([kept.note_writes(stores) for kept in list(_stores.values())]):
            _NoticedWrites.record()


def _after_a_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Fused optimizers leave the versions of parameters alone, and a small step may leave a sample alone."""
    if not torch.compiler.is_compiling():  # then the graph that writes counts as a write by itself
        note_writes(p for group in optimizer.param_groups for p in group["params"])


register_optimizer_step_post_hook(_after_a_step)


def refresh(model: torch.nn.Module) -> int:
    """Packs again, now, all weights of `model` that `backend="fp4"` has packed; returns how many.

    Call it after a write that the backend cannot notice (docs/compiler.md, "Weights that change"): of a few
    elements through `.data`, NumPy or a kernel; or any write before you replay a CUDA graph that you captured
    yourself. Packed tensors keep their addresses, so such a graph reads the new values.
    Raises TypeError if `model` is no torch.nn.Module, and ValueError for a weight with NaN or infinity.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"fp4: refresh takes a torch.nn.Module; it got {type(model).__name__}")
    tensors = {id(t): t for t in itertools.chain(model.parameters(), model.buffers())}
    done = sum(kept.refresh(tensors) for kept in list(_stores.values()))
    _NoticedWrites.record()
    return done


def packed_ids(weights: Sequence[torch.Tensor]) -> set[int]:
    """The ids of those weights of which something is packed."""
    return set().union(*(kept.of(weights) for kept in list(_stores.values())))


def forget_all() -> None:
    """torch.compiler.reset(): nothing that was packed is used again."""
    _NoticedWrites.record()
    for kept in list(_stores.values()):
        kept.clear()
    for lookup in list(_lookups):
        lookup.clear()


@dataclass(frozen=True)
class Swap:
    """Graph inputs `indices` make up a weight; its packed tensors follow the other inputs, in order."""

    indices: tuple[int, ...]
    spec: Spec
    names: tuple[str, ...] = ()
    """Of these inputs, in the model."""

    def check(self, weights: Sequence[torch.Tensor]) -> None:
        """Raises ValueError if a weight has no memory, or values that have no 4-bit code."""
        for name, w in zip(self.names, weights):
            if not all(map(_has_memory, leaves_of([w]))):
                raise ValueError(f"fp4: the weight {name} {NO_MEMORY}")
            if not is_traceable_wrapper_subclass(w) and not bool(w.isfinite().all()):
                raise ValueError(
                    f"fp4: the weight {name} holds NaN or infinity, which have no 4-bit code. Correct it, or "
                    "run this model without the backend"
                )


def runtime(
    compiled: Callable[..., Any], keep: list[int], swaps: list[Swap], repeatable: bool = False
) -> Callable[..., Any]:
    """The callable Dynamo gets: packed tensors are looked up, unused originals dropped.

    `repeatable`: the graph may run twice for one call. Then a GPU need not say beforehand whether weights
    have changed: the host asks when the graph's kernels are under way, and runs them again if they have.

    Dynamo guards that no gradient can be asked for here, so autograd is skipped as a whole: the kernel that
    refuses gradients is Python and costs each operator call 8 us.
    """
    kept, lookup = _getter(keep), _Lookup(swaps)
    below_autograd = torch._C._AutoDispatchBelowAutograd

    def run(*args: Any) -> Any:
        # Dual tensors are not guarded against, and their tangents would be lost below autograd.
        if gradients.has_tangent(args):
            gradients.refuse_tangent('a model compiled with backend="fp4"', "call the model uncompiled")
        packed, unsure = lookup.get(args, repeatable)
        with below_autograd():
            out = compiled(*kept(args), *packed)
        if unsure is not None and unsure.differ():
            del out
            packed = unsure.again(args)
            with below_autograd():
                out = compiled(*kept(args), *packed)
        return out

    return run


def _getter(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda args: tuple(args[i] for i in indices)


_Packed = tuple[torch.Tensor, ...]


class _Met:
    """The weights of one call, all of which were packed."""

    def __init__(self, writes: object, states: Any, entries: list[_Entry], refs: list[Any]) -> None:
        self.writes, self.states, self.refs = writes, states, refs
        self.serials = [e.serial for e in entries]
        self.packed: _Packed = tuple(t for e in entries for t in e.packed)
        distinct = {e.serial: e for e in entries}.values()
        self.samples = Samples.joined(s for e in distinct for s in e.samples)
        self.on_gpu = any(s.device.type == "cuda" for s in self.samples)


class _Unsure:
    """Comparisons that a GPU has still to make."""

    def __init__(self, comparisons: list[Comparison], again: Callable[[Sequence[Any]], _Packed]) -> None:
        self._comparisons, self.again = comparisons, again

    def differ(self) -> bool:
        return any([c.differs() for c in self._comparisons])


class _Lookup:
    """The packed tensors of all swaps, in order, for a graph's arguments.

    One comparison checks the address and version of every weight that was met before, and one their samples:
    asking each store takes microseconds a weight, before every step. Nothing is kept
    longer than they live.
    """

    def __init__(self, swaps: list[Swap]) -> None:
        self._swaps = swaps
        self._stores = [(_getter(s.indices), store(s.spec)) for s in swaps]
        self._weights = _getter(sorted({i for s in swaps for i in s.indices}))
        self._met: dict[tuple[int, ...], _Met] = {}
        _lookups.add(self)

    def get(self, args: Sequence[Any], may_repeat: bool = False) -> tuple[_Packed, _Unsure | None]:
        weights = self._weights(args)
        key = tuple(map(id, weights))
        met = self._met.get(key)
        if met is None or met.writes != _NoticedWrites.last or met.states != _states(weights):
            return self._ask(key, args, ()), None
        if met.on_gpu and torch.cuda.is_current_stream_capturing():
            return met.packed, None  # to a CUDA graph of the user's, which cannot ask
        comparisons = [s.begin() for s in met.samples]
        if may_repeat and met.on_gpu:
            return met.packed, _Unsure(comparisons, lambda args: self._ask(key, args, met.serials))
        if any([c.differs() for c in comparisons]):
            return self._ask(key, args, met.serials), None
        return met.packed, None

    def _ask(self, key: tuple[int, ...], args: Sequence[Any], but: Sequence[int]) -> _Packed:
        """Asks each store. `but`: the serials of entries that are not to be trusted.

        A sample of one weight that differs makes all of the graph suspect: who changes one changes others, of
        which the samples may have missed it.
        """
        self._met.pop(key, None)  # what is packed anew takes the place of the old
        writes, weights = _NoticedWrites.last, self._weights(args)
        states, suspect = _states(weights), set(but)
        entries = []
        for swap, (chosen, kept) in zip(self._swaps, self._stores):
            of = chosen(args)
            try:
                entry = kept.entry(of)
                entries.append(kept.entry(of, entry.serial) if entry.serial in suspect else entry)
            except RuntimeError:
                swap.check(of)
                raise
        refs = watch(weights, self._forget(key), all(e.owned for e in entries))
        self._met[key] = met = _Met(writes, states, entries, refs)
        return met.packed

    def clear(self) -> None:
        self._met.clear()

    def _forget(self, key: tuple[int, ...]) -> Callable[[Any], None]:
        lookup = weakref.ref(self)

        def forget(dead: Any) -> None:
            me = lookup()
            if me is not None:
                me._met.pop(key, None)

        return forget


_lookups: weakref.WeakSet[_Lookup] = weakref.WeakSet()


def _states(weights: tuple[torch.Tensor, ...]) -> Any:
    return states_of(weights if _PLAIN.issuperset(map(type, weights)) else leaves_of(weights))


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
