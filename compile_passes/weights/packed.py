"""Packed weights. They are made at the first call, shared by all graphs, packed again after writes, and freed
together with the weights."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...backends.samples import Samples
from ...meta.torch_internals import is_traceable_wrapper_subclass
from ...tensor import FP4Tensor
from .specs import Spec


def layout_of(t: torch.Tensor) -> tuple[Any, ...]:
    return (t.shape, t.dtype, t.device, t.stride())


def memory_of(t: torch.Tensor) -> int:
    try:
        return t.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors, or tensors on no device
        return 0


NO_MEMORY = (
    "has no memory: its storage was freed, or made smaller than the weight is. Fill it again before the "
    "call. To run without the original weights, use fp4_ops.prepare(model), which frees them"
)


def has_memory(t: torch.Tensor) -> bool:
    """Return whether all elements lie within the storage. `untyped_storage().resize_(0)` frees memory that
    is still read."""
    if t.numel() == 0 or t.layout is not torch.strided or t.device.type == "meta":
        return True
    last = t.storage_offset() + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
    return (last + 1) * t.element_size() <= t.untyped_storage().nbytes()


def leaves_of(weights: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return plain tensors: the weights themselves, or the tensors that a tensor subclass holds."""
    found: list[torch.Tensor] = []
    for w in weights:
        if type(w) is FP4Tensor:  # a shortcut: the general way takes 2 us a weight in each call
            found += w.inner_tensors()
        elif is_traceable_wrapper_subclass(w):
            found += leaves_of(getattr(w, name) for name in w.__tensor_flatten__()[0])
        else:
            found.append(w)
    return tuple(found)


