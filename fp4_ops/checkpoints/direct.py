"""Files read and written past the page cache (O_DIRECT), where the file system has it.

What is read once and exceeds the memory gains nothing from the cache, and filling the cache can cost more
processor time than quantising does. Addresses, offsets and lengths of such transfers are multiples of BLOCK.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

BLOCK = 4096
_READ_CHUNK = 64 << 20
_STAGE = 16 << 20


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which lives as long as the view does."""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def _open(file: Path, flags: int) -> int:
    try:
        return os.open(file, flags | getattr(os, "O_DIRECT", 0), 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:  # which a file system that cannot do it says
            raise
        return os.open(file, flags, 0o666)


def open_reading(file: Path) -> int:
    """A descriptor for `read`."""
    return _open(file, os.O_RDONLY)


def read(fd: int, offset: int, nbytes: int) -> Tensor | None:
    """uint8 [nbytes] from `offset`, in memory of its own; None if the file ends before."""
    start = offset // BLOCK * BLOCK
    length = -(-(offset + nbytes - start) // BLOCK) * BLOCK
    memory = torch.empty(length + BLOCK, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % BLOCK :][:length]
    view = bytes_of(memory)
    done = 0
    while done < offset + nbytes - start:
        n = os.preadv(fd, [view[done : done + _READ_CHUNK]], start + done)
        if n == 0:
            return None
        done += n
        if n % BLOCK:  # the end of the file
            break
    return memory[offset - start :][:nbytes] if done >= offset + nbytes - start else None


class Sink:
    """A new file, written from front to back. Its OSErrors name the file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._fd = _open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._stage = mmap.mmap(-1, _STAGE)
        self._used = self._size = 0

    def write(self, data: memoryview) -> None:
        self._size += len(data)
        while data:
            n = min(len(data), _STAGE - self._used)
            self._stage[self._used : self._used + n] = data[:n]
            self._used, data = self._used + n, data[n:]
            if self._used == _STAGE:
                self._put()

    def finish(self) -> None:
        """Everything is on the disk when this returns."""
        self._put()
        with _naming(self._file):
            os.ftruncate(self._fd, self._size)  # the last block was written whole
            os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _put(self) -> None:
        whole = memoryview(self._stage)[: -(-self._used // BLOCK) * BLOCK]
        with _naming(self._file):
            while whole:
                try:
                    done = os.write(self._fd, whole)
                except OSError as error:
                    if error.errno != errno.EINVAL or not self._through_cache():
                        raise
                    continue
                if done % BLOCK:
                    self._through_cache()
                whole = whole[done:]
        self._used = 0

    def _through_cache(self) -> bool:
        """Writes by the page cache from now on: only that takes a part of a block, where a disk is nearly
        full. False if it did so already."""
        flags, direct = fcntl.fcntl(self._fd, fcntl.F_GETFL), getattr(os, "O_DIRECT", 0)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~direct)
        return bool(flags & direct)


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Gives OSErrors of calls on a descriptor the name of its file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None
