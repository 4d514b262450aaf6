"""Runs collectives of one process group. If a rank does not take part, they end with an error that names it.

On the CPU (gloo), a waiting process looks into the group's store every POLL seconds to see if another process
has given up. A process that gives up writes there that it is alive, waits REPLY seconds for the others to do
the same, and names those that did not. All processes therefore end soon after the first one notices the
problem. It notices at once if a connection breaks, and otherwise after the group's own timeout
(`init_process_group(timeout=...)`). On GPUs nothing waits here, because NCCL's watchdog has its own timeout.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..meta.text import first_line
from .shares import described

POLL = timedelta(seconds=1)
REPLY = 3 * POLL
"""Seconds to wait for replies. Longer than POLL, so that all others look at the store."""


def _function(name: str) -> Any:
    """Returns torch's collective over whole tensors, which has another name in older releases."""
    import torch.distributed as dist

    older = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}[name]
    return getattr(dist, f"{name}_single", None) or getattr(dist, older)


@dataclass(frozen=True)
class Group:
    """A process group, found by the name that an operator gets."""

    what: str
    """Name of the operator, for errors."""
    group: Any

    @classmethod
    def named(cls, what: str, name: str) -> Group:
        from torch.distributed import is_available

        if not is_available():
            raise RuntimeError(f"{what}: this torch was built without torch.distributed")
        from ..meta.torch_internals import resolve_process_group

        try:
            return cls(what, resolve_process_group(name))  # type: ignore[arg-type]
        except (RuntimeError, ValueError, KeyError):
            raise RuntimeError(
                f"{what}: group_name is '{name}', and this process is in no such group. Pass "
                "group.group_name of one that torch.distributed.init_process_group or new_group made"
            ) from None

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    def sum(self, t: Tensor) -> Tensor:
        """Returns the sum over the ranks. May write it to a contiguous `t`."""
        from torch.distributed import all_reduce

        if self.size > 1 and t.numel():
            self._wait(all_reduce(t, group=self.group, async_op=True), t)
        return t

    def largest(self, t: Tensor) -> Tensor:
        """Returns the elementwise maximum over the ranks. May write it to a contiguous `t`."""
        from torch.distributed import ReduceOp, all_reduce

        if self.size > 1 and t.numel():
            self._wait(all_reduce(t, ReduceOp.MAX, group=self.group, async_op=True), t)
        return t

    def gather(self, t: Tensor) -> Tensor:
        """Returns [size, *t.shape]: `t` of every rank. All have the same shape."""
        if self.size == 1:
            return t[None]
        data = t.contiguous()
        # As bytes, so that no backend needs to know the dtype.
        data = data.view(torch.uint8) if data.dim() else data.view(1)
        out = data.new_empty((self.size * data.shape[0], *data.shape[1:]))
        if data.numel():
            self._wait(_function("all_gather")(out, data, group=self.group, async_op=True), t)
        return out.view(t.dtype).view(self.size, *t.shape)

    def sum_of_own(self, t: Tensor) -> Tensor:
        """Returns the sum over the ranks of t[rank], for t [size, ...]."""
        if self.size == 1:
            return t[0]
        out = t.new_empty(t.shape[1:])
        if out.numel():
            self._wait(_function("reduce_scatter")(out, t.flatten(0, 1), group=self.group, async_op=True), t)
        return out

    # --- ranks that are missing ---

    def _wait(self, work: Any, t: Tensor) -> None:
        if t.device.type != "cpu":
            work.wait()
            return
        while True:
            try:
                work.wait(POLL)
                return
            except RuntimeError as error:
                if work.is_completed():
                    self._give_up(str(error), error)
                if other := self._who_gave_up():
                    self._give_up(f"{described(other)} gave up", None)

    def _key(self, rank: int) -> str:
        return f"fp4_ops/gave_up/{rank}"

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _who_gave_up(self) -> list[int]:
        try:
            store = self.group.get_group_store()
            return [self._global(rank) for rank in self._others() if store.check([self._key(rank)])]
        except Exception:  # the store ended with the process that held it; the collective will end, too
            return []

    def _global(self, rank: int) -> int:
        from torch.distributed import get_process_group_ranks

        return get_process_group_ranks(self.group)[rank]

    def _give_up(self, reason: str, error: Exception | None) -> NoReturn:
        missing, end = self._others(), time.monotonic() + REPLY.total_seconds()
        try:
            store = self.group.get_group_store()
            store.set(self._key(self.rank), "1")
            while missing and time.monotonic() < end:
                time.sleep(0.05)
                missing = [rank for rank in missing if not store.check([self._key(rank)])]
            who = described([self._global(rank) for rank in missing]) if missing else ""
            missed = f"{who} did not answer within {REPLY.seconds} s" if who else "all ranks still answer"
        except Exception:
            missed = "rank 0 has ended, and it held the store through which the ranks find each other"
        ranks = ", ".join(str(self._global(rank)) for rank in range(self.size))
        raise RuntimeError(
            f"{self.what}: on rank {self._global(self.rank)} of the group {ranks}: {missed}. A rank has "
            "ended, hangs or never called the operator; nothing was computed. Look at its own output, and "
            "start all ranks anew. "
            f"({first_line(reason)[:300]})"
        ) from error
