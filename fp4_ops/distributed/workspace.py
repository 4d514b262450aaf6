"""Manages memory that all GPUs of a node can address. A process group has one workspace.

All ranks make it together, once (`connect`, which `prepare` calls). They never make it inside a captured
graph, because kernels of the graph hold its addresses. If it cannot be made, all ranks agree on that, and
torch.distributed's collectives exchange the data.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..meta.text import in_short
from ..runtime.fitted import FILE, read
from . import nvlink
from .collectives import Group
from .local import Parts

HERE = Path(__file__).parent
FITTED = {name: int(value) for name, value in read(HERE / FILE)["exchange"].values.items()}
"""Thresholds that were measured between GPUs (docs/kernels.md)."""
WORD_BYTES = FITTED["word_bytes"]
"""Up to this number of bytes to one rank, words carry their own flags. This doubles the data and saves a
fence."""
SUM_WORD_BYTES = FITTED["sum_word_bytes"]
"""The same threshold for a reduction, where every rank sends all of its data."""
TWO_STEPS_BYTES = {2: FITTED["two_ranks_two_steps_bytes"]}
"""Reductions of at least this many bytes use two steps (reduce-scatter, then gather).

The threshold depends on the number of ranks: with more ranks two steps send less.
"""
MORE_RANKS_BYTES = FITTED["more_ranks_two_steps_bytes"]
FP8_BYTES = FITTED["fp8_bytes"]
"""Tokens of a rank with at least this many bytes are quantised before they are sent."""
GATHER_BLOCKS, GATHER_WORD_BLOCKS = FITTED["gather_blocks"], FITTED["gather_word_blocks"]
REDUCE_BLOCKS, REDUCE_WORD_BLOCKS = FITTED["reduce_blocks"], FITTED["reduce_word_blocks"]
REDUCE_TURNS = FITTED["reduce_turns"]
SUM_BLOCKS, SUM_TURNS = FITTED["sum_blocks"], FITTED["sum_turns"]
"""The number of thread blocks of a reduction, and the number of turns in which each block sends its data."""
MAX_TOKENS = 4096


def _aligned(n: int) -> int:
    return -(-n // 1024) * 1024


class Layout:
    """Offsets in a rank's buffer. interface.h describes the fields."""

    def __init__(self, ranks: int, max_tokens: int, row_bytes: int) -> None:
        rows = ranks * max_tokens
        # A piece of 16 bytes of a row carries 8 bytes of data; ids and weights of slots have 8 bytes each.
        most_tokens = WORD_BYTES // 256  # rows so short that their slots weigh more have plain data
        self.word_stride = _aligned(2 * WORD_BYTES + 16 * nvlink.MOST_TOP_K * min(max_tokens, most_tokens))
        self.part_stride = _aligned(max_tokens * row_bytes)
        sizes = {
            "headers": 2 * nvlink.MOST_RANKS * 8,
            "flags": 2 * nvlink.MOST_RANKS * nvlink.SLOTS * 4,
            "words": 2 * ranks * self.word_stride,
            "parts": 2 * ranks * self.part_stride,
            "rows": rows * row_bytes,
            "factors": rows * 4,
            "ids": rows * nvlink.MOST_TOP_K * 4,
            "weights": rows * nvlink.MOST_TOP_K * 4,
        }
        self.at, self.bytes = {}, 0
        for name, size in sizes.items():
            self.at[name] = self.bytes
            self.bytes += _aligned(size)


class Gathered(NamedTuple):
    """Gathered data of [ranks * tokens] tokens: views of the buffer, valid until the next call."""

    rows: Tensor
    """Rows of tokens. A row without a local expert is undefined."""
    factors: Tensor
    ids: Tensor
    """Local numbers of experts, int32. -1 is an expert of another rank."""
    weights: Tensor
    """float32."""