def shapes_of(weights: Iterable[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [(w.shape, w.stride()) for w in weights]


def watch(weights: Iterable[torch.Tensor], gone: Callable[[Any], None], owned: bool) -> list[Any]:
    """Create weak references that call `gone` when the weights are freed.

    They refer to the weights' memory, not to the tensors: `load_state_dict` and `Module.to` may use
    `torch.utils.swap_tensors`, which refuses a tensor with weak references. But memory that our packed
    tensors share is never freed. So without `owned` (`packed.Entry.owned`) they refer to the tensors.
    """
    kept = [leaf.untyped_storage() for leaf in leaves_of(weights)] if owned else weights
    return [weakref.ref(x, gone) for x in kept]


def states_of(leaves: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Return versions and addresses. Inference tensors have no version."""
    try:
        versions = [w._version for w in leaves]
    except RuntimeError:
        versions = [-1 if w.is_inference() else w._version for w in leaves]
    return versions, list(map(_data_ptr, leaves))


_data_ptr = torch.Tensor.data_ptr


class Entry:
    """The known state of some weights, and the operands that they were packed into."""

    __slots__ = ("owned", "packed", "refs", "samples", "serial", "shapes", "states", "stores", "written")

    def __init__(self, weights: tuple[torch.Tensor, ...]) -> None:
        leaves = leaves_of(weights)
        if not all(map(has_memory, leaves)):
            raise RuntimeError(f"fp4: a weight {NO_MEMORY}")
        self.shapes, self.states = shapes_of(weights), states_of(leaves)
        self.refs: list[Any] = []
        self.stores = frozenset(map(memory_of, leaves))
        self.written = False
        # The samples are taken before the weights are read, so that writes during the packing are noticed
        # later.
        self.samples = Samples.of(leaves)
        self.serial = next(_serials)
        self.packed: tuple[torch.Tensor, ...] = ()
        self.owned = False
        """True if the packed tensors share no memory with the weights."""

    def holds(self, weights: tuple[torch.Tensor, ...]) -> bool:
        """Return whether these are the same weights, and nothing shows that they were written to."""
        if self.written or self.shapes != shapes_of(weights):
            return False
        return self.states == states_of(leaves_of(weights)) and not any(s.differs() for s in self.samples)

    def put(self, packed: tuple[torch.Tensor, ...], old: Entry | None) -> None:
        """Store packed tensors in the memory of the old ones, so that recorded CUDA graphs read the new
        ones."""
        self.packed, self.owned = packed, self.stores.isdisjoint(map(memory_of, packed))
        if old is None:
            return
        if self.owned and old.owned and list(map(layout_of, old.packed)) == list(map(layout_of, packed)):
            with torch.inference_mode(False), torch.no_grad():
                for kept, new in zip(old.packed, packed, strict=True):
                    kept.copy_(new)
            self.packed = old.packed
        else:
            NoticedWrites.record()


_serials = itertools.count(1)


class PackedWeights:
    """Maps parameters to packed tensors of one spec.

    An entry is valid as long as the Parameters are the same objects in the same memory, and nothing shows
    that they were written to. A write shows in `_version`, in the step of an optimizer (`note_writes`), or in
    a sample of their bytes.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._entries: dict[tuple[int, ...], Entry] = {}
        self._lock = threading.Lock()

    def get(self, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.entry(weights).packed

    def entry(self, weights: tuple[torch.Tensor, ...], but: int = 0) -> Entry:
        """Return a valid entry, and pack the weights again if necessary. An entry whose serial is `but`
        counts as invalid."""
        key = tuple(map(id, weights))
        entry = self._entries.get(key)
        if entry is not None and entry.serial != but and entry.holds(weights):
            return entry
        with self._lock:
            now = self._entries.get(key)
            if now is not None and now is not entry and now.serial != but and now.holds(weights):
                return now  # another thread has packed them meanwhile
            made = Entry(weights)
            made.put(self._spec.pack(*weights), now)
            made.refs = watch(weights, lambda dead: self._forget(key, dead), made.owned)
            self._entries[key] = made
            return made

    def _forget(self, key: tuple[int, ...], dead: Any) -> None:
        entry = self._entries.get(key)
        if entry is not None and any(ref is dead for ref in entry.refs):
            del self._entries[key]

    def note_writes(self, stores: set[int]) -> bool:
        """Return whether any of these weights are in memory that was written to. They are then packed
        again."""
        found = [e for e in list(self._entries.values()) if not e.stores.isdisjoint(stores)]
        for entry in found:
            entry.written = True
        return bool(found)

    def refresh(self, tensors: Mapping[int, torch.Tensor]) -> int:
        """Pack again everything that was packed from these weights, which are given by id. This is done now,
        except for entries that also have other weights: they are packed again at their next use."""
        done = 0
        for key, entry in list(self._entries.items()):
            found = (tensors[i] for i in key if i in tensors)  # an id may belong to another tensor by now
            weights = tuple(w for w in found if not entry.stores.isdisjoint(map(memory_of, leaves_of([w]))))
            if len(weights) == len(key):
                self.entry(weights, entry.serial)
            entry.written = entry.written or bool(weights)
            done += bool(weights)
        return done

    def of(self, weights: Iterable[torch.Tensor]) -> set[int]:
        """Return the ids of those weights for which something is stored."""
        stores: dict[int, set[int]] = {}
        for key, entry in list(self._entries.items()):
            for i in key:
                stores.setdefault(i, set()).update(entry.stores)
        # An id may belong to another tensor by now, because memory may outlive the parameter that was packed.
        known = [w for w in weights if id(w) in stores]
        return {id(w) for w in known if not stores[id(w)].isdisjoint(map(memory_of, leaves_of([w])))}

    def clear(self) -> None:
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


_stores: dict[Spec, PackedWeights] = {}


def store(spec: Spec) -> PackedWeights:
    """Return the single cache for this spec. Prefill, decode and regional graphs share their packed
    weights."""
    return _stores.setdefault(spec, PackedWeights(spec))


# --- noticing writes to weights ---


class NoticedWrites:
    """`last` becomes a new object after each noticed write. Then every store is asked again."""

    last = object()

    @classmethod
    def record(cls) -> None:
        cls.last = object()


def note_writes(tensors: Iterable[Any]) -> None:
    """Note writes to tensors that do not show in the tensors' versions, so that the weights are packed
    again."""
    if any(map(len, list(_stores.values()))):
        stores = {memory_of(t) for t in leaves_of(t for t in tensors if isinstance(t, torch.Tensor))} - {0}
        if any([kept.note_writes(stores) for kept in list(_stores.values())]):
            NoticedWrites.record()


def _after_a_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Note a step of an optimizer. Fused optimizers do not change versions, and a small step may change no
    sample."""
    # A compiled optimizer needs no note here: the graph that writes notes its writes itself.
    if not torch.compiler.is_compiling():
        note_writes(p for group in optimizer.param_groups for p in group["params"])


register_optimizer_step_post_hook(_after_a_step)


def refresh(model: torch.nn.Module) -> int:
    """Packs all weights of `model` again that `backend="fp4"` has packed. Returns how many
    packed weights there are. A weight joined from many parameters counts once.

    Call it after a write that the backend cannot notice, such as one to a few elements through `.data`,
    NumPy or a kernel (docs/compiler.md, "Weights that change"). Call it also after any write if you captured
    a CUDA graph yourself and replay it. Packed tensors keep their addresses, so such a graph reads the new
    values.

    Raises TypeError if `model` is not a torch.nn.Module, and ValueError for a weight with NaN or infinity.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"fp4: refresh takes a torch.nn.Module; it got {type(model).__name__}")
    tensors = {id(t): t for t in itertools.chain(model.parameters(), model.buffers())}
    done = sum(kept.refresh(tensors) for kept in list(_stores.values()))
    NoticedWrites.record()
    return done


def packed_ids(weights: Sequence[torch.Tensor]) -> set[int]:
    """Return the ids of those weights from which something is packed."""
    return set().union(*(kept.of(weights) for kept in list(_stores.values())))


def forget_packed() -> None:
    """Forget everything that was packed."""
    NoticedWrites.record()
    for kept in list(_stores.values()):
        kept.clear()
