"""Reads and writes files past the page cache (O_DIRECT), if the file system supports it.

Data that is larger than the memory and read only once gains nothing from the cache. Filling the cache can
cost more processor time than quantising. Addresses, offsets and lengths of direct transfers are multiples of
BLOCK.
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
    """Returns the memory of a contiguous CPU tensor. The view keeps the memory alive."""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def _open(file: Path, flags: int) -> int:
    try:
        return os.open(file, flags | getattr(os, "O_DIRECT", 0), 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: the file system does not support O_DIRECT
            raise
        return os.open(file, flags, 0o666)


def open_reading(file: Path) -> int:
    """Returns a file descriptor for `read`."""
    return _open(file, os.O_RDONLY)


def read(fd: int, offset: int, nbytes: int) -> Tensor | None:
    """Returns uint8 [nbytes] from `offset`, in new memory, or None if the file is too short."""
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
    """A new file that is written from front to back. Its OSErrors name the file."""

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
        """Writes the rest. When this returns, everything is on the disk."""
        self._put()
        with naming(self._file):
            os.ftruncate(self._fd, self._size)  # the last block was written with padding
            os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _put(self) -> None:
        whole = memoryview(self._stage)[: -(-self._used // BLOCK) * BLOCK]
        with naming(self._file):
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
        """Writes through the page cache from now on, because a nearly full disk may have room only for a part
        of a block. Returns False if it already did so.
        """
        flags, direct = fcntl.fcntl(self._fd, fcntl.F_GETFL), getattr(os, "O_DIRECT", 0)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~direct)
        return bool(flags & direct)


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Gives OSErrors of calls on a descriptor the name of its file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None