class Workspace:
    """A rank's view of the buffers of all ranks."""

    def __init__(
        self, buffer: Tensor, addresses: list[int], rank: int, max_tokens: int, row_bytes: int, seconds: float
    ) -> None:
        self.buffer, self.rank, self.ranks = buffer, rank, len(addresses)
        self.max_tokens, self.row_bytes = max_tokens, row_bytes
        self.layout = layout = Layout(self.ranks, max_tokens, row_bytes)
        assert buffer.nbytes >= layout.bytes
        self.counters = torch.zeros(4, dtype=torch.int32, device=buffer.device)
        self.told = torch.zeros(
            ctypes.sizeof(nvlink.Failure), dtype=torch.uint8, pin_memory=buffer.is_cuda
        )  # the GPU writes there
        self.seconds = seconds
        self.handle: Any = None  # torch's, which keeps the others' buffers mapped
        self.space = nvlink.Space(
            (nvlink.POINTER * nvlink.MOST_RANKS)(*addresses), **layout.at,
            word_stride=layout.word_stride, part_stride=layout.part_stride,
            counters=self.counters.data_ptr(), failure=self.told.data_ptr(),
            patience=int(seconds * 1e9), rank=rank, ranks=self.ranks,
        )  # fmt: skip

    # --- what fits ---

    def takes(self, tokens: int, row_bytes: int, top_k: int) -> bool:
        """True if gather and reduce can carry so much data. All ranks get the same answer."""
        fits = tokens <= self.max_tokens and row_bytes <= self.row_bytes and row_bytes % 16 == 0
        return fits and 0 < top_k <= nvlink.MOST_TOP_K

    def sums(self, num_bytes: int) -> bool:
        return 0 < num_bytes <= self.layout.part_stride and num_bytes % 16 == 0

    # --- the calls ---

    def _view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        start, count = self.layout.at[name], 1
        for size in shape:
            count *= size
        return self.buffer[start : start + count * dtype.itemsize].view(dtype).view(shape)

    def _launch(self, name: str, params: ctypes.Structure) -> None:
        if words := self.failure():
            raise RuntimeError(words)
        nvlink.launch(name, params, self.stream())

    def stream(self) -> int | None:
        if not self.buffer.is_cuda:
            return None
        return torch.cuda.current_stream(self.buffer.device).cuda_stream

    def gather(
        self, x: Tensor, ids: Tensor, weights: Tensor, tokens: int, experts: int, factor: Tensor | None = None
    ) -> Gathered:
        """Sends x [own, row] of any dtype, with a factor for each fp8 row, to the ranks of its experts."""
        (own, width), top_k = x.shape, ids.shape[1]
        row_bytes = width * x.itemsize
        words = factor is None and tokens * row_bytes <= WORD_BYTES and row_bytes >= 256
        params = nvlink.GatherParams(
            space=self.space, x=x.data_ptr(), factor=None if factor is None else factor.data_ptr(),
            ids=ids.data_ptr(), weights=weights.data_ptr(),
            own=own, tokens=tokens, row_bytes=row_bytes, top_k=top_k, experts=experts,
            ids64=ids.dtype == torch.int64, weight_type=nvlink.dtype_code(weights), words=words,
            blocks=GATHER_WORD_BLOCKS if words else GATHER_BLOCKS,
            signature=nvlink.signature(0, tokens, row_bytes, top_k, experts, str(x.dtype)),
        )  # fmt: skip
        self._launch("gather", params)
        rows = self.ranks * tokens
        return Gathered(
            self._view("rows", (rows, width), x.dtype),
            self._view("factors", (rows,), torch.float32),
            self._view("ids", (rows, top_k), torch.int32),
            self._view("weights", (rows, top_k), torch.float32),
        )

    def rows_like(self, tokens: int, x: Tensor) -> Tensor:
        """Returns the buffer that gather would fill with rows of x, for operators that only need its type."""
        return self._view("rows", (self.ranks * tokens, x.shape[1]), x.dtype)

    def reduce(
        self, parts: Parts, got: Gathered, own_ids: Tensor, own_weights: Tensor, tokens: int, experts: int,
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        """Returns [own, H] of `dtype`: the sum over all ranks of the parts of this rank's tokens.

        parts: this rank's results for the tokens of all ranks. They are sums of `dtype`, or rows of experts
        in bfloat16 or float32, which are weighted and summed here.
        """
        own, top_k = own_ids.shape
        y, places = parts.y, parts.places
        hidden = y.shape[1]
        out = y.new_empty((own, hidden), dtype=dtype)
        row_bytes = hidden * out.itemsize
        words = tokens * row_bytes <= WORD_BYTES
        params = nvlink.ReduceParams(
            space=self.space, y=y.data_ptr(), position=None if places is None else places.data_ptr(),
            ids=got.ids.data_ptr(), weights=got.weights.data_ptr(),
            own_ids=own_ids.data_ptr(), own_weights=own_weights.data_ptr(), out=out.data_ptr(),
            own=own, tokens=tokens, columns=hidden, top_k=top_k, experts=experts,
            ids64=own_ids.dtype == torch.int64, weight_type=nvlink.dtype_code(own_weights),
            type=nvlink.dtype_code(out), y_type=nvlink.dtype_code(y), fused=not parts.summed, words=words,
            blocks=REDUCE_WORD_BLOCKS if words else REDUCE_BLOCKS, turns=REDUCE_TURNS,
            early=not parts.summed,
            signature=nvlink.signature(1, tokens, row_bytes, top_k, experts, str(out.dtype)),
        )  # fmt: skip
        self._launch("reduce", params)
        return out

    def all_reduce(self, x: Tensor, two_steps: bool | None = None) -> Tensor:
        """Returns the sum over the ranks. All ranks get equal bits."""
        out = torch.empty_like(x)
        if two_steps is None:
            two_steps = x.nbytes >= TWO_STEPS_BYTES.get(self.ranks, MORE_RANKS_BYTES)
        params = nvlink.AllReduceParams(
            space=self.space, x=x.data_ptr(), out=out.data_ptr(), units=x.nbytes // 16,
            type=nvlink.dtype_code(x), words=x.nbytes <= SUM_WORD_BYTES and not two_steps,
            blocks=SUM_BLOCKS, turns=1 if two_steps else SUM_TURNS, two_steps=two_steps,
            signature=nvlink.signature(2, x.nbytes // 16, str(x.dtype), two_steps),
        )  # fmt: skip
        self._launch("all_reduce", params)
        return out

    # --- what went wrong ---

    def failure(self) -> str | None:
        """Says why the kernels gave up, or None."""
        told = nvlink.Failure.from_buffer_copy(bytes(ctypes.string_at(self.told.data_ptr(), 24)))
        if told.reason == 0:
            return None
        name = "fp4::all_reduce" if told.kind == 2 else "fp4::moe_ep"
        who = f"{name}: on rank {self.rank} of {self.ranks}: rank {told.rank}"
        if told.reason == 1:
            return (
                f"{who} did not come within {self.seconds:g} s. It has ended, hangs or never called the "
                "operator; nothing was computed. Look at its own output, and start all ranks anew"
            )
        return (
            f"{who} calls for {nvlink.described(told.theirs)}, and this rank for "
            f"{nvlink.described(told.ours)}: all ranks must make the same calls, with the same number of "
            "tokens where a CUDA graph has captured it (pass max_tokens, and tokens that choose no expert)"
        )


# --- one for each group ---

_SPACES: dict[str, Workspace] = {}
_WHY_NOT: dict[str, str] = {}
_OLD: list[Workspace] = []
"""Workspaces that larger ones replaced. Captured graphs may still use their addresses."""


def of(group_name: str) -> Workspace | None:
    """Returns the group's workspace, or None."""
    return _SPACES.get(group_name)


def of_same_ranks(group_name: str) -> tuple[str, Workspace] | None:
    """Returns a workspace of the same processes in the same order, and its group. Prefers the group's own.

    transformers' meshes have several groups of the same processes, and `connect` made one workspace for them.
    """
    if not _SPACES:
        return None
    if group_name in _SPACES:
        return group_name, _SPACES[group_name]
    from torch.distributed import get_process_group_ranks

    ranks = get_process_group_ranks(Group.named("fp4_ops", group_name).group)
    for name, space in _SPACES.items():
        if get_process_group_ranks(Group.named("fp4_ops", name).group) == ranks:
            return name, space
    return None


def connect(what: str, group_name: str, device: torch.device, hidden_bytes: int, max_tokens: int) -> str:
    """Makes the group's workspace for rows of so many bytes, unless there is one. All ranks must call it.

    Returns "", or the reason why the ranks have none. torch.distributed's collectives then exchange the data.
    A rank that sees no GPU returns alone, because its group may be NCCL's. The others then wait for it until
    the group's timeout.
    """
    group = Group.named(what, group_name)
    if group.size == 1:
        return "there is one process"
    if device.type != "cuda":
        return f"the experts are on {device.type}"
    if not torch.cuda.is_available():
        return "this process has no GPU"
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    sizes = torch.tensor([hidden_bytes, max_tokens], device=device)
    row_bytes, most = (_aligned(n) if i == 0 else n for i, n in enumerate(group.largest(sizes).tolist()))
    existing = _SPACES.get(group_name)
    if existing is not None and existing.row_bytes >= row_bytes and existing.max_tokens >= most:
        return ""
    if group_name not in _WHY_NOT:
        _WHY_NOT[group_name] = _agreed(group, device, _obstacle(group, device))
    if _WHY_NOT[group_name]:
        return _WHY_NOT[group_name]
    if existing is not None:
        _OLD.append(existing)
        row_bytes, most = max(row_bytes, existing.row_bytes), max(most, existing.max_tokens)
    made: Workspace | None = None
    reason = ""
    try:
        made = _rendezvous(group, device, row_bytes, most)
    except Exception as error:  # this driver or torch may lack support
        reason = f"symmetric memory failed: {in_short(error)[:200]}"
    reason = _agreed(group, device, reason)
    if reason or made is None:
        _WHY_NOT[group_name] = reason
        return reason
    _SPACES[group_name] = made
    _watch(made)
    return ""


def _number(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())


def _obstacle(group: Group, device: torch.device) -> str:
    """Says why this rank can have no workspace; "" if it can. All ranks must call it together."""
    host = _number(socket.gethostname(), _boot())
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    here = torch.tensor([host, _number(uuids[device.index])], dtype=torch.int64, device=device)
    hosts, devices = group.gather(here).unbind(1)
    if nvlink.library() is None:
        return "fp4_ops/_nvlink.so was not built (FP4_CUDA_ARCHS=90a builds it, with nvcc)"
    if group.size > nvlink.MOST_RANKS:
        return f"there are {group.size} processes; the kernels take up to {nvlink.MOST_RANKS}"
    if len(set(hosts.tolist())) > 1:
        return "the processes are on several machines"
    if len(set(devices.tolist())) < group.size:
        return "processes share a GPU"
    indices = {_number(uuid): i for i, uuid in enumerate(uuids)}
    for peer in devices.tolist():
        index = indices.get(peer)  # None: this process does not see it; the rendezvous will tell
        if index in (None, device.index):
            continue
        if not torch.cuda.can_device_access_peer(device.index, index):
            return f"cuda:{device.index} cannot address the memory of cuda:{index} (no NVLink between them)"
    return ""


def _boot() -> str:
    """Returns an id of this machine, because hosts may share a name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read()
    except OSError:
        return ""


def _agreed(group: Group, device: torch.device, reason: str) -> str:
    """Returns the same reason on all ranks: that of any rank that has one."""
    first = torch.tensor([group.size - group.rank if reason else 0], device=device)
    rank = group.size - int(group.largest(first).item())
    if rank == group.size:
        return ""
    return reason or f"rank {rank} has an obstacle, which its report names"


def _rendezvous(group: Group, device: torch.device, row_bytes: int, max_tokens: int) -> Workspace:
    from ..meta.torch_internals import symmetric_memory as symmetric

    layout = Layout(group.size, max_tokens, row_bytes)
    with torch.inference_mode(False), torch.no_grad(), _without_multicast():
        buffer = symmetric.empty(layout.bytes, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(buffer, group.group.group_name)
        buffer.zero_()
        made = Workspace(
            buffer, list(handle.buffer_ptrs), group.rank, max_tokens, row_bytes, _patience(group, device)
        )
        made.handle = handle
        torch.cuda.synchronize(device)
    return made  # the ranks agree on it next, so that no kernel runs before all buffers are ready


@contextmanager
def _without_multicast() -> Iterator[None]:
    """Turns multicast off. Nothing here needs it, and some machines forbid it."""
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _patience(group: Group, device: torch.device) -> float:
    """Returns the group's timeout in seconds (`init_process_group(timeout=...)`).

    It is longer than a compilation takes.
    """
    try:
        seconds: float = group.group._get_backend(device).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        from torch.distributed.distributed_c10d import default_pg_timeout

        seconds = default_pg_timeout.total_seconds()
    return seconds


_WATCHED: list[Workspace] = []


def _watch(space: Workspace) -> None:
    """Prints to stderr why kernels gave up. CUDA's own error only says that they did."""
    _WATCHED.append(space)
    if len(_WATCHED) > 1:
        return

    def watch() -> None:
        told: set[int] = set()
        while True:
            for i, one in enumerate(_WATCHED):
                if i not in told and (words := one.failure()) is not None:
                    told.add(i)
                    print(words, file=sys.stderr, flush=True)
            time.sleep(0.2)

    threading.Thread(target=watch, name="fp4_ops failures", daemon=True).start()
