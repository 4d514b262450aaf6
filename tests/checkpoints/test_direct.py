"""Files read and written past the page cache, and on file systems that have only the cache."""

from __future__ import annotations

import errno
import os
import random

import pytest
import torch

from fp4_ops.checkpoints import direct
from fp4_ops.checkpoints.files import Reader, TensorInfo


@pytest.fixture(params=["direct", "cached"])
def way(request, monkeypatch):
    if request.param == "cached":
        real = os.open

        def refuse(file, flags, *mode):
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(file, flags, *mode)

        monkeypatch.setattr(os, "open", refuse)


def write(file, data: bytes) -> None:
    sink = direct.Sink(file)
    view = memoryview(data)
    while view:
        n = random.randint(1, 1 << random.randint(1, 25))
        sink.write(view[:n])
        view = view[n:]
    sink.finish()


@pytest.mark.parametrize("size", [0, 1, direct.BLOCK - 1, direct.BLOCK, 12345, (16 << 20) + 7])
def test_what_is_written_is_read(way, tmp_path, size):
    data, file = random.randbytes(size), tmp_path / "file"
    write(file, data)
    assert file.read_bytes() == data
    fd = direct.open_reading(file)
    for _ in range(20):
        start = random.randint(0, size)
        n = random.randint(0, size - start)
        assert bytes(direct.bytes_of(direct.read(fd, start, n))) == data[start : start + n]
        assert direct.read(fd, start, size - start + random.randint(1, 3 * direct.BLOCK)) is None
    os.close(fd)


def test_joined_tensors_at_any_offset(way, tmp_path):
    """Neighbours and others, at offsets that no element size divides, as odd headers make them."""
    data, file = random.randbytes(100_001), tmp_path / "file"
    write(file, data)
    with Reader(once=True) as reader:
        for offset in (0, 8, 4095, 4097, 50_003):
            first, second = (
                TensorInfo(name, torch.int16, (n, 12), file, offset + at)
                for name, n, at in (("a", 100, 0), ("b", 7, 2400))
            )
            apart = TensorInfo("c", torch.int16, (3, 12), file, 9_999)
            for infos in ((first,), (first, second), (second, apart), (apart, first, second)):
                want = b"".join(data[t.offset : t.offset + t.nbytes] for t in infos)
                got = reader.read_joint(infos)
                assert got.shape[1:] == (12,) and bytes(direct.bytes_of(got)) == want


def test_views_keep_their_memory(tmp_path):
    view = direct.bytes_of(torch.arange(1 << 20, dtype=torch.int32))
    torch.full((1 << 20,), -1, dtype=torch.int32)  # would take the freed memory
    assert view[:12] == torch.arange(3, dtype=torch.int32).numpy().tobytes()
