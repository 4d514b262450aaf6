"""Reads the header of a GGUF file, or of all files of a split one: the metadata, and the place of each
tensor.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..files import DAMAGED, INCOMPLETE, CheckpointError, TensorInfo, what_it_is
from .types import BY_NAME, TYPES

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SPLIT = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's letters for the types of metadata that have a fixed size."""
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


def shape_of(info: TensorInfo) -> tuple[int, ...]:
    """Returns the shape of a tensor's values."""
    if not info.foreign:
        return info.shape
    kind = BY_NAME[info.foreign]
    return *info.shape[:-1], info.shape[-1] // kind.nbytes * kind.block


@dataclass
class GGUF:
    """A model's GGUF files."""

    path: Path
    """The file that was given."""
    metadata: dict[str, Any]
    """The metadata of the first file. A list of strings is replaced by its length."""
    tensors: dict[str, TensorInfo]
    """Tensors by ggml's names, with the slowest dimension first. A quantised tensor has the shape of its
    bytes; `foreign` is ggml's name of its type.
    """

    @classmethod
    def open(cls, path: Path) -> GGUF:
        """Read the headers of all files. Raises CheckpointError for damaged and missing ones."""
        metadata: dict[str, Any] = {}
        tensors: dict[str, TensorInfo] = {}
        files = _files_of(path)
        for i, file in enumerate(files):
            found, infos = _read_header(file)
            _check_split(file, i, len(files), found)
            metadata = metadata or found
            for info in infos:
                if info.name in tensors:
                    raise CheckpointError(f"fp4: {info} is in {tensors[info.name].file.name}, too. {DAMAGED}")
                tensors[info.name] = info
        count = metadata.get("split.tensors.count", len(tensors))
        if count != len(tensors):
            raise CheckpointError(
                f"fp4: {files[0]} says that its files hold {count} tensors; they hold {len(tensors)}. "
                f"{INCOMPLETE}"
            )
        return cls(path, metadata, tensors)

    @property
    def architecture(self) -> str:
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise CheckpointError(f"fp4: {self.path} has no general.architecture in its metadata. {DAMAGED}")
        return name

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a value of the architecture's own metadata. A list whose values are equal for all layers
        gives this value.
        """
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and value and len(set(value)) == 1:
            return value[0]
        return value


def find_gguf(path: Path) -> Path | None:
    """Returns the GGUF file that `path` names: the file itself, or the only one in a folder without
    safetensors files.

    Raises CheckpointError for a folder with several models.
    """
    if path.suffix == ".gguf" and not path.is_dir():
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
        return None
    files = sorted(f for f in path.glob("*.gguf") if not f.name.startswith("mmproj"))
    models = {m[1] if (m := _SPLIT.match(f.name)) else f.name: f for f in reversed(files)}
    if len(models) > 1:
        names = ", ".join(f.name for f in sorted(models.values())[:4])
        raise CheckpointError(
            f"fp4: {path} holds several models in GGUF: {names}. Give the file of one of them"
        )
    return next(iter(models.values()), None)


def _files_of(path: Path) -> list[Path]:
    """Returns the files of a split model in order, whichever of them is given."""
    match = _SPLIT.match(path.name)
    if match is None:
        return [path]
    stem, total = match[1], int(match[3])
    files = [path.with_name(f"{stem}-{i:05}-of-{total:05}.gguf") for i in range(1, total + 1)]
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        raise CheckpointError(
            f"fp4: {path} is one of {total} files of a model; {', '.join(missing[:3])} "
            f"{'is' if len(missing) == 1 else 'are'} not beside it. {INCOMPLETE}"
        )
    return files


def _check_split(file: Path, i: int, files: int, metadata: dict[str, Any]) -> None:
    count, number = metadata.get("split.count", files), metadata.get("split.no", i)
    if (count or 1, number) != (files, i):
        raise CheckpointError(
            f"fp4: {file} says that it is file {number + 1} of {count}; by its name it is file {i + 1} of "
            f"{files}. Give the files the names that llama.cpp gave them (NAME-00001-of-00003.gguf)"
        )


def _read_header(file: Path) -> tuple[dict[str, Any], list[TensorInfo]]:
    try:
        size = file.stat().st_size
        with file.open("rb") as f:
            return _Header(file, f, size).read()
    except FileNotFoundError:
        raise CheckpointError(
            f"fp4: {file} is not there. Give the path of a GGUF file, or of a folder that has one"
        ) from None
    except OSError as error:
        raise CheckpointError(f"fp4: {file} cannot be read: {error.strerror}. {INCOMPLETE}") from None


class _Header:
    def __init__(self, file: Path, stream: BinaryIO, size: int) -> None:
        self._file, self._stream, self._size = file, stream, size

    def read(self) -> tuple[dict[str, Any], list[TensorInfo]]:
        magic = self._stream.read(len(_MAGIC))
        if magic != _MAGIC:
            what = f"is not a GGUF file: it begins with {magic!r}. {DAMAGED}"
            raise self._error(what_it_is(self._file) or what)
        self._check_version(self._bytes(4))
        tensors, keys = self._number("Q"), self._number("Q")
        metadata = {self._text(): self._value(self._number("I")) for _ in self._times(keys, 12)}
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._error(
                f"has general.alignment {alignment!r}; it must be a positive integer. {DAMAGED}"
            )
        entries = [self._entry() for _ in self._times(tensors, 24)]
        start = -(-self._stream.tell() // alignment) * alignment
        return metadata, [self._info(*entry, start, alignment) for entry in entries]

    def _check_version(self, raw: bytes) -> None:
        version = int.from_bytes(raw, "little")
        if version in _VERSIONS:
            return
        if int.from_bytes(raw, "big") in (1, *_VERSIONS):
            raise self._error(
                "is big-endian, which is not read. Convert it with llama.cpp's gguf_convert_endian.py, or "
                "fetch the little-endian file"
            )
        known = " and ".join(map(str, _VERSIONS))
        raise self._error(
            f"is GGUF version {version}; {known} are read. Convert the model again with a current llama.cpp"
        )

    def _info(
        self, name: str, shape: tuple[int, ...], number: int, offset: int, start: int, alignment: int
    ) -> TensorInfo:
        if number not in TYPES:
            raise self._error(
                f"holds {name} in ggml's type {number}, whose size is not known. Quantise the model to a "
                "type of the table in docs/checkpoints.md"
            )
        kind = TYPES[number]
        if offset % alignment:
            raise self._error(
                f"holds {name} at byte {offset}, which is not aligned to {alignment}. {DAMAGED}"
            )
        if kind.dtype is not None:
            info = TensorInfo(name, kind.dtype, shape, self._file, start + offset)
        else:
            if shape[-1] % kind.block:
                raise self._error(
                    f"holds {name} {list(shape)} in {kind.name}; its rows must be multiples of {kind.block}. "
                    f"{DAMAGED}"
                )
            in_bytes = (*shape[:-1], shape[-1] // kind.block * kind.nbytes)
            info = TensorInfo(name, torch.uint8, in_bytes, self._file, start + offset, kind.name)
        end = info.offset + info.nbytes
        if end > self._size:
            raise self._error(f"is truncated: {name} ends at byte {end} of {self._size}. {DAMAGED}")
        return info

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._text(), self._number("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._error(
                f"holds {name} with {dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are valid. {DAMAGED}"
            )
        shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))
        if not 0 < prod(shape) < 1 << 48:
            raise self._error(f"holds {name} of shape {list(shape)}. {DAMAGED}")
        return name, shape, self._number("I"), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            raise self._error(f"has metadata of type {kind}, which GGUF does not have. {DAMAGED}")
        element, count = self._number("I"), self._number("Q")
        if element in _NUMBERS:
            letter = _NUMBERS[element]
            return list(
                struct.unpack(f"<{count}{letter}", self._bytes(count * struct.calcsize(f"<{letter}")))
            )
        if element == _STRING:
            for _ in self._times(count, 8):
                self._bytes(self._number("Q"))
            return count
        return [self._value(element) for _ in self._times(count, 12)]

    def _times(self, count: int, least: int) -> Iterator[int]:
        """Counts to `count`. Each step reads at least `least` bytes, so a damaged count that is too large
        for the file fails at once."""
        if count * least > self._size:
            raise self._error(f"is damaged: it announces {count} entries in {self._size} bytes. {DAMAGED}")
        return iter(range(count))

    def _text(self) -> str:
        raw = self._bytes(self._number("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._error(f"has a name that is no UTF-8: {raw[:40]!r}. {DAMAGED}") from None

    def _number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self._bytes(struct.calcsize(f"<{letter}")))[0]

    def _bytes(self, count: int) -> bytes:
        left = self._size - self._stream.tell()
        if count > left:
            raise self._error(
                f"is truncated: its header needs {count} bytes more and {left} are left. {DAMAGED}"
            )
        return self._stream.read(count)

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"fp4: {self._file} {what}")
