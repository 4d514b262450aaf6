"""Reads and writes safetensors and JSON files, one tensor at a time.

safetensors' own reader maps whole files (every touched page counts as resident), and its writer needs every
tensor of a file at once. This module does neither, because checkpoints are larger than the memory. It reads
tensors into memory of their own. It writes them one by one after a header that is made from the shapes alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import direct

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""dtypes of safetensors whose elements share bytes. This module knows only their size, and does not read
them.
"""
_MAX_HEADER = 100 << 20  # safetensors' own limit
CHUNK = 16 << 20
"""The number of bytes to read at a time, if there is a choice."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as its config describes it. The message names the file and the
    tensor."""

    unknown_meaning = False
    """True if the config describes weights that this package cannot compute with."""


DAMAGED = "The file is damaged or not complete: fetch or export it again"
OTHER_MODEL = "config.json describes another model than the files: take the one that was written with them"
PREFIXED = (
    "Save the model itself, not a wrapper around it (DataParallel, torch.compile), or rename the tensors"
)
NO_CONFIG = (
    "but config.json has no quantization_config that says what they mean. Take the config.json that was "
    "written with these files"
)
INCOMPLETE = "Fetch or export the folder again, with all its files"
"""Advice at the end of an error message."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a safetensors file, as its header describes it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int
    """The start of its bytes in the file."""
    foreign: str = ""
    """Name of the dtype in the file, if it is one that this module does not read. `dtype` and `shape` are
    then those of its bytes.
    """

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_ordinary(self) -> bool:
        """Returns whether it has floating-point numbers of 16 bits or more."""
        return self.dtype.is_floating_point and self.dtype.itemsize > 1

    def row(self, i: int) -> TensorInfo:
        """Returns entry i along the first dimension, as a tensor of its own."""
        row = replace(self, name=f"{self.name}[{i}]", shape=self.shape[1:])
        return replace(row, offset=self.offset + i * row.nbytes)

    def rows(self, which: range) -> TensorInfo:
        """Returns neighbouring entries along the first dimension."""
        cut = replace(
            self, name=f"{self.name}[{which.start}:{which.stop}]", shape=(len(which), *self.shape[1:])
        )
        return replace(cut, offset=self.offset + which.start * (self.nbytes // max(self.shape[0], 1)))

    def chunks(self) -> Iterator[TensorInfo]:
        """Yields its bytes in pieces, as tensors of their own."""
        for start in range(0, self.nbytes, CHUNK):
            nbytes = min(self.nbytes - start, CHUNK)
            yield replace(self, offset=self.offset + start, dtype=torch.uint8, shape=(nbytes,))

    def __str__(self) -> str:
        return f"tensor {self.name} of {self.file}"


def unexplained(codes: TensorInfo) -> CheckpointError:
    """Returns the error for codes of a weight that no config explains."""
    dtype = str(codes.dtype).removeprefix("torch.")
    return CheckpointError(f"fp4: {codes} is {dtype}: codes of a quantised weight, {NO_CONFIG}")


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Reads the header of a safetensors file. Raises CheckpointError if it is truncated or not such a
    file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                what = f"is truncated or not a safetensors file ({size} bytes). {DAMAGED}"
                raise CheckpointError(f"fp4: {file} {what_it_is(file) or what}")
            header = json.loads(f.read(length))
            if not isinstance(header, dict):
                raise ValueError
    except OSError as error:
        raise _cannot_be_read(file, error) from None
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"fp4: {file} is not a safetensors file: its header is no JSON object. {DAMAGED}"
        ) from None
    start, end = 8 + length, 8 + length
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        info, last = tensor_info(name, entry, file, start)
        if last > size:
            raise CheckpointError(
                f"fp4: {file} is truncated: {name} ends at byte {last} of {size}. {DAMAGED}"
            )
        end = max(end, last)
        tensors[name] = info
    if end != size:
        raise CheckpointError(f"fp4: {file} has {size - end} bytes that belong to no tensor. {DAMAGED}")
    return tensors


def tensor_info(name: str, entry: Any, file: Path, start: int) -> tuple[TensorInfo, int]:
    """Reads one entry of a header. Also returns the position in the file where the tensor ends."""
    try:
        stored, shape = entry["dtype"], tuple(map(int, entry["shape"]))
        first, last = map(int, entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"fp4: {file}: the header's entry for {name} is malformed. {DAMAGED}") from None
    if stored in _BITS:
        nbytes = -(-prod(shape) * _BITS[stored] // 8)
        info = TensorInfo(name, torch.uint8, (nbytes,), file, start + first, foreign=stored)
    elif stored in _DTYPES:
        info = TensorInfo(name, _DTYPES[stored], shape, file, start + first)
    else:
        raise CheckpointError(
            f"fp4: tensor {name} of {file} has dtype {stored}, which neither safetensors nor fp4_ops knows. "
            "Update safetensors, or export the folder again in another dtype"
        )
    if last - first != info.nbytes or first < 0:
        raise CheckpointError(
            f"fp4: {info} has {last - first} bytes; {stored} {list(shape)} needs {info.nbytes}. {DAMAGED}"
        )
    return info, start + last


_STARTS = {
    b"version https://git-lfs": "is a git-lfs pointer, not the file itself. Run `git lfs pull` in its folder",
    b"GGUF": "is a GGUF file, not a safetensors file. Give it a name that ends in .gguf",
    b"PK\x03\x04": "is a pickle of torch.save, not a safetensors file. Save the model with save_pretrained",
    b"<": "is a web page, not the file itself. Fetch it again; a private repository needs a token",
}
"""The first bytes of files whose name is misleading."""


def what_it_is(file: Path) -> str:
    """Says what a file with a misleading name is, and what to do; "" if it is not known."""
    with file.open("rb") as f:
        start = f.read(32)
    if not start:
        return f"is empty. {DAMAGED}"
    return next((what for first, what in _STARTS.items() if start.startswith(first)), "")


def _cannot_be_read(file: Path, error: OSError) -> CheckpointError:
    if isinstance(error, FileNotFoundError) and file.is_symlink():
        why = f"it is a link to {os.readlink(file)}, which is not there. {INCOMPLETE}"
    elif isinstance(error, FileNotFoundError):
        why = f"{error.strerror}. {INCOMPLETE}"
    else:
        why = str(error.strerror)
    return CheckpointError(f"fp4: {file} cannot be read: {why}")


def are_neighbours(infos: Sequence[TensorInfo]) -> bool:
    """Returns whether each tensor starts where the one before it ends."""
    return all((a.file, a.offset + a.nbytes) == (b.file, b.offset) for a, b in pairwise(infos))


def _joined(infos: Sequence[TensorInfo], data: Tensor) -> Tensor:
    """Returns the bytes of tensors of one dtype as one tensor."""
    first = infos[0]
    if data.storage_offset() % first.dtype.itemsize:
        data = data.clone()  # needed if the file's header has an odd length
    return data.view(first.dtype).view(first.shape if len(infos) == 1 else (-1, *first.shape[1:]))


class Reader:
    """Reads tensors. The last file stays open.

    once: the data will not be read again soon, so reads bypass the page cache.
    """

    def __init__(self, once: bool = False) -> None:
        self._once = once
        self._file: Path | None = None
        self._fd = -1

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._fd)
            self._file = None

    def read(self, info: TensorInfo, device: torch.device | str = "cpu") -> Tensor:
        """Reads a tensor into memory of its own."""
        return self.read_joint((info,)).to(device)

    def read_joint(self, infos: Sequence[TensorInfo]) -> Tensor:
        """Reads tensors of one dtype and joins them along their first dimension."""
        if are_neighbours(infos):
            return _joined(infos, self._bytes(infos[0], sum(t.nbytes for t in infos)))
        return _joined(infos, torch.cat([self._bytes(t, t.nbytes) for t in infos]))

    def read_run(self, reads: Sequence[Sequence[TensorInfo]]) -> list[Tensor]:
        """Reads several joint tensors that are neighbours at once. The results share their memory."""
        sizes = [sum(t.nbytes for t in infos) for infos in reads]
        parts = self._bytes(reads[0][0], sum(sizes)).split(sizes)
        return [_joined(infos, part) for infos, part in zip(reads, parts)]

    def _bytes(self, info: TensorInfo, nbytes: int) -> Tensor:
        """Reads bytes from the start of the tensor."""
        if self._file != info.file:
            self.close()
            opened = direct.open_reading(info.file) if self._once else os.open(info.file, os.O_RDONLY)
            self._fd, self._file = opened, info.file
        data = direct.read(self._fd, info.offset, nbytes)
        if data is None:
            raise CheckpointError(f"fp4: {info} is truncated. {DAMAGED}")
        return data


class Writer:
    """Writes one safetensors file, tensor by tensor, in the order of `tensors`.

    The file gets its name when it is complete and on the disk. Until then its name ends in ".partial".
    """

    def __init__(self, file: Path, tensors: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> None:
        self.file = file
        self.partial = file.with_name(file.name + ".partial")
        self._expected = list(reversed(tensors))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, dtype, shape in tensors:
            end = offset + prod(shape) * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data starts aligned
        self._sink = direct.Sink(self.partial)
        self._sink.write(memoryview(len(text).to_bytes(8, "little") + text))

    def write(self, name: str, tensor: Tensor) -> None:
        self.begin(name, tensor.dtype, tuple(tensor.shape))
        self.append(tensor)

    def begin(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Begins the next tensor. Its bytes follow in calls of `append`."""
        expected = self._expected.pop()
        assert (name, dtype, shape) == expected, f"{name} {dtype} {shape} is written where {expected} belongs"

    def append(self, part: Tensor) -> None:
        self._sink.write(direct.bytes_of(part.detach().cpu().contiguous()))

    def close(self) -> None:
        """Gives the file its name."""
        assert not self._expected, f"{self._expected[-1][0]} was not written"
        self._sink.finish()
        os.replace(self.partial, self.file)

    def abandon(self) -> None:
        self._sink.close()
        self.partial.unlink(missing_ok=True)


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises CheckpointError if the file does not hold one."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _cannot_be_read(file, error) from None
    except ValueError as error:
        what = what_it_is(file) or _why_no_json(error)
        raise CheckpointError(f"fp4: {file} {what}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"fp4: {file} is not a JSON object. {DAMAGED}")
    return value


def _why_no_json(error: ValueError) -> str:
    """Says why a file is not JSON, and what to do. An editor may have saved it, with a mistake."""
    if isinstance(error, json.JSONDecodeError) and not error.msg.startswith("Unexpected UTF-8 BOM"):
        place = f"{error.msg}, line {error.lineno} column {error.colno}"
        return f"is not JSON: {place}. Correct that if you edited it; else fetch or export it again"
    return "is not JSON in UTF-8 without a byte order mark. Save it as that, or fetch or export it again"


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file completely or not at all. Its OSErrors name the file."""
    partial = file.with_name(file.name + ".partial")
    with direct.naming(partial):
        with partial.open("w") as f:
            f.write(json.dumps(value, indent=2) + "\n")
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, file)
